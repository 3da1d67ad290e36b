"""A user's `__del__`, run by the garbage collector, interrupts the framework at work."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Resident, Role, method
from colocate._signals.in_framework import is_in_framework
from colocate.testing.waiting import PATIENCE_S


class Notes(Role):
    def __init__(self) -> None:
        self.notes: list[str] = []

    @method
    def note(self, what: str) -> list[str]:
        self.notes.append(what)
        return list(self.notes)


class Dropped:
    """Garbage in a cycle, whose `__del__` calls `end`."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.itself = self
        self.end = end

    def __del__(self) -> None:
        self.end()


@pytest.fixture
def group() -> Iterator[ColocatedGroup]:
    with colocate.connect() as runtime, runtime.reserve(slots=2) as pool:
        yield pool.spawn({"notes": colocate.role(Notes)})


@pytest.fixture
def collected(group: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Run a callback in a `__del__`, as soon as the next message has been sent to the first slot only."""
    host: Any = group._node.workforce.workers[0].host
    send = host.send

    def arm(end: Callable[[], object]) -> None:
        Dropped(end)

        def send_and_collect(frame: Any) -> None:
            monkeypatch.setattr(host, "send", send)
            send(frame)
            gc.collect()

        monkeypatch.setattr(host, "send", send_and_collect)

    gc.disable()  # The cycle must be collected in `send`, and not before.
    try:
        yield arm  # type: ignore[misc]
    finally:
        gc.enable()


def test_call_kept_in_del_is_sent_later(group: ColocatedGroup, collected: Any) -> None:
    """A call that a `__del__` keeps doesn't overtake, on any slot, a call that is sent only in part.

    A call that uses the resident is refused: it would wait in the worker for a call queued behind it.
    """
    notes = group.role("notes", Notes)
    kept: list[Resident[Any]] = []
    refused: list[str] = []

    def end() -> None:
        kept.append(notes.note.keep("from __del__"))
        try:
            notes.note.submit(kept[0].ref)
        except colocate.PipelineError as error:
            refused.append(str(error))

    collected(end)
    assert notes.note("first") == [["first"], ["first"]]
    assert kept[0].fetch(PATIENCE_S) == [["first", "from __del__"]] * 2
    kept[0].free()
    assert len(refused) == 1
    assert "would be sent before notes.note" in refused[0]


def test_blocking_call_in_del_is_refused(group: ColocatedGroup, collected: Any, tmp_path: Path) -> None:
    """A blocking call in such a `__del__` is refused with the reason; the call that was being sent completes."""
    notes = group.role("notes", Notes)
    kept = notes.note.keep("kept")
    pool: Any = group.owner
    roles = {"notes": colocate.role(Notes)}
    ways: dict[str, Callable[[], object]] = {
        "call": lambda: notes.note("never"),
        "result": lambda: notes.note.submit("later").result(),
        "fetch": kept.fetch,
        "run": lambda: group.run(lambda ctx: None),
        "close": group.close,
        "checkpoint": lambda: group.checkpoint(tmp_path / "there"),
        "restore": lambda: group.restore(tmp_path),
        "memory": group.memory,
        "sleep": lambda: group.sleep("notes"),
        "wake": lambda: group.wake("notes"),
        "wait_ready": group.wait_ready,
        "spawn": lambda: pool.spawn(roles, name="another"),
        "reserve": pool.owner.reserve,
        "connect": colocate.connect,
        "all in one": lambda: colocate.spawn(roles),
        "audit": pool.owner.audit,
    }
    errors: dict[str, str] = {}

    def end() -> None:
        for what, way in ways.items():
            try:
                way()
            except colocate.ColocateError as error:
                errors[what] = str(error)

    collected(end)
    assert notes.note("first")[0][:2] == ["kept", "first"]
    assert [*errors] == [*ways]
    for what, error in errors.items():
        assert "would wait for an answer on a thread on which colocate is at work" in error, what
    kept.free()


def test_threads_of_users_wait(group: ColocatedGroup) -> None:
    """A callback of the user's may block: its thread isn't the framework's."""
    notes = group.role("notes", Notes)
    heard: list[Any] = []
    done = threading.Event()

    def callback(call: Any) -> None:
        heard.append((is_in_framework(), notes.note("from a callback")[0]))
        done.set()

    notes.note.submit("first").add_done_callback(callback)
    assert done.wait(PATIENCE_S)
    assert heard == [(False, ["first", "from a callback"])]
