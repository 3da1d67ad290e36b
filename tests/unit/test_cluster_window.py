"""A job's window for others of its cluster, where something is in the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import colocate
from colocate.errors import ClusterError, ConfigError
from colocate.executor import Reach, Watchable, Window
from colocate_report.window import look_at, window
from colocate_run.cli.top import Sight, _chosen


class Registry(Watchable):
    """An engine's, in this process, which refuses what is announced."""

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
    """The job goes on without it, and nothing listens any more."""
    registry = Registry()
    with colocate.connect() as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(runtime._node.services, "executor", registry)
            with window(runtime, "demo"):
                pass
        assert not [each.name for each in threading.enumerate() if "window-demo" in each.name]
    (tried,) = registry.heard
    with pytest.raises(ClusterError, match=r"job 'demo' \(.*\) can't be reached from here"):
        look_at(tried, registry)


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
