"""Handles of residents for users: the results of `.keep`, and the placeholders (`.ref`) for arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import attrs

from colocate import _display as html
from colocate._calls.pending import PendingCall, unpack_result
from colocate._protocol.uses import Item, LocalPart, Origin, Part, Pick, Rows, Source, Use
from colocate._role.call import INSTEAD_OF_RESIDENT, DriverObject, Resident, ResidentSpec
from colocate._signals.in_framework import check_may_wait
from colocate._system.lines import format_line
from colocate._system.numbers import FOREVER_S, format_size, parse_limit
from colocate._values import batch
from colocate._values.batch import Deferred
from colocate._values.collect import Concat, Gather
from colocate._values.dispatch import check_items
from colocate._values.mesh import Mesh
from colocate._values.plain import split_evenly

if TYPE_CHECKING:
    from colocate._values.batch import AlignedRows, Padding
    from colocate._values.plain import Partition

from colocate._calls.residents import Pin, ResidentRecord, Residents

T_co = TypeVar("T_co", covariant=True)


@attrs.frozen(eq=False)
class Consumer:
    """A role that uses residents, with the facts for comparing partitions.

    `alignments` caches answers for residents of the role's group, which are used again in each step: whether each
    rank has its part in its own worker, by origin and split.
    """

    group: str
    slots: tuple[int, ...] | range
    mesh: Callable[[str | None], Mesh]
    alignments: dict[tuple[Origin, str, str | None, int], bool] = attrs.field(factory=dict, init=False)


class Reference(DriverObject, Deferred):
    """A placeholder for a resident in a call's arguments. Type checkers see the value's type. Other uses fail."""

    __slots__ = ("_consumer", "_handle", "_kept", "_lent", "_residents")
    _instead = INSTEAD_OF_RESIDENT

    def __init__(self, handle: KeptResident[Any], consumer: Consumer | None = None) -> None:
        self._handle = handle  # This reference keeps the value alive.
        self._residents = handle._residents
        self._kept = handle._kept
        self._consumer = consumer
        self._lent: object = None

    def bind_consumer(self, consumer: Consumer) -> Reference:
        return Reference(self._handle, consumer)

    def lend(self, call: PendingCall, borrower: Residents) -> None:
        self._lent = self._residents.lend(call, self._kept, borrower)

    def give_back(self) -> None:
        """End the loan to a finished call. Idempotent."""
        self._lent = None

    def sizes(self, axis: str, mesh: str | None, count: int, of: int = 1) -> list[int]:
        """Wait for the call that makes the value; return the number of rows of each part."""
        record = self._kept
        self._residents.wait_until_made(record, FOREVER_S)
        if isinstance(record.source.collect, Concat):
            sizes = record.sizes()
        else:  # The value isn't a sequence of parts, so fetch the whole value and count.
            sizes = [batch.get_row_count(self._residents.fetch(record), f"the resident of {record.source.label}")]
        return split_evenly(sum(sizes), count, of) if self.own(axis, mesh, count) is None else sizes

    def part(self, index: int, count: int, axis: str, mesh: str | None, padding: Padding, of: int = 1) -> Any:
        own_part = self.own(axis, mesh, count, of) if padding == "none" else None
        return (
            Part(self._kept.source, index, count, padding == "even", from_values=of) if own_part is None else own_part
        )

    def own(
        self, axis: str, mesh: str | None, count: int, of: int = 1, partition: Partition | None = None
    ) -> Any | None:
        """Return a placeholder for all parts if each rank has the right rows locally; otherwise None."""
        if not self._is_aligned(axis, mesh, count) or partition != self.partition:
            return None
        return LocalPart(self._kept.source, count, of)

    @property
    def partition(self) -> Partition | None:
        """The row indices of each part, if the rows were distributed by cost and are concatenated; otherwise None."""
        source = self._kept.source
        if source.partition is None or not isinstance(source.collect, Concat):
            return None
        ranks = source.ranks
        return ranks.pick(source.partition, source.collect.sources(ranks))

    def pick(self, rows: Sequence[int], beside: AlignedRows) -> Any:
        return Pick(self._kept.source, rows, beside)

    @property
    def known(self) -> bool:
        """Whether the number of rows in each part is known."""
        return self._kept.call.done() and isinstance(self._kept.source.collect, Concat)

    def share(self, index: int, count: int, padding: Padding, beside: AlignedRows, of: int = 1) -> Any:
        return Part(self._kept.source, index, count, padding == "even", beside, of)

    def items(self, count: int, parameter: str) -> Sequence[Any]:
        """Return a placeholder for each item. The driver checks the number of items for a list of ranks' results."""
        source = self._kept.source
        if type(source.collect) is Gather:
            check_items(parameter, list(source.holders), count)
        return [Item(source, index, count, parameter) for index in range(count)]

    def slice(self, start: int, stop: int) -> Any:
        return Rows(self._kept.source, start, stop)

    def whole(self) -> Any:
        return Use(self._kept.source)

    def fetch(self) -> Any:
        check_may_wait(f"the resident of {self._kept.source.label}")
        return self._residents.fetch(self._kept)

    def _is_aligned(self, axis: str, mesh: str | None, count: int) -> bool:
        """Return whether each rank of the consumer has the right part locally: same slots, same partition."""
        origin, consumer = self._kept.source.origin, self._consumer
        if consumer is None or origin.group != consumer.group or origin.ranks.targets is not None:
            return False
        key = origin, axis, mesh, count
        is_own = consumer.alignments.get(key)
        if is_own is None:
            is_own, collect = False, origin.collect
            if isinstance(collect, Concat) and origin.slots == consumer.slots:
                source_mesh, target_mesh = origin.ranks.mesh(collect.mesh), consumer.mesh(mesh)
                if source_mesh.size(collect.axis) == count and "pp" not in source_mesh.shape:
                    is_own = count == origin.ranks.world_size or source_mesh.matches_layout(
                        collect.axis, target_mesh, axis
                    )
            consumer.alignments[key] = is_own
        return is_own

    def _no_use(self, *_args: Any, **_options: Any) -> NoReturn:
        raise TypeError(
            f"the value of {self._kept.source.label} lives in the workers: .ref only stands for it as an argument of a "
            "call; .fetch() brings it to the driver"
        )

    __iter__ = __len__ = __getitem__ = __bool__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = _no_use
    __rsub__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = _no_use
    __float__ = __int__ = __index__ = __contains__ = __lt__ = __gt__ = __le__ = __ge__ = __setitem__ = _no_use
    __call__ = __array__ = __array_ufunc__ = _no_use  # Otherwise NumPy would make an array of one object.
    __eq__ = __ne__ = _no_use  # Otherwise `ref == value` would silently be False.
    __hash__ = object.__hash__

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


class KeptResident(Resident[T_co]):
    """The handle of a kept result. The value is freed after the handle, by the next call to all workers or soon."""

    def __init__(self, residents: Residents, source: Source, call: PendingCall) -> None:
        self._residents = residents
        self._hold: Pin | None = Pin()  # None after `free`, which drops the pin.
        ending = weakref.ref(self._hold, lambda _: residents.ended.append(source.key))
        self._kept = ResidentRecord(source, call, weakref.ref(self), ending)

    def __repr__(self) -> str:
        return f"<Resident of {self._kept.source.label} in group {self._kept.source.group!r}>"

    def _repr_html_(self) -> str:
        record = self._kept
        state, why = self._residents.state_of(record)
        parts = [
            {"rank": rank, "rows": "" if size[1] is None else size[1], "bytes": format_size(size[0])}
            for rank, size in zip(record.call.ranks, record.call.bodies, strict=False)
            if size is not None
        ]
        return html.page(
            html.heading(
                "resident of",
                record.source.label,
                state,
                f"group {record.source.group}, {format_line(record.call.line)}",
            ),
            html.reason(why, "" if state == "freed" else "bad") if why else html.table(parts),
        )

    @property
    def ref(self) -> T_co:
        """A placeholder for the value as an argument, which keeps the value alive like the handle."""
        return cast("T_co", Reference(self))

    @property
    def spec(self) -> ResidentSpec:
        residents, record = self._residents, self._kept
        deadline, source = residents.wait_until_made(record, None), record.source
        counted = source.collect.sources(source.ranks) or source.holders
        body = residents.ask_parts(record, counted[:1], False, deadline)[0]
        structure = unpack_result(residents.link, record.call, source.slot(counted[0]), body)
        return ResidentSpec(structure, tuple(size[0] for size in record.call.bodies), tuple(record.call.rows))

    def wait(self, timeout: float | None = None) -> None:
        check_may_wait(f"the resident of {self._kept.source.label}")
        self._residents.wait_until_made(self._kept, parse_limit(timeout, "wait(timeout)"))

    def fetch(self, timeout: float | None = None) -> T_co:
        check_may_wait(f"the resident of {self._kept.source.label}")
        value: T_co = self._residents.fetch(self._kept, parse_limit(timeout, "fetch(timeout)"))
        return value

    def free(self) -> None:
        """Free the value. Calls that already use the value still get the value."""
        link = self._residents.link
        if link.is_forked:
            link.check_usable()
        self._residents.release(self._kept, "free()")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._residents.link.is_forked:
            self.free()
