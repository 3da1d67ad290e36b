"""Random programs in which later calls use results of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from .values import values

SCATTERED = ("same", "double", "inference", "graded", "view", "hold", "padded", "masked", "later", "balanced")
WHOLE = ("first", "gather", "copies", "mean", "on_rank", "rotate")


@attrs.frozen
class Node:
    """Stands for the result of step `index`; with `fetched`, for the value in either run."""

    index: int
    fetched: bool = False


@attrs.frozen
class Step:
    """One call: role, method and arguments, with nodes in place of earlier results."""

    role: str
    method: str
    arguments: dict[str, Any]


@attrs.frozen
class Kind:
    """The known properties of a result.

    Attributes:
        rows: The number of its rows, or None.
        plain: Whether it can be indexed, unlike jagged tensors.
        even: Whether its rows are spread like a value's rows; if not, a rank may be without any although there
            are enough for all, which `empty="error"` refuses.
        chosen: Whether its rows may be spread by cost, so that methods have to return a row for each.
    """

    rows: int | None
    plain: bool = True
    even: bool = True
    chosen: bool = False


def replace(argument: Any, node: Callable[[Node], Any]) -> Any:
    """Return the argument with each node replaced."""
    if isinstance(argument, Node):
        return node(argument)
    if isinstance(argument, dict):
        return {key: replace(item, node) for key, item in argument.items()}
    if isinstance(argument, list | tuple):
        return type(argument)(replace(item, node) for item in argument)
    return argument


def nodes(step: Step) -> list[Node]:
    """Return the nodes for the earlier results that a step uses."""
    found: list[Node] = []
    replace(step.arguments, found.append)
    return found


@attrs.define
class _Writer:
    """Writes one program."""

    draw: Callable[[Any], Any]
    roles: dict[str, int]
    steps: list[Step] = attrs.field(factory=list)
    kinds: list[Kind] = attrs.field(factory=list)

    def step(self) -> None:
        role = self.draw(st.sampled_from(list(self.roles)))
        how = self.draw(
            st.sampled_from(["scatter", "scatter", "scatter", "whole", "both", "stretch", "count", "items"])
        )
        name, arguments, kind = getattr(self, f"_{how}")(self.roles[role])
        self.steps.append(Step(role, name, arguments))
        self.kinds.append(kind)

    # -- arguments

    def _node(self, wanted: Callable[[Kind], bool]) -> Node | None:
        found = [index for index, kind in enumerate(self.kinds) if wanted(kind)]
        if not found:
            return None
        # Draws shrink towards the latest result: short chains first.
        place = self.draw(st.integers(0, len(found) - 1))
        return Node(found[-1 - place], self.draw(st.integers(0, 9)) == 9)

    def _rows(
        self, rows: int | None = None, plain: bool = False, even: bool = False, chosen: bool = True
    ) -> tuple[Any, Kind]:
        """Draw an argument with rows: a new value, an earlier result, or a container with one."""
        node = self._node(
            lambda kind: (
                kind.rows is not None
                and rows in (None, kind.rows)
                and (kind.plain or not plain)
                and (kind.even or not even)
                and (chosen or not kind.chosen)
            )
        )
        if node is None or self.draw(st.integers(0, 4)) == 4:
            count = self.draw(st.integers(0, 7)) if rows is None else rows
            ragged = not plain and self.draw(st.booleans())
            return self.draw(values(count, ragged)), Kind(count, not ragged)
        kind = self.kinds[node.index]
        shape = self.draw(st.integers(0, 5))
        if shape == 4:
            assert kind.rows is not None
            return {"node": node, "new": self.draw(values(kind.rows, False))}, kind
        return ((node, None), kind) if shape == 5 else (node, kind)

    def _anything(self) -> tuple[Any, Kind]:
        """Draw any argument; nodes may be nested."""
        node = self._node(lambda kind: True)
        if node is None or self.draw(st.booleans()):
            return self._rows()
        if self.draw(st.booleans()):
            return node, self.kinds[node.index]
        return {"deep": [node, (node, 1)]}, Kind(2)

    # -- steps

    def _scatter(self, ranks: int) -> tuple[str, dict[str, Any], Kind]:
        x, kind = self._rows()
        name = self.draw(st.sampled_from(SCATTERED))
        even = kind.even and name not in ("padded", "masked")
        if name != "balanced":
            return name, {"x": x}, attrs.evolve(kind, even=even)
        assert kind.rows is not None
        costs = self.draw(st.lists(st.integers(0, 9), min_size=kind.rows, max_size=kind.rows))
        return name, {"x": x, "costs": costs}, attrs.evolve(kind, even=even, chosen=True)

    def _both(self, ranks: int) -> tuple[str, dict[str, Any], Kind]:
        x, kind = self._rows()
        y, other = self._rows(kind.rows)
        made = Kind(kind.rows, kind.plain and other.plain, kind.even and other.even, kind.chosen or other.chosen)
        return "both", {"x": x, "y": y}, made

    def _stretch(self, ranks: int) -> tuple[str, dict[str, Any], Kind]:
        x, kind = self._rows(plain=True, chosen=False)
        assert kind.rows is not None
        counts = self.draw(st.lists(st.integers(0, 2), min_size=kind.rows, max_size=kind.rows))
        return "stretch", {"x": x, "counts": counts}, Kind(sum(counts), even=False)

    def _count(self, ranks: int) -> tuple[str, dict[str, Any], Kind]:
        return "count", {"x": self._rows(even=True)[0]}, Kind(None)

    def _items(self, ranks: int) -> tuple[str, dict[str, Any], Kind]:
        x, _ = self._anything()
        items = [self._anything()[0] for _ in range(ranks)]
        return "per_rank", {"items": items, "x": x}, Kind(ranks)

    def _whole(self, ranks: int) -> tuple[str, dict[str, Any], Kind]:
        name = self.draw(st.sampled_from(WHOLE))
        x, kind = self._rows() if name in ("copies", "on_rank") else self._anything()
        if name == "gather":
            return name, {"x": x}, Kind(ranks)
        if name == "mean":
            return name, {"x": x}, Kind(None)
        if name == "copies":
            assert kind.rows is not None
            return name, {"x": x}, Kind(kind.rows * ranks, kind.plain, even=False)
        return name, {"x": x}, attrs.evolve(kind, even=True)


def programs(roles: dict[str, int], longest: int = 6) -> st.SearchStrategy[Sequence[Step]]:
    """Draw programs over these roles (name: number of ranks)."""

    @st.composite
    def written(draw: Any) -> Sequence[Step]:
        writer = _Writer(draw, roles)
        for _ in range(draw(st.integers(1, longest))):
            writer.step()
        return writer.steps

    return written()
