"""The ownership graph, as text, HTML or plain data."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from colocate import _display as html
from colocate._owned.owned import Owned
from colocate._system.deadline import Deadline
from colocate._system.jobs import format_error
from colocate._system.limits import LEDGERS_WITHIN_S
from colocate._system.lines import format_line
from colocate._system.numbers import format_size
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, ConfigError

MemoryByGroup: TypeAlias = Mapping[str, Any]
"""The memory of each group (`GroupMemory`), by name, or the exception that prevented the measurement."""


class Graph:
    """The ownership tree of a runtime. The tree is read anew at each call."""

    def __init__(self, root: Owned) -> None:
        self._root = root

    def data(self, memory: bool = False) -> dict[str, Any]:
        """Return the graph as nested plain data: kind, name, state, age, line, children and details of each kind.

        Args:
            memory: Whether to ask workers for the memory of their roles, in bytes; see `ColocatedGroup.memory`.
                "unmeasured" has the reason if a group didn't answer.

        Raises:
            ForkedError: This is a forked child, and workers don't answer forks (`memory`).
        """
        if memory and self._root.is_forked:
            self._root.check_usable()
        deadline = Deadline(LEDGERS_WITHIN_S)
        return _describe_node(self._root, _measure_memory(self._root, deadline) if memory else {})

    def render(self, format: str = "tree", memory: bool = False) -> str:
        """Return the graph as text.

        Args:
            format: "tree", "mermaid" or "json".
            memory: Whether to show the memory of each role, and the memory of each worker process.

        Raises:
            ConfigError: `format` is none of these values.
            ForkedError: This is a forked child, and workers don't answer forks (`memory`).
        """
        if format not in FORMATS:
            raise ConfigError(f"graph.render({format!r}): the formats are {', '.join(FORMATS)}")
        return FORMATS[format](self.data(memory))

    def __repr__(self) -> str:
        return self.render("tree")

    def _repr_html_(self) -> str:
        return render_html(self._root)


def _measure_memory(node: Owned, deadline: Deadline) -> MemoryByGroup:
    if not isinstance(node, WorkerGroup):
        below = (_measure_memory(child, deadline) for child in list(node.children.values()))
        return {name: memory for measured in below for name, memory in measured.items()}
    if node.state != "ready":
        return {}
    try:
        return {node.name: cast("Any", node.get_part("memory")).ask_memory(deadline)}
    except (ColocateError, TimeoutError) as error:
        return {node.name: error}


def _describe_node(node: Owned, measured: MemoryByGroup) -> dict[str, Any]:
    """Return a node of the graph with all children. A group's children include workers, residents and calls."""
    data: dict[str, Any] = {
        "kind": node.kind,
        "name": node.name,
        "state": node.state,
        "age_s": round(time.time() - node.created, 3),
        "line": format_line(node.line),
        **({"where": node.where} if node.where else {}),
        "children": [_describe_node(child, measured) for child in list(node.children.values())],
    }
    if not isinstance(node, WorkerGroup):
        return data
    memory = measured.get(node.name)
    if isinstance(memory, BaseException):
        data["unmeasured"], memory = format_error(memory), None
    data["children"] += [_describe_worker(node, worker, memory) for worker in node.workforce.workers]
    data["children"] += [
        {
            "kind": "resident",
            "name": resident.source.label,
            "state": node.residents.state_of(resident)[0],
            "bytes": sum(size[0] for size in resident.call.bodies if size is not None),
            "line": format_line(resident.call.line),
            "children": [],
        }
        for resident in list(node.residents.records.values())
        if resident.freed_by is None
    ]
    for call in list(node.order.pending.values()):
        state = f"waits for rank {', '.join(str(call.rank_of(slot)) for slot in call.missing_slots()[:8])}"
        data["children"].append(
            {"kind": "call", "name": call.label, "state": state, "line": format_line(call.line), "children": []}
        )
    return data


def _describe_worker(worker_group: WorkerGroup, worker: Worker, measured: Any) -> dict[str, Any]:
    memory = None if measured is None else measured.slots[worker.slot]
    roles = []
    for name, info in worker_group.roles.items():
        if worker.slot not in info.slots:
            continue
        rank = info.slots.index(worker.slot)
        title = f"{name} rank {rank}/{len(info.slots)}"
        role: dict[str, Any] = {"kind": "role", "name": title, "state": info.cls.__qualname__}
        if memory is not None:
            held = next((role_memory for role_memory in memory.roles if role_memory.role == name), None)
            role |= {"bytes": 0 if held is None else held.total}
            role |= {"asleep": held.asleep} if held is not None and held.asleep else {}
        sizes = {} if memory is None else memory.children.get(name, {})
        below: list[dict[str, Any]] = []
        for part in worker_group.parts.values():
            role |= part.role_attributes(name)
            below += [
                node | ({"bytes": sizes[node["name"]]} if node["name"] in sizes else {})
                for node in part.role_children(worker, name)
            ]
        roles.append({**role, "children": below})
    return {
        "kind": "worker",
        "name": str(worker.slot),
        "state": worker.state,
        "pid": worker.pid,
        "node": worker.boot.node,
        "device": worker.boot.device,
        **({} if memory is None or memory.process is None else {"bytes": memory.process}),
        "children": roles,
    }


def _node_label(data: dict[str, Any]) -> str:
    return f"{data['kind']} {data['name']} ({', '.join([data['state'], *_list_details(data)])})"


def _list_details(data: Mapping[str, Any]) -> list[str]:
    notes = [f"{key} {data[key]}" for key in ("pid", "port", "node", "device") if data.get(key) is not None]
    if "where" in data:
        notes.append(data["where"])
    if data.get("bytes"):
        notes.append(format_size(data["bytes"]))
    if data.get("asleep"):
        notes.append(f"{format_size(data['asleep'])} asleep")
    if data.get("paused"):
        notes.append("paused")
    if data.get("weights"):
        notes.append(data["weights"])
    if "unmeasured" in data:
        # Only the first line is shown. `data` has the full text.
        notes.append(f"its memory isn't known: {data['unmeasured'].partition(chr(10))[0]}")
    if "age_s" in data:
        notes.append(f"{data['age_s']:.0f} s")
    if "line" in data:
        notes.append(data["line"].rpartition("/")[2])
    return notes


def render_html(root: Owned, *more: str) -> str:
    """Return a node as HTML for a notebook: why the node can't be used, the HTML in `more`, and the children."""
    data = Graph(root).data()
    why = [] if root.closed_by is None else [html.reason(f"closed by {root.closed_by}")]
    if root.life.failure is not None:
        why.append(html.reason(format_error(root.life.failure), "bad"))
    if root.is_forked:
        why.append(html.reason("it belongs to the process that forked this one, which can't use it"))
    below = data["children"] if root.closed_by is None else ()
    return html.page(
        html.heading(root.kind, root.name, root.state, ", ".join(_list_details(data))),
        *why,
        *more,
        html.tree(below, lambda node: ", ".join(_list_details(node))),
    )


def _draw_tree(data: dict[str, Any], lead: str, branch: str) -> Iterator[str]:
    yield lead + branch + _node_label(data)
    below = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    children = data["children"]
    for index, child in enumerate(children):
        yield from _draw_tree(child, below, "└─ " if index == len(children) - 1 else "├─ ")


def _draw_mermaid(data: dict[str, Any]) -> str:
    lines, numbers = ["graph TD"], itertools.count()

    def draw(data: dict[str, Any], owner: int | None) -> None:
        number = next(numbers)
        label = _node_label(data).replace('"', "'")
        lines.append(f'  n{number}["{label}"]')
        if owner is not None:
            lines.append(f"  n{owner} --> n{number}")
        for child in data["children"]:
            draw(child, number)

    draw(data, None)
    return "\n".join(lines)


FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tree": lambda data: "\n".join(_draw_tree(data, "", "")),
    "mermaid": _draw_mermaid,
    "json": lambda data: json.dumps(data, indent=2),
}
