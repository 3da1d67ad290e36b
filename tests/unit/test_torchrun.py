"""The environment that torchrun sets, for the slots of several nodes."""

from __future__ import annotations

import pytest

from colocate.worker.torch_groups.groups import ProcessGroups

NODES = [0, 1, 1, 0, 1]  # two slots on one node and three on another, in turns


def environment(slot: int, device: str = "cpu", generation: int = 0) -> dict[str, str]:
    """What one of the workers has."""
    groups = ProcessGroups(None, False, "policy", slot, device=device)  # type: ignore[arg-type]  # nobody is asked
    groups.default.rendezvous = lambda: ("10.0.0.7", 29511)  # type: ignore[method-assign]
    groups.default.have = lambda: None  # type: ignore[method-assign]
    groups.default.generation = generation
    return groups.torchrun_environment(NODES)


@pytest.mark.parametrize(("slot", "local_rank", "here"), [(0, 0, 2), (1, 0, 3), (2, 1, 3), (3, 1, 2), (4, 2, 3)])
def test_several_nodes(slot: int, local_rank: int, here: int) -> None:
    """Ranks are counted over all slots, local ones over those of the node; all meet at one place."""
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


@pytest.mark.parametrize(("device", "local_rank"), [("cuda", "0"), ("cuda:0", "0"), ("cuda:2", "2")])
def test_with_a_gpu(device: str, local_rank: str) -> None:
    """The local rank is the number that the device has in the worker, which may see but its own."""
    found = environment(4, device)
    assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("4", local_rank, "3")
