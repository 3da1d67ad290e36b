"""Checkpoints of runs in object stores: only whole ones count, and another machine can resume from one."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_run_folder import killed_at_each_step

import colocate
from colocate import Role, Run, method
from colocate.config import load_config
from colocate.errors import ColocateError, ConfigError
from colocate_run.folder import RunFolder
from colocate_run.lock import lock_folder
from colocate_run.store import Store

pytest.importorskip("fsspec", reason="the extra `stores`")


def made(root: Path, name: str, *steps: int) -> RunFolder:
    """Make the folder of a run with checkpoints of some steps."""
    folder = RunFolder.create(name, root)
    folder.write_file("config.yaml", load_config({"name": name}).dump())
    for step in steps:
        save(folder, step)
    return folder


def save(folder: RunFolder, step: int) -> None:
    folder.append_metrics({"step": step})
    folder.close()
    with folder.write_checkpoint(step) as directory:
        (directory / "policy" / ".own").mkdir(parents=True)
        (directory / "policy" / ".own" / "weights").write_bytes(bytes([step]) * 100_000)
        (directory / "step").write_text(str(step))


def files(path: Path) -> dict[str, bytes]:
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def test_a_checkpoint_there_and_back(url: str, tmp_path: Path) -> None:
    """A downloaded checkpoint has the same bytes and metrics, and the store drops what the run's folder has dropped."""
    store, here = Store(url), made(tmp_path / "here", "demo")
    assert not store.has_run("demo")
    for step in (1, 2, 10):
        save(here, step)
        store.upload_checkpoint(here, "demo", step)
    store.upload_checkpoint(here, "demo", 10)  # A second upload replaces the first.
    assert Store(url)._list_names("demo") == ["step-000002", "step-000002.json", "step-000010-2", "step-000010-2.json"]
    Store(url).download_run("demo", tmp_path / "there")
    there = RunFolder.find_latest("demo", tmp_path / "there")
    assert [step for step, _ in there.list_checkpoints()] == [10]
    assert files(there.find_checkpoint(10)) == files(here.find_checkpoint(10))
    assert [row["step"] for row in there.rewind_metrics(10)] == [1, 2, 10]
    assert sorted(path.name for path in there.path.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]


def test_nothing_is_brought_to_a_folder_that_another_driver_has(url: str, tmp_path: Path) -> None:
    """A download into a folder that another driver writes is refused, and changes no file."""
    Store(url).upload_checkpoint(made(tmp_path / "here", "demo", 1, 2), "demo", 2)
    there = made(tmp_path / "there", "demo", 1)
    with lock_folder(there.path, lambda text: None):
        there.append_metrics({"step": 5})
        there.close()
        before = files(there.path)
        with pytest.raises(ConfigError, match="is being written by the driver with pid"):
            Store(url).download_run("demo", tmp_path / "there")
        assert files(there.path) == before
    Store(url).download_run("demo", tmp_path / "there")
    assert [step for step, _ in there.list_checkpoints()] == [1, 2]


def test_one_that_is_not_whole_does_not_count(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial upload doesn't count: a download gets the checkpoint before, and the next upload cleans up."""
    store, here = Store(url), made(tmp_path / "here", "demo", 1, 2)
    store.upload_checkpoint(here, "demo", 1)

    def cut(*args: Any, **more: Any) -> None:
        raise OSError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "pipe_file", cut)
        with pytest.raises(ColocateError, match=r"step 2 is in .*, and couldn't be brought to .*connection was lost"):
            store.upload_checkpoint(here, "demo", 2)
    assert "step-000002" in store._list_names("demo")
    Store(url).download_run("demo", tmp_path / "there")
    assert [step for step, _ in RunFolder.find_latest("demo", tmp_path / "there").list_checkpoints()] == [1]
    save(here, 3)
    store.upload_checkpoint(here, "demo", 3)
    assert [name for name in store._list_names("demo") if "." not in name] == ["step-000003"]


@pytest.mark.parametrize("steps", [(2,), (1, 2)])
def test_another_checkpoint_of_the_same_step(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    """An upload that is cut off at any call leaves the old checkpoint of the step or the new one, whole."""
    here = made(tmp_path / "here", "demo", *steps)
    for step in steps:
        Store(url).upload_checkpoint(here, "demo", step)
    before, is_whole = "2", False
    for number in itertools.count():
        (here.find_checkpoint(2) / "step").write_text(f"new {number}")
        store, calls = Store(url), itertools.count()

        def until_cut(call: Any, *args: Any, calls: Any = calls, number: int = number, **more: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return call(*args, **more)

        with monkeypatch.context() as patch:
            for name in ("put", "pipe_file", "rm", "mv"):
                patch.setattr(store._files, name, partial(until_cut, getattr(store._files, name)))
            try:
                store.upload_checkpoint(here, "demo", 2)
                is_whole = True
            except KeyboardInterrupt:
                pass
        there = tmp_path / f"there-{number}"
        Store(url).download_run("demo", there)
        found = files(RunFolder.find_latest("demo", there).find_checkpoint(2))
        after = found["step"].decode()
        assert after in (before, f"new {number}")
        assert found == {**files(here.find_checkpoint(2)), "step": after.encode()}
        before = after
        if is_whole:
            break
    assert before == f"new {number}"
    assert number > 4
    lists = [name for name in Store(url)._list_names("demo") if name.endswith(".json")]
    assert len(lists) == len(steps)


@pytest.mark.long
def test_kill_during_replacement_keeps_checkpoint(tmp_path: Path) -> None:
    """A kill during a replacement leaves the old checkpoint or the new one, and the next upload cleans up."""
    kills = killed_at_each_step(tmp_path, "stored")
    texts = [kill["brought"]["5"] for kill in kills]
    assert texts == sorted(texts, reverse=True)
    assert {*texts} == {"old", "new"}
    for kill in kills:
        assert kill["again"] == {"5": "new"}
        assert len(kill["names"]) == 2


def test_download_gets_run_of_exact_name(url: str, tmp_path: Path) -> None:
    """A download gets the run of exactly this name, if any, and keeps later local checkpoints."""
    store = Store(url)
    for name, steps in {"demo": (1,), "demo-2": (5,)}.items():
        store.upload_checkpoint(made(tmp_path / "here", name, *steps), name, steps[-1])
    store.download_run("demo", tmp_path / "there")
    assert RunFolder.find_latest("demo", tmp_path / "there").path.name == "demo"
    farther = made(tmp_path / "farther", "demo", 1, 2)
    store.download_run("demo", tmp_path / "farther")
    assert [step for step, _ in farther.list_checkpoints()] == [1, 2]
    assert RunFolder.create("demo", tmp_path / "new", store.has_run).path.name == "demo-3"
    store.download_run("other", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["demo"]


GOOD: dict[str, Any] = {"step": 2, "name": "demo", "files": {"step": 1}}
WRONG = {
    "cut short": json.dumps(GOOD)[:-5],
    "no JSON": "\xff",
    "deep": "[" * 100_000,
    "a list": "[]",
    "another step": json.dumps({**GOOD, "step": 1}),
    "no name": json.dumps({"step": 2, "files": {}}),
    "no files": json.dumps({**GOOD, "files": ["step"]}),
    "no size": json.dumps({**GOOD, "files": {"step": "1"}}),
    "above": json.dumps({**GOOD, "files": {"../../../../above": 1}}),
    "elsewhere": json.dumps({**GOOD, "files": {"/tmp/elsewhere": 1}}),
    "no file": json.dumps({**GOOD, "files": {"": 1}}),
    "the run's lock": json.dumps({**GOOD, "files": {".run/lock.json": 1}}),
    "below the run's": json.dumps({**GOOD, "files": {".run/config.yaml/x": 1}}),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=list(WRONG))
def test_a_list_of_files_that_is_none(url: str, tmp_path: Path, text: str) -> None:
    """A file list that is damaged or forged is refused, and nothing is written locally."""
    store = Store(url)
    store.upload_checkpoint(made(tmp_path / "here", "demo", 1, 2), "demo", 2)
    store._files.pipe_file(f"{store._root}/demo/step-000002.json", text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"can't go on from .*/demo: step-000002\.json: "):
        Store(url).download_run("demo", tmp_path / "there")
    assert not (tmp_path / "there").exists()


class Counter(Role):
    """A counter that saves in two halves."""

    def __init__(self) -> None:
        self.count = 0

    @method
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def save(self, directory: str) -> Any:
        taken = self.count
        yield
        Path(directory, str(self.ctx.rank)).write_text(str(taken))

    def restore(self, directory: str) -> None:
        self.count = int(Path(directory, str(self.ctx.rank)).read_text())


def count(run: Run, *, steps: int) -> None:
    """A job that saves a checkpoint after each step, beside the next step."""
    group = run.groups["policy"]
    done = 0 if run.resumed is None else json.loads((run.resumed / "done").read_text())
    for step in range(done + 1, steps + 1):
        run.log(step, count=group["counter"].add(step)[0])
        with run.checkpoint(step) as directory:
            group.checkpoint(directory / "policy", wait=False)
            (directory / "done").write_text(str(step))


@pytest.mark.in_make_test("memory")
def test_a_run_goes_on_on_another_machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run resumes on a machine without its files, with the same numbers and log; a new run gets another name."""

    def rows(machine: str, steps: int, resume: bool) -> tuple[str, list[Any]]:
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine)
        config = {
            "name": "counts",
            "checkpoints": url,
            "pools": {"main": {"slots": 2}},
            "groups": {"policy": {"pool": "main", "roles": {"counter": f"{__name__}:Counter"}}},
            "job": {"use": f"{__name__}:count", "with": {"steps": steps}},
        }
        with colocate.launch(load_config(config)) as job:
            record = job.run(resume=resume, quiet=True)
        return record.directory.name, [(row["step"], row["count"]) for row in record.metrics]

    assert rows("one", 2, False) == ("counts", [(1, 1), (2, 3)])
    assert rows("two", 4, True) == ("counts", [(1, 1), (2, 3), (3, 6), (4, 10)])
    assert rows("one", 5, True) == ("counts", [(1, 1), (2, 3), (3, 6), (4, 10), (5, 15)])
    assert rows("three", 1, False) == ("counts-2", [(1, 1)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("nowhere://bucket/x", "nowhere"), ("s3:bucket", "must be the address of a folder in a store"), (3, "address")],
)
def test_invalid_store_is_refused(wrong: Any, words: str) -> None:
    def begin() -> None:
        load_config({"name": "demo", "checkpoints": wrong})
        Store(wrong)

    with pytest.raises(ConfigError, match=words):
        begin()


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there() -> None:
    """A missing bucket is refused when its store is opened."""
    with pytest.raises(ConfigError, match="s3://no-such-bucket/x isn't to be had: FileNotFoundError"):
        Store("s3://no-such-bucket/x")
