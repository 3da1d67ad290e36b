"""What workers are told of a sync of weights, and what they tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs

from colocate._protocol.uses import Source

SYNC = "the sync of weights"
"""What the call on whole workers says that it is."""
DIGESTS = "the digests of weights"
"""Likewise of the call by which weights are compared."""
BUCKETS = 32
"""Bits for the numbers of what is offered in a sync: keys go down from the first one."""


@attrs.frozen
class SyncPlan:
    """A sync as a group's workers have to know it.

    Attributes:
        giver: What has the weights, as errors say it: "actor", or "policy.actor" of another group.
        taker: What gets them, likewise.
        source: The role of this group that has the weights; None where that is another group's.
        target: The role of this group that gets them; None likewise.
        members: How many ranks the target has.
        names: What the target calls weights, by what the source calls them; None for what it doesn't get.
        dtype: What floating-point weights are converted to, as torch calls it; None for what they are.
        finite: Whether a weight that isn't finite is an error.
        check: Whether what the target has then is compared with what was to arrive.
        shares: Whether the target is to have the source's very tensors.
        described: Whether all ranks know what the source yields, where that doesn't say it itself.
        bucket: How many bytes travel together to ranks of the target on other slots.
        offers: Where that is done: what is offered there, as workers know it, with the source's ranks and slots. The
            keys of what is offered go down from its own.
        idle: Whether nothing is brought, as the object of one of both roles only stands in for one.
        takes: By slot of this group from which of these ranks it takes them.
        serves: By slot of this group how many take them from it.
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
class Synced:
    """What a sync has done on a rank of the target.

    Attributes:
        version: Of its weights now.
        nbytes: Their bytes, as they came.
        seconds: How long it took.
        by: How they came; see `WeightSync`.
        checked: How many were compared; None where that wasn't wanted.
    """

    version: int
    nbytes: int
    seconds: float
    by: str
    checked: int | None


@attrs.frozen
class Wanted:
    """A wish for the digests of a role's weights.

    Attributes:
        role: The role that has the weights.
        whose: The same, as errors say it.
        dtypes: What weights are converted to before, by name, as torch calls it; others are as they are.
    """

    role: str
    whose: str
    dtypes: Mapping[str, str]


class Digest(NamedTuple):
    """A tensor without its bytes.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, as "bfloat16".
        value: The digest of its bits.
        tied: The first of the names under which this very memory is there.
    """

    shape: tuple[int, ...]
    dtype: str
    value: int
    tied: str

    @property
    def content(self) -> tuple[tuple[int, ...], str, int]:
        """The digest without its names."""
        return self[:3]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"
