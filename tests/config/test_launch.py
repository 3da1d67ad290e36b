"""A config in Python: `load_config`, `launch`, `job.run()`."""

import importlib
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate.config import Config
from colocate.errors import ClosedError, PlacementError, RoleStartError
from colocate_report.record import RunRecord
from colocate_run.run import Run

Write = Callable[[str], Path]

MODULE = """
import colocate

class Worker(colocate.Role):
    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise OSError("no weights here")

    @colocate.method(collect=colocate.Gather())
    def place(self) -> tuple[int, int]:
        return self.ctx.slot, self.ctx.world_size

def job(run, *, steps: int = 2):
    for step in range(steps):
        with run.timed("calls"):
            run.groups["group"]["worker"].place()
            run.groups["group"]["some"].place()
        run.log(step, value=step / 2)
    run.show("rows", [{"a": 1}])
"""

CONFIG = """\
seed: 3
pools:
  main: {slots: 3}
groups:
  group:
    pool: main
    roles:
      worker: launch_module:Worker
      some: {use: "launch_module:Worker", slots: [2, 0]}
job: {use: "launch_module:job", with: {steps: 2}}
"""


@pytest.fixture
def load(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    (tmp_path / "launch_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def load(text: str = CONFIG, **options: Any) -> Config:
        return colocate.load_config(write(text), **options)

    return load


def test_launch_closes_groups_after_block(load: Callable[..., Config]) -> None:
    with colocate.launch(load()) as job:
        assert job.runtime.seed == 3
        assert list(job.groups) == ["group"]
        assert job.groups["group"]["some"].place() == [(2, 2), (0, 2)]
    with pytest.raises(ClosedError):
        job.groups["group"]["worker"].place()
    assert not job.runtime._node.children


def test_groups_share_a_pool(load: Callable[..., Config]) -> None:
    beside = "  beside: {pool: main, roles: {worker: launch_module:Worker}}\njob"
    text = CONFIG.replace("slots: 3", "slots: 3, groups: 2").replace("job", beside, 1)
    with colocate.launch(load(text)) as job:
        assert [job.groups[name]["worker"].place()[0] for name in ("group", "beside")] == [(0, 3)] * 2


def test_the_graph_names_the_lines_of_the_config(load: Callable[..., Config]) -> None:
    with colocate.launch(load()) as job:
        runtime, pool, group = job.runtime.graph.render("tree").splitlines()[:3]
    assert "demo.yaml:1" in runtime
    assert "demo.yaml:3" in pool
    assert "demo.yaml:5" in group


def test_graph_names_source_option(load: Callable[..., Config]) -> None:
    """The graph names the option, not the line that read the option."""
    changes = ["+pools.second.slots=3", "pools.second.cpus=2", "groups.group.pool=second", "pools.main.slots=1"]
    with pytest.warns(UserWarning, match="no group uses"):
        config = load(executor="local", set=changes)
    with colocate.launch(config) as job:
        runtime, main, second, group = job.runtime.graph.render("tree").splitlines()[:4]
    assert runtime == "runtime local (ready, 0 s, --executor local)"
    assert "demo.yaml:3" in main
    assert second.endswith("pool second (ready, 0 s, --set +pools.second.slots=3)")
    assert "demo.yaml:5" in group


def test_failed_launch_closes_opened_resources(load: Callable[..., Config]) -> None:
    closed: list[str] = []
    with pytest.warns(UserWarning, match="no group uses"):
        config = load(set=["+pools.second={slots: 1, gpus: 99}"])
    with pytest.raises(PlacementError), colocate.launch(config):
        closed.append("never")
    with pytest.raises(RoleStartError, match="no weights here"):  # noqa: SIM117
        with colocate.launch(load(set=["groups.group.roles.worker.with.fails=true"])):
            closed.append("never")
    assert closed == []


def test_run_returns_record(load: Callable[..., Config], tmp_path: Path) -> None:
    config = load()
    with colocate.launch(config) as job:
        record = job.run(quiet=True)
    assert record.directory == tmp_path / "runs" / "demo"
    assert record.config == config.dump() == (record.directory / "config.yaml").read_text()
    assert [(row["step"], row["value"]) for row in record.metrics] == [(0, 0.0), (1, 0.5)]
    assert all(set(row["seconds"]) == {"calls"} for row in record.metrics)
    assert record.tables == {"rows": [{"a": 1}]}
    assert [(total.role, total.method, total.calls) for total in record.totals] == [
        ("worker", "place", 2),
        ("some", "place", 2),
    ]
    assert sorted(span.slot for span in record.spans if span.role == "some") == [0, 0, 2, 2]
    assert sum(span.end - span.start for span in record.spans) >= 0
    assert record.tree.startswith("runtime local")
    assert record.stopped is None


def test_scalars_of_numpy_and_torch_are_numbers(load: Callable[..., Config]) -> None:
    """NumPy's and torch's scalars are logged as numbers, whole ones as steps."""
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")

    def job(run: Run) -> None:
        run.log(numpy.int64(1), a=numpy.float32(0.5), b=torch.tensor(2), c=True, d=torch.tensor([0.25]))
        run.log(torch.tensor(2), a=1.0)
        with run.checkpoint(numpy.int64(2)):
            pass

    record = _run(load, job)
    first, second = ({**row, "time": None} for row in record.metrics)
    assert first == {"step": 1, "time": None, "a": 0.5, "b": 2, "c": True, "d": 0.25}
    assert second == {"step": 2, "time": None, "a": 1.0}
    assert [path.name for path in (record.directory / "checkpoints").iterdir()] == ["step-000002"]


def test_a_job_on_another_thread_sets_no_handlers(load: Callable[..., Config]) -> None:
    """A job sets a handler of SIGINT on the main thread only, and for its duration."""
    before, found = signal.getsignal(signal.SIGINT), []

    def job(run: Run) -> None:
        found.append(signal.getsignal(signal.SIGINT) == before)

    _run(load, job)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(_run, load, job).result()
    assert found == [False, True]
    assert signal.getsignal(signal.SIGINT) == before


def _run(load: Callable[..., Config], job: Callable[[Run], None]) -> RunRecord:
    importlib.import_module("launch_module").given = job  # type: ignore[attr-defined]
    with colocate.launch(
        load(CONFIG.replace('{use: "launch_module:job", with: {steps: 2}}', "launch_module:given"))
    ) as it:
        return it.run(quiet=True)
