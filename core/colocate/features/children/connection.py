"""A role's end of the connection to a function that is its child: where it breaks, that is told as the child's end."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate.features.children.child import Child


class ChildConnection(Connection):
    """The connection of a child."""

    def __init__(self, handle: int, child: Child) -> None:
        super().__init__(handle)
        self._child = child
        self._closing = threading.Lock()

    def close(self) -> None:
        """Close it, once: the role and whoever ends its worker may do so at the same time."""
        with self._closing:
            super().close()


def _telling(name: str) -> Any:
    plain = getattr(Connection, name)

    def told(self: ChildConnection, *args: Any, **options: Any) -> Any:
        try:
            return plain(self, *args, **options)
        except (EOFError, OSError) as error:
            raise self._child._blamed(error) from error

    return told


for _name in ("send", "recv", "poll", "send_bytes", "recv_bytes", "recv_bytes_into"):
    setattr(ChildConnection, _name, _telling(_name))
