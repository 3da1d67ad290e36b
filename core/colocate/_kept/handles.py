"""Handles of residents: the `Resident` that `.keep` returns, and the `.ref` that stands for its value as an argument.

The group owns the bytes; the handle is the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import attrs

from colocate import _display as html
from colocate._calls.pending import PendingCall
from colocate._kept.kept import Kept
from colocate._kept.residents import Residents
from colocate._protocol.uses import Item, Origin, Own, Part, Rows, Use
from colocate._role.on_driver import OnDriver
from colocate._role.resident import INSTEAD_OF_RESIDENT, Resident, ResidentSpec
from colocate._signals.at_work import refuse_to_wait
from colocate._signals.off_main import off_main
from colocate._system.lines import at
from colocate._system.numbers import limit, size_text
from colocate._values.batch import Deferred, even_sizes
from colocate._values.collect import Concat, Gather
from colocate._values.dispatch import check_items
from colocate._values.mesh import Mesh

if TYPE_CHECKING:
    from colocate._values.batch import Padding
    from colocate._values.beside import Beside

T_co = TypeVar("T_co", covariant=True)


class Reference(OnDriver, Deferred):
    """A resident in a call's arguments. Typed as its value; at run time a placeholder with no use of its own."""

    __slots__ = ("_consumer", "_kept", "_lease", "_lent", "_residents")
    _instead = INSTEAD_OF_RESIDENT

    def __init__(self, residents: Residents, kept: Kept, lease: object, consumer: Consumer | None = None) -> None:
        self._residents = residents
        self._kept = kept
        self._lease = lease  # the value lives as long as anybody can still name it
        self._consumer = consumer
        self._lent: object = None

    def bound(self, consumer: Consumer) -> Reference:
        """The same reference, as seen by the role that uses it."""
        return Reference(self._residents, self._kept, self._lease, consumer)

    def lend(self, call: PendingCall, borrower: Residents) -> None:
        """Have a call use the resident from now on.

        Raises:
            ColocateError: It has been freed, or its group has failed.
        """
        self._lent = self._residents.lend(call, self._kept, borrower)

    def give_back(self) -> None:
        """The call has ended. Idempotent."""
        self._lent = None

    def sizes(self, axis: str, mesh: str | None, count: int, of: int = 1) -> list[int]:
        """Rows of each part; waits for the call that makes it."""
        sizes = self._residents.rows_of(self._kept)
        return sizes if self._own(axis, mesh, count) else even_sizes(sum(sizes), count, of)

    def part(self, index: int, count: int, axis: str, mesh: str | None, padding: Padding, of: int = 1) -> Any:
        """A placeholder for one part."""
        own = self.own(axis, mesh, count, of) if padding == "none" else None
        return Part(self._kept.source, index, count, padding == "even", of=of) if own is None else own

    def own(self, axis: str, mesh: str | None, count: int, of: int = 1) -> Any | None:
        """A placeholder for all parts, where each rank finds its own in its own worker."""
        return Own(self._kept.source, count, of) if self._own(axis, mesh, count) else None

    @property
    def known(self) -> bool:
        """Whether the call that makes it has said how many rows each part has."""
        return self._kept.call.done() and isinstance(self._kept.source.collect, Concat)

    def share(self, index: int, count: int, padding: Padding, beside: Beside, of: int = 1) -> Any:
        """A placeholder for one even part."""
        return Part(self._kept.source, index, count, padding == "even", beside, of)

    def items(self, count: int, parameter: str) -> Sequence[Any]:
        """A placeholder for each item; their number is seen now where the value is a list of the ranks' results."""
        source = self._kept.source
        if type(source.collect) is Gather:
            check_items(parameter, list(source.holders), count)
        return [Item(source, index, count, parameter) for index in range(count)]

    def slice(self, start: int, stop: int) -> Any:
        """A placeholder for some rows."""
        return Rows(self._kept.source, start, stop)

    def whole(self) -> Any:
        """A placeholder for the value."""
        return Use(self._kept.source)

    def fetch(self) -> Any:
        """The value, on the driver."""
        refuse_to_wait(f"the resident of {self._kept.source.label}")
        return self._residents.fetch(self._kept)

    def _no_use(self, *_args: Any, **_options: Any) -> NoReturn:
        raise TypeError(
            f"the value of {self._kept.source.label} lives in the workers: .ref only stands for it as an argument of a "
            "call; .fetch() brings it to the driver"
        )

    __iter__ = __len__ = __getitem__ = __bool__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = _no_use
    __rsub__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = _no_use
    __float__ = __int__ = __index__ = __contains__ = __lt__ = __gt__ = __le__ = __ge__ = __setitem__ = _no_use
    __call__ = __array__ = __array_ufunc__ = _no_use  # NumPy would make an array of one object
    __eq__ = __ne__ = _no_use  # `ref == value` would be False without a word
    __hash__ = object.__hash__

    def _own(self, axis: str, mesh: str | None, count: int) -> bool:
        """Whether each rank of the consumer finds its part in its own worker: same slots, same partition."""
        origin, consumer = self._kept.source.origin, self._consumer
        if consumer is None or origin.group != consumer.group or origin.ranks.targets is not None:
            return False
        asked = origin, axis, mesh, count
        found = consumer.finds_own.get(asked)
        if found is None:
            found = consumer.finds_own[asked] = _finds_own(origin, consumer, axis, mesh, count)
        return found

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a resident's .ref stands for the value of {self._kept.source.label} as an argument of a call; it has no "
            f"{name!r} here. Use .fetch() to get the value"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the .ref of {self._kept.source.label} can't be pickled: pass it as an argument, or inside lists, tuples "
            "and dicts, of a role's method"
        )

    def __repr__(self) -> str:
        return f"<reference to {self._kept.source.label}>"


@attrs.frozen(eq=False)
class Consumer:
    """The role that uses a resident, as far as partitions go.

    `finds_own` is what it has been asked before of residents of its group, which are used again in each step: whether
    each rank has its part in its own worker, by what made them and how they are taken apart.
    """

    group: str
    slots: tuple[int, ...] | range
    mesh: Callable[[str | None], Mesh]
    finds_own: dict[tuple[Origin, str, str | None, int], bool] = attrs.field(factory=dict, init=False)


def _finds_own(origin: Origin, consumer: Consumer, axis: str, mesh: str | None, count: int) -> bool:
    """Whether the ranks of two roles of a group lie on the same slots, and parts of what one made as the other's do."""
    collect = origin.collect
    if not isinstance(collect, Concat) or origin.slots != consumer.slots:
        return False
    made, wanted = origin.ranks.mesh(collect.mesh), consumer.mesh(mesh)
    if made.size(collect.axis) != count or "pp" in made.shape:
        return False
    return count == origin.ranks.world_size or made.lies_as(collect.axis, wanted, axis)


class KeptResident(Resident[T_co]):
    """The handle of a kept result. Dropping it ends the lease; its group is told with the next message."""

    def __init__(self, residents: Residents, kept: Kept) -> None:
        self._residents = residents
        self._kept = kept
        self._lease = residents.lease(kept)

    def __repr__(self) -> str:
        return f"<Resident of {self._kept.source.label} in group {self._kept.source.group!r}>"

    def _repr_html_(self) -> str:
        kept = self._kept
        state, why = self._residents.state_of(kept)
        parts = [
            {"rank": rank, "rows": "" if size[1] is None else size[1], "bytes": size_text(size[0])}
            for rank, size in zip(kept.call.ranks, kept.call.bodies, strict=False)
            if size is not None
        ]
        return html.page(
            html.heading("resident of", kept.source.label, state, f"group {kept.source.group}, {at(kept.line)}"),
            html.reason(why, "" if state == "freed" else "bad") if why else html.table(parts),
        )

    @property
    def ref(self) -> T_co:
        """Stands for the value as an argument; another name of it keeps it alive as the handle does."""
        return cast("T_co", Reference(self._residents, self._kept, self._lease))

    @property
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes; waits until it is there."""
        self._residents.ask(self._kept)
        return self._residents.spec_of(self._kept)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is there, in the workers."""
        refuse_to_wait(f"the resident of {self._kept.source.label}")
        self._residents.ask(self._kept)
        self._residents.wait(self._kept, limit(timeout, "wait(timeout)"))

    def fetch(self, timeout: float | None = None) -> T_co:
        """The collected value, on the driver; waits until it is there."""
        refuse_to_wait(f"the resident of {self._kept.source.label}")
        self._residents.ask(self._kept)
        value: T_co = self._residents.fetch(self._kept, limit(timeout, "fetch(timeout)"))
        return value

    def free(self) -> None:
        """Let go of it. Calls that use it already still get it."""
        self._residents.refuse_fork()
        off_main(lambda: self._residents.release(self._kept, "free()"), waits_s=None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._residents.link.forked:
            self.free()
