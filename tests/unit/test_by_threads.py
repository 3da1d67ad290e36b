"""Something that is done for several things by several threads."""

from __future__ import annotations

import _thread
from typing import Any

import pytest

from colocate._system import jobs as module
from colocate._system.jobs import by_threads


def refuse(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def lack(*_: Any) -> None:
    raise MemoryError


_INSTEAD = {"that die as they begin": lambda *_: 0, "that can't be started": refuse, "for which nothing is left": lack}


@pytest.fixture(params=["as many as are wanted", *_INSTEAD])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What becomes of other threads."""
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: range(8))
    if request.param in _INSTEAD:
        monkeypatch.setattr(_thread, "start_new_thread", _INSTEAD[request.param])
    return str(request.param)


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_all_is_done(threads: str, count: int) -> None:
    """In order."""
    assert by_threads(lambda item: item * 2, range(count), 4) == [item * 2 for item in range(count)]


def test_errors(threads: str) -> None:
    """The first is raised, when all is over."""
    done: list[int] = []

    def do(item: int) -> None:
        done.append(item)
        if item % 2:
            raise ValueError(item)

    with pytest.raises(ValueError, match=r"^1$"):
        by_threads(do, range(10), 4)
    assert sorted(done) == list(range(10))
