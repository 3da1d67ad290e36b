"""The environment that torchrun sets, for libraries that read it."""

from __future__ import annotations

from collections.abc import Sequence

from colocate.gpus import backend_for, number_of
from colocate.worker.site import Site


def torchrun_environment(site: Site, nodes: Sequence[int]) -> dict[str, str]:
    """The variables of one worker, which agree with torch's default group.

    Args:
        site: The worker.
        nodes: Which slots lie on one node, as a number for each slot.
    """
    slot, device = site.boot.slot, site.boot.device
    host, port = site.groups.rendezvous()
    here = [each for each, node in enumerate(nodes) if node == nodes[slot]]
    # Libraries take it for the device's number, too; a worker may see but its own.
    local_rank = here.index(slot) if backend_for(device) is None else number_of(device)
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(slot),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already
        "TORCHELASTIC_RESTART_COUNT": str(site.groups.generation),
    }
