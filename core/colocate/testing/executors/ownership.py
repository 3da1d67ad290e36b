"""Ownership: who owns what, what is shown of it, names, and what dropping a variable doesn't do."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate._api.pool import Slots
from colocate.errors import ColocateError, ConfigError
from colocate.testing.executors._base import ExecutorCase
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


def nodes(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All nodes of a graph."""
    yield data
    for child in data["children"]:
        yield from nodes(child)


def shown(runtime: Runtime) -> set[tuple[str, str]]:
    """Kind and name of everything that the ownership graph shows."""
    return {(node["kind"], node["name"]) for node in nodes(runtime.graph.data())}


class Ownership(ExecutorCase):
    """The tree: runtime, pools, groups, workers, role instances; groups' residents and calls."""

    def test_automatic_names_are_free_ones(self) -> None:
        """What users have named so before keeps its name: groups and pools alike."""
        roles: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "rows": colocate.role(Rows)}
        with self.connect() as runtime:
            named = runtime.reserve(1, cpus=0, name="pool-1")
            pools = [runtime.reserve(1, cpus=0) for _ in range(2)]
            assert [pool.name for pool in (named, *pools)] == ["pool-1", "pool-2", "pool-3"]
            groups = [named.spawn(roles, name="group-1"), *(pool.spawn(roles) for pool in pools)]
            assert [group.name for group in groups] == ["group-1", "group-2", "group-3"]
            assert runtime.groups == {group.name: group for group in groups}
            with groups[0].role("rows", Rows).produce.keep(2) as kept:
                for group in groups:
                    assert group.role("echo", Echo).first.options(timeout=PATIENCE_S)(kept.ref) == [0, 1]

    def test_graph(self, runtime: Runtime) -> None:
        """The graph shows what lives, under its one owner, with states and the lines that made it; then it is gone."""
        with runtime.reserve(2, cpus=0, name="ground") as pool:
            group = pool.spawn({"rows": colocate.role(Rows), "one": colocate.role(Rows).on(slots=[1])}, name="shown")
            kept = group.role("rows", Rows).double.keep([1, 2])
            kept.fetch()
            (ground,) = (node for node in runtime.graph.data()["children"] if node["name"] == "ground")
            assert [(node["kind"], node["name"]) for node in nodes(ground)] == [
                ("pool", "ground"),
                ("group", "shown"),
                ("worker", "0"),
                ("role", "rows rank 0/2"),
                ("worker", "1"),
                ("role", "rows rank 1/2"),
                ("role", "one rank 0/1"),
                ("resident", "rows.double"),
            ]
            assert [node["state"] for node in nodes(ground) if node["kind"] == "worker"] == ["running"] * 2
            made = [node["line"] for node in nodes(ground) if node["kind"] in ("pool", "group", "resident")]
            assert all("ownership.py:" in line for line in made)
            kept.free()
        assert ("pool", "ground") not in shown(runtime)
        assert ("group", "shown") not in shown(runtime)

    def test_graph_of_calls(self, pair: ColocatedGroup) -> None:
        """A call under way is shown with the ranks that it waits for."""
        with Gate() as gate:
            call = pair.role("faulty", Faulty).fail_after.submit([None, gate.address], -1)  # type: ignore[arg-type]
            gate.wait_for()
            found = [node for node in nodes(pair.owner.owner.graph.data()) if node["kind"] == "call"]
            assert [node["name"] for node in found] == ["faulty.fail_after"]
            assert "1" in found[0]["state"]
        call.result(PATIENCE_S)
        assert [node for node in nodes(pair.owner.owner.graph.data()) if node["kind"] == "call"] == []

    def test_graph_formats(self, pair: ColocatedGroup) -> None:
        """Every format shows the same nodes."""
        graph = pair.owner.owner.graph
        count = len(list(nodes(graph.data())))
        assert len(graph.render("tree").splitlines()) == count
        assert sum("[" in line for line in graph.render("mermaid").splitlines()) == count
        assert sum("label=" in line for line in graph.render("dot").splitlines()) == count
        assert len(list(nodes(json.loads(graph.render("json"))))) == count
        with pytest.raises(ConfigError, match="tree, mermaid, dot, json"):
            graph.render("svg")

    def test_dropping_closes_nothing(self, runtime: Runtime) -> None:
        """Dropping every variable leaves pools and groups alive; their owner has them still."""
        pool_name = runtime.reserve(1, cpus=0, name="kept by its owner").name
        node = next(child for child in runtime._node.children.values() if child.name == pool_name)
        assert isinstance(node, Slots)
        pool = colocate.Pool._of(node)
        pool.spawn({"echo": colocate.role(Echo)}, name="still there").role("echo", Echo).noop()
        gc.collect()
        assert {("pool", pool_name), ("group", "still there")} <= shown(runtime)
        assert pool.groups["still there"].role("echo", Echo).noop() == [None]
        pool.close()

    def test_names(self, runtime: Runtime) -> None:
        """A group's name is taken until it is closed; the error says where the other one was made."""
        with runtime.reserve(2, cpus=0) as pool:
            first = pool[0:1].spawn({"echo": colocate.role(Echo)}, name="taken")
            with pytest.raises(ConfigError, match=r"there is a group 'taken' already, made at .*ownership\.py:\d+"):
                pool[1:2].spawn({"echo": colocate.role(Echo)}, name="taken")
            first.close()
            second = pool[1:2].spawn({"echo": colocate.role(Echo)}, name="taken")
            assert second.role("echo", Echo).who()[0]["group"] == "taken"

    def test_slots(self, runtime: Runtime) -> None:
        """A slot takes one group at a time; parts of a pool take one each."""
        with runtime.reserve(3, cpus=0) as pool:
            front = pool[0:2].spawn({"echo": colocate.role(Echo)}, name="front")
            with pytest.raises(ColocateError, match=r"slot 0 of pool .* is taken by group 'front'"):
                pool.spawn({"echo": colocate.role(Echo)})
            back = pool[2].spawn({"echo": colocate.role(Echo)}, name="back")
            assert [slot.state for slot in pool.slots] == ["front", "front", "back"]
            assert [slot.index for slot in pool[1:3].slots] == [1, 2]
            assert set(pool.groups) == {"front", "back"}
            assert front.role("echo", Echo).who()[1]["slot"] == 1
            assert back.role("echo", Echo).who()[0]["slot"] == 0
            front.close()
            assert [slot.state for slot in pool.slots] == ["free", "free", "back"]
            with pytest.raises(ConfigError, match="picks none"):
                pool[3:]
