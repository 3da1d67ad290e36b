"""Decides which process groups of a rank are still usable during a hold, without torch, threads or a clock.

The driver's part is in `_calls/order.py`, and `tests/laws/simulator.py` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from colocate.features.process_groups.messages import Operations


class UsableGroups:
    """A rank's record of cut groups, and of the operations of ranks that start no more operations.

    Attributes:
        epoch: The last hold in which this rank was back.
        cuts: The groups that this rank has cut or dropped, until its roles are renewed.
    """

    def __init__(self, epoch: int = 0) -> None:
        """Start without groups. `epoch` is the last hold in which this rank was back."""
        self.epoch = epoch
        self._left_slots: dict[int, Operations] = {}
        self.cuts: set[str] = set()

    def on_peer_left(self, hold: int, slot: int, operations: Operations) -> bool:
        """Record that a rank starts no operations until the hold ends. Return False if this rank is back already."""
        if hold <= self.epoch:  # The driver didn't know yet that this rank is back.
            return False
        self._left_slots[slot] = operations
        return True

    def find_hopeless(self, begun: Operations, members: Callable[[str], Collection[int]]) -> set[str]:
        """Return the groups on which this rank has started operations that can't end.

        Args:
            begun: The operations that this rank has started on each group.
            members: Returns the slots of a group.
        """
        names = set()
        for name, (count, _) in begun.items():
            slots = members(name)
            can_end = [
                counts.get(name, (0, 0))[0]
                for slot, counts in self._left_slots.items()
                if name in counts or slot in slots
            ]
            if can_end and count > min(can_end):
                names.add(name)
        return names

    def includes_left(self, slots: Collection[int]) -> bool:
        """Return whether any of these slots has a rank that starts no more operations."""
        return not self._left_slots.keys().isdisjoint(slots)

    def on_back(self, hold: int) -> None:
        """Mark this rank as back in a hold."""
        self.epoch = hold
        self._left_slots.clear()
