"""Meshes: coordinates, lines and leaders are what row-major order says they are."""

from __future__ import annotations

import math
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate._values.mesh import Mesh, Ranks, parse_meshes
from colocate.errors import ConfigError, DispatchError

AXES = ("dp", "tp", "pp", "cp")


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    axes = draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1))
    return {axis: draw(st.integers(1, 4)) for axis in axes}


@given(shapes())
def test_coordinates_are_those_of_row_major_order(shape: dict[str, int]) -> None:
    mesh = Mesh(shape)
    assert mesh.world_size == math.prod(shape.values())
    assert mesh.shape == shape
    for rank in range(mesh.world_size):
        expected = np.unravel_index(rank, tuple(shape.values()))
        assert [mesh.coordinate(rank, axis) for axis in shape] == list(expected)


@given(shapes(), st.sampled_from((*AXES, "other")))
def test_lines_part_the_ranks_and_differ_along_their_axis_only(shape: dict[str, int], axis: str) -> None:
    mesh = Mesh(shape)
    lines = {tuple(mesh.line(rank, axis)) for rank in range(mesh.world_size)}
    assert sorted(rank for line in lines for rank in line) == list(range(mesh.world_size))
    for line in lines:
        assert [mesh.coordinate(rank, axis) for rank in line] == list(range(mesh.size(axis)))
        for other in set(AXES) - {axis}:
            assert len({mesh.coordinate(rank, other) for rank in line}) == 1


@given(shapes(), st.sampled_from((*AXES, "other")))
def test_leaders_are_first_along_other_axes_and_of_the_last_stage(shape: dict[str, int], axis: str) -> None:
    mesh = Mesh(shape)
    leaders = mesh.leaders(axis)
    assert [mesh.coordinate(rank, axis) for rank in leaders] == list(range(mesh.size(axis)))
    for rank in leaders:
        for other in set(AXES) - {axis}:
            assert mesh.coordinate(rank, other) == (mesh.size("pp") - 1 if other == "pp" else 0)


@given(shapes(), st.sampled_from(AXES), st.data())
def test_leaders_among_some_ranks_are_the_best_of_each_place(
    shape: dict[str, int], axis: str, data: st.DataObject
) -> None:
    mesh = Mesh(shape)
    everyone = Ranks(mesh.world_size, {"": mesh})
    named = data.draw(st.permutations(range(mesh.world_size)))
    assert list(attrs.evolve(everyone, targets=named).leaders(axis)) == list(everyone.leaders(axis))
    some = named[: data.draw(st.integers(1, len(named)))]
    leaders = attrs.evolve(everyone, targets=some).leaders(axis)
    assert set(leaders) <= set(some)
    assert [mesh.coordinate(r, axis) for r in leaders] == sorted({mesh.coordinate(r, axis) for r in some})


def test_an_axis_that_the_mesh_lacks_has_size_one() -> None:
    mesh = Mesh({"dp": 3})
    assert mesh.size("tp") == 1
    assert [mesh.coordinate(rank, "tp") for rank in range(3)] == [0, 0, 0]


def test_meshes_are_values() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    assert mesh == Mesh({"dp": 2, "tp": 4})
    assert mesh != Mesh({"tp": 4, "dp": 2})
    assert hash(mesh) == hash(Mesh({"dp": 2, "tp": 4}))
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert pickle.loads(pickle.dumps(mesh)).coordinate(5, "dp") == 1
    assert repr(mesh) == "Mesh({'dp': 2, 'tp': 4})"


def test_pick_takes_items_by_rank() -> None:
    items = ["a", "b", "c"]
    assert list(Ranks(3).pick(items, [2, 0])) == ["c", "a"]
    assert list(Ranks(3).pick(items, range(3))) == items
    assert list(Ranks(9, targets=[8, 4, 6]).pick(items, [4, 8])) == ["b", "a"]


def test_the_mesh_without_a_name_is_the_unnamed_or_only_one() -> None:
    train, infer = Mesh({"dp": 4}), Mesh({"dp": 2, "tp": 2})
    assert Ranks(4).mesh() == train
    assert Ranks(4, {"infer": infer}).mesh() is infer
    assert Ranks(4, {"train": train, "infer": infer}).mesh("infer") is infer
    with pytest.raises(DispatchError, match=r"several meshes \('train', 'infer'\): say which one with mesh="):
        Ranks(4, {"train": train, "infer": infer}).mesh()
    with pytest.raises(DispatchError, match=r"no mesh 'trian'; it has 'train', 'infer'; did you mean 'train'\?"):
        Ranks(4, {"train": train, "infer": infer}).mesh("trian")
    with pytest.raises(DispatchError, match="no mesh 'train'; it has no named one"):
        Ranks(4).mesh("train")


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
