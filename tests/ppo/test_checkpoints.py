"""A checkpoint is independent of the number of ranks: one rank or four restore a checkpoint of two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ppo.stored import tensors_of
from tests.ppo.test_parallel import SMALL, learn

import colocate
from colocate import ColocatedGroup
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.spread import Parallel
from colocate_ppo.task import Problems
from colocate_ppo.team import Team


@contextmanager
def group(slots: int, parallel: Parallel) -> Iterator[ColocatedGroup]:
    """Spawn the four roles in processes."""
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=slots) as pool:
        roles: dict[str, colocate.RoleSpec[Any]] = {
            "actor": colocate.role(Actor, **SMALL, parallel=parallel),
            "critic": colocate.role(Critic, parallel=parallel),
            "reference": colocate.role(Reference, parallel="none" if parallel == "ddp" else parallel),
            "reward": colocate.role(Reward),
        }
        yield pool.spawn(roles, name="policy")


@pytest.mark.parametrize("slots", [pytest.param(1, id="to one"), pytest.param(4, id="to four", marks=pytest.mark.long)])
def test_from_two_ranks(problems: Problems, tmp_path: Path, slots: int) -> None:
    """Four ranks, or whole models outside any worker, restore weights and moments of two ranks to the last bit."""
    folders = [tmp_path / name for name in ("of two", "of others")]
    with group(2, "fsdp2") as found:
        team = Team.from_group(found)
        learn(team, problems, team.actor.weights(), minibatch=4)
        found.checkpoint(folders[0])
        if slots == 1:  # A checkpoint that is written beside steps has the same tensors.
            saving = found.checkpoint(tmp_path / "beside", wait=False)
            while not saving.done():
                learn(team, problems, team.actor.weights(), minibatch=4)
            saving.result()
            for role in ("actor", "critic", "reference"):
                beside, waiting = (tensors_of(folder / role) for folder in (tmp_path / "beside", folders[0]))
                torch.testing.assert_close(beside, waiting, rtol=0, atol=0)
    if slots == 1:
        for role in (Actor(**SMALL), Critic(), Reference()):
            name = type(role).__name__.lower()
            (folders[1] / name).mkdir(parents=True)
            role.restore(str(folders[0] / name))
            role.save(str(folders[1] / name))
    else:
        with group(slots, "fsdp2") as found:
            found.restore(folders[0])
            found.checkpoint(folders[1])
    first, written_again = (
        {
            name: tensor
            for role in ("actor", "critic", "reference")
            for name, tensor in tensors_of(folder / role).items()
        }
        for folder in folders
    )
    assert {name.rpartition(".")[2] for name in first if ".q_proj." in name} == {
        *("weight", "step", "exp_avg", "exp_avg_sq")
    }
    torch.testing.assert_close(written_again, first, rtol=0, atol=0)


def test_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(colocate.ConfigError, match=r"has written nothing there that is complete$"):
        Actor(**SMALL).restore(str(tmp_path))


def test_of_another_model(tmp_path: Path) -> None:
    """A checkpoint of another model is refused, and the error names the tensor."""
    Actor(**SMALL).save(str(tmp_path))
    with pytest.raises(
        colocate.ConfigError,
        match=r"another model: model.embed_tokens.weight is \[100, 16\] here, there it is \[100, 32\]",
    ):
        Actor(**{**SMALL, "hidden": 16}).restore(str(tmp_path))


@pytest.mark.parametrize("cls", [Critic, Reference])
def test_a_role_without_a_model(tmp_path: Path, cls: type[Any]) -> None:
    with pytest.raises(colocate.ColocateError, match="has no model yet: call `load` or `restore` before"):
        cls().save(str(tmp_path))
