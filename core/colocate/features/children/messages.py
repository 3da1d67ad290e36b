"""The message in which a worker reports the processes that roles have started."""

from __future__ import annotations

from collections.abc import Sequence

from colocate._protocol.message import Message, message


@message
class ChildrenReport(Message):
    """Report all processes that a worker's roles have started by `ctx.start`."""

    children: Sequence[tuple[str, str, int, int | None, str]]  # One tuple per process: role, name, pid, port and state.
