"""Reports of workers on the processes started by roles."""

from __future__ import annotations

from collections.abc import Sequence

from colocate._protocol.message import Message, message


@message
class HasChildren(Message):
    """All processes that the worker's roles have started by `ctx.start`."""

    children: Sequence[tuple[str, str, int, int | None, str]]  # role, name, pid, port, state
