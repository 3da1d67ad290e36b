"""Tasks: the split, the stream, demonstrations."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ppo import test_grpo, test_job

import colocate
from colocate_ppo.task import Task, compare_rows, is_held_out

ROOT = Path(__file__).parents[2]

SHORT = {"min_word_len": 3, "max_word_len": 4}


def words(questions: list[Any]) -> set[str]:
    return {question.rsplit(" ", 1)[1] for question in questions}


def test_no_held_out_word_is_ever_drawn() -> None:
    task = Task(options=SHORT)
    held_out = words(task.held_out(256).questions)
    drawn = words(task.draw(5000).questions)
    assert len(held_out) == 256
    assert len(drawn) > 2000
    assert not held_out & drawn


def test_the_split_is_by_question_and_fixed() -> None:
    """The split holds out a fixed tenth: 1,713 of the 16,772 questions with words of 3 to 5 letters."""
    dataset = Task(options={"min_word_len": 3, "max_word_len": 5})._training
    question = "Spell this word backward (example: sun -> nus): {}".format
    assert len(dataset.words) == 16772
    assert sum(is_held_out(question(word)) for word in dataset.words) == 1713


def test_held_out_problems_are_the_same_for_every_seed() -> None:
    """Held-out problems don't depend on the seed, and don't repeat if a task has too few."""
    first, second = Task(options=SHORT, seed=1), Task(options=SHORT, seed=2)
    assert first.held_out(20) == second.held_out(20)
    assert first.draw(20) != second.draw(20)
    found = Task(options={"min_word_len": 3, "max_word_len": 3}).held_out(400)
    assert 0 < len(found) < 400
    assert len({*found.questions}) == len(found)


def test_stream_resumes_at_position() -> None:
    whole, first, second = Task(options=SHORT), Task(options=SHORT), Task(options=SHORT)
    head = [*first.demonstrate(7, flawed=0.5), *first.draw(5)]
    second.position = first.position
    assert [*whole.demonstrate(7, flawed=0.5), *whole.draw(5), *whole.draw(9)] == [*head, *second.draw(9)]


@pytest.mark.parametrize("flawed", [0.0, 0.7, 1.0])
def test_so_many_demonstrations_are_wrong_on_purpose(flawed: float) -> None:
    shown = Task().demonstrate(1000, flawed)
    right = [problem.answer == problem.entry["answer"] for problem in shown]
    # A flawed answer to a palindrome, or to a word in alphabetical order, can be right.
    assert 1 - sum(right) / len(right) == pytest.approx(flawed, abs=0.05)
    assert all(sorted(problem.answer) == sorted(problem.entry["answer"]) for problem in shown)


def test_other_tasks_are_selected_by_name_and_options() -> None:
    task = Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    (problem,) = task.draw(1)
    assert problem.entry["metadata"]["source_dataset"] == "chain_sum"
    assert problem.answer.lstrip("-").isdigit()


def numbers(count: int, word: str = "number") -> list[dict[str, str]]:
    """Return a task's questions."""
    return [{"question": f"{word} {index}", "answer": str(index), "more": "kept"} for index in range(count)]


def test_a_task_of_ones_own() -> None:
    """A task of one's own repeats its questions in order, without the held-out ones."""
    task = Task(f"{__name__}:numbers", {"count": 40})
    questions = [problem.question for problem in task.draw(100)]
    held_out = {problem.question for problem in task.held_out(100)}
    assert held_out
    once = [f"number {index}" for index in range(40) if f"number {index}" not in held_out]
    assert questions == (once * 4)[:100]
    assert task.draw(1)[0].entry["more"] == "kept"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Task("spell_backwards"), "no task 'spell_backwards'; did you mean 'spell_backward'"),
        (lambda: Task("no_such:questions"), r"task 'no_such:questions' can't be imported: No module named 'no_such'"),
        (lambda: Task(f"{__name__}:nothing"), "can't be imported: .* no attribute 'nothing'"),
        (lambda: Task("itertools:count"), "must give a list, .* at least one; it gave count of 0"),
        (lambda: Task(f"{__name__}:numbers", {"count": 0}), "must give a list, .* at least one; it gave list of 0"),
        (lambda: Task(options={"max_word_length": 4}), r"'spell_backward' refuses the options .*'max"),
        (lambda: Task(options={"min_word_len": 9, "max_word_len": 4}), r"'spell_backward' refuses the options .*'max"),
        (lambda: Task(options={"seed": 1}), r"'spell_backward' refuses the options .*'seed"),
        (lambda: Task().held_out(0), r"no held-out problem \(asked for 0\)"),
    ],
)
def test_invalid_tasks_and_options_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(colocate.ConfigError, match=told):
        make()


ROWS: list[dict[str, Any]] = [
    {"question": f"{number}: ", "answer": "aeiou", "tests": {"b", "a"}} for number in range(100)
]


def own_rows(kind: str = "same") -> Any:
    """Return the rows, changed by `kind`."""
    rows: Any = [dict(row) for row in ROWS]
    if kind == "shuffled":
        random.Random().shuffle(rows)
    elif kind == "random":
        random.shuffle(rows)
    elif kind == "numpy":
        np.random.shuffle(rows)
    elif kind == "torch":
        rows = [rows[place] for place in torch.randperm(len(rows)).tolist()]
    elif kind == "fewer":
        del rows[-1]
    elif kind == "changed":
        rows[50]["answer"] = "a"
    elif kind == "column":
        rows[50]["tests"] = {"c"}
    elif kind == "object":
        rows = [row | {"image": object()} for row in rows]
    return rows


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("same", None),
        (
            "shuffled",
            "the rows come in another order (a generator that shuffles them needs a fixed seed)",
        ),
        ("fewer", "there were 100 rows, and are 99"),
        ("changed", "rows have other contents; `options` was [], and is [('kind', 'changed')]"),
        ("column", "rows have other contents"),
    ],
)
def test_rows_that_differ(kind: str, words: str | None) -> None:
    """`compare_rows` says how a task's rows differ from earlier rows."""
    before = json.loads(json.dumps(Task(f"{__name__}:own_rows").describe_rows()))
    now = Task(f"{__name__}:own_rows", {"kind": kind}).describe_rows()
    difference = compare_rows(before, now)
    assert difference is words or (words is not None and str(difference).startswith(words))


@pytest.mark.parametrize("kind", ["random", "numpy", "torch"])
def test_shuffled_rows(kind: str) -> None:
    """Rows shuffled by a global generator get an order by the run's seed, and the generators' states don't change."""

    def state() -> list[Any]:
        return [repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()]

    name, options, states = f"{__name__}:own_rows", {"kind": kind}, state()
    before = Task(name, options).describe_rows()
    assert state() == states
    assert Task(name, options).describe_rows() == before
    assert before["contents"] == Task(name).describe_rows()["contents"]
    assert len({Task(name, options, seed).describe_rows()["order"] for seed in range(3)} | {"in order"}) == 4


@pytest.mark.long
def test_rows_of_another_process() -> None:
    """Rows with sets, and with objects whose repr has an address, are the same in another process."""
    code = f"import json; from {__name__} import *; "
    code += f"print(json.dumps(Task('{__name__}:own_rows', {{'kind': 'object'}}).describe_rows()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert json.loads(found) == Task(f"{__name__}:own_rows", {"kind": "object"}).describe_rows()


def test_generated_rows() -> None:
    """Generated rows depend on options and seed, and the comparison names the changed one."""
    before = Task("spell_backward").describe_rows()
    assert compare_rows(before, Task("spell_backward").describe_rows()) is None
    options = {"min_word_len": 9}
    assert "`options` was [], and is [('min_word_len', 9)]" in str(
        compare_rows(before, Task("spell_backward", options).describe_rows())
    )
    assert "`seed` was 0, and is 1" in str(compare_rows(before, Task("spell_backward", seed=1).describe_rows()))


@pytest.mark.parametrize("job", ["ppo", "grpo"])
def test_resumed_run_needs_same_rows(job: str, tmp_path: Path) -> None:
    """A resumed run whose rows have another order is refused, unless `same_rows` is false."""

    def go(kind: str, **how: Any) -> test_job.Recorder:
        changes = [f"+job.with.task={__name__}:own_rows", f"job.with.task_options={{kind: {kind}}}"]
        changes += ["job.with.eval_problems=1", f"+job.with.same_rows={how.pop('same_rows', True)}"]
        changes += ["groups.policy.roles.reward=tests.ppo.judged:Lengths"]
        if job == "ppo":
            return test_job.run("ppo-small.yaml", [*test_job.TINY, *changes], tmp_path, **how)
        return test_grpo.run([*test_grpo.TINY, *changes], tmp_path, **how)

    first = go("shuffled", stop_after=9)
    with pytest.raises(colocate.ConfigError, match=rf"^{job}.train: the run can.t go on after step .* another order"):
        go("shuffled", resumed=first.resumed)
    assert go("shuffled", resumed=first.resumed, same_rows=False).rows[0]["step"] == first.rows[-1]["step"] + 1
    first = go("same", stop_after=9)
    assert go("same", resumed=first.resumed).rows[0]["step"] == first.rows[-1]["step"] + 1
