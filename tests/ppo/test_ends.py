"""An answer ends where transformers' `generate` ends it, sampled by the actor or by an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import colocate
from colocate import ConfigError, First, method
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.rollout import Rollout
from colocate_ppo.task import Problem, Problems
from colocate_ppo.tokenizer import make_character_tokenizer
from colocate_rollout.role import EngineRole

LENGTH = 16
WORDS = Problems.from_list(
    Problem("".join(chr(97 + (7 * a + b) % 26) for b in range(1 + a % 4)), "", {}) for a in range(12)
)
# Each case has an `eos_token_id` for the generation config, and the actor's option `stop`.
CASES: dict[str, tuple[Any, tuple[str | int, ...]]] = {
    "several": ([2, *range(10, 40)], ()),
    "none": (None, ()),
    "others": ([*range(10, 30)], ()),
    "stop": ([2], ("b", "c", "d", *range(40, 60))),
}


class Generating(GroupActor):
    """An actor that also answers with transformers' `generate`."""

    @method(collect=First())
    def generated(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the likeliest answer to each prompt."""
        answers = []
        module: Any = self.model.module
        for prompt in prompts:
            tokens = module.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
            answers.append(tokens[0, len(prompt) :].tolist())
        return answers


def make_folder(folder: Path, eos: Any) -> str:
    """Write a model whose answers are long, with its tokenizer; return the folder."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = make_character_tokenizer()
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=tokenizer.size, num_attention_heads=2, initializer_range=0.3, eos_token_id=3, **sizes
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder)
    tokenizer.inner.save_pretrained(folder)
    return str(folder)


@pytest.mark.in_make_test("none-False", "several-False", "others-False", "stop-False")
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_actor_and_engine_end_where_generate_does(tmp_path: Path, case: str, processes: bool) -> None:
    """Greedy answers of an actor, and of an engine with its model, equal transformers' `generate`."""
    eos, stop = CASES[case]
    roles = {
        "actor": colocate.role(Generating, model=make_folder(tmp_path, eos), stop=stop),
        "rollout": colocate.role("rollout.engine", engine="transformers", role="actor"),
    }
    with colocate.connect(**({"processes": True} if processes else {})) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn(roles)
        actor, rollout = group.role("actor", Generating), group.role("rollout", EngineRole)
        prompts = actor.prompts(WORDS)
        expected = actor.generated(prompts)
        assert len({len(each) for each in expected}) > 1 or case == "none"  # Equal lengths would prove nothing.
        greedy = actor.generate(WORDS, LENGTH, greedy=True)
        answers = greedy["tokens"][:, -LENGTH:]
        assert [row[mask].tolist() for row, mask in zip(answers, greedy["mask"], strict=True)] == expected
        rows = rollout.generate(prompts, sampling={"temperature": 0, "max_tokens": LENGTH})
        assert [[*row.token_ids] for (row,) in rows] == expected


class Strict(GroupActor):
    """An actor that refuses answers with tokens after their end, and batches without an ended answer."""

    @method(dispatch=GroupActor.read.spec.dispatch, collect=GroupActor.read.spec.collect, awake=())
    def read(self, problems: Problems, responses: Sequence[Sequence[Any]], max_new_tokens: int) -> Rollout:
        ends = {*self.tokenizer.ends}
        answers = [row.token_ids for group in responses for row in group]
        if not any(answer[-1] in ends for answer in answers) or any(ends & {*answer[:-1]} for answer in answers):
            raise AssertionError(f"answers that don't end by {ends}: {answers}")
        return super().read(problems, responses, max_new_tokens)


@pytest.mark.in_make_test("several")
@pytest.mark.parametrize("case", ["several", "others", "stop"])
def test_engine_uses_end_tokens_of_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A job's engine ends answers where the actor does, though the engine's own model folder names no end token."""
    monkeypatch.chdir(tmp_path)
    eos, stop = CASES[case]
    actor = {"model": make_folder(tmp_path / "actor", eos), "stop": [*stop]}
    engine = {"engine": "transformers", "model": make_folder(tmp_path / "engine", None)}
    roles = {
        "actor": {"use": f"{__name__}:Strict", "with": actor},
        "rollout": {"use": "rollout.engine", "with": engine},
        "reward": "ppo.reward",
    }
    job = {"rollout": "rollout", "steps": 1, "batch": 4, "samples": 4, "max_new_tokens": LENGTH, "eval_problems": 4}
    config = {
        "name": "ends",
        "pools": {"main": {"slots": 1}},
        "groups": {"policy": {"pool": "main", "roles": roles}},
        "job": {"use": "grpo.train", "with": {**job, "on_step_failure": "fail"}},
    }
    with colocate.launch(colocate.load_config(config)) as launched:
        launched.run(quiet=True)


def test_demonstrations_end_where_answers_do(tmp_path: Path) -> None:
    """A demonstration ends with the tokenizer's end token, or with the model's first one if the model lacks that."""
    for case, end in (("several", 2), ("none", 2), ("others", 10), ("stop", 2)):
        eos, stop = CASES[case]
        actor = GroupActor(model=make_folder(tmp_path, eos), stop=stop)
        shown = actor.tokenizer.encode_answers(["ab"], torch.device("cpu"))
        assert shown.tokens[0, -1] == end


@pytest.mark.parametrize("stop", ["ab", "ä", 1000, -1])
def test_stop_is_one_token(stop: str | int) -> None:
    """A `stop` that is a text of several tokens, an unknown text or an unknown token id is refused."""
    with pytest.raises(ConfigError, match=rf"stop={stop!r} is no single token"):
        GroupActor(stop=[stop])


def test_ends_by_text_are_refused(tmp_path: Path) -> None:
    """`stop_strings` in a model folder's generation config are refused; the error points to `stop`."""
    folder = make_folder(tmp_path, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "stop_strings": ["User:"]}')
    with pytest.raises(ConfigError, match=r"stop_strings=\['User:'\], .* name tokens by `stop`"):
        GroupActor(model=folder)
