"""Process groups of a rank that are still usable in a hold: no torch, no threads, no clock.

The driver's half is in `_calls/order.py`; `tests/laws/simulator.py` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from colocate.features.process_groups.messages import Operations


class Usable:
    """One rank's cuts, and the operation counts of ranks that begin no more.

    Attributes:
        epoch: The last hold in which this rank was back.
        cuts: The groups that this rank has cut or dropped, until its roles have gone on without them.
    """

    def __init__(self, epoch: int = 0) -> None:
        """Start at the other ranks' state. Args: epoch: A hold in which this rank was back without any groups."""
        self.epoch = epoch
        self._gone: dict[int, Operations] = {}
        self.cuts: set[str] = set()

    def left(self, hold: int, slot: int, operations: Operations) -> bool:
        """Record that a rank begins no operations until the hold is over; return False if this rank is back already."""
        if hold <= self.epoch:  # the driver didn't know yet
            return False
        self._gone[slot] = operations
        return True

    def vain(self, begun: Operations, members: Callable[[str], Collection[int]]) -> set[str]:
        """Return the groups on which this rank has begun more operations than can end.

        Args:
            begun: The operations of this rank on each group.
            members: Returns the slots of a group.
        """
        names = set()
        for name, (count, _) in begun.items():
            slots = members(name)
            can_end = [
                counts.get(name, (0, 0))[0] for slot, counts in self._gone.items() if name in counts or slot in slots
            ]
            if can_end and count > min(can_end):
                names.add(name)
        return names

    def shares(self, slots: Collection[int]) -> bool:
        """Return whether one of the slots begins no more operations."""
        return not self._gone.keys().isdisjoint(slots)

    def back(self, hold: int) -> None:
        """Mark this rank as back in a hold."""
        self.epoch = hold
        self._gone.clear()
