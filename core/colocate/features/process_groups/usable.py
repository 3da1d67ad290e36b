"""Which process groups of a rank are of use, in a hold: without torch, threads or a clock.

The driver's half of that is in `_calls/order.py`; `tests/laws/simulator.py` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from colocate.features.process_groups.messages import Operations


class Usable:
    """What one rank has cut of its process groups, and what others had begun on theirs that begin nothing more.

    Attributes:
        epoch: The last hold in which this rank is back.
        cuts: The groups that it has cut, or dropped, and that its roles haven't gone on without yet.
    """

    def __init__(self, epoch: int = 0) -> None:
        """Begin where other ranks are. Args: epoch: A hold in which this rank was back without any groups."""
        self.epoch = epoch
        self._gone: dict[int, Operations] = {}
        self.cuts: set[str] = set()

    def left(self, hold: int, slot: int, operations: Operations) -> bool:
        """Note that another rank begins nothing more until a hold is over; False where this one is back in it."""
        if hold <= self.epoch:  # which the driver hadn't heard
            return False
        self._gone[slot] = operations
        return True

    def vain(self, begun: Operations, members: Callable[[str], Collection[int]]) -> set[str]:
        """Return the groups on which this rank has begun more operations than can end.

        Args:
            begun: What it has begun on each.
            members: Tells the slots that share one.
        """
        found = set()
        for name, (count, _) in begun.items():
            slots = members(name)
            can_end = [told.get(name, (0, 0))[0] for slot, told in self._gone.items() if name in told or slot in slots]
            if can_end and count > min(can_end):
                found.add(name)
        return found

    def shares(self, slots: Collection[int]) -> bool:
        """Whether one of some slots begins nothing more."""
        return not self._gone.keys().isdisjoint(slots)

    def back(self, hold: int) -> None:
        """Note that this rank runs nothing, in a hold."""
        self.epoch = hold
        self._gone.clear()
