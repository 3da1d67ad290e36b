"""The engine `transformers`: what all engines hold, and what it alone does."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import colocate
from colocate import ConfigError
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import LLAMA, PROMPTS, ModelSuite, log_probs, made


class TestTransformers(ModelSuite):
    """By a few rows at once, of short prompts, so that rows come and go in every step."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {"model": LLAMA, "max_rows": 5, "max_batch_tokens": 12}
    tolerance = 1e-5


class TestInAChild(ModelSuite):
    """In a process of its own, which takes seconds to start: of the models one is tried."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {
        **TestTransformers.options,
        "child": {"env": {"OMP_NUM_THREADS": "1"}, "bucket": "4KiB"},
    }
    tolerance = 1e-5

    @pytest.fixture
    def leave_nothing(self) -> None:
        """The engine stays for the next test, and so does its group."""

    @pytest.fixture
    def without(self) -> None:
        """It is in the way of no other child."""

    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", ["tied"])
    def test_updates(self, kind: str) -> None:
        """See `ModelSuite`."""
        super().test_updates(kind)


@pytest.mark.parametrize(
    "given",
    [
        lambda model: iter(model.state_dict().items()),
        lambda model: ((name, each.detach()) for name, each in model.named_parameters()),
        lambda model: colocate.torch.named_weights(model),
    ],
)
def test_weights_by_hand(given: Callable[[Any], Any]) -> None:
    """Outside of any worker a role takes weights as they come from a module; what are none is told."""
    model, role = made(LLAMA), EngineRole("transformers", model=LLAMA)
    role.load_weights(given(model), 3)
    ((row,),) = role.generate(PROMPTS[:1], sampling={"max_tokens": 8})
    assert row.versions == ((3, len(row.token_ids)),)
    assert row.log_probs == pytest.approx(log_probs(model, PROMPTS[0], row), abs=1e-5)
    for wrong, said in (([], "yields nothing"), ([("a", 1)], "'a' is int, and no tensor"), ([1], "yields int")):
        with pytest.raises(ConfigError, match=said):
            role.load_weights(wrong, 4)
    role.close()
