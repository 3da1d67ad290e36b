"""How rows lie over the parts that `Scatter` makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import attrs

from colocate._system.numbers import plural
from colocate._values.batch import (
    Deferred,
    count_rows,
    even_sizes,
    is_deferred,
    leaf_deferred,
    leaf_splitter,
    padded_sizes,
    resolve,
)
from colocate._values.beside import Beside, Cut, check_sets, same_rows
from colocate._values.tree import replaced, take_apart
from colocate.errors import DispatchError


@attrs.frozen
class Layout:
    """What each of `count` parts along an axis gets.

    `sizes` are the real rows of each part, None when only the workers will know. `each` is the rows of every part with
    padding, None without padding or, again, when only the workers will know.

    `beside` says, by the leaf's id, what leaves in the workers are compared with there, when the rows of one aren't
    known yet. `by` is the placeholder of the one whose partition governs, when that is its producer's. `of` is how many
    rows stay together.
    """

    axis: str
    mesh: str | None
    count: int
    padding: Literal["none", "even"]
    sizes: Sequence[int] | None
    each: int | None
    beside: Mapping[int, Beside] = attrs.field(factory=dict)
    by: Any = None
    of: int = 1

    def cut(self, values: Mapping[str, Any]) -> list[Any]:
        """The parts of the values, one mapping per part."""
        plain = None if self.sizes is None else leaf_splitter(self.sizes, self.each)

        def leaf(value: Any) -> Sequence[Any]:
            if isinstance(value, Deferred):
                return self._cut_deferred(value)
            if plain is None:
                raise AssertionError("a layout without sizes is made for values without plain rows")
            return plain(resolve(value, lambda item: item.whole()) if isinstance(value, list) else value)

        return take_apart(dict(values), self.count, leaf)

    def shared(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """One mapping for all parts, where each rank finds in its own worker what governs; None where it doesn't."""
        if self.by is None:
            return None
        together: dict[str, Any] = replaced(dict(values), self._with_its_part)
        return together

    def _with_its_part(self, leaf: Any) -> Any:
        """What every rank gets of a leaf, to take from it what lies beside its own part of the one that governs."""
        if isinstance(leaf, Deferred):
            own = leaf.own(self.axis, self.mesh, self.count, self.of)
            return leaf.share(0, self.count, self.padding, self.beside[id(leaf)], self.of) if own is None else own
        plain = resolve(leaf, lambda item: item.whole()) if isinstance(leaf, list) else leaf
        return Cut(plain, self.by, next(iter(self.beside.values())))

    def _cut_deferred(self, value: Deferred) -> list[Any]:
        if self.beside:
            beside = self.beside[id(value)]
            return [value.share(index, self.count, self.padding, beside, self.of) for index in range(self.count)]
        if self.sizes is None or self.padding == "even":
            parts = range(self.count)
            return [value.part(index, self.count, self.axis, self.mesh, self.padding, self.of) for index in parts]
        return [value.slice(start, stop) for start, stop in pairwise(accumulate(self.sizes, initial=0))]


def own_parts(values: Mapping[str, Any], axis: str, mesh: str | None, count: int, of: int) -> dict[str, Any] | None:
    """One mapping for all parts, because each rank has its own in its worker already; None where it has not."""
    owned: list[Any] = []

    def own(leaf: Any) -> Any:
        placeholder = leaf.own(axis, mesh, count, of) if is_deferred(type(leaf)) else None
        if placeholder is None:
            raise _Elsewhere
        owned.append(placeholder)
        return placeholder

    try:
        found = {name: replaced(value, own) for name, value in values.items()}
    except _Elsewhere:
        return None
    return found if owned else None


class _Elsewhere(Exception):
    """A leaf whose part a rank hasn't in its own worker."""


def lay_out(
    values: Mapping[str, Any],
    axis: str,
    mesh: str | None,
    count: int,
    padding: Literal["none", "even"],
    empty: Literal["error", "run"],
    of: int = 1,
) -> Layout:
    """Work out who gets which rows, of which each `of` stay together.

    Values on the driver are spread evenly. Where values in the workers are among them, the partition of the first of
    those governs; where there are only such ones, or the rows of one aren't known yet, the workers see to it.

    Raises:
        DispatchError: A parameter has no rows, parameters disagree, or there are too few rows, or no whole sets.
    """
    name, total = _plain_rows(values)
    if total is None:
        return Layout(axis, mesh, count, padding, None, None, of=of)
    check_sets(f"the parameter {name!r}", total, of, name)
    deferred = [(owner, leaf) for owner, value in values.items() for leaf in leaf_deferred(value)]
    sizes = even_sizes(total, count, of)
    beside: dict[int, Beside] = {}
    by: Any = None
    if not all(leaf.known for _, leaf in deferred):
        beside = {id(leaf): Beside(name, total, owner) for owner, leaf in deferred}
        by = deferred[0][1].own(axis, mesh, count, of) if padding == "none" else None
        deferred = []  # they are compared where their rows are
    for place, (owner, leaf) in enumerate(deferred):
        theirs = leaf.sizes(axis, mesh, count, of)
        same_rows(name, total, owner, sum(theirs))
        if place == 0:
            sizes = theirs
            for size in sizes:
                check_sets(f"a part of {owner!r}, as it lies in the workers,", size, of, owner)
    each = None
    if padding == "even" and (total > 0 or empty == "error"):
        each, sizes = padded_sizes(total, count)
    if empty == "error" and (total == 0 or (each is None and 0 in sizes)):
        raise _too_few(name, total, axis, count, of)
    if by is not None:
        return Layout(axis, mesh, count, padding, None, None, beside, by, of)
    return Layout(axis, mesh, count, padding, sizes, each, beside, of=of)


def _plain_rows(values: Mapping[str, Any]) -> tuple[str, int | None]:
    """The first parameter whose rows the driver knows, and these rows; the others agree with it."""
    first: tuple[str, int | None] = "", None
    for name, value in values.items():
        try:
            total = count_rows(value, name)
        except DispatchError as error:
            error.parameter = name
            raise
        if total is not None and first[1] is None:
            first = name, total
        elif total is not None and first[1] is not None:
            same_rows(first[0], first[1], name, total)
    return first


def _too_few(name: str, total: int, axis: str, count: int, of: int) -> DispatchError:
    if total < count * of:
        sets = f", in sets of {of}," if of > 1 else ""
        what = f"the parameter {name!r} has {plural(total, 'row')}{sets} for {plural(count, 'rank')} along {axis!r}"
    else:
        what = f"some of the {count} ranks along {axis!r} have none of the {total} rows of {name!r} where they lie now"
    hint = "give more rows, or declare Scatter(empty='run')" + (" or pad=True" if total and of == 1 else "")
    return DispatchError(f"{what}, and no rank is skipped: {hint}", parameter=name)
