"""Lay out the ownership graph as nested nodes, and memory as bars and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import attrs

from colocate.texts import format_count, format_size
from colocate_report.scale import format_duration
from colocate_report.tables import Table, column_names, table
from colocate_report.times import Bar, label_role, make_share_bar

if TYPE_CHECKING:
    from colocate.driver import GroupMemory, SlotMemory

SLOTS = 4  # The most slots of a group that have a bar.


@attrs.frozen
class Memory:
    """The memory use of a group, as bars and a table."""

    group: str
    # For each slot, a label and a bar of the roles' shares of the memory of the process or the device.
    bars: tuple[tuple[str, Bar], ...]
    hidden: str  # The number of slots without a bar, in words.
    table: Table  # The bytes by role and kind of memory.


def memory_of_groups(found: Sequence[GroupMemory], roles: Mapping[str, int]) -> tuple[Memory, ...]:
    """Lay out the memory use of groups as bars and tables."""
    return tuple(_group_memory(item, roles) for item in found)


def _group_memory(group: GroupMemory, roles: Mapping[str, int]) -> Memory:
    hidden, rows = len(group.slots) - SLOTS, group.texts()
    return Memory(
        group.group,
        tuple(_memory_bars(group.slots[:SLOTS], roles)),
        f"and {format_count(hidden, 'more slot')}" if hidden > 0 else "",
        table(group.group, rows, sizes={*column_names(rows)} - {"role"}),
    )


def _memory_bars(slots: Sequence[SlotMemory], roles: Mapping[str, int]) -> Iterator[tuple[str, Bar]]:
    for slot in slots:
        on_device = slot.device != "cpu"
        held = [(role.role, sum(role.device.values()) if on_device else role.total) for role in slot.roles]
        parts = [(roles[name], label_role(name), size) for name, size in held if size]
        # The empty part of a bar is memory that is free or belongs to no role.
        whole = slot.gpu["used"] if slot.gpu is not None else slot.process
        total = max(whole or 0, sum(size for _, _, size in parts))
        yield f"slot {slot.slot}, {slot.device}: {format_size(total)}", make_share_bar(parts, total, format_size)


PER_OWNER = 24  # The most nodes of one kind that are shown under one owner.
ALTOGETHER = 600
FEW = 4  # The number of workers of a group that are unfolded at first.


@attrs.frozen
class Node:
    """A node of the ownership graph on the page."""

    kind: str  # One of: runtime, pool, group, worker, role, resident, call.
    name: str
    facts: tuple[str, ...]  # Short phrases about state, class, process, node, device and size.
    role: int | None  # The role's colour number; None if the node isn't a role.
    children: tuple[Node, ...]
    hidden: str  # The number of owned nodes that aren't shown, in words; empty for none.
    closed: bool = False  # Whether the node is folded at first, because there are many such nodes.


def ownership_tree(graph: str, roles: Mapping[str, int]) -> Node | None:
    """Return the root of the ownership graph; None for an empty graph.

    Names of hosts and folders are left out, so that a page can be shared.
    """
    if not graph.strip():
        return None
    hosts: dict[str, str] = {}
    return _make_node(json.loads(graph), roles, hosts, iter(range(ALTOGETHER)))


def _make_node(data: Mapping[str, Any], roles: Mapping[str, int], hosts: dict[str, str], budget: Iterator[int]) -> Node:
    shown, hidden = [], []
    for kind, alike in groupby(data.get("children", ()), key=lambda child: child["kind"]):
        children = list(alike)
        nodes = [
            _make_node(child, roles, hosts, budget) for child, _ in zip(children[:PER_OWNER], budget, strict=False)
        ]
        shown += nodes[:FEW]
        shown += [attrs.evolve(node, closed=True) if kind == "worker" else node for node in nodes[FEW:]]
        if len(nodes) < len(children):
            hidden.append(format_count(len(children) - len(nodes), f"more {kind}"))
    name, rank = str(data["name"]), ""
    if data["kind"] == "role":
        name, _, rank = name.rpartition(" rank ")
    facts = [str(data.get("state") or ""), f"rank {rank}" if rank else "", *_list_facts(data, hosts)]
    return Node(
        kind=data["kind"],
        name=name,
        facts=tuple(filter(None, facts)),
        role=roles.get(name) if rank else None,
        children=tuple(shown),
        hidden=", ".join(hidden),
    )


def _list_facts(data: Mapping[str, Any], hosts: dict[str, str]) -> Iterator[str]:
    if data.get("pid") is not None:
        yield f"pid {data['pid']}"
    if data.get("node") is not None:
        yield hosts.setdefault(str(data["node"]), f"node {len(hosts) + 1}")
    if data.get("device") is not None:
        yield str(data["device"])
    if data.get("bytes"):
        yield format_size(data["bytes"])
    if data.get("age_s") is not None:
        yield format_duration(data["age_s"])
    if data.get("line"):
        yield PurePath(data["line"]).name
