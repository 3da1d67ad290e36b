"""The law of ownership, checked against a model after each step."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

import colocate
from colocate import ClosedError

from .landlord import Group, OnePool, OneResident, OneRuntime
from .tenants import Tenant

NODE = r"\b(runtime|pool|group|worker|role|resident|call) (.+?) \("


class Lawful(RuleBasedStateMachine):
    """A program's runtimes, and the invariants of all steps; subclasses add the steps."""

    options: dict[str, Any] = {}
    cpus = 4

    def __init__(self) -> None:
        super().__init__()
        self.runtimes: list[OneRuntime] = []
        self.ended: list[OneRuntime | OnePool | Group] = []
        self.numbers = itertools.count(1)
        self.calls: list[colocate.Call[Any]] = []
        self.gates = Path(tempfile.mkdtemp(prefix="gates-"))

    # -- invariants after each step

    @invariant()
    def graphs_show_what_lives(self) -> None:
        for each in self.runtimes:
            graph = each.runtime.graph
            data = json.loads(graph.render("json"))
            assert sorted((node["kind"], node["name"]) for node in flat(data)) == each.below()
            for format in ("tree", "mermaid"):
                lines = graph.render(format).splitlines()
                shown = [found for line in lines if (found := re.search(NODE, line))]
                assert sorted((found[1], found[2]) for found in shown) == each.below(), format
            owned = [(id(child), node.name) for node in owners(each.runtime._node) for child in node.children.values()]
            assert len({child for child, _ in owned}) == len(owned), f"something has two owners: {owned}"

    @invariant()
    def the_engine_runs_what_lives(self) -> None:
        for each in self.runtimes:
            assert not (found := each.runtime.audit()), found
            workers = [one.id for one in each.runtime._node.services.executor.running() if one.kind == "worker"]
            living = {name.partition("/")[2] for name in workers}
            for group in each.groups():
                assert group.dead or {f"{group.name}/{slot}" for slot in range(group.slots)} <= living

    @invariant()
    def what_is_closed_stays_closed(self) -> None:
        for each in self.ended[-3:]:
            held: Any = getattr(each, type(each).__name__.removeprefix("One").lower())
            before = held._node.closed_by
            assert before
            held.close()
            held.close(force=True)
            assert held._node.closed_by == before
            assert not held._node.children
            self._refuses(each, before)

    def _refuses(self, each: OneRuntime | OnePool | Group, by: str) -> None:
        uses: list[Callable[[], Any]] = []
        if isinstance(each, OneRuntime):
            uses = [each.runtime.reserve]
        elif isinstance(each, OnePool):
            uses = [lambda: each.pool.spawn({"tenant": colocate.role(Tenant)})]
        else:
            tenant = each.tenant
            uses = [tenant.echo, tenant.echo.submit, lambda: tenant.make.keep(1), lambda: tenant.stored()]
            for kept in each.residents:
                if kept.resident is not None and not kept.freed and not kept.poisoned and kept.made:
                    uses.append(kept.resident.fetch)
        for use in uses:
            with pytest.raises(ClosedError) as caught:
                use()
            assert caught.value.closed_by == by
            assert by in str(caught.value)

    # -- choices

    def pools(self) -> list[OnePool]:
        return [pool for runtime in self.runtimes for pool in runtime.pools]

    def groups(self) -> list[Group]:
        return [group for runtime in self.runtimes for group in runtime.groups() if not group.dead]

    def idle(self) -> list[Group]:
        return [group for group in self.groups() if not group.calls]

    def busy(self) -> list[Group]:
        return [group for group in self.groups() if group.calls]

    def neighbours(self) -> list[tuple[Group, Group]]:
        """Return the pairs of idle groups of one runtime."""
        groups = [[group for group in runtime.groups() if group in self.idle()] for runtime in self.runtimes]
        return [pair for own in groups for pair in itertools.permutations(own, 2)]

    def residents(self) -> list[OneResident]:
        kept = [kept for group in self.groups() for kept in group.residents]
        return [each for each in kept if each.resident is not None and not each.freed]

    def teardown(self) -> None:
        try:
            for runtime in list(self.runtimes):
                with contextlib.suppress(BaseExceptionGroup):
                    runtime.runtime.close()
            assert all(call.done() for call in self.calls), "a future was left unresolved"
        finally:
            shutil.rmtree(self.gates)


def flat(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield data
    for child in data["children"]:
        yield from flat(child)


def owners(node: Any) -> Iterator[Any]:
    yield node
    for child in node.children.values():
        yield from owners(child)
