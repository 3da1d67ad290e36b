"""`NodeHandle`: the base class of the users' handles of runtimes, pools and groups."""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from colocate import features
from colocate._owned.owned import Owned
from colocate._role.call import DriverObject
from colocate._system.lines import format_line

N = TypeVar("N", bound=Owned)
_names: dict[type[Owned], type[NodeHandle[Any]]] = {}


class NodeHandle(DriverObject, Generic[N]):
    """A user's handle of a runtime, pool or group. Dropping a handle closes nothing."""

    _by: ClassVar[str]
    _unsent = " to a worker or pickled"

    def __init_subclass__(cls, *, node: type[Owned] | None = None, by: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if node is not None:
            _names[node] = cls
            cls._by = by

    def __init__(self, node: N) -> None:
        if not isinstance(node, Owned):
            raise TypeError(f"a {type(self).__name__} is made by {self._by}(...), not by its class")
        self._node: N = node

    @classmethod
    def _wrap(cls, node: N) -> Self:
        """Return the user's handle of a node. Each call for one node returns the same object."""
        # Use `setdefault`, because other threads may request the handle at the same time.
        handle: Self = node.names.get(cls) or node.names.setdefault(cls, cls(node))
        return handle

    @property
    def name(self) -> str:
        """The name of the runtime, pool or group."""
        return self._node.name

    @property
    def owner(self) -> Any:
        """The owner, which closes this object at the latest: a group's pool or a pool's runtime; None for a runtime."""
        owner = self._node.owner
        return None if owner is None else _names[type(owner)]._wrap(owner)

    @property
    def alive(self) -> bool:
        """Whether this object is open; false in a forked child process."""
        return self._node.alive

    @property
    def state(self) -> str:
        """The current state, as one word such as "ready"."""
        return self._node.state

    def __repr__(self) -> str:
        return repr(self._node)

    def _repr_html_(self) -> str:
        return self._render()

    def _render(self, *more: str) -> str:
        return str(features.import_module_of("looking.graph").render_html(self._node, *more))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        node = self._node.closed_as
        if not node.is_forked:
            node.close_after(
                error, f"leaving its with block at {format_line(node.line)}", 10.0 if error is None else 2.0
            )
