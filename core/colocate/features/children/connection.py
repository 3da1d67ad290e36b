"""`ChildConnection`: a role's connection to a child process, which raises `ChildDied` if the child has died."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate.features.children.child import Child


class ChildConnection(Connection):
    """A role's connection to a child process; every method raises `ChildDied` if the child has died."""

    def __init__(self, handle: int, child: Child) -> None:
        super().__init__(handle)
        self._child = child
        self._closing = threading.Lock()

    def close(self) -> None:
        """Close the connection under a lock, because the role and the ending worker may close at the same time."""
        with self._closing:
            super().close()


def _wrap_method(name: str) -> Any:
    plain = getattr(Connection, name)

    def told(self: ChildConnection, *args: Any, **options: Any) -> Any:
        try:
            return plain(self, *args, **options)
        except (EOFError, OSError) as error:
            raise self._child._explain_error(error) from error

    return told


for _name in ("send", "recv", "poll", "send_bytes", "recv_bytes", "recv_bytes_into"):
    setattr(ChildConnection, _name, _wrap_method(_name))
