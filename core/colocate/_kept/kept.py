"""`Kept`: one resident as the driver knows it, and the lease that everybody shares who can still name it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from colocate._calls.pending import PendingCall
from colocate.errors import ColocateError, DispatchError

if TYPE_CHECKING:
    from colocate._protocol.uses import Source


class Lease:
    """What everybody holds who can still name a resident."""

    __slots__ = ("__weakref__",)


class LeaseEnd(weakref.ref[Lease]):
    """Notes the end of a lease, which comes at any point of any thread: by a function in C, so that no signal falls in.

    A finalizer in Python would lose what a signal's handler raises in it, and then the release too.
    """

    __slots__ = ("key",)
    key: int

    def __new__(cls, lease: Lease, note: Callable[[LeaseEnd], None], key: int) -> LeaseEnd:
        """Args: note: Called with this. key: The resident's."""
        self: LeaseEnd = super().__new__(cls, lease, note)
        self.key = key
        return self

    def __init__(self, lease: Lease, note: Callable[[LeaseEnd], None], key: int) -> None:
        super().__init__(lease, note)  # type: ignore[call-arg]


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Kept:
    """What driver-side code shares of one resident: its source, the call that makes it, and what ends the lease."""

    source: Source
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
