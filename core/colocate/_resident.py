"""`Resident`: a result that stays in the workers. The group owns the bytes; the handle on the driver is the lease."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

import attrs

from colocate._batch import Deferred, even_sizes
from colocate._collect import Concat, Gather
from colocate._dispatch import check_items
from colocate._leases import LeaseEnd
from colocate._mesh import Mesh
from colocate._numbers import limit
from colocate._off_main import off_main
from colocate.errors import ClosedError, ColocateError, DispatchError
from colocate.worker.uses import Item, Own, Part, Rows, Source, Use

if TYPE_CHECKING:
    from colocate._batch import Padding
    from colocate._beside import Beside
    from colocate._group import ColocatedGroup
    from colocate._order import PendingCall

T_co = TypeVar("T_co", covariant=True)


@attrs.frozen
class ResidentSpec:
    """What a resident holds, without its contents.

    Attributes:
        structure: The value of the first rank whose result counts, with shapes and dtypes in place of tensors.
        bytes_per_rank: Bytes of tensors and arrays on each rank.
        rows_per_rank: Rows that the call worked on, on each rank; None where nothing was scattered.
    """

    structure: Any
    bytes_per_rank: tuple[int, ...]
    rows_per_rank: tuple[int | None, ...]


class Resident(abc.ABC, Generic[T_co]):
    """A kept result. Pass `.ref` (or the resident) as an argument; a context manager that frees it at the end."""

    @property
    @abc.abstractmethod
    def ref(self) -> T_co:
        """Stands for the value as an argument of any role's method."""

    @property
    @abc.abstractmethod
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes; waits until it is there."""

    @abc.abstractmethod
    def fetch(self, timeout: float | None = None) -> T_co:
        """The collected value, on the driver.

        Args:
            timeout: Seconds to wait at most; None for the runtime's `call_timeout`.

        Raises:
            TimeoutError: It isn't there yet; the resident stays.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Let go of it. Idempotent; using it afterwards raises ClosedError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent; pass it (or its .ref) as a call's argument")


class LocalResident(Resident[T_co]):
    """The resident of a role object outside any worker: it is the value."""

    def __init__(self, value: T_co) -> None:
        self._value: T_co | None = value
        self._freed = False

    @property
    def ref(self) -> T_co:
        """The value itself."""
        return self.fetch()

    @property
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes."""
        from colocate._values import describe, tensor_bytes

        return ResidentSpec(describe(self._value), (tensor_bytes(self._value),), (None,))

    def fetch(self, timeout: float | None = None) -> T_co:
        """The value itself."""
        limit(timeout, "fetch(timeout)")
        if self._freed:
            raise ClosedError("this resident was freed")
        return cast("T_co", self._value)

    def free(self) -> None:
        """Let go of it."""
        self._value, self._freed = None, True


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Kept:
    """What driver-side code shares of one resident: its source, the call that makes it, and what ends the lease."""

    source: Source
    group: ColocatedGroup
    call: PendingCall
    line: tuple[str, int]
    used: bool = False
    released: str | None = None
    ending: LeaseEnd | None = None
    lost: ColocateError | None = None

    @property
    def freed_by(self) -> str | None:
        """What has ended its lease."""
        if self.released is None and self.ending is not None and self.ending() is None:
            return "dropping its handle"
        return self.released

    def check(self) -> None:
        """Raise unless it can be used: freed, or made by a call that failed, or its group is closed."""
        self.refuse_fork()
        if self.freed_by is not None:
            raise ClosedError(f"resident of {self.source.label} was freed by {self.freed_by}", closed_by=self.freed_by)
        error = self.call._error or self.lost
        if error is not None:
            self.used = True
            # Each gets a copy: its traceback will hold the frames, and so the handle, of who is told, while the group
            # holds the original for as long as the handle lives.
            raise copy.copy(error)
        self.group.check()

    def refuse_fork(self) -> None:
        """Raise in a forked child, which owns nothing."""
        if self.group.forked:
            self.group.check()

    def sizes(self) -> list[int]:
        """Rows of each part in the order in which they are joined, once its call is done and if they are rows."""
        source = self.source
        counted = source.collect.sources(source.ranks)
        sizes = source.ranks.pick([size[1] for size in self.call.bodies], counted)
        for rank, size in zip(counted, sizes, strict=True):
            if size is None:
                raise DispatchError(f"what {source.label} has kept on rank {rank} has no rows to join", rank=rank)
        return list(sizes)

    def use(self) -> None:
        """It becomes an argument."""
        self.check()
        self.used = True

    def ask(self) -> None:
        """It is wanted on the driver."""
        self.check()
        self.call._check_unsent()
        self.used = True


class Reference(Deferred):
    """A resident in a call's arguments. Typed as its value; at run time a placeholder with no use of its own."""

    __slots__ = ("_consumer", "_kept", "_lease")

    def __init__(self, kept: Kept, lease: object, consumer: Consumer | None = None) -> None:
        self._kept = kept
        self._lease = lease  # the value lives as long as anybody can still name it
        self._consumer = consumer

    def bound(self, consumer: Consumer) -> Reference:
        """The same reference, as seen by the role that uses it."""
        return Reference(self._kept, self._lease, consumer)

    def sizes(self, axis: str, mesh: str | None, count: int) -> list[int]:
        """Rows of each part; waits for the call that makes it."""
        sizes = self._kept.group.residents.rows_of(self._kept)
        return sizes if self._own(axis, mesh, count) else even_sizes(sum(sizes), count)

    def part(self, index: int, count: int, axis: str, mesh: str | None, padding: Padding) -> Any:
        """A placeholder for one part."""
        own = self.own(axis, mesh, count) if padding == "none" else None
        return Part(self._kept.source, index, count, padding == "even") if own is None else own

    def own(self, axis: str, mesh: str | None, count: int) -> Any | None:
        """A placeholder for all parts, where each rank finds its own in its own worker."""
        return Own(self._kept.source, count) if self._own(axis, mesh, count) else None

    @property
    def known(self) -> bool:
        """Whether the call that makes it has said how many rows each part has."""
        return self._kept.call.done() and isinstance(self._kept.source.collect, Concat)

    def share(self, index: int, count: int, padding: Padding, beside: Beside) -> Any:
        """A placeholder for one even part."""
        return Part(self._kept.source, index, count, padding == "even", beside)

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
        return self._kept.group.residents.fetch(self._kept)

    def _no_use(self, *_args: Any) -> NoReturn:
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
        source, consumer = self._kept.source, self._consumer
        collect = source.collect
        if consumer is None or not isinstance(collect, Concat) or source.ranks.targets is not None:
            return False
        if (source.group, source.slots) != (consumer.group, consumer.slots):
            return False
        made, wanted = source.ranks.mesh(collect.mesh), consumer.mesh(mesh)
        if made.size(collect.axis) != count or "pp" in made.shape:
            return False
        return count == source.ranks.world_size or made.lies_as(collect.axis, wanted, axis)

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


@attrs.frozen
class Consumer:
    """The role that uses a resident, as far as partitions go."""

    group: str
    slots: tuple[int, ...] | range
    mesh: Callable[[str | None], Mesh]


class KeptResident(Resident[T_co]):
    """The handle of a kept result. Dropping it ends the lease; its group is told with the next message."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._lease = kept.group.residents.lease(kept)

    def __repr__(self) -> str:
        return f"<Resident of {self._kept.source.label} in group {self._kept.source.group!r}>"

    @property
    def ref(self) -> T_co:
        """Stands for the value as an argument; another name of it keeps it alive as the handle does."""
        return cast("T_co", Reference(self._kept, self._lease))

    @property
    def spec(self) -> ResidentSpec:
        """Its structure, shapes, dtypes and bytes; waits until it is there."""
        self._kept.ask()
        return self._kept.group.residents.spec_of(self._kept)

    def fetch(self, timeout: float | None = None) -> T_co:
        """The collected value, on the driver; waits until it is there."""
        self._kept.ask()
        value: T_co = self._kept.group.residents.fetch(self._kept, limit(timeout, "fetch(timeout)"))
        return value

    def free(self) -> None:
        """Let go of it. Calls that use it already still get it."""
        self._kept.refuse_fork()
        off_main(lambda: self._kept.group.residents.release(self._kept, "free()"), waits_s=None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._kept.group.forked:
            self.free()


def check_same_runtime(kept: Kept, runtime: object) -> None:
    """A resident can be used by groups of its own runtime only."""
    if kept.group.runtime is not runtime:
        raise ColocateError(
            f"resident of {kept.source.label} belongs to another runtime; fetch() it and pass the value"
        )
