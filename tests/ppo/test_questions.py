"""Questions of chat models, and the text and tokens of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.ppo.chats import (
    ASSISTANT,
    CHATS,
    chats,
    deepseek_tokenizer,
    make_folder,
    own_tokenizer,
    sentencepiece_tokenizer,
)

import colocate
from colocate import ConfigError
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.reward import Reward
from colocate_ppo.task import Problem, Problems, Question, Task
from colocate_ppo.tokenizer import Tokenizer, make_character_tokenizer
from colocate_rollout import Row

TOKENIZERS: dict[str, Callable[[], Any]] = {"own": own_tokenizer, "deepseek": deepseek_tokenizer}


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    """Disable progress bars, which would leave a thread and a semaphore."""
    from transformers.utils import logging

    bars: Any = logging
    bars.disable_progress_bar()
    yield
    bars.enable_progress_bar()


def ask(*questions: Question) -> Problems:
    return Problems.from_list(Problem(each, "", {}) for each in questions)


def rendered(inner: Any, messages: Any, **options: Any) -> tuple[str, list[int]]:
    options = {"add_generation_prompt": True, **options}
    tokens = inner.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
    return inner.apply_chat_template(messages, tokenize=False, **options), tokens


@pytest.mark.in_make_test("False-own", "True-own", "False-deepseek")
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("processes", [False, True])
def test_chats(tmp_path: Path, kind: str, processes: bool) -> None:
    """A question as messages, as templated text or as token ids has the same prompt tokens."""
    inner = TOKENIZERS[kind]()
    folder = make_folder(tmp_path, inner)
    texts, tokens = zip(*(rendered(inner, each) for each in CHATS), strict=True)
    with colocate.connect(**({"processes": True} if processes else {})) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"actor": colocate.role(GroupActor, model=folder)})
        actor = group.role("actor", GroupActor)
        assert actor.prompts(ask(*CHATS)) == [*tokens]
        assert actor.prompts(ask(*texts)) == [*tokens]
        assert actor.prompts(ask(*tokens)) == [*tokens]
        rollout = actor.generate(ask(*CHATS, *texts), 2)
        assert [problem.prompt for problem in rollout["problems"]] == [*tokens, *tokens]
        asked = zip(rollout["tokens"][:, :-2], rollout["attention"][:, :-2], strict=True)
        assert [row[mask].tolist() for row, mask in asked] == [*tokens, *tokens]


@pytest.mark.parametrize("adds", ["begin", "end", "both", "nothing"])
def test_texts(adds: str) -> None:
    """A prompt has one begin token if the tokenizer adds it, and an end token only if the text has it."""
    inner = own_tokenizer(adds)
    tokenizer = Tokenizer.from_transformers(inner)
    begin = [1] if adds in ("begin", "both") else []
    for text in ("ab", " a\n", "", "<think>", "a</s>", "</s>"):
        own = inner(text, add_special_tokens=False)["input_ids"]
        if begin or own:  # Another test has questions without tokens.
            assert tokenizer.make_prompt(text) == [*begin, *own]
        assert tokenizer.make_prompt(f"<s>{text}") == [1, *own]


def test_template_options() -> None:
    """Template options reach the template, and an answer that the last message begins is continued."""
    inner = own_tokenizer()
    tokenizer = attrs.evolve(Tokenizer.from_transformers(inner), template_options={"thinking": True})
    assert tokenizer.make_prompt(CHATS[0]) == rendered(inner, CHATS[0], thinking=True)[1]
    begun = [*CHATS[0], {"role": "assistant", "content": "It is"}]
    text = inner.decode(tokenizer.make_prompt(begun), skip_special_tokens=False)
    assert text.endswith(f"{ASSISTANT}It is")


def test_the_template_is_applied_once(tmp_path: Path) -> None:
    """An engine's answers are read with the engine's prompts: the template isn't applied again."""
    actor = GroupActor(model=make_folder(tmp_path, own_tokenizer()))
    problems = ask(*CHATS)
    prompts = actor.prompts(problems)
    asked = attrs.evolve(problems, prompts=prompts)
    actor.tokenizer.inner.chat_template = "{{ raise_exception('asked twice') }}"
    rows = [(Row(at, 0, (40, 41), (-1.0, -1.0), "length", ()),) * 2 for at in range(len(CHATS))]
    rollout = actor.read(asked, rows, 4)
    assert rollout["problems"].prompts == [each for each in prompts for _ in range(2)]
    assert actor.prompts(asked) == prompts
    with pytest.raises(ConfigError, match="asked twice"):
        actor.prompts(problems)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ([{"role": "tool", "content": "1"}], r"chat template .* can't ask \[\{'role': 'tool'.*: no such role"),
        ([1, 1 << 30], r"has the token 1073741824, and the tokenizer has \d+ tokens"),
        ([3, -1], "has the token -1"),
        ([], "has no tokens"),
    ],
)
def test_questions_that_cannot_be_asked(question: Any, words: str) -> None:
    """A question that can't be asked is refused with the reason."""
    with pytest.raises(ConfigError, match=words):
        Tokenizer.from_transformers(own_tokenizer()).make_prompt(question)


def test_without_a_template() -> None:
    """Messages are refused if the tokenizer has no chat template."""
    with pytest.raises(ConfigError, match=r"chat template of the model's tokenizer can't ask .* is not set"):
        make_character_tokenizer().make_prompt(CHATS[0])


def test_questions_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's messages and token ids are split like texts, and stay unchanged; malformed ones are refused."""
    task = Task("tests.ppo.chats:chats")
    held_out, drawn = task.held_out(90), task.draw(90)
    assert {type(each) for each in drawn.questions} == {str, list}
    given = [each["question"] for each in chats()]
    assert all(each in given for each in (*held_out.questions, *drawn.questions))
    assert held_out.questions
    assert not any(each in drawn.questions for each in held_out.questions)
    monkeypatch.setattr("tests.ppo.chats.chats", lambda: [{"question": [{"content": "?"}], "answer": ""}])
    with pytest.raises(ConfigError, match=r"question of the task is .*: it must be a text, messages"):
        Task("tests.ppo.chats:chats").draw(1)


class Format(Reward):
    """A reward for the exact text."""

    def score_answer(self, answer: str, problem: Problem) -> float:
        return float(answer == problem.answer)


@pytest.mark.in_make_test("False-own", "True-own", "False-characters")
@pytest.mark.parametrize("kind", [*TOKENIZERS, "characters"])
@pytest.mark.parametrize("processes", [False, True])
def test_answers(tmp_path: Path, kind: str, processes: bool) -> None:
    """A reward gets an answer's exact text, without the token that ended it, and all its tokens."""
    texts = ["<think>1+1</think>2", "    return x", "x\n", "a  b , c", "\t", "", "</think>"]
    if kind == "characters":
        inner, options = make_character_tokenizer().inner, {}
        texts = [*(text for text in texts if "\t" not in text), "<pad>a"]
    else:
        inner = TOKENIZERS[kind]()
        options = {"model": make_folder(tmp_path, inner)}
    end = inner.eos_token_id
    bodies = [inner(text, add_special_tokens=False)["input_ids"] for text in texts]
    ended = [(*body, end) for body in bodies]
    open_ended = [tuple(body or bodies[0]) for body in bodies]
    with colocate.connect(**({"processes": True} if processes else {})) as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"actor": colocate.role(GroupActor, **options), "reward": colocate.role(Format)})
        actor, reward = group.role("actor", GroupActor), group.role("reward", Format)
        problems = Problems.from_list(Problem("?", text, {}) for text in texts)
        rows = [
            tuple(Row(at, sample, ids, (0.0,) * len(ids), "stop", ()) for sample, ids in enumerate(pair))
            for at, pair in enumerate(zip(ended, open_ended, strict=True))
        ]
        rollout = actor.read(problems, rows, 40)
        assert rollout["answers"][::2] == texts
        assert rollout["token_ids"] == [[*ids] for pair in zip(ended, open_ended, strict=True) for ids in pair]
        assert rollout["answers"][1::2] == [text or texts[0] for text in texts]
        assert reward.score(rollout)[::2].tolist() == [1.0] * len(texts)


@pytest.mark.parametrize("letters", ["abc", "bc"])
def test_leading_blanks_of_sentencepiece(letters: str) -> None:
    """A leading blank of an answer is kept, unless the tokenizer has no letter "a" and texts are decoded plainly."""
    inner = sentencepiece_tokenizer(letters)
    tokenizer = Tokenizer.from_transformers(inner)
    bodies = [inner.convert_tokens_to_ids([*tokens]) for tokens in ("▁bc", "b▁c", "▁▁b", "bc", "")]
    answers = tokenizer.pad_rows([[*body, inner.eos_token_id] for body in bodies], torch.device("cpu"), side="right")
    begun = "" if letters == "bc" else " "
    assert tokenizer.decode_responses(answers) == [f"{begun}bc", "b c", f"{begun} b", "bc", ""]


def test_sampled_answers(actor: GroupActor, problems: Problems) -> None:
    """The text of a sampled answer is its decoded tokens, without an end token."""
    rollout = actor.generate(problems, max_new_tokens=6, temperature=3.0)
    lengths = rollout["mask"].sum(1).tolist()
    for ids, text, length, tokens in zip(
        rollout["token_ids"], rollout["answers"], lengths, rollout["tokens"], strict=True
    ):
        assert ids == tokens[-6:][:length].tolist()
        body = ids[:-1] if ids[-1] in actor.tokenizer.ends else ids
        assert text == actor.tokenizer.inner.decode(body)


def test_blanks_around_a_right_answer(actor: GroupActor, problems: Problems) -> None:
    """Blanks around a right answer lower neither the score of reasoning-gym nor the accuracy."""
    reward = Reward()
    rollout = actor.generate(problems, max_new_tokens=2)
    rollout["answers"] = [f" {answer}\n" for answer in problems.answers]
    scores = reward.score(rollout)
    assert scores.tolist() == [1.0] * len(problems)
    assert reward.summary(rollout, scores)["accuracy"] == 1.0


@pytest.mark.parametrize("rollout", ["actor", "rollout"])
def test_a_job_with_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: str) -> None:
    """GRPO trains a folder's model on messages, token ids and texts, by the actor's own sampling and by an engine."""
    monkeypatch.chdir(tmp_path)
    roles: dict[str, Any] = {
        "actor": {"use": "grpo.actor", "with": {"model": make_folder(tmp_path / "model", own_tokenizer())}},
        "rollout": {"use": "rollout.engine", "with": {"engine": "transformers", "role": "actor"}},
        "reward": "ppo.reward",
    }
    roles["reward"] = f"{__name__}:Format"
    options = {"rollout": rollout, "task": "tests.ppo.chats:chats", "warm_up_steps": 0, "steps": 2, "batch": 4}
    options |= {"max_new_tokens": 4, "samples": 2, "eval_problems": 4}
    config = {
        "name": "chats",
        "pools": {"main": {"slots": 1}},
        "groups": {"policy": {"pool": "main", "roles": roles}},
        "job": {"use": "grpo.train", "with": options},
    }
    with colocate.launch(colocate.load_config(config)) as job:
        job.run(quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "runs/chats/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(torch.isfinite(torch.tensor(line["policy_loss"])) for line in lines[1:])
