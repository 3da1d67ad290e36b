"""Test suites for authors of engines.

    from colocate_rollout.testing import EngineSuite

    class TestAcme(EngineSuite):
        engine = "acme"

`EngineSuite` tests the contract of all engines; it needs no torch. `ModelSuite` adds tests for engines that run a model
of transformers. For example, log-probabilities must equal those of the model's own forward pass. With an option
`child`, both suites test the engine in a child process.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import colocate
from colocate import Concat, ConfigError, Role, RoleStartError, Scatter, Weights, method
from colocate_rollout.contract import Prompt, Row, Sampling
from colocate_rollout.models import import_transformers, load_config
from colocate_rollout.role import EngineRole

if TYPE_CHECKING:
    import torch

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 3,
    "tie_word_embeddings": False,
}
"""A tiny model with clearly unequal probabilities of tokens."""

MODELS: Mapping[str, Mapping[str, Any]] = {
    "untied": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gqa": {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
}
"""The models of `ModelSuite`."""

PROMPTS = [[5 + number] * (1 + number % 7) + [50, 60] for number in range(8)]
_NEVER = lambda: False  # noqa: E731


class Trainer(Role):
    """A role with a model, which provides weights to another role."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.model = make_model(model)

    @method
    def step(self) -> None:
        """Change all weights of the model."""
        change_weights(self.model, 1)

    def named_weights(self) -> Any:
        """Return the model's weights; see `colocate.sync_weights`."""
        return colocate.torch.named_weights(self.model)

    @method(dispatch=Scatter("prompts"), collect=Concat())
    def make_prompts(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the prompts, for a test that keeps a resident."""
        return [*prompts]

    @method
    def log_probs(self, prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[list[float]]:
        """Compute the log-probabilities of one row's tokens for each prompt with the model's forward pass."""
        return [log_probs(self.model, prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


def make_model(model: Mapping[str, Any]) -> Any:
    """Build a model from a config's fields, with the same random weights each time."""
    built = import_transformers().AutoModelForCausalLM.from_config(load_config(model)).eval()
    change_weights(built, 0)
    return built


def change_weights(model: Any, seed: int) -> None:
    """Replace a model's weights by random weights drawn with a seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(".bias"):
                parameter.normal_(0, model.config.initializer_range, generator=generator)


def log_probs(model: Any, prompt: Sequence[int], row: Row, temperature: float = 1.0) -> list[float]:
    """Compute the log-probabilities of a row's tokens with a model's forward pass."""
    import torch

    tokens = torch.tensor([[*prompt, *row.token_ids]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    values: list[float] = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).squeeze(1).tolist()
    return values


def make_weights(model: Any, until: int | None = None) -> Weights:
    """Return a model's weights for an engine's `update`; their iterator raises after `until` weights."""
    named = colocate.torch.named_weights(model)

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for number, tensor in enumerate(named):
            if number == until:
                raise ArithmeticError("the weights end here")
            yield tensor

    return Weights("the suite's model", given(), named.specs, shared=False)


class _GroupOwner(EngineRole):
    """An engine role in a local group, for engines in children; `close` on the test's thread closes the group."""

    instances: ClassVar[list[_GroupOwner]] = []
    group: colocate.ColocatedGroup

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lane = threading.get_ident()
        self.instances.append(self)

    def close(self) -> None:
        """Close the engine if called on the lane; otherwise close the group, which closes the engine on the lane."""
        super().close() if threading.get_ident() == self.lane else self.group.close()


def _make_in_worker(engine: str | type[Any], options: Mapping[str, Any]) -> EngineRole:
    try:
        group = colocate.spawn({"engine": colocate.role(_GroupOwner, engine, **options)}, executor="local")
    except RoleStartError as error:
        raise error.__cause__ or error from None
    role = _GroupOwner.instances.pop()
    role.group = group
    return role


def make_prompts(samples: int = 2, of: Sequence[Sequence[int]] = PROMPTS) -> list[Prompt]:
    """Return prompts with seeds that are all different."""
    return [
        Prompt(number, tuple(token_ids), tuple(1000 * number + sample for sample in range(samples)))
        for number, token_ids in enumerate(of)
    ]


def index_rows(rows: Iterator[Row]) -> dict[tuple[int, int], Row]:
    """Return rows by the numbers of prompt and sample; fail on a duplicate."""
    rows_by_key: dict[tuple[int, int], Row] = {}
    for row in rows:
        assert (row.index, row.sample) not in rows_by_key, f"row {row.index}, sample {row.sample} comes twice"
        rows_by_key[row.index, row.sample] = row
    return rows_by_key


def assert_equal_rows(found: Mapping[Any, Row], wanted: Mapping[Any, Row], tolerance: float = 1e-4) -> None:
    """Assert that rows are equal, except for the rounding of log-probabilities."""
    assert {key: row.token_ids for key, row in found.items()} == {key: row.token_ids for key, row in wanted.items()}
    for key, row in found.items():
        assert row.finish_reason == wanted[key].finish_reason
        assert row.log_probs == pytest.approx(wanted[key].log_probs, abs=tolerance)


class EngineSuite:
    """Tests of the contract of all engines.

    Attributes:
        engine: The engine's name or class.
        options: The engine's options.
    """

    engine: ClassVar[str | type[Any]]
    options: ClassVar[Mapping[str, Any]] = {}
    sampling = Sampling(max_tokens=16)

    @pytest.fixture(scope="class")
    @classmethod
    def roles(cls) -> Iterator[list[EngineRole]]:
        """A list with the open role; at most one is open, because some engines allow only one role per process."""
        roles: list[EngineRole] = []
        yield roles
        for role in roles:
            role.close()

    @pytest.fixture
    def role(self, roles: list[EngineRole]) -> EngineRole:
        """A role with the engine, shared by most tests. The role is in a worker only if the engine is in a child."""
        if not roles:
            roles.append(self.ready())
        return roles[0]

    @pytest.fixture
    def without(self, roles: list[EngineRole]) -> None:
        """Close the shared role, to make room for a test's own engines."""
        while roles:
            roles.pop().close()

    def make(self, **options: Any) -> EngineRole:
        """Make a role with the engine; `options` override the class's options."""
        engine_options = {**self.options, **options}
        return (
            _make_in_worker(self.engine, engine_options)
            if "child" in engine_options
            else EngineRole(self.engine, **engine_options)
        )

    def ready(self) -> EngineRole:
        """Make a role that is ready to generate."""
        return self.make()

    @pytest.fixture
    def rows(self, role: EngineRole) -> Mapping[tuple[int, int], Row]:
        """The rows that the engine generates for `prompts()`."""
        return index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER))

    def test_rows(self, rows: Mapping[tuple[int, int], Row]) -> None:
        """Each sample of each prompt comes once, complete and with a finish reason."""
        assert rows.keys() == {*itertools.product(range(len(PROMPTS)), range(2))}
        for row in rows.values():
            assert 1 <= len(row.token_ids) <= self.sampling.max_tokens
            assert row.finish_reason in ("stop", "length")
            assert (len(row.token_ids) == self.sampling.max_tokens) or row.finish_reason == "stop"
            assert len(row.log_probs) == len(row.token_ids) == sum(count for _, count in row.versions)
            assert all(math.isfinite(value) and value <= 0 for value in row.log_probs)
        assert len({row.token_ids for row in rows.values()}) > len(PROMPTS)

    def test_no_prompts(self, role: EngineRole) -> None:
        """An empty list of prompts gives no rows."""
        assert index_rows(role._engine.rows([], self.sampling, _NEVER)) == {}

    def test_seeds(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """A row depends neither on other rows nor on the order of prompts."""
        alone: dict[tuple[int, int], Row] = {}
        for prompt in make_prompts()[::-3]:
            alone |= index_rows(role._engine.rows([prompt], self.sampling, _NEVER))
        assert_equal_rows(alone, {key: rows[key] for key in alone})
        assert_equal_rows(index_rows(role._engine.rows(make_prompts()[::-1], self.sampling, _NEVER)), rows)

    def test_stop_tokens(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """A stop token ends a response, and occurs nowhere before the end."""
        longest = max(rows.values(), key=lambda row: len(set(row.token_ids)))
        at = next(at for at, candidate in enumerate(longest.token_ids) if candidate != longest.token_ids[0])
        token = longest.token_ids[at]
        sampling = Sampling(max_tokens=16, stop_token_ids=(token,))
        rows_by_key = index_rows(role._engine.rows(make_prompts(), sampling, _NEVER))
        ended = rows_by_key[longest.index, longest.sample]
        assert (ended.token_ids, ended.finish_reason) == (longest.token_ids[: at + 1], "stop")
        for row in rows_by_key.values():
            assert token not in row.token_ids[:-1]
            assert (row.finish_reason == "stop") == (row.token_ids[-1] == token)
        endless = index_rows(role._engine.rows(make_prompts(), Sampling(max_tokens=16, stop_token_ids=()), _NEVER))
        assert {len(row.token_ids) for row in endless.values()} == {16}

    def test_likeliest(self, role: EngineRole) -> None:
        """At temperature 0 seeds don't matter, and `top_k=1` draws the same tokens."""
        greedy = index_rows(role._engine.rows(make_prompts(), Sampling(max_tokens=8, temperature=0), _NEVER))
        assert all(greedy[index, 0].token_ids == greedy[index, 1].token_ids for index in range(len(PROMPTS)))
        first = index_rows(role._engine.rows(make_prompts(), Sampling(max_tokens=8, top_k=1), _NEVER))
        assert {key: row.token_ids for key, row in first.items()} == {key: row.token_ids for key, row in greedy.items()}
        assert all(value == pytest.approx(0, abs=1e-5) for row in first.values() for value in row.log_probs)

    def test_aborted(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """An aborted call yields a complete call's first tokens, and leaves no rows in the engine."""
        counter = itertools.count()
        actual = index_rows(role._engine.rows(make_prompts(), self.sampling, lambda: next(counter) >= 4))
        assert actual.keys() == rows.keys()
        assert "aborted" in {row.finish_reason for row in actual.values()}
        for key, row in actual.items():
            assert row.token_ids == rows[key].token_ids[: len(row.token_ids)]
            assert len(row.log_probs) == len(row.token_ids) == sum(count for _, count in row.versions)
        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    def test_closed(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """An iterator that is closed early leaves no rows in the engine."""
        iterator: Any = iter(role._engine.rows(make_prompts(), self.sampling, _NEVER))
        next(iterator)
        iterator.close()
        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    def test_failed(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """A failure between two steps leaves no rows in the engine."""
        counter = itertools.count()

        def fails() -> bool:
            if next(counter) == 3:
                raise ArithmeticError("in a step")
            return False

        with pytest.raises(ArithmeticError, match="in a step"):
            index_rows(role._generate_rows(make_prompts(), self.sampling, fails))
        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    def test_sleep(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """Sleep frees the memory that `managed` reports; after waking up, the engine generates the same rows."""
        engine = role._engine
        before = engine.managed()
        for tags in (["cache"], ["cache"], ["weights", "cache"]):
            engine.sleep(tags)
        assert engine.managed().get("cache", 0) <= 0.02 * before.get("cache", 0)
        for tags in (["weights"], ["cache"], ["weights", "cache"]):
            engine.wake(tags)
        assert engine.managed() == before
        assert_equal_rows(index_rows(engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    def test_sleep_amid_rows(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """Sleep and wake between two steps don't change the rows."""
        counter = itertools.count()

        def stop() -> bool:
            if next(counter) in (3, 6):
                role._engine.sleep(["cache"])
                role._engine.wake(["cache"])
            return False

        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, stop)), rows)

    def test_wrong_prompts(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """The error for an invalid prompt names the prompt's number, and comes before any row."""
        for wrong in ((), (5, 1 << 40), (-1,)):
            wrong_prompts = [Prompt(0, (5, 6)), Prompt(1, wrong)]
            with pytest.raises(ConfigError, match="prompt 1 "):
                next(iter(role._engine.rows(wrong_prompts, self.sampling, _NEVER)))
        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    def test_full(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """A prompt without room for a response gets an empty response and doesn't affect other prompts."""
        long_prompts = [Prompt(len(PROMPTS), (5,) * 100_000, (1, 2)), *make_prompts()]
        actual = index_rows(role._engine.rows(long_prompts, self.sampling, _NEVER))
        for row in (actual.pop((len(PROMPTS), sample)) for sample in range(2)):
            assert row.token_ids or (row.finish_reason, row.log_probs, row.versions) == ("length", (), ())
        assert_equal_rows(actual, rows)

    @pytest.mark.usefixtures("without")
    def test_wrong_options(self) -> None:
        """The error for an unknown option names the option."""
        with pytest.raises(ConfigError, match="optoin_of_nobody"):
            self.make(optoin_of_nobody=1)


class ModelSuite(EngineSuite):
    """Tests of engines that run a model of transformers, with the config's fields as option `model`.

    Attributes:
        tolerance: The largest difference of log-probabilities from those of the forward pass.
    """

    options: ClassVar[Mapping[str, Any]] = {"model": LLAMA}
    tolerance: ClassVar[float] = 5e-5

    def ready(self) -> EngineRole:
        """Make a role with the weights of the model that `make_model` builds."""
        role = super().ready()
        role.load_weights(make_weights(make_model(self.options["model"])), 1)
        return role

    def _assert_as_forward(self, engine: Any, model: Any, version: int, sampling: Sampling | None = None) -> None:
        used = sampling or self.sampling
        for (index, _), row in index_rows(engine.rows(make_prompts(), used, _NEVER)).items():
            expected = log_probs(model, PROMPTS[index], row, used.temperature or 1.0)
            assert row.log_probs == pytest.approx(expected, abs=self.tolerance)
            assert row.versions == ((version, len(row.token_ids)),)

    @pytest.mark.parametrize("temperature", [0.7, 0.0])
    def test_temperature(self, role: EngineRole, temperature: float) -> None:
        """Log-probabilities refer to the distribution from which the tokens were drawn."""
        model = make_model(self.options["model"])
        self._assert_as_forward(role._engine, model, 1, Sampling(max_tokens=16, temperature=temperature))

    def test_nucleus(self, role: EngineRole) -> None:
        """No token outside `top_p` is drawn, and probabilities are relative to the remaining tokens."""
        import torch

        model, sampling = make_model(self.options["model"]), Sampling(max_tokens=16, top_p=0.6)
        for (index, _), row in index_rows(role._engine.rows(make_prompts(), sampling, _NEVER)).items():
            tokens = torch.tensor([[*PROMPTS[index], *row.token_ids]])
            with torch.no_grad():
                probs = model(tokens, use_cache=False).logits[0, len(PROMPTS[index]) - 1 : -1].softmax(-1)
            for place, token in enumerate(row.token_ids):
                ordered, order = probs[place].sort(descending=True)
                nucleus = order[: int((ordered.cumsum(0) < 0.6).sum()) + 1]
                assert token in nucleus
                share = math.log(float(probs[place][token] / probs[place][nucleus].sum()))
                assert row.log_probs[place] == pytest.approx(share, abs=self.tolerance)

    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", MODELS)
    def test_updates(self, kind: str) -> None:
        """After each update, log-probabilities equal a forward pass with the new weights.

        After half an update, the engine refuses to generate until a complete update.
        """
        model = make_model(MODELS[kind])
        role = self.make(model=MODELS[kind])
        try:
            engine = role._engine
            for version in range(1, 4):
                change_weights(model, version)
                role.load_weights(make_weights(model), version)
                self._assert_as_forward(engine, model, version)
            change_weights(model, 4)
            with pytest.raises(ArithmeticError, match="the weights end here"):
                role.load_weights(make_weights(model, until=6), 4)
            with pytest.raises(ConfigError, match="no whole weights"):
                next(iter(engine.rows(make_prompts(), self.sampling, _NEVER)))
            role.load_weights(make_weights(model), 4)
            self._assert_as_forward(engine, model, 4)
        finally:
            role.close()

    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", MODELS)
    def test_weights_given_back(self, kind: str) -> None:
        """Returned weights equal the updated weights bit by bit, under all names."""
        import torch

        model = make_model(MODELS[kind])
        role = self.make(model=MODELS[kind])
        engine: Any = role._engine
        try:
            if not hasattr(engine, "named_weights"):
                pytest.skip("the engine gives no weights back")
            for seed in (1, 2):
                change_weights(model, seed)
                role.load_weights(make_weights(model), seed)
                expected = dict(colocate.torch.named_weights(model))
                weights = engine.named_weights()
                tensors = {name: tensor.clone() for name, tensor in weights}
                assert tensors.keys() == expected.keys()
                assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
                for name, spec in getattr(weights, "specs", {}).items():
                    assert (spec.shape, spec.dtype) == (tuple(expected[name].shape), expected[name].dtype)
        finally:
            role.close()

    def test_update_amid_rows(self, role: EngineRole) -> None:
        """An update between two steps takes effect, and rows report the version of each token."""
        counter, models = (
            itertools.count(),
            {1: make_model(self.options["model"]), 2: make_model(self.options["model"])},
        )
        change_weights(models[2], 2)

        def stop() -> bool:
            if next(counter) == 5:
                role.load_weights(make_weights(models[2]), 2)
            return False

        endless = Sampling(max_tokens=12, stop_token_ids=())
        rows_by_key = index_rows(role._engine.rows(make_prompts(), endless, stop))
        assert (
            len({row.versions for row in rows_by_key.values()}) > 1
            or len(next(iter(rows_by_key.values())).versions) > 1
        )
        for (index, _), row in rows_by_key.items():
            begin = 0
            for version, count in row.versions:
                expected = log_probs(models[version], PROMPTS[index], row)[begin : begin + count]
                assert row.log_probs[begin : begin + count] == pytest.approx(expected, abs=self.tolerance)
                begin += count
        role.load_weights(make_weights(models[1]), 1)

    def test_weights_that_are_no_numbers(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """Non-finite logits raise an error; after an update with finite weights, the engine works again."""
        import torch

        for temperature, bad in ((1.0, math.nan), (0.0, math.nan), (1.0, math.inf)):
            spoiled = make_model(self.options["model"])
            with torch.no_grad():
                spoiled.lm_head.weight.fill_(bad)
            role.load_weights(make_weights(spoiled), 2)
            sampling = Sampling(max_tokens=16, temperature=temperature)
            with pytest.raises(FloatingPointError, match="whose log-probability is no number"):
                index_rows(role._generate_rows(make_prompts(), sampling, _NEVER))
        role.load_weights(make_weights(make_model(self.options["model"])), 1)
        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)), rows)

    def test_other_weights(self, role: EngineRole, rows: Mapping[tuple[int, int], Row]) -> None:
        """Weights of another model are refused before any write."""
        other = copy.deepcopy(make_model(self.options["model"]))
        del other.model.layers[1]
        with pytest.raises(ConfigError, match=r"model\.layers\.1\..* doesn't come"):
            role.load_weights(make_weights(other), 2)
        assert_equal_rows(index_rows(role._engine.rows(make_prompts(), self.sampling, _NEVER)), rows)
