"""The environment of torchrun, for slots on several nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from colocate.executor import Boot
from colocate.features.process_groups.groups import ProcessGroups

NODES = [0, 1, 1, 0, 1]  # two slots on one node and three on another, in turns


def environment(slot: int, device: str = "cpu", generation: int = 0) -> dict[str, str]:
    boot = Boot("policy/0", "policy", slot, "here", device, generation=generation)
    worker: Any = SimpleNamespace(boot=boot, in_process=False, lane=SimpleNamespace(last_hold=0))
    groups = ProcessGroups(worker)
    groups.default.rendezvous = lambda: ("10.0.0.7", 29511)  # type: ignore[method-assign]
    groups.default.ensure_made = lambda: None  # type: ignore[method-assign]
    return groups.torchrun_environment(NODES)


def test_several_nodes() -> None:
    """Ranks count over all slots, and local ranks over the node's slots; all workers have one rendezvous address."""
    for slot, (local_rank, here) in enumerate([(0, 2), (0, 3), (1, 3), (1, 2), (2, 3)]):
        assert environment(slot, generation=slot) == {
            "MASTER_ADDR": "10.0.0.7",
            "MASTER_PORT": "29511",
            "RANK": str(slot),
            "WORLD_SIZE": "5",
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(here),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(slot),
        }


def test_with_a_gpu() -> None:
    """The local rank is the device's index in the worker, which may see its own device only."""
    for device, local_rank in (("cuda", "0"), ("cuda:0", "0"), ("cuda:2", "2")):
        found = environment(4, device)
        assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("4", local_rank, "3")
