"""Dispatch, collect and residents over any meshes, against a plain model of ranks as tuples of coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colocate
from colocate import Broadcast, ColocatedGroup, Concat, First, Gather, PerRank, Reduce, Role, Scatter, method
from colocate._values.mesh import Mesh, parse_meshes
from colocate.errors import ConfigError

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

    def add(self: Any, number: float) -> float:
        return number

    def first(self: Any) -> Any:
        return self.ctx.rank

    def place(self: Any) -> tuple[int, int]:
        here = self.ctx.meshes[mesh]
        return here.rank(axis), here.size(axis)

    def same(self: Any, batch: list[Any]) -> list[Any] | None:
        """Only the last stage has a result."""
        here = self.ctx.meshes[mesh]
        return batch if here.rank("pp") == here.size("pp") - 1 or axis == "pp" else None

    return {
        "seen": (seen, Scatter("batch", mesh=mesh, axis=axis, empty="run"), Gather()),
        "give": (give, PerRank("rows"), Concat(axis, mesh=mesh)),
        "add": (add, PerRank("number"), Reduce("sum", axis=axis, mesh=mesh)),
        "first": (first, Broadcast(), First(mesh=mesh)),
        "place": (place, Broadcast(), Gather()),
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


@pytest.fixture(params=["threads", "strict"])
def groups(request: pytest.FixtureRequest) -> Iterator[dict[str, ColocatedGroup]]:
    """A group of eight slots with a role for each layout, and one of three."""
    with (
        colocate.connect("local", strict=request.param == "strict") as runtime,
        runtime.reserve(SLOTS) as pool,
        runtime.reserve(3) as other,
    ):
        main = pool.spawn({name: colocate.role(AnyMesh).on(mesh=meshes) for name, meshes in LAYOUTS.items()})
        yield {"main": main, "other": other.spawn({"other": colocate.role(AnyMesh).on(mesh=OTHER)})}


def test_dispatch_and_collect(groups: dict[str, ColocatedGroup]) -> None:
    """Ranks, parts, and which results count are those of the model."""

    @given(wheres, st.integers(0, 20))
    @settings(max_examples=150, deadline=None)
    def holds(where: Where, count: int) -> None:
        model, axis = where.model, where.axis
        ranks = len(model.places)
        assert where.call(groups, "place")() == [(place, model.size(axis)) for place in model.coordinates(axis)]
        assert where.call(groups, "seen")(list(range(count))) == model.parts(list(range(count)), axis)
        counted = model.counted(axis)
        given_rows: list[Any] = [
            [(rank, row) for row in range(rank)] if rank in counted else None for rank in range(ranks)
        ]
        assert where.call(groups, "give")(given_rows) == [row for rank in counted for row in given_rows[rank]]
        assert where.call(groups, "add")([2.0**rank for rank in range(ranks)]) == sum(2.0**rank for rank in counted)
        assert where.call(groups, "first")() == min(
            rank for rank in range(ranks) if model.along(rank, "pp") == model.size("pp") - 1
        )

    holds()


def test_residents(groups: dict[str, ColocatedGroup]) -> None:
    """A resident from any mesh of any role of any group is spread over any other as its value would be."""

    @given(wheres, wheres, st.lists(st.integers(0, 3), min_size=SLOTS, max_size=SLOTS), st.booleans())
    @settings(max_examples=250, deadline=None)
    def holds(maker: Where, user: Where, sizes: list[int], absent: bool) -> None:
        made, used = maker.model, user.model
        rows = [[(place, row) for row in range(sizes[place])] for place in made.coordinates(maker.axis)]
        counted = made.counted(maker.axis)
        given_rows: list[Any] = [each if rank in counted or not absent else None for rank, each in enumerate(rows)]
        value = [row for rank in counted for row in rows[rank]]
        with maker.call(groups, "give").keep(given_rows) as kept:
            assert kept.fetch() == value
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


def test_through_pipelines(groups: dict[str, ColocatedGroup]) -> None:
    """All of it in pipelines of both groups gives the same."""

    @given(st.lists(wheres, min_size=1, max_size=6), st.integers(0, 12))
    @settings(max_examples=100, deadline=None)
    def holds(chain: list[Where], count: int) -> None:
        value: Any = list(range(count))
        with groups["main"].pipeline(), groups["other"].pipeline():
            kept = [chain[0].call(groups, "same").keep(value)]
            for where in chain[1:]:
                kept.append(where.call(groups, "same").keep(kept[-1].ref))
            seen = chain[0].call(groups, "seen").submit(kept[-1].ref)
        assert [each.fetch() for each in kept] == [value] * len(chain)
        model, axis = chain[0].model, chain[0].axis
        places = model.coordinates(axis)
        parts = dict(zip(places, seen.result(), strict=True))
        assert [row for place in sorted(parts) for row in parts[place]] == value

    holds()


def test_declared_meshes() -> None:
    assert parse_meshes(None, 3) == {"": Mesh({"dp": 3})}
    assert parse_meshes({"dp": 2, "tp": 4}, 8) == {"": Mesh({"dp": 2, "tp": 4})}
    assert parse_meshes({"train": {"dp": 8}, "infer": {"dp": 2, "tp": 4}}, 8) == {
        "train": Mesh({"dp": 8}),
        "infer": Mesh({"dp": 2, "tp": 4}),
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"dp": 2, "tp": 4}, "mesh: dp=2 x tp=4 makes 8 ranks, but the role has 6 slots"),
        ({"train": {"dp": 6}, "infer": {"dp": 4}}, "mesh 'infer': dp=4 makes 4 ranks, but the role has 6 slots"),
        ({"dp": 2, "infer": {"dp": 3}}, "either the axes of one mesh or several named meshes"),
        ({"dp": 0}, "size of the axis 'dp' is 0; it has to be a whole number from 1 up"),
        ({"dp": True}, "size of the axis 'dp' is True"),
        ({"dp": "6"}, "size of the axis 'dp' is '6'"),
        ({"d p": 6}, "'d p' is no name for an axis"),
        ({1: 6}, "1 is no name for an axis"),
        ({"": {"dp": 6}}, "a mesh needs a name"),
        ({"train": {}}, "at least one axis"),
        ({}, "a mesh is a mapping from axes to sizes"),
        ([2, 3], "a mesh is a mapping from axes to sizes"),
    ],
)
def test_a_wrong_mesh_is_refused_with_what_is_wrong(spec: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_meshes(spec, 6)  # type: ignore[arg-type]
    assert message in str(caught.value)
