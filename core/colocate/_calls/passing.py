"""How a large body gets to workers of other machines: once to each machine, and from one to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from colocate._protocol.to_worker import Passed

if TYPE_CHECKING:
    from colocate._worker_group.workforce import Worker


def _far(workers: Iterable[Worker]) -> list[list[Worker]]:
    """List the workers that don't lie on this machine, by machine."""
    machines: dict[str, list[Worker]] = {}
    for worker in workers:
        if (lane := worker.host.lane) is not None and not lane.is_local:
            machines.setdefault(worker.boot.node, []).append(worker)
    return list(machines.values())


def ways(workers: Iterable[Worker], key: int) -> tuple[Sequence[tuple[int, Passed]], Sequence[Worker]]:
    """How a body comes to those that don't lie on this machine: the first gets it from the driver.

    Each machine's first one has it from that of the machine before, and the others there have it from that.

    Args:
        workers: Who is to have it.
        key: What it is called.

    Returns:
        Their slots, with what each is told; nothing where nothing is to be passed on, or it isn't known where those are
        reached that would. These come second.
    """
    machines = _far(workers)
    if sum(map(len, machines)) < 2:
        return (), ()
    found: list[tuple[int, Passed]] = []
    unknown: list[Worker] = []
    before = ""
    for index, (first, *others) in enumerate(machines):
        takers = len(others) + (index + 1 < len(machines))
        found.append((first.slot, (key, takers, before)))
        if takers:
            if (address := first.address) is None:
                unknown.append(first)
            else:
                before = address
                found += [(other.slot, (key, 0, address)) for other in others]
    return ((), unknown) if unknown else (found, ())
