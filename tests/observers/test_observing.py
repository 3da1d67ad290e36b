"""Observers of a run: their events and the order of these, and the run's safety from their faults."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo


class Notes:
    """Records its events, and raises in one hook."""

    def __init__(self, raises_in: str = "") -> None:
        self.told: list[str] = []
        self.raises_in = raises_in
        self.run: colocate.RunInfo | None = None
        self.ended: tuple[colocate.RunRecord, BaseException | None] | None = None

    def _note(self, hook: str) -> None:
        self.told.append(hook)
        if hook == self.raises_in:
            raise LookupError(f"in {hook}")

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        self.run = run
        self._note("started")

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        self._note(f"logged {record.step}")

    def colocate_call_finished(self, record: colocate.CallRecord) -> None:
        self._note(record.method)

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        self.ended = record, error
        self._note("finished")


def in_a_run(runtime: colocate.Runtime, folder: Path, *observe: object, fails: bool = False) -> colocate.Run:
    group = runtime.reserve(1).spawn({"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)})
    with colocate.record(runtime, folder / "sums", observe=observe) as run:
        group.role("echo", Echo).noop()
        run.log(0, loss=1.0)
        if fails:
            group.role("faulty", Faulty).fail()
        run.log(1, loss=0.5)
    return run


def test_observers_get_events_in_order(tmp_path: Path) -> None:
    """Observers get events in order, from before the block to after the report, and none later."""
    notes = Notes()
    with colocate.connect("local") as runtime:
        run = in_a_run(runtime, tmp_path, notes)
        assert notes.told == ["started", "noop", "logged 0", "logged 1", "finished"]
        runtime.groups[next(iter(runtime.groups))].role("echo", Echo).noop()
        runtime.audit()
        assert notes.told[-1] == "finished"  # no event after the end
        second = in_a_run(runtime, tmp_path)
    assert notes.run is not None
    assert (notes.run.name, notes.run.directory, notes.run.resumed) == ("sums", tmp_path / "sums", None)
    assert notes.ended == (run.record, None)
    assert {path.name for path in run.directory.iterdir()} >= {"metrics.jsonl", "log.txt", "report.html"}
    assert "step 1" in (run.directory / "log.txt").read_text()
    assert second.directory.name == "sums-2"
    assert second.record is not None
    assert [(each.method, each.calls) for each in second.record.totals] == [("noop", 1)]
    for late in (
        lambda: run.log(1, loss=1.0),
        lambda: run.show("numbers", []),
        lambda: run.checkpoint(1).__enter__(),
    ):
        with pytest.raises(colocate.ClosedError, match="this is after the block of run 'sums'"):
            late()


def test_a_block_that_raises(tmp_path: Path) -> None:
    """The observers and the report get the error of a block that raises."""
    notes = Notes()
    with colocate.connect("local") as runtime, pytest.raises(colocate.RoleError) as caught:
        in_a_run(runtime, tmp_path, notes, fails=True)
    assert notes.told == ["started", "noop", "logged 0", "fail", "finished"]
    assert notes.ended is not None
    assert notes.ended[1] == caught.value
    for name in ("error.txt", "report.html"):
        assert "a plain one" in (tmp_path / "sums" / name).read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_a_report_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Observers are notified of the end though no report can be written."""
    notes = Notes()

    def full(*args: object, **kwargs: object) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr("colocate_report.write", full)
    expected = colocate.RoleError if fails else OSError
    with colocate.connect("local") as runtime, pytest.raises(expected):
        in_a_run(runtime, tmp_path, notes, fails=fails)
    assert notes.told[-1] == "finished"


def test_secrets_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values whose keys in a config name secrets are hidden from observers and from the report."""
    monkeypatch.chdir(tmp_path)
    config = colocate.load_config(
        {
            "name": "demo",
            "executor": {"use": "local", "with": {"processes": True}},
            "pools": {"main": {"slots": 1, "env": {"HF_TOKEN": "hf_SECRET", "WORD": "shown"}}},
            "job": f"{__name__}:keeps_what_it_is_told",
            "observe": [f"{__name__}:Notes"],
        }
    )
    monkeypatch.setattr(f"{__name__}.Notes", lambda: STARTED)
    with colocate.launch(config) as launched:
        launched.run(quiet=True)
    assert STARTED.run is not None
    assert STARTED.run.config["pools"]["main"]["env"] == {"HF_TOKEN": "(hidden)", "WORD": "shown"}
    (page,) = tmp_path.glob("runs/*/report.html")
    assert "WORD: shown" in page.read_text(encoding="utf-8")
    assert "hf_SECRET" not in page.read_text(encoding="utf-8")
    assert STARTED.ended is not None
    assert "hf_SECRET" not in STARTED.ended[0].config


STARTED = Notes()


def keeps_what_it_is_told(run: colocate.Run) -> None:
    """A job that does nothing."""


@pytest.mark.parametrize("hook", ["noop", "logged 0", "finished"])
def test_one_that_raises(tmp_path: Path, hook: str) -> None:
    """An observer that raises gets no event but the end, and the log has its error once, with the traceback."""
    broken, notes = Notes(hook), Notes()
    with colocate.connect("local") as runtime:
        in_a_run(runtime, tmp_path, broken, notes)
    wanted = ["started", "noop", "logged 0", "logged 1", "finished"]
    assert broken.told == [*wanted[: wanted.index(hook)], *dict.fromkeys((hook, "finished"))]
    assert notes.told == wanted
    log = (tmp_path / "sums" / "log.txt").read_text()
    assert log.count("the observer 'Notes' raised in colocate_") == 1
    assert ("is told nothing more but of the end: LookupError: in" in log) == (hook != "finished")
    assert f"LookupError: in {hook}" in log
    assert "_note" in log


class Stuck(Notes):
    """Blocks in the hook of a step until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        super().colocate_run_logged(record)
        self.inside.set()
        assert self.go.wait(60)


class StepsOnly:
    """Records steps, and has no other hook."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        self.steps.append(record.step)


def test_one_that_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An observer that blocks too long is named, with its stack, and all observers are notified of the end."""
    monkeypatch.setattr("colocate._calls.services.TOLD_WITHIN_S", 0.1)
    first, stuck, behind, steps = Notes(), Stuck(), Notes(), StepsOnly()
    with colocate.connect("local") as runtime:
        group = runtime.reserve(1).spawn({"echo": colocate.role(Echo)})
        with colocate.record(runtime, tmp_path / "sums", observe=[first, stuck, behind, steps]) as run:
            run.log(0, loss=1.0)
            assert stuck.inside.wait(60)
            for step in (1, 2):
                group.role("echo", Echo).noop()
                run.log(step, loss=1.0)
            group.role("echo", Echo).noop()
        assert first.told == ["started", "logged 0", "finished"]
        assert behind.told == ["started", "finished"]
        stuck.go.set()
        runtime._node.services.dispatcher.run(lambda: None)  # By now the dispatcher has dropped the other events.
    assert stuck.told == ["started", "logged 0", "finished"]
    assert (first.told, behind.told, steps.steps) == (["started", "logged 0", "finished"], ["started", "finished"], [])
    (warning,) = [each.getMessage() for each in caplog.records if each.name == "colocate"]
    log = (run.directory / "log.txt").read_text()
    for text in (warning, log):
        assert "its report lacks the last calls" in text
        assert "because 'Stuck' hasn't returned from colocate_run_logged" in text
    assert "assert self.go.wait(60)" in log  # the stack of 'Stuck'


def test_options_of_a_script(tmp_path: Path) -> None:
    """Options of observers in a script are checked as in a config."""
    mistakes = {"port": "9464", "adress": "::1"}
    with colocate.connect("local") as runtime:
        with (
            pytest.raises(colocate.ConfigError) as error,
            colocate.record(runtime, tmp_path / "sums", observe=[{"use": "prometheus", "with": mistakes}]),
        ):
            pass
        with (
            pytest.raises(colocate.ConfigError, match="observe=None is no list of observers"),
            colocate.record(runtime, tmp_path / "none", observe=None),  # type: ignore[arg-type]
        ):
            pass
    assert str(error.value).splitlines() == [
        "observe: prometheus: 2 mistakes",
        "  with.port: must be an integer, not the text '9464'; remove the quotes",
        "  with.adress: prometheus has no parameter 'adress' (did you mean 'address'?)",
    ]


def test_the_end_of_the_process(tmp_path: Path) -> None:
    """A `sys.exit()` in the block ends a run well, as in a job; one with another status is an error."""
    notes, failed = Notes(), Notes()
    for name, observer, code in (("good", notes, None), ("bad", failed, 3)):
        with (
            pytest.raises(SystemExit),
            colocate.connect("local") as runtime,
            colocate.record(runtime, tmp_path / name, observe=[observer]),
        ):
            sys.exit(code)
    assert notes.ended is not None
    assert failed.ended is not None
    assert notes.ended[1] is None
    assert isinstance(failed.ended[1], SystemExit)
    assert not (tmp_path / "good" / "error.txt").exists()
    assert (tmp_path / "bad" / "error.txt").exists()
    assert (tmp_path / "good" / "report.html").exists()


@pytest.mark.parametrize("way", ["leaves", "raises", "exits"])
def test_a_fork_in_the_block(tmp_path: Path, way: str) -> None:
    """A child that leaves the block after a fork doesn't end the run, and writes and notifies nothing."""

    class Ends:
        def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
            with (tmp_path / "ends").open("a") as file:
                file.write(f"{os.getpid()} {error}\n")

    with colocate.connect("local") as runtime:
        try:
            with colocate.record(runtime, tmp_path / "sums", observe=[Ends()]) as run:
                child = os.fork()
                if not child and way == "raises":
                    raise LookupError
                if not child and way == "exits":
                    sys.exit(0)
                if child:
                    os.waitpid(child, 0)
        finally:
            if not child:
                os._exit(0)
    assert (tmp_path / "ends").read_text() == f"{os.getpid()} None\n"
    assert sorted(path.name for path in run.directory.iterdir()) == ["log.txt", "report.html"]


def test_a_callback_that_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run's end waits for callbacks, but not forever: a warning says that calls are missing."""
    go, notes = threading.Event(), Notes()
    with colocate.connect("local") as runtime:
        group = runtime.reserve(1).spawn({"echo": colocate.role(Echo)})
        with colocate.record(runtime, tmp_path / "late") as late:
            group.role("echo", Echo).noop.submit().add_done_callback(lambda call: go.wait(60))
            group.role("echo", Echo).noop()
            threading.Timer(0.2, go.set).start()
        assert late.record is not None
        assert [total.calls for total in late.record.totals] == [2]
        monkeypatch.setattr("colocate._calls.services.TOLD_WITHIN_S", 0.1)
        for name, observe in (("watched", [notes]), ("plain", [])):
            go.clear()
            with colocate.record(runtime, tmp_path / name, observe=observe):
                call = group.role("echo", Echo).noop.submit()
                call.add_done_callback(lambda call: go.wait(60))
                call.result()
                group.role("echo", Echo).noop()
            go.set()
    watched, plain = [each.getMessage() for each in caplog.records if each.name == "colocate"]
    for text in (watched, plain):
        assert "its report lacks the last calls" in text
        assert "because a callback goes on" in text


def test_one_that_raises_at_the_start(tmp_path: Path) -> None:
    """A run doesn't start if an observer raises at the start; earlier observers are notified of the end."""
    first, broken, last = Notes(), Notes("started"), Notes()
    with (
        colocate.connect("local") as runtime,
        pytest.raises(colocate.PluginError, match=r"'Notes' raised when") as error,
    ):
        in_a_run(runtime, tmp_path, first, broken, last)
    assert isinstance(error.value.__cause__, LookupError)
    assert (first.told, broken.told, last.told) == (["started", "finished"], ["started"], [])
    assert first.ended is not None
    assert first.ended[1] == error.value


class Misspelt:
    """An observer with a misspelt hook."""

    def colocate_run_loged(self, record: object) -> None:
        """There is no such hook."""


@pytest.mark.parametrize(
    ("observer", "words"),
    [
        (
            Misspelt(),
            r"Misspelt has a hook 'colocate_run_loged', which doesn't exist; did you mean 'colocate_run_logged'",
        ),
        (Misspelt, r"is given the class Misspelt: give it an object, Misspelt\(\.\.\.\)"),
        (7, "is given 7, which has none of an observer's hooks: colocate_group_spawned, "),
        (None, "is given None, which has none"),
    ],
)
def test_invalid_observer_is_refused(tmp_path: Path, observer: object, words: str) -> None:
    """An object without valid hooks is refused as an observer."""
    with colocate.connect("local") as runtime:
        with pytest.raises(colocate.ConfigError, match=f"^runtime.observe.*{words}"):
            runtime.observe(observer)
        with (
            pytest.raises(colocate.ConfigError, match=f"^observe.*{words}"),
            colocate.record(runtime, tmp_path / "sums", observe=[observer]),
        ):
            pass


def test_config_observers_may_be_limited_to_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config may name a class of a module, but neither that nor an address if it may name plugins only."""
    config: dict[str, Any] = {"name": "demo", "pools": {"main": {"slots": 1}}}
    module = {"use": f"{__name__}:Notes", "with": {"raises_in": "noop"}}
    (found,) = colocate.load_config({**config, "observe": [module]}).observe
    assert (found.use, found.with_) == (module["use"], module["with"])
    sent = {"use": "prometheus", "with": {"address": "0.0.0.0"}}
    for observer, words in ((module, "names a module"), (sent, "can't say where an observer sends")):
        with pytest.raises(colocate.ConfigError, match=words):
            colocate.load_config({**config, "observe": [observer]}, allow_import=False)
    changed = colocate.load_config(
        {**config, "observe": ["prometheus"]}, allow_import=False, set=["observe[0].with.port=0"]
    )
    assert changed.observe[0].with_ == {"port": 0}


def test_invalid_runtime_and_folder_are_refused(tmp_path: Path) -> None:
    """An object that is no runtime is refused, and so is a folder that can't be made."""
    (tmp_path / "file").write_text("")
    with colocate.connect() as runtime, runtime.reserve(slots=1) as pool:
        for what, folder, told in (
            (pool, tmp_path / "x", r"colocate.record\(runtime, directory\): a Pool is no runtime"),
            (runtime, tmp_path / "file" / "x", f"can't make the run's folder {tmp_path}/file: File exists"),
        ):
            with pytest.raises(colocate.ConfigError, match=told), colocate.record(what, folder):  # type: ignore[arg-type]
                raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
