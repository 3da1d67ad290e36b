"""What workers tell of the processes that roles have started."""

from __future__ import annotations

from collections.abc import Sequence

from colocate._protocol.message import Message, message


@message
class HasChildren(Message):
    """Which processes its roles have started, by `ctx.start`."""

    children: Sequence[tuple[str, str, int, int | None, str]]  # role, name, process id, port, and what it does
