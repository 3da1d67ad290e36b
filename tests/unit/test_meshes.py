"""Rows and residents over any meshes, against a plain model of ranks as tuples of coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

import colocate
from colocate import ColocatedGroup, Concat, Gather, PerRank, Role, Scatter, method

Shape = Mapping[str, int]
SLOTS = 8
TRAIN: Shape = {"pp": 2, "dp": 2, "tp": 2}
LAYOUTS: dict[str, dict[str, Shape]] = {
    "usual": {"train": TRAIN, "infer": {"dp": 2, "tp": 4}},
    "odd": {"train": {"dp": 4, "pp": 2}, "infer": {"tp": 2, "pp": 4}},
    "flat": {"train": {"dp": 8}, "infer": {"tp": 8}},
}
OTHER: dict[str, Shape] = {"train": {"pp": 3}, "infer": {"dp": 3}}
AXES = ("pp", "dp", "tp")


class Model:
    """A mesh by the book."""

    def __init__(self, shape: Shape) -> None:
        self.axes = list(shape)
        self.places = list(itertools.product(*(range(size) for size in shape.values())))
        self.shape = shape

    def along(self, rank: int, axis: str) -> int:
        return self.places[rank][self.axes.index(axis)] if axis in self.axes else 0

    def size(self, axis: str) -> int:
        return self.shape.get(axis, 1)

    def counted(self, axis: str) -> list[int]:
        """The rank of each place along the axis that is first along the others, in the last stage."""
        found = []
        for place in range(self.size(axis)):
            stage = place if axis == "pp" else self.size("pp") - 1
            wanted = dict.fromkeys(self.axes, 0) | {"pp": stage} | {axis: place}
            found.append(
                next(
                    rank
                    for rank in range(len(self.places))
                    if all(self.along(rank, other) == wanted[other] for other in self.axes)
                )
            )
        return found

    def parts(self, rows: list[Any], axis: str) -> list[list[Any]]:
        """What each rank gets of rows spread over the axis."""
        count = self.size(axis)
        small, more = divmod(len(rows), count)
        ends = list(itertools.accumulate([small + (index < more) for index in range(count)]))
        return [rows[ends[place] - small - (place < more) : ends[place]] for place in self.coordinates(axis)]

    def coordinates(self, axis: str) -> list[int]:
        return [self.along(rank, axis) for rank in range(len(self.places))]


class AnyMesh(Role):
    """Has the methods below for each mesh and axis, under names that say which."""


def _methods(mesh: str, axis: str) -> dict[str, Any]:
    def seen(self: Any, batch: list[Any]) -> list[Any]:
        return batch

    def give(self: Any, rows: list[Any] | None) -> list[Any] | None:
        return rows

    def same(self: Any, batch: list[Any]) -> list[Any] | None:
        """Only the last stage has a result."""
        here = self.ctx.meshes[mesh]
        return batch if here.rank("pp") == here.size("pp") - 1 or axis == "pp" else None

    return {
        "seen": (seen, Scatter("batch", mesh=mesh, axis=axis, empty="run"), Gather()),
        "give": (give, PerRank("rows"), Concat(axis, mesh=mesh)),
        "same": (same, Scatter("batch", mesh=mesh, axis=axis, pad=True, empty="run"), Concat(axis, mesh=mesh)),
    }


for _mesh, _axis in itertools.product(("train", "infer"), AXES):
    for _name, (_function, _dispatch, _collect) in _methods(_mesh, _axis).items():
        _function.__name__ = f"{_mesh}_{_axis}_{_name}"
        setattr(AnyMesh, _function.__name__, method(dispatch=_dispatch, collect=_collect)(_function))


@attrs.frozen
class Where:
    """One of the roles, and one of its meshes and axes."""

    role: str
    mesh: str
    axis: str

    @property
    def model(self) -> Model:
        return Model((LAYOUTS.get(self.role) or OTHER)[self.mesh])

    def call(self, groups: Mapping[str, ColocatedGroup], name: str) -> Any:
        group = groups["other" if self.role == "other" else "main"]
        return getattr(group.role(self.role), f"{self.mesh}_{self.axis}_{name}")


wheres = st.builds(
    Where, st.sampled_from([*LAYOUTS, "other"]), st.sampled_from(["train", "infer"]), st.sampled_from(AXES)
)


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, ColocatedGroup]]:
    """A group of eight slots with a role for each layout, and one of three."""
    with (
        colocate.connect("local") as runtime,
        runtime.reserve(SLOTS) as pool,
        runtime.reserve(3) as other,
    ):
        main = pool.spawn({name: colocate.role(AnyMesh).on(mesh=meshes) for name, meshes in LAYOUTS.items()})
        yield {"main": main, "other": other.spawn({"other": colocate.role(AnyMesh).on(mesh=OTHER)})}


def test_residents(groups: dict[str, ColocatedGroup]) -> None:
    """A resident from any mesh of any role of any group is spread over any other as its value would be."""

    # Values as well, so that what is wrong for both is found.
    @given(wheres, wheres, st.lists(st.integers(0, 3), min_size=SLOTS, max_size=SLOTS), st.booleans())
    @settings(max_examples=100, deadline=None)
    def holds(maker: Where, user: Where, sizes: list[int], absent: bool) -> None:
        made, used = maker.model, user.model
        rows = [[(place, row) for row in range(sizes[place])] for place in made.coordinates(maker.axis)]
        counted = made.counted(maker.axis)
        given_rows: list[Any] = [each if rank in counted or not absent else None for rank, each in enumerate(rows)]
        value = [row for rank in counted for row in rows[rank]]
        with maker.call(groups, "give").keep(given_rows) as kept:
            assert kept.fetch() == value
            assert user.call(groups, "seen")(value) == used.parts(value, user.axis)
            seen = user.call(groups, "seen")(kept.ref)
            same_slots = (maker.role == "other") == (user.role == "other")
            alike = made.coordinates(maker.axis) == used.coordinates(user.axis) and "pp" not in made.shape
            # Where the ranks match each keeps what it has, however uneven; otherwise it is as with the value.
            assert seen == (rows if same_slots and alike else used.parts(value, user.axis))
            with user.call(groups, "same").keep(kept.ref) as again:
                assert again.fetch() == value
                assert again.spec.structure == user.call(groups, "same").keep(value).spec.structure
                back = maker.call(groups, "same")(again.ref)
            assert back == value

    holds()
