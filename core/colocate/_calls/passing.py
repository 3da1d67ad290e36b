"""Plan routes by which large bodies reach each other machine once, forwarded from one machine to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from colocate._protocol.to_worker import Passed

if TYPE_CHECKING:
    from colocate._worker_group.workforce import Worker


def _remote_machines(workers: Iterable[Worker]) -> list[list[Worker]]:
    machines: dict[str, list[Worker]] = {}
    for worker in workers:
        if (lane := worker.host.lane) is not None and not lane.is_local:
            machines.setdefault(worker.boot.node, []).append(worker)
    return list(machines.values())


def plan_relays(workers: Iterable[Worker], key: int) -> tuple[Sequence[tuple[int, Passed]], Sequence[Worker]]:
    """Return the route of a message body that workers pass on from machine to machine.

    The driver sends to the first machine only. The first worker of each machine fetches from the previous machine, and
    forwards to the other workers of the machine.

    Args:
        workers: The receivers.
        key: The body's key.

    Returns:
        The receivers' slots, each with its forwarding instructions; empty if nothing is to be forwarded, or
            addresses are unknown. Second, the workers with unknown addresses.
    """
    machines = _remote_machines(workers)
    if sum(map(len, machines)) < 2:
        return (), ()
    relays: list[tuple[int, Passed]] = []
    unknown: list[Worker] = []
    before = ""
    for index, (first, *other_workers) in enumerate(machines):
        takers = len(other_workers) + (index + 1 < len(machines))
        relays.append((first.slot, (key, takers, before)))
        if takers:
            if (address := first.address) is None:
                unknown.append(first)
            else:
                before = address
                relays += [(other.slot, (key, 0, address)) for other in other_workers]
    return ((), unknown) if unknown else (relays, ())
