"""Messages of weight syncs and comparisons between the driver and workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs

from colocate._protocol.uses import Source

SYNC = "the sync of weights"
"""The label of a sync's call on whole workers."""
DIGESTS = "the digests of weights"
"""The label of a comparison's call on whole workers."""
BUCKETS = 32
"""Bits for the numbers of offers in a sync: keys go down from the first one."""


@attrs.frozen
class SyncPlan:
    """The plan of a sync for a group's workers.

    Attributes:
        giver: The source's name for error texts: "actor", or "policy.actor" in another group.
        taker: The target's name, in the same form.
        source: The source's role in this group; None if the source is in another group.
        target: The target's role in this group; None if the target is in another group.
        members: The number of ranks of the target.
        names: The target's names by the source's names; None for weights that the target doesn't get.
        dtype: The dtype for floating-point weights, without "torch."; None for no conversion.
        finite: Whether a weight that isn't finite is an error.
        check: Whether the target's weights are compared with the source's afterwards.
        shares: Whether the target keeps the source's very tensors.
        described: Whether all ranks know the source's names, shapes and dtypes, if `named_weights` has no `specs`.
        bucket: The bytes that travel together to ranks of the target on other slots.
        offers: The first offer to other workers, with the source's ranks and slots; None without takers. The keys of
            offers go down from this one's.
        idle: Whether nothing is copied, since one of the roles is only a stand-in.
        takes: By slot of this group, the source's rank that the slot takes the weights from.
        serves: By slot of this group, the number of takers.
    """

    giver: str
    taker: str
    source: str | None
    target: str | None
    members: int
    names: Mapping[str, str | None]
    dtype: str | None
    finite: bool
    check: bool
    shares: bool
    described: bool
    bucket: int
    offers: Source | None = None
    idle: bool = False
    takes: Mapping[int, int] = attrs.field(factory=dict)
    serves: Mapping[int, int] = attrs.field(factory=dict)


@attrs.frozen
class SyncReport:
    """The result of a sync on one rank of the target.

    Attributes:
        version: The version of the rank's weights.
        nbytes: The bytes of the weights, as they arrived.
        seconds: The duration.
        by: The way of the transfer; see `WeightSync`.
        checked: The number of compared weights; None without a check.
    """

    version: int
    nbytes: int
    seconds: float
    by: str
    checked: int | None


@attrs.frozen
class DigestRequest:
    """A request for the digests of a role's weights.

    Attributes:
        role: The role with the weights.
        owner: The role's name in error texts.
        dtypes: The dtypes to convert weights to, by name, without "torch."; other weights aren't converted.
    """

    role: str
    owner: str
    dtypes: Mapping[str, str]


class Digest(NamedTuple):
    """The digest of a tensor, with shape and dtype.

    Attributes:
        shape: The shape.
        dtype: The dtype, as "bfloat16".
        value: The digest of the bits.
        tied: The first of the names that share this memory.
    """

    shape: tuple[int, ...]
    dtype: str
    value: int
    tied: str

    @property
    def content(self) -> tuple[tuple[int, ...], str, int]:
        """Shape, dtype and value, without the name in `tied`."""
        return self[:3]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"
