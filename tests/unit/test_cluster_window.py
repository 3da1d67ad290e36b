"""A job's window for its cluster: a failed announcement, and the choice among several jobs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import colocate
from colocate.errors import ClusterError, ConfigError
from colocate.executor import Reach, Watchable, Window
from colocate_report.window import inspect_cluster_job, open_window
from colocate_run.cli.top import JobView, _choose_view


class Registry(Watchable):
    """A registry in this process that refuses each announcement."""

    def __init__(self) -> None:
        self.heard: list[Window] = []

    def reach(self) -> Reach:
        return Reach()

    def announce(self, window: Window) -> None:
        self.heard.append(window)
        raise ClusterError("the cluster is gone")

    def retract(self, window: Window) -> None:
        raise AssertionError("it never was announced")

    def windows(self) -> Sequence[Window]:
        return []


def test_one_that_can_not_be_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose window can't be announced runs without one, and no thread of the window remains."""
    registry = Registry()
    with colocate.connect() as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(runtime._node.services, "executor", registry)
            with open_window(runtime, "demo"):
                pass
        assert not [each.name for each in threading.enumerate() if "window-demo" in each.name]
    (tried,) = registry.heard
    with pytest.raises(ClusterError, match=r"job 'demo' \(.*\) can't be reached from here"):
        inspect_cluster_job(tried, registry)


def test_which_is_meant() -> None:
    """A job is chosen by its process or as the only one; the error for an unclear choice lists the jobs."""
    one, other = (JobView("demo", (id, id.split("/")[1]), lambda: None) for id in ("n1/7/1", "n2/8/1"))
    assert _choose_view(None, [one], "on this cluster") is one
    assert _choose_view("8", [one, other], "on this cluster") is other
    assert _choose_view("n1/7/1", [one, other], "on this cluster") is one
    with pytest.raises(ConfigError, match=r"which job\? These run on this cluster: demo \(n1/7/1\), demo \(n2/8/1\)"):
        _choose_view("demo", [one, other], "on this cluster")
    with pytest.raises(ConfigError, match="no job runs on this cluster, and no pool is detached"):
        _choose_view(None, [], "on this cluster")
    with pytest.raises(ConfigError, match=r"on this machine, .*or by colocate\.record\(\.\.\.\) in a script"):
        _choose_view(None, [], "on this machine")
