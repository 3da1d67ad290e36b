"""`Kept`: one resident as the driver knows it, the lease of who can name it, and the hold of who needs its value."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from colocate._calls.pending import PendingCall
from colocate.errors import ColocateError, DispatchError

if TYPE_CHECKING:
    from colocate._protocol.uses import Source


class Hold:
    """What everybody holds who needs a resident's value in the workers: its lease, and each call that uses it.

    Nothing is counted, so that an interruption of who begins to use it leaves nothing behind: what its frames had is
    let go of with them.
    """

    __slots__ = ("__weakref__",)


class HoldEnd(weakref.ref[Hold]):
    """Notes the end of a hold, which comes at any point of any thread: by a function in C, so that no signal falls in.

    A finalizer in Python would lose what a signal's handler raises in it, and then the release too.
    """

    __slots__ = ("key",)
    key: int

    def __new__(cls, hold: Hold, note: Callable[[HoldEnd], None], key: int) -> HoldEnd:
        """Args: note: Called with this. key: The resident's."""
        self: HoldEnd = super().__new__(cls, hold, note)
        self.key = key
        return self

    def __init__(self, hold: Hold, note: Callable[[HoldEnd], None], key: int) -> None:
        super().__init__(hold, note)  # type: ignore[call-arg]


class Lease:
    """What everybody holds who can still name a resident. It has the hold until the resident is freed."""

    __slots__ = ("__weakref__", "hold")

    def __init__(self, hold: Hold) -> None:
        self.hold: Hold | None = hold


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Kept:
    """What driver-side code shares of one resident: its source, the call that makes it, its lease and its hold."""

    source: Source
    call: PendingCall
    used: bool = False
    released: str | None = None
    lease: weakref.ref[Lease] | None = None
    ending: HoldEnd | None = None
    lost: ColocateError | None = None

    @property
    def line(self) -> tuple[str, int]:
        """The user's that has kept it."""
        return self.call.line

    @property
    def freed_by(self) -> str | None:
        """What has ended its lease."""
        if self.released is None and self.lease is not None and self.lease() is None:
            return "dropping its handle"
        return self.released

    @property
    def hold(self) -> Hold | None:
        """What keeps its value in the workers, unless it has been freed."""
        lease = None if self.lease is None else self.lease()
        return None if lease is None else lease.hold

    def free(self, by: str) -> None:
        """End its lease, though there may be who can name it."""
        self.released = by
        lease = None if self.lease is None else self.lease()
        if lease is not None:
            lease.hold = None

    @property
    def error(self) -> ColocateError | BaseException | None:
        """Why there is none: its call has failed, or its workers are gone."""
        return self.call._error or self.lost

    @property
    def untold(self) -> bool:
        """Whether its call has failed and nobody knows: by its use, or by another call that has failed of the same."""
        error = self.call._error
        return error is not None and not self.used and not (isinstance(error, ColocateError) and error._told)

    def known_sizes(self) -> list[tuple[int, int | None]]:
        """Bytes and rows of the parts that are there."""
        return [size for size in self.call.bodies if size is not None]

    def sizes(self) -> list[int]:
        """Rows of each part in the order in which they are joined, once its call is done and if they are rows."""
        source = self.source
        counted = source.collect.sources(source.ranks)
        sizes = source.ranks.pick([size[1] for size in self.call.bodies], counted)
        for rank, size in zip(counted, sizes, strict=True):
            if size is None:
                raise DispatchError(f"what {source.label} has kept on rank {rank} has no rows to join", rank=rank)
        return list(sizes)
