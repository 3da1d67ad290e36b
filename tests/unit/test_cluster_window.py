"""A job's window for others of its cluster, where something is in the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import colocate
from colocate.errors import ConfigError, EngineError
from colocate.executor import Reach, Watchable, Window
from colocate_report.window import ClusterWindow, Job, look_at, window
from colocate_run.cli.cluster import Cluster
from colocate_run.cli.top import Sight, _chosen, show_top


class Registry(Watchable):
    """An engine's, in this process; it may refuse what is announced."""

    def __init__(self, refuses: bool = False) -> None:
        self.heard: list[Window] = []
        self.listed: list[Window] = []
        self.refuses = refuses

    def reach(self) -> Reach:
        return Reach()

    def announce(self, window: Window) -> None:
        self.heard.append(window)
        if self.refuses:
            raise EngineError("the cluster is gone")
        self.listed.append(window)

    def retract(self, window: Window) -> None:
        self.listed.remove(window)

    def windows(self) -> Sequence[Window]:
        return self.listed


def test_one_that_can_not_be_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on without it, and nothing listens any more."""
    registry = Registry(refuses=True)
    with colocate.connect() as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(runtime._node.services, "executor", registry)
            with window(runtime, "demo"):
                pass
        assert not [each.name for each in threading.enumerate() if "window-demo" in each.name]
    (tried,) = registry.heard
    with pytest.raises(EngineError, match=r"job 'demo' \(.*\) can't be reached from here"):
        look_at(tried, registry)


def test_job_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks is told so after a while; the next look is answered as soon as it does again."""
    registry, go = Registry(), threading.Event()

    def seen() -> dict[str, bool]:
        return {"went_on": go.wait(60)}

    opened = ClusterWindow(registry, "demo", "here/1/1", seen)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("colocate_report.window.PATIENCE_S", 0.2)
            with pytest.raises(TimeoutError, match=r"job 'demo' \(here/1/1\) doesn't answer"):
                look_at(registry.windows()[0], registry)
        go.set()
        assert look_at(registry.windows()[0], registry) == {"went_on": True}
    finally:
        opened.close()
    assert registry.windows() == []


def test_which_is_meant() -> None:
    """By name, by process, or the only one; what is there is said where that isn't clear."""
    one, other = (Sight("demo", (id, id.split("/")[1]), lambda: None) for id in ("n1/7/1", "n2/8/1"))
    assert _chosen(None, [one], "on this cluster") is one
    assert _chosen("8", [one, other], "on this cluster") is other
    assert _chosen("n1/7/1", [one, other], "on this cluster") is one
    with pytest.raises(ConfigError, match=r"which job\? These run on this cluster: demo \(n1/7/1\), demo \(n2/8/1\)"):
        _chosen("demo", [one, other], "on this cluster")
    with pytest.raises(ConfigError, match="no job runs on this cluster, and no pool is detached"):
        _chosen(None, [], "on this cluster")
    with pytest.raises(ConfigError, match=r"on this machine, .*and a script's is a block of colocate\.record"):
        _chosen(None, [], "on this machine")


def test_command_says_what_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that is stopped, say."""

    def hangs(job: Job) -> None:
        raise TimeoutError(f"job {job.name!r} doesn't answer")

    monkeypatch.setattr("colocate_run.cli.top.jobs", lambda: [Job("demo", 7)])
    monkeypatch.setattr("colocate_run.cli.top.look", hangs)
    assert show_top("demo", Cluster(), once=True, every=1.0, json=False) == 1
    assert "job 'demo' doesn't answer" in capsys.readouterr().err
