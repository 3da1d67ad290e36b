"""The ownership graph as a person or a program reads it: tree, mermaid, dot, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from colocate import _display as html
from colocate._api.memory import GroupMemory, RoleMemory
from colocate._api.memory import memory as memory_of
from colocate._crew.crew import Crew
from colocate._owned.owned import Owned
from colocate._signals.off_main import off_main
from colocate._system.deadline import Deadline
from colocate._system.jobs import error_text
from colocate._system.limits import LEDGERS_WITHIN_S
from colocate._system.lines import at
from colocate._system.numbers import size_text
from colocate.errors import ColocateError, ConfigError

FORMATS = ("tree", "mermaid", "dot", "json")

Measured: TypeAlias = Mapping[str, "GroupMemory | BaseException"]
"""By group what its memory is used for, or why that isn't known."""


class Graph:
    """Who owns what, at the moment when it is asked."""

    def __init__(self, root: Owned) -> None:
        self._root = root

    def data(self, memory: bool = False) -> dict[str, Any]:
        """The graph as nested plain data: kind, name, state, age, line, children and what else a kind knows.

        Args:
            memory: Whether workers are asked for the memory of their roles, in bytes, see `ColocatedGroup.memory`;
                "unmeasured" says of a group why that isn't known.
        """
        if not memory:
            return _node(self._root, {})
        deadline = Deadline(LEDGERS_WITHIN_S)
        return _node(self._root, off_main(lambda: _measured(self._root, deadline)))

    def render(self, format: str = "tree", memory: bool = False) -> str:
        """The graph as text.

        Args:
            format: "tree", "mermaid", "dot" or "json".
            memory: Whether each role says how much memory it holds, and each worker how much it has of its own.
        """
        if format not in FORMATS:
            raise ConfigError(f"graph.render({format!r}): the formats are {', '.join(FORMATS)}")
        data = self.data(memory)
        if format == "json":
            return json.dumps(data, indent=2)
        if format == "tree":
            return "\n".join(_tree(data, "", ""))
        return _mermaid(data) if format == "mermaid" else _dot(data)

    def __repr__(self) -> str:
        return self.render("tree")

    def _repr_html_(self) -> str:
        return shown(self._root)


def _measured(node: Owned, deadline: Deadline) -> Measured:
    """What the memory of each group below a node is used for, of those that are ready."""
    if not isinstance(node, Crew):
        below = (_measured(child, deadline) for child in list(node.children.values()))
        return {name: found for measured in below for name, found in measured.items()}
    if node.state != "ready":
        return {}
    try:
        return {node.name: memory_of(node, deadline)}
    except (ColocateError, TimeoutError) as error:
        return {node.name: error}


def _node(node: Owned, measured: Measured) -> dict[str, Any]:
    data = node.describe()
    data["children"] = [_node(child, measured) for child in list(node.children.values())]
    if isinstance(node, Crew):
        found = measured.get(node.name)
        if isinstance(found, BaseException):
            data["unmeasured"], found = error_text(found), None
        data["children"] += [*_workers(node, found), *_residents(node), *_calls(node)]
    return data


def _workers(crew: Crew, measured: GroupMemory | None) -> Iterator[dict[str, Any]]:
    ranks = {name: {slot: rank for rank, slot in enumerate(info.slots)} for name, info in crew.roles.items()}
    for worker in crew.workforce.workers:
        found = None if measured is None else measured.slots[worker.slot]
        held = {} if found is None else {role.role: role for role in found.roles}
        roles = [
            {
                "kind": "role",
                "name": f"{name} rank {ranks[name][worker.slot]}/{len(info.slots)}",
                "state": info.cls.__qualname__,
                **({} if found is None else _bytes(held.get(name))),
                "children": [],
            }
            for name, info in crew.roles.items()
            if worker.slot in ranks[name]
        ]
        yield {
            "kind": "worker",
            "name": str(worker.slot),
            "state": worker.state,
            "pid": worker.pid,
            "node": worker.boot.node,
            "device": worker.boot.device,
            **({} if found is None or found.process is None else {"bytes": found.process}),
            "children": roles,
        }


def _bytes(found: RoleMemory | None) -> dict[str, int]:
    """What a role holds, and what of it sleeps, if something does."""
    if found is None:
        return {"bytes": 0}
    return {"bytes": found.total, **({"asleep": found.asleep} if found.asleep else {})}


def _residents(crew: Crew) -> Iterator[dict[str, Any]]:
    for kept in list(crew.residents.kept.values()):
        if kept.freed_by is not None:
            continue
        yield {
            "kind": "resident",
            "name": kept.source.label,
            "state": crew.residents.state_of(kept)[0],
            "bytes": sum(size[0] for size in kept.call.bodies if size is not None),
            "line": at(kept.call.line),
            "children": [],
        }


def _calls(crew: Crew) -> Iterator[dict[str, Any]]:
    for call in list(crew.order.pending.values()):
        missing = [call.rank_of(slot) for slot in call.missing()]
        yield {
            "kind": "call",
            "name": call.label,
            "state": f"waits for rank {', '.join(map(str, missing[:8]))}",
            "line": at(call.line),
            "children": [],
        }


def _label(data: dict[str, Any]) -> str:
    return f"{data['kind']} {data['name']} ({', '.join([data['state'], *_known(data)])})"


def _known(data: Mapping[str, Any]) -> list[str]:
    """What is known of a node besides its state."""
    found = [f"{key} {data[key]}" for key in ("pid", "node", "device") if data.get(key) is not None]
    if data.get("bytes"):
        found.append(size_text(data["bytes"]))
    if data.get("asleep"):
        found.append(f"{size_text(data['asleep'])} asleep")
    if "unmeasured" in data:
        found.append(f"its memory isn't known: {data['unmeasured'].partition(chr(10))[0]}")  # all of it is in the data
    if "age_s" in data:
        found.append(f"{data['age_s']:.0f} s")
    if "line" in data:
        found.append(data["line"].rpartition("/")[2])
    return found


def shown(root: Owned, *more: str) -> str:
    """A node as a notebook shows it: why it can't be used if so, what more is given, and what it owns."""
    data = Graph(root).data()
    why = [] if root.closed_by is None else [html.reason(f"closed by {root.closed_by}")]
    if root.life.failure is not None:
        why.append(html.reason(error_text(root.life.failure), "bad"))
    if root.forked:
        why.append(html.reason("it belongs to the process that forked this one, which can't use it"))
    below = data["children"] if root.closed_by is None else ()
    return html.page(
        html.heading(root.kind, root.name, root.state, ", ".join(_known(data))),
        *why,
        *more,
        html.tree(below, lambda node: ", ".join(_known(node))),
    )


def _tree(data: dict[str, Any], lead: str, branch: str) -> Iterator[str]:
    yield lead + branch + _label(data)
    below = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    children = data["children"]
    for index, child in enumerate(children):
        yield from _tree(child, below, "└─ " if index == len(children) - 1 else "├─ ")


def _flat(data: dict[str, Any], number: Iterator[int], owner: int | None) -> Iterator[tuple[int, int | None, str, str]]:
    own = next(number)
    yield own, owner, data["kind"], _label(data).replace('"', "'")
    for child in data["children"]:
        yield from _flat(child, number, own)


def _mermaid(data: dict[str, Any]) -> str:
    lines = ["graph TD"]
    for own, owner, _, label in _flat(data, iter(range(10**9)), None):
        lines.append(f'  n{own}["{label}"]')
        if owner is not None:
            lines.append(f"  n{owner} --> n{own}")
    return "\n".join(lines)


def _dot(data: dict[str, Any]) -> str:
    lines = ["digraph ownership {", "  node [shape=box];"]
    for own, owner, _, label in _flat(data, iter(range(10**9)), None):
        lines.append(f'  n{own} [label="{label}"];')
        if owner is not None:
            lines.append(f"  n{owner} -> n{own};")
    return "\n".join([*lines, "}"])
