"""What workers are told of a sync of weights, and what they tell."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colocate._protocol.uses import Source

SYNC = "the sync of weights"
"""What the call on whole workers says that it is."""
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
        shares: Whether the target is to have the source's very tensors.
        described: Whether all ranks know what the source yields, where that doesn't say it itself.
        bucket: How many bytes travel together to ranks of the target on other slots.
        offers: Where that is done: what is offered there, as workers know it, with the source's ranks and slots. The
            keys of what is offered go down from its own.
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
    shares: bool
    described: bool
    bucket: int
    offers: Source | None = None
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
    """

    version: int
    nbytes: int
    seconds: float
    by: str
