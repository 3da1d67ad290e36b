"""The PPO job's first update is the same on every executor, from a config in which only `executor:` changes.

`make test` has the parts: `test_parallel.py` makes the update in processes, and `tests/conformance` checks that an
executor passes on seeds, arguments and residents unchanged.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.conformance.shared import cluster
from tests.ppo.stored import tensors_of

import colocate

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo-small.yaml"
# One step at the full learning rate follows a warm-up of two. Answers are sampled, so generators count too.
ONE_UPDATE = [
    "groups.policy.roles.actor.with={layers: 1, hidden: 32, heads: 2, feed_forward: 64, lr: 1e-3, threads: 1}",
    "job.with={task_options: {min_word_len: 3, max_word_len: 5}, warm_up_steps: 2, warm_up_batch: 9, steps: 1,"
    " batch: 31, minibatch: 8, epochs: 2, critic_only_steps: 0, actor_ramp: 1, actor_decay: 0, eval_problems: 16}",
]
PROCESSES = {"use": "local", "with": {"processes": True}}
NUMBERS = {"policy_loss", "value_loss", "policy_grad_norm", "value_grad_norm", "reward", "kl", "entropy", "eval_score"}
SLOTS = pytest.mark.parametrize("slots", [1, 2])

pytestmark = pytest.mark.long


@attrs.frozen(eq=False)
class Update:
    """The metrics of the first update, and the tensors that each role saves, optimizers included."""

    numbers: Mapping[str, float]
    tensors: Mapping[str, torch.Tensor]


Run = Callable[..., Update]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs the job on an executor with a number of slots."""

    def go(executor: Any, slots: int, **layout: Any) -> Update:
        changes = [*ONE_UPDATE, f"pools.main.slots={slots}", f"executor={json.dumps(executor)}"]
        for role in ("actor", "critic"):
            changes += [
                f"+groups.policy.roles.{role}.with.{name}={json.dumps(value)}" for name, value in layout.items()
            ]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("run"))
            with colocate.launch(colocate.load_config(EXAMPLE, set=changes)) as job:
                record = job.run(quiet=True)
            written = [*record.directory.absolute().glob("checkpoints/*/policy/*/.metadata")]
        tensors = {name: value for file in written for name, value in tensors_of(file.parent).items()}
        numbers = {
            name: value for row in record.metrics for name, value in row.items() if name not in ("seconds", "time")
        }
        return Update(numbers, tensors)

    return go


@pytest.fixture(scope="module")
def local(run: Run) -> Callable[[int], Update]:
    """Return the local update by slots: in a thread for one, in processes for two, as torch's process groups need."""
    return functools.cache(lambda slots: run("local" if slots == 1 else PROCESSES, slots))


@pytest.fixture(scope="module", params=["processes", "ray", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the executor's entry in a config."""
    if request.param == "processes":
        yield PROCESSES
        return
    pytest.importorskip({"dask": "distributed"}.get(request.param, request.param))
    with cluster(request.param) as options:
        yield {"use": request.param, "with": options}


@SLOTS
def test_the_first_update_is_the_local_one(run: Run, local: Callable[[int], Update], executor: Any, slots: int) -> None:
    found, expected = run(executor, slots), local(slots)
    assert found.numbers.keys() >= NUMBERS
    assert found.numbers == pytest.approx(expected.numbers, rel=1e-5, abs=1e-6)
    assert {name.partition("/")[0] for name in found.tensors} == {"actor", "critic", "reference"}
    torch.testing.assert_close(found.tensors, expected.tensors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel": "ddp"},
        {"parallel": "fsdp2"},
        {"parallel": "fsdp2", "gradient_checkpointing": True},
        {"parallel": "none", "gradient_checkpointing": True},
    ],
    ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_results_are_the_same_in_every_layout(
    run: Run, local: Callable[[int], Update], executor: Any, layout: dict[str, Any]
) -> None:
    """Losses, weights and moments are the same in every layout, to float tolerance."""
    found, expected = run(executor, 2, **layout), local(2)
    assert found.numbers == pytest.approx(expected.numbers, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(found.tensors, expected.tensors, rtol=1e-3, atol=2e-5)


def test_bfloat16_is_near_float32(run: Run, local: Callable[[int], Update], executor: Any) -> None:
    """In bfloat16 value loss and policy gradient norm are within 10 % of float32's, but not equal."""
    expected = local(2).numbers
    for parallel in ("none", "fsdp2"):
        found = run(executor, 2, parallel=parallel, dtype="bfloat16").numbers
        for name in ("value_loss", "policy_grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=0.1)
            assert found[name] != pytest.approx(expected[name], rel=1e-5)


@SLOTS
def test_the_update_is_one(local: Callable[[int], Update], slots: int) -> None:
    """The update changes the actor's weights; otherwise equal ones would prove nothing."""
    tensors = local(slots).tensors
    before, after = (
        [value for name, value in tensors.items() if name.startswith(which)]
        for which in ("reference/model.", "actor/model.")
    )
    assert max((new - old).abs().max().item() for old, new in zip(before, after, strict=True)) > 1e-3


def test_other_ranks_give_other_answers(local: Callable[[int], Update]) -> None:
    assert local(1).numbers["reward"] != local(2).numbers["reward"]
