"""`connect(debug=True)` and the driver's PYTHONBREAKPOINT: refusals, and the workers' settings."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import pytest

import colocate
from colocate.errors import CapabilityError
from colocate.features.debugging import desk as desks
from colocate.features.debugging.desk import Desk, Stop, Terminal


def test_on_threads() -> None:
    """`debug=True` is refused on threads, which can't stop where a role raises."""
    with pytest.raises(CapabilityError, match="stop where a role raises"):
        colocate.connect("local", debug=True)


@pytest.mark.parametrize(
    ("debug", "hook", "told"),
    [
        (False, None, None),
        (True, None, (True, "")),
        (False, "debugpy.breakpoint", (False, "debugpy.breakpoint")),
        (True, "0", (True, "0")),
        (False, "ray.util.rpdb._driver_set_trace", None),  # Ray sets this in a driver that it was connected from.
    ],
)
def test_workers_receive_settings_only_while_debugging(
    monkeypatch: pytest.MonkeyPatch, debug: bool, hook: str | None, told: tuple[bool, str] | None
) -> None:
    """Workers get debugging settings only if the driver debugs; `debug=True` makes the collective timeout a day."""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    if hook is not None:
        monkeypatch.setenv("PYTHONBREAKPOINT", hook)
    with colocate.connect("local", processes=True, debug=debug, collective_timeout=5.0) as runtime:
        services = runtime._node.services
        assert services.debugging == told
        assert services.collective_timeout == (86400.0 if debug else 5.0)


@pytest.mark.parametrize("how", ["closed", "detached"])
def test_closed_terminal_gets_no_stops(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A terminal that has closed or detached gets no more stops: the next stop waits for another terminal."""
    monkeypatch.setattr(desks, "_find_screen", lambda: None)
    desk, announced, told = Desk(), list[str](), list[Any]()
    here, there = socket.socketpair()
    terminal = Terminal(here, "that of a test", followed=("policy", 1))  # Nobody reads from this socket.

    def stop(number: int) -> Stop:
        return Stop("policy", 1, "node", number, "actor", "step", 1, "file.py:1", "", told.append, announced.append)

    first, second = stop(1), stop(2)
    desk._jobs.run(partial(desk._terminals.append, terminal))
    desk.add_stop(first)
    if how == "detached":
        desk._jobs.run(partial(desk._on_message, terminal, {"line": None}))
        assert first.is_over
    desk.end_stop(first, "goes on")
    if how == "closed":
        desk._jobs.run(there.close)
    desk.add_stop(second)
    desk._jobs.run(partial(desk._on_terminal_closed, terminal))
    assert not second.is_over
    assert second.needs_terminal
    assert len(announced) == 1
    desk.end_stop(second, "goes on")
    desk.close()
    there.close()
