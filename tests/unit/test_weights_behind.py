"""The metric `weights_behind`: its name, and the count of updates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from colocate.driver import Driver
from colocate.features.weights.updates import SourceUpdates


def driver_of(behind: dict[str, int], targets: int) -> Any:
    """Return a stand-in for a driver with a group some of whose roles have had rows since the last call."""
    part = SimpleNamespace(updates=dict.fromkeys(map(str, range(targets))), pop_behind=lambda: behind)
    group = SimpleNamespace(parts={"weights": part})
    return SimpleNamespace(_node=SimpleNamespace(worker_groups={"g": group, "other": SimpleNamespace(parts={})}))


def test_name() -> None:
    """The metric's name depends on the number of targets, whichever of these had rows since the last call."""
    assert Driver.take_weights_behind(driver_of({"a": 2}, 1)) == {"weights_behind": 2}
    assert Driver.take_weights_behind(driver_of({}, 1)) == {}
    assert Driver.take_weights_behind(driver_of({"a": 2}, 2)) == {"weights_behind/g.a": 2}
    both = {"weights_behind/g.a": 2, "weights_behind/g.b": 0}
    assert Driver.take_weights_behind(driver_of({"a": 2, "b": 0}, 2)) == both


def test_count() -> None:
    """An update counts if it ended before the rows began, or at that moment."""
    updates = SourceUpdates("actor", 0)
    updates.times.extend([1.0, 2.0, 3.0])
    assert [updates.count_before(began) for began in (0.5, 1.0, 2.5, 9.0)] == [0, 1, 2, 3]
