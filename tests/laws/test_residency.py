"""The law of residency: a resident gives the same results as the collected value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import event, given, settings, strategies as st

from colocate import ColocatedGroup, ColocateError, Resident

from .layouts import EXECUTORS, ranks, spawn
from .programs import Node, Step, nodes, programs, replace
from .reused import Reused
from .values import difference


def with_values(group: ColocatedGroup, program: Sequence[Step]) -> list[Any]:
    """Run a program with collected values; an error stands for a failed step and for its users."""
    results: list[Any] = []
    for step in program:
        failed = [results[node.index] for node in nodes(step) if isinstance(results[node.index], ColocateError)]
        results.append(failed[0] if failed else _called(group, step, results))
    return results


def _called(group: ColocatedGroup, step: Step, results: Sequence[Any]) -> Any:
    given = replace(step.arguments, lambda node: results[node.index])
    before = copy.deepcopy(given)
    try:
        return getattr(group.role(step.role), step.method)(**given)
    except ColocateError as error:
        return error
    finally:
        assert difference(given, before) is None, f"{step.method} changed its arguments on the driver"


def with_residents(group: ColocatedGroup, program: Sequence[Step], wanted: Sequence[Any]) -> list[Any]:
    """Run a program whose values stay in the workers, and fetch all values at the end."""
    kept: list[Any] = []

    def argument(node: Node) -> Any:
        return wanted[node.index] if node.fetched else kept[node.index].ref

    for step, value in zip(program, wanted, strict=True):
        failed = [kept[node.index] for node in nodes(step) if isinstance(kept[node.index], ColocateError)]
        fails = isinstance(value, ColocateError)
        if fails:  # Alone: its failure may fail calls that are running.
            kept = [_settled(item) for item in kept]
        kept.append(failed[0] if failed else _kept(group, step, argument))
        if fails:
            kept[-1] = _settled(kept[-1])
    return [_fetched(item) for item in kept]


def _settled(item: Any) -> Any:
    """Return a resident once it is made, or the error of its call."""
    found = _fetched(item)
    return found if isinstance(found, ColocateError) else item


def _kept(group: ColocatedGroup, step: Step, argument: Callable[[Node], Any]) -> Any:
    try:
        return getattr(group.role(step.role), step.method).keep(**replace(step.arguments, argument))
    except ColocateError as error:
        return error


def _fetched(item: Any) -> Any:
    try:
        return item.fetch() if isinstance(item, Resident) else item
    except ColocateError as error:
        return error


def compare(group: ColocatedGroup, program: Sequence[Step]) -> None:
    wanted = with_values(group, program)
    found = with_residents(group, program, wanted)
    for index, (step, value, resident) in enumerate(zip(program, wanted, found, strict=True)):
        if isinstance(value, ColocateError) or isinstance(resident, ColocateError):
            event(f"{step.method} failed")
            assert type(value) is type(resident), f"step {index}, {step}: {value!r} and {resident!r}"
        else:
            event(step.method)
            words = difference(value, resident)
            assert words is None, f"step {index}, {step}: {words}"


@st.composite
def pairs(draw: Any, roles: dict[str, int]) -> Sequence[Step]:
    """Draw two residents of equal length with any partitions, and a call that scatters both."""
    rows = draw(st.integers(1, 6))
    steps: list[Step] = []
    for start in (0, 100):
        counts = [1] * rows
        for _ in range(draw(st.integers(0, rows))):  # The number of rows stays, their selection changes.
            counts[draw(st.integers(0, rows - 1))] += 1
            counts[draw(st.sampled_from([i for i, count in enumerate(counts) if count]))] -= 1
        role, method = draw(st.sampled_from(list(roles))), draw(st.sampled_from(["stretch", "stretch", "first"]))
        arguments: dict[str, Any] = {"x": list(range(start, start + rows))}
        steps.append(Step(role, method, {**arguments, "counts": counts} if method == "stretch" else arguments))
    arguments = draw(st.sampled_from([{"x": Node(0), "y": Node(1)}, {"x": {"a": Node(0), "b": Node(1)}, "y": Node(0)}]))
    return [*steps, Step(draw(st.sampled_from(list(roles))), "both", arguments)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_resident_values_match_sent_values(executor: str, examples: dict[str, int]) -> None:
    """Random chains of role methods give the same results whether values travel or stay in the workers."""
    slots = 4 if executor == "threads" else 3
    with Reused(lambda stack: spawn(stack, executor, slots)) as spawned:

        @given(programs(ranks(slots)))
        def chains(program: Sequence[Step]) -> None:
            with spawned() as group:
                compare(group, program)
                for role in ranks(slots):
                    group.role(role).forget()

        @given(pairs(ranks(slots)))
        def residents_scattered_together(program: Sequence[Step]) -> None:
            with spawned() as group:
                compare(group, program)

        for law in (chains, residents_scattered_together):
            settings(max_examples=examples[executor])(law)()
