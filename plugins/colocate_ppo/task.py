"""The problems of a task: a stream for training, held-out problems for evaluation, and demonstrations.

A task is a dataset of reasoning-gym, or a user's function that returns problems by index.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import itertools
import json
import operator
import pickle
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import attrs

from colocate import ConfigError, register_batch
from colocate.signatures import brief

# A reasoning-gym dataset derives items from `seed + index`, so seeds this far apart give disjoint streams.
_ITEMS = 1 << 30
_HELD_OUT_SEED = 1 << 60
_HELD_OUT_PART = 10
# The most rows that a digest covers: of a given list, and of a generated stream, which few rows identify.
_DIGESTED, _DIGESTED_ITEMS = 1 << 16, 4


Question: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A question: a plain text, the messages of a chat (`role` and `content`), or token ids."""


@attrs.frozen
class Problem:
    """A question of a task with the right answer.

    Attributes:
        question: The question for the policy.
        answer: The task's own answer; in a demonstration, the answer to imitate.
        entry: The task's original item, which the scorer needs.
        prompt: The token ids of the question's prompt; empty before the prompt is made.
    """

    question: Question
    answer: str
    entry: Mapping[str, Any] = attrs.field(repr=False)
    prompt: Sequence[int] = attrs.field(default=(), repr=False)


@attrs.frozen
class Problems(Sequence[Problem]):
    """A batch of problems, stored as columns, which are cheap to send.

    Attributes:
        questions: The questions for the policy.
        answers: The task's own answers; in demonstrations, the answers to imitate.
        entries: The task's original items, pickled because only the scorer reads them.
        prompts: The token ids of each question's prompt; empty before the prompts are made.
    """

    questions: list[Question]
    answers: list[str]
    entries: list[bytes] = attrs.field(repr=False)
    prompts: Sequence[Sequence[int]] = attrs.field(
        default=attrs.Factory(lambda self: [()] * len(self.questions), takes_self=True), repr=False
    )

    @classmethod
    def from_list(cls, problems: Iterable[Problem]) -> Problems:
        """Combine single problems into a batch."""
        rows = [*problems]
        entries = [pickle.dumps(p.entry) for p in rows]
        return cls([p.question for p in rows], [p.answer for p in rows], entries, [p.prompt for p in rows])

    def repeat(self, times: int) -> Problems:
        """Return a batch that has each problem `times` times in adjacent rows."""
        rows = [row for row in range(len(self)) for _ in range(times)]
        return Problems(
            [self.questions[row] for row in rows],
            [self.answers[row] for row in rows],
            [self.entries[row] for row in rows],
            [self.prompts[row] for row in rows],
        )

    def __len__(self) -> int:
        return len(self.questions)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> Problems: ...

    def __getitem__(self, index: int | slice) -> Problem | Problems:
        if isinstance(index, slice):
            return Problems(self.questions[index], self.answers[index], self.entries[index], self.prompts[index])
        entry = pickle.loads(self.entries[index])
        return Problem(self.questions[index], self.answers[index], entry, self.prompts[index])


def _split_problems(problems: Problems, sizes: Sequence[int]) -> list[Problems]:
    ends = [*itertools.accumulate(sizes)]
    return [problems[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _concat_problems(parts: Sequence[Problems]) -> Problems:
    columns = ((part.questions, part.answers, part.entries, part.prompts) for part in parts)
    return Problems(*([*itertools.chain(*column)] for column in zip(*columns, strict=True)))


register_batch(Problems, length=len, split=_split_problems, concat=_concat_problems)


@attrs.define(eq=False)
class Task:
    """A task, split by question into training and held-out problems.

    Attributes:
        name: The name of a reasoning-gym dataset, or "module:function" for a function that returns mappings with a
            `question` (see `Question`) and an `answer` by index, such as a list. The training stream restarts at the
            end.
        options: The dataset's options, such as `max_word_len`, or the function's.
        seed: Decides the training stream; the held-out problems are the same for every seed.
        position: The index of the training stream's next item, which is the only state to save and restore.
    """

    name: str = "spell_backward"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    seed: int = 0
    position: int = attrs.field(default=0, init=False)
    _training: Any = attrs.field(init=False)

    @_training.default
    def _make_training(self) -> Any:
        return self._make_dataset(self.seed * _ITEMS)

    def _make_dataset(self, seed: int) -> Any:
        if ":" in self.name:
            return self._load_own_dataset()
        import reasoning_gym  # Imported only when needed, because the import takes a second.
        from reasoning_gym.factory import DATASETS

        if self.name not in DATASETS:
            close = difflib.get_close_matches(self.name, DATASETS, 1)
            raise ConfigError(
                f"reasoning-gym has no task {self.name!r}{f'; did you mean {close[0]!r}?' if close else ''}; a task of "
                "your own is task: module:function"
            )
        try:
            return reasoning_gym.create_dataset(self.name, seed=seed, size=_ITEMS, **self.options)
        except (TypeError, ValueError, AssertionError) as error:  # reasoning-gym raises these for wrong options.
            raise ConfigError(f"task {self.name!r} refuses the options {dict(self.options)}: {error}") from error

    def _load_own_dataset(self) -> Any:
        module, _, name = self.name.partition(":")
        with _seed_generators(self.seed):
            try:
                function = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise ConfigError(f"task {self.name!r} can't be imported: {error}") from error
            rows = function(**self.options)
        size = len(rows) if hasattr(rows, "__len__") else 0
        if not size or not {"question", "answer"} <= set(rows[0]):
            raise ConfigError(
                f"task {self.name!r} must give a list, or what is like one, of mappings with 'question' and 'answer', "
                f"at least one; it gave {type(rows).__name__} of {size}"
            )
        return rows

    def describe_rows(self) -> dict[str, Any]:
        """Describe the training stream, so that a resumed run can detect a different stream.

        Returns:
            `task`, `options`, `seed` and `count`; `contents`, a digest of the rows in any order; `order`, a digest of
            the rows in their order.
        """
        size = len(self._training)
        looks = min(size, _DIGESTED if ":" in self.name else _DIGESTED_ITEMS)
        rows = [_digest_entry(self._training[look * size // looks]) for look in range(looks)]
        return {
            "task": self.name,
            "options": repr(sorted(self.options.items())),
            "seed": self.seed,
            "count": size,
            "contents": hashlib.blake2b(b"".join(sorted(rows)), digest_size=8).hexdigest(),
            "order": hashlib.blake2b(b"".join(rows), digest_size=8).hexdigest(),
        }

    def draw(self, count: int) -> Problems:
        """Draw the next problems of the training stream."""
        return Problems.from_list(self._draw_problems(count))

    def _draw_problems(self, count: int) -> list[Problem]:
        problems: list[Problem] = []
        size, looked_at = len(self._training), 0
        while len(problems) < count:
            problem = _make_problem(self._training[self.position % size])
            self.position += 1
            looked_at += 1
            if not is_held_out(problem.question):
                problems.append(problem)
            elif looked_at >= size and not problems:
                raise ConfigError(f"task {self.name!r} gives no problem for training: all {size} are held out")
        return problems

    def demonstrate(self, count: int, flawed: float) -> Problems:
        """Draw the next problems of the training stream, with some answers wrong on purpose.

        Args:
            count: Number of problems.
            flawed: The fraction of wrong answers. Half of these are the answer backward (the word itself, if the task
                is to spell it backward), half have the characters in alphabetical order.
        """
        chance = random.Random(f"{self.seed}/{self.position}")
        drawn = self.draw(count)
        return attrs.evolve(drawn, answers=[_make_flawed(answer, chance, flawed) for answer in drawn.answers])

    def held_out(self, count: int) -> Problems:
        """Return up to `count` distinct problems that are never drawn for training."""
        dataset = self._make_dataset(_HELD_OUT_SEED)
        looks = min(10 * _HELD_OUT_PART * count, len(dataset))
        candidates = (_make_problem(dataset[index]) for index in range(looks))
        held_out = _drop_duplicates(problem for problem in candidates if is_held_out(problem.question))
        problems = list(itertools.islice(held_out, count))
        if not problems:
            raise ConfigError(
                f"task {self.name!r} gives no held-out problem (asked for {count}): evaluation needs one, and about a "
                "tenth of the questions is held out"
            )
        return Problems.from_list(problems)


@contextlib.contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """A context manager that seeds the global random generators of Python, NumPy and torch.

    A task that shuffles its rows then returns the same order after a resume.
    """
    import numpy as np
    import torch

    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def compare_rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Compare two descriptions of rows (`Task.describe_rows`); return the difference as text, or None."""
    if all(now[name] == before[name] for name in ("count", "contents", "order")):
        return None
    if now["count"] != before["count"]:
        text = f"there were {before['count']:,} rows, and are {now['count']:,}"
    elif now["contents"] == before["contents"]:
        text = "the rows come in another order (a generator that shuffles them needs a fixed seed)"
    else:
        text = "rows have other contents"
    named = [name for name in ("task", "options", "seed") if now[name] != before[name]]
    return "; ".join([text, *(f"`{name}` was {before[name]}, and is {now[name]}" for name in named)])


def is_held_out(question: Question) -> bool:
    """Return whether a question is held out for evaluation. A hash selects about a tenth of all questions."""
    return zlib.crc32(question_text(question).encode()) % _HELD_OUT_PART == 0


def question_text(question: Question) -> str:
    """Return a question as one text for comparisons and messages; chat messages and token ids become JSON."""
    return question if isinstance(question, str) else json.dumps(question, ensure_ascii=False, default=str)


def _digest_entry(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(dict(entry), default=_to_stable_json, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _to_stable_json(value: Any) -> Any:
    """Convert a value to JSON that is equal in every process, without memory addresses and with sorted sets."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _make_problem(entry: Mapping[str, Any]) -> Problem:
    return Problem(_make_question(entry["question"]), str(entry["answer"]), entry)


def _make_question(value: Any) -> Question:
    if not isinstance(value, list | tuple):
        return str(value)
    if value and all(isinstance(message, Mapping) and "role" in message for message in value):
        return [dict(message) for message in value]
    try:
        if value:
            return [*map(operator.index, value)]
    except TypeError:
        pass
    raise ConfigError(
        f"a question of the task is {brief(repr(value))}: it must be a text, messages (mappings with a role and a "
        "content) or token ids, at least one"
    )


def _drop_duplicates(problems: Iterator[Problem]) -> Iterator[Problem]:
    texts: set[str] = set()
    for problem in problems:
        if (text := question_text(problem.question)) not in texts:
            texts.add(text)
            yield problem


def _make_flawed(answer: str, chance: random.Random, flawed: float) -> str:
    if chance.random() >= flawed:
        return answer
    return answer[::-1] if chance.random() < 0.5 else "".join(sorted(answer))
