"""Tasks: the split, the stream, demonstrations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import colocate
from colocate_ppo.task import Task, is_held_out

SHORT = {"min_word_len": 3, "max_word_len": 4}


def words(questions: list[str]) -> set[str]:
    return {question.rsplit(" ", 1)[1] for question in questions}


def test_no_held_out_word_is_ever_drawn() -> None:
    task = Task(options=SHORT)
    held_out = words(task.held_out(256).questions)
    drawn = words(task.draw(5000).questions)
    assert len(held_out) == 256
    assert len(drawn) > 2000
    assert not held_out & drawn


def test_the_split_is_by_question_and_fixed() -> None:
    """A tenth of all words: as many of the task's 3 to 5 letter words as the recipe counted."""
    dataset = Task(options={"min_word_len": 3, "max_word_len": 5})._training
    question = "Spell this word backward (example: sun -> nus): {}".format
    assert len(dataset.words) == 16772
    assert sum(is_held_out(question(word)) for word in dataset.words) == 1713


def test_held_out_problems_are_the_same_for_every_seed() -> None:
    """They end where there are no more."""
    first, second = Task(options=SHORT, seed=1), Task(options=SHORT, seed=2)
    assert first.held_out(20) == second.held_out(20)
    assert first.draw(20) != second.draw(20)
    found = Task(options={"min_word_len": 3, "max_word_len": 3}).held_out(400)
    assert 0 < len(found) < 400
    assert len({*found.questions}) == len(found)


def test_a_stream_goes_on_at_its_position() -> None:
    whole, first, second = Task(options=SHORT), Task(options=SHORT), Task(options=SHORT)
    head = [*first.demonstrate(7, flawed=0.5), *first.draw(5)]
    second.position = first.position
    assert [*whole.demonstrate(7, flawed=0.5), *whole.draw(5), *whole.draw(9)] == [*head, *second.draw(9)]


@pytest.mark.parametrize("flawed", [0.0, 0.7, 1.0])
def test_so_many_demonstrations_are_wrong_on_purpose(flawed: float) -> None:
    shown = Task().demonstrate(1000, flawed)
    right = [problem.answer == problem.entry["answer"] for problem in shown]
    # A palindrome or a word in alphabetical order comes out right in spite of it.
    assert 1 - sum(right) / len(right) == pytest.approx(flawed, abs=0.05)
    assert all(sorted(problem.answer) == sorted(problem.entry["answer"]) for problem in shown)


def test_other_tasks_are_selected_by_name_and_options() -> None:
    task = Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    (problem,) = task.draw(1)
    assert problem.entry["metadata"]["source_dataset"] == "chain_sum"
    assert problem.answer.lstrip("-").isdigit()


def numbers(count: int, word: str = "number") -> list[dict[str, str]]:
    """Questions of one's own."""
    return [{"question": f"{word} {index}", "answer": str(index), "more": "kept"} for index in range(count)]


def test_a_task_of_ones_own() -> None:
    """Its questions come in their order, again and again, but for those that are held out."""
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
def test_what_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(colocate.ConfigError, match=told):
        make()
