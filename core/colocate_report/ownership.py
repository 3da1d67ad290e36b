"""The ownership graph as nested nodes with what a reader wants to know of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import PurePath
from typing import Any

import attrs

from colocate.texts import plural, size_text
from colocate_report.scale import duration

PER_OWNER = 24  # nodes of one kind under one owner
ALTOGETHER = 600
FEW = 4  # workers of a group that show their roles without being asked


@attrs.frozen
class Node:
    """A node of the graph."""

    kind: str  # runtime, pool, group, worker, role, resident or call
    name: str
    facts: tuple[str, ...]  # what it was doing, or a role's class, and more about it, in short phrases
    role: int | None  # the number of the role that it is an instance of; None for other kinds
    children: tuple[Node, ...]  # what it owns
    hidden: str  # what it owns besides, in words; empty when that is nothing
    closed: bool = False  # whether what it owns is at first not shown: it is one of many that look alike


def ownership(graph: str, roles: Mapping[str, int]) -> Node | None:
    """The root of the graph; None when there is no graph.

    Hosts and folders are left out: who passes a page on should not have to think of what they are called.
    """
    if not graph.strip():
        return None
    hosts: dict[str, str] = {}
    return _node(json.loads(graph), roles, hosts, iter(range(ALTOGETHER)))


def _node(data: Mapping[str, Any], roles: Mapping[str, int], hosts: dict[str, str], budget: Iterator[int]) -> Node:
    shown, hidden = [], []
    for kind, alike in groupby(data.get("children", ()), key=lambda child: child["kind"]):
        children = list(alike)
        nodes = [_node(child, roles, hosts, budget) for child, _ in zip(children[:PER_OWNER], budget, strict=False)]
        shown += nodes[:FEW]
        shown += [attrs.evolve(node, closed=True) if kind == "worker" else node for node in nodes[FEW:]]
        if len(nodes) < len(children):
            hidden.append(plural(len(children) - len(nodes), f"more {kind}"))
    name, rank = str(data["name"]), ""
    if data["kind"] == "role":
        name, _, rank = name.rpartition(" rank ")
    facts = [str(data.get("state") or ""), f"rank {rank}" if rank else "", *_facts(data, hosts)]
    return Node(
        kind=data["kind"],
        name=name,
        facts=tuple(filter(None, facts)),
        role=roles.get(name) if rank else None,
        children=tuple(shown),
        hidden=", ".join(hidden),
    )


def _facts(data: Mapping[str, Any], hosts: dict[str, str]) -> Iterator[str]:
    if data.get("pid") is not None:
        yield f"pid {data['pid']}"
    if data.get("node") is not None:
        yield hosts.setdefault(str(data["node"]), f"node {len(hosts) + 1}")
    if data.get("device") is not None:
        yield str(data["device"])
    if data.get("bytes"):
        yield size_text(data["bytes"])
    if data.get("age_s") is not None:
        yield duration(data["age_s"])
    if data.get("line"):
        yield PurePath(data["line"]).name
