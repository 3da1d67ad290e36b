"""The engine `transformers`: the suite of all engines, and behaviour of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.rollout.ending import LENGTH, PLACES, Ending, check_ends, generated, make_folder
from tests.rollout.long_rope import PHI

import colocate
from colocate import ConfigError, RoleStartError
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import LLAMA, PROMPTS, ModelSuite, Trainer, log_probs, make_model


class TestTransformers(ModelSuite):
    """The suite with a few rows at once and short prompts, so that rows begin and end in every step."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {"model": LLAMA, "max_rows": 5, "max_batch_tokens": 12}
    tolerance = 1e-5


class TestInAChild(ModelSuite):
    """The suite in a child process, which takes seconds to start: only one of the models is tried."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {
        **TestTransformers.options,
        "child": {"env": {"OMP_NUM_THREADS": "1"}, "bucket": "4KiB"},
    }
    tolerance = 1e-5

    @pytest.fixture
    def leave_nothing(self) -> None:
        """Skip the leak check: the engine and its group stay for the next test."""

    @pytest.fixture
    def without(self) -> None:
        """Keep the shared engine: a second child can run beside it."""

    @pytest.mark.long
    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", ["tied"])
    def test_updates(self, kind: str) -> None:
        """See `ModelSuite`."""
        super().test_updates(kind)

    @pytest.mark.long
    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", ["tied"])
    def test_weights_given_back(self, kind: str) -> None:
        """See `ModelSuite`."""
        super().test_weights_given_back(kind)


@pytest.mark.parametrize(
    "given",
    [
        lambda model: iter(model.state_dict().items()),
        lambda model: ((name, each.detach()) for name, each in model.named_parameters()),
        lambda model: colocate.torch.named_weights(model),
    ],
)
def test_weights_by_hand(given: Callable[[Any], Any]) -> None:
    """A role outside any worker loads weights from a module, and refuses values that are no weights."""
    model, role = make_model(LLAMA), EngineRole("transformers", model=LLAMA)
    role.load_weights(given(model), 3)
    ((row,),) = role.generate(PROMPTS[:1], sampling={"max_tokens": 8})
    assert row.versions == ((3, len(row.token_ids)),)
    assert row.log_probs == pytest.approx(log_probs(model, PROMPTS[0], row), abs=1e-5)
    for wrong, said in (([], "yields nothing"), ([("a", 1)], "'a' is int, and no tensor"), ([1], "yields int")):
        with pytest.raises(ConfigError, match=said):
            role.load_weights(wrong, 4)
    role.close()


@pytest.mark.parametrize("place", PLACES)
def test_ends(tmp_path: Path, place: str) -> None:
    """Responses end where transformers' `generate` ends them, wherever a folder names the end tokens."""
    folder = make_folder(tmp_path, place)
    role = EngineRole("transformers", model=folder, max_rows=3)
    check_ends(role, folder)
    lengths = {len(each) for each in generated(folder)}
    assert lengths == {LENGTH} if place == "none" else len(lengths) > 1  # Equal lengths would prove nothing.
    role.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("processes", [False, True])
def test_ends_of_another_roles_model(processes: bool, background: bool) -> None:
    """An engine with another role's model, or a copy, ends responses where that model's `generate` does."""
    engine = colocate.role("rollout.engine", engine="transformers", role="trainer").on(background=background)
    with colocate.connect(**({"processes": True} if processes else {})) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"trainer": colocate.role(Ending), "rollout": engine})
        trainer, rollout = group.role("trainer", Ending), group.role("rollout", EngineRole)
        if background:
            colocate.sync_weights(trainer, rollout)
        (expected,) = trainer.generated()
        rows = rollout.generate(PROMPTS, sampling={"temperature": 0, "max_tokens": LENGTH})
        assert [row.token_ids for (row,) in rows] == expected
        assert len({len(each) for each in expected}) > 1


def test_ends_by_text_are_refused() -> None:
    """A text that ends responses is refused; the error points to `eos_token_id`."""
    with colocate.connect() as runtime, runtime.reserve(slots=1) as pool:
        roles = {
            "trainer": colocate.role(Texts),
            "rollout": colocate.role("rollout.engine", engine="transformers", role="trainer"),
        }
        with pytest.raises(RoleStartError, match=r"stop_strings=\['User:'\].* name tokens in eos_token_id"):
            pool.spawn(roles)


class Texts(Trainer):
    """A trainer whose generation config ends responses by a text."""

    def __init__(self) -> None:
        super().__init__(LLAMA)
        self.model.generation_config.stop_strings = ["User:"]


def test_long_rope() -> None:
    """A long-rope model is refused unless `max_length` is short; short rows depend on no other row."""
    with pytest.raises(ConfigError, match=r"long-rope.* more than 16 tokens .* may have 64: max_length=16"):
        EngineRole("transformers", model=PHI)
    role, model = EngineRole("transformers", model=PHI, max_length=16, max_rows=3), make_model(PHI)
    role.load_weights(colocate.torch.named_weights(model), 1)
    sampling = {"max_tokens": 12, "seed": 1, "stop_token_ids": ()}
    beside = role.generate([[1, 2, 3], list(range(4, 18)), [5]], sampling=sampling)
    ((alone,),) = role.generate([[1, 2, 3]], sampling=sampling)
    assert beside[0][0].token_ids == alone.token_ids
    assert alone.log_probs == pytest.approx(log_probs(model, [1, 2, 3], alone), abs=1e-5)
    role.close()
