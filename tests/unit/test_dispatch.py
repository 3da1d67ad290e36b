"""Dispatch: who gets which rows, what stays whole, and what is refused before anything is sent."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rows import split

from colocate._values import batch
from colocate._values.collect import Concat
from colocate._values.dispatch import Broadcast, Dispatch, OnRank, Parts, PerRank, Plan, Scatter, plan
from colocate._values.leaves import map_leaves
from colocate._values.mesh import Mesh, Ranks
from colocate.errors import ConfigError, DispatchError

LAWS = settings(deadline=None, max_examples=80)


@attrs.frozen(eq=False)
class Asked:
    """A placeholder that says what was asked of a deferred value."""

    what: tuple[Any, ...]
    value: Any


@attrs.frozen(eq=False)
class Away(batch.Deferred):
    """A list that lies in the workers in parts of these sizes."""

    value: list[Any]
    partition: list[int] | None = None

    def sizes(self, axis: str, mesh: str | None, count: int, of: int = 1) -> list[int]:
        matches = self.partition is not None and len(self.partition) == count
        return list(self.partition or []) if matches else batch.even_sizes(len(self.value), count, of)

    def part(self, index: int, count: int, axis: str, mesh: str | None, padding: batch.Padding, of: int = 1) -> Any:
        if padding == "even":
            found = padded(self.value, count)[index]
        else:
            found = split(self.value, Away.sizes(self, axis, mesh, count, of))[index]
        return Asked(("part", index, count, axis, mesh, padding), found)

    def slice(self, start: int, stop: int) -> Any:
        return Asked(("slice", start, stop), self.value[start:stop])

    def whole(self) -> Any:
        return Asked(("whole",), self.value)

    def fetch(self) -> Any:
        return self.value


def padded(value: list[Any], count: int) -> list[Any]:
    """Equal parts of it, with its last row in place of those that it lacks."""
    each = -(-len(value) // count)
    return split(value + value[-1:] * (each * count - len(value)), [each] * count)


def in_worker(value: Any) -> Any:
    """What a worker makes of the placeholders."""
    return map_leaves(value, lambda leaf: leaf.value if isinstance(leaf, Asked) else leaf)


def received(made: Plan) -> list[dict[str, Any]]:
    return [in_worker(dict(part)) for part in made.arguments]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    axes = draw(st.permutations(["dp", "tp", "pp"]))
    return Mesh({axis: draw(st.integers(1, 3)) for axis in axes})


def ranks_of(mesh: Mesh) -> Ranks:
    return Ranks(mesh.world_size, {"": mesh})


@LAWS
@given(meshes(), st.integers(0, 12), st.sampled_from([False, True, "masked"]), st.sampled_from(["dp", "tp", "cp"]))
def test_scatter_spreads_over_its_axis_and_repeats_along_the_others(
    mesh: Mesh, total: int, pad: Any, axis: str
) -> None:
    ranks, size = ranks_of(mesh), mesh.size(axis)
    arguments = {"flag": 7, "x": list(range(total)), "y": {"t": torch.arange(total), "none": None}}
    made = plan(Scatter("x", "y", axis=axis, pad=pad, empty="run"), arguments, ranks)
    assert list(made.targets) == list(range(mesh.world_size))
    each = math.ceil(total / size)
    seen: dict[int, Mapping[str, Any]] = {}
    for rank, part in enumerate(made.arguments):
        place = mesh.coordinate(rank, axis)
        assert seen.setdefault(place, part) is part  # copies are one object, encoded once
        assert list(part) == ["flag", "x", "y"]
        assert part["flag"] == 7
        assert part["y"]["t"].tolist() == part["x"]
        assert part["y"]["none"] is None
        padded = made.padded[rank]
        assert len(part["x"]) == (made.valid[rank] if padded is None else padded)
        if pad and total:
            assert made.padded[rank] == each
            assert made.valid[rank] == min(max(total - place * each, 0), each)
            assert set(part["x"][made.valid[rank] :]) <= {total - 1}
        else:
            assert made.padded[rank] is None
    rows = [seen[place]["x"][: made.valid[mesh.line(0, axis)[place]]] for place in range(size)]
    assert list(itertools.chain(*rows)) == list(range(total))
    sizes = [len(part) for part in rows]
    assert pad or max(sizes) - min(sizes) <= 1
    assert arguments["x"] == list(range(total))


@LAWS
@given(meshes(), st.integers(1, 12), st.sampled_from([False, True, "masked"]), st.integers(0, 3))
def test_what_comes_back_is_what_was_sent(mesh: Mesh, total: int, pad: Any, seed: int) -> None:
    """Scatter then Concat of a row-wise method is the method on the whole batch: padding never shows."""
    x = torch.arange(total * 2).view(total, 2) + seed
    ranks = ranks_of(mesh)
    made = plan(Scatter("x", pad=pad, empty="run"), {"x": x}, ranks)
    results = [{"square": part["x"] ** 2, "list": part["x"].sum(1).tolist()} for part in made.arguments]
    after = attrs.evolve(ranks, rows=made.valid, padded=made.padded)
    joined = Concat().join(results, after)
    assert torch.equal(joined["square"], x**2)
    assert joined["list"] == x.sum(1).tolist()
    needed = set(Concat().sources(after))
    only = [result if rank in needed else None for rank, result in enumerate(results)]
    assert torch.equal(Concat().join(only, after)["square"], x**2)


@LAWS
@given(meshes(), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data(), st.booleans())
def test_a_deferred_value_reaches_the_ranks_as_the_value_would(
    mesh: Mesh, partition: list[int], data: st.DataObject, pad: bool
) -> None:
    total = sum(partition)
    x, y = list(range(total)), [str(row) for row in range(total)]
    plain: dict[str, Any] = {"x": x, "y": {"k": y}, "z": 1}
    wrap = {name: data.draw(st.booleans()) for name in plain}
    away = {
        "x": Away(x, partition) if wrap["x"] else x,
        "y": {"k": Away(y, partition) if wrap["y"] else y},
        "z": Away([1]) if wrap["z"] else [1],
    }
    dispatch = Scatter("x", "y", pad=pad, empty="run")
    made = plan(dispatch, away, ranks_of(mesh))
    size = mesh.size("dp")
    if pad and total:
        sizes = batch.padded_sizes(total, size)[1]
        expected = padded(x, size)
    elif pad and wrap["x"] and wrap["y"]:
        return  # only the workers find out that there are no rows to pad with
    else:
        follows = (wrap["x"] or wrap["y"]) and len(partition) == size
        sizes = partition if follows else batch.even_sizes(total, size)
        expected = split(x, sizes)
    known = not (wrap["x"] and wrap["y"])
    for rank, got in enumerate(received(made)):
        place = mesh.coordinate(rank, "dp")
        assert got["x"] == expected[place]
        assert got["y"]["k"] == [str(row) for row in expected[place]]
        assert got["z"] == [1]
        assert made.valid[rank] == (sizes[place] if known else None)


def test_deferred_values_alone_block_nobody() -> None:
    """The driver does not wait to know their rows."""

    class Unknown(Away):
        def sizes(self, axis: str, mesh: str | None, count: int, of: int = 1) -> list[int]:
            raise AssertionError("this would block")

    made = plan(
        Scatter("x", "y", axis="tp", mesh="m"), {"x": Unknown([1, 2]), "y": None}, Ranks(2, {"m": Mesh({"tp": 2})})
    )
    assert [part["x"].what for part in made.arguments] == [("part", i, 2, "tp", "m", "none") for i in (0, 1)]
    assert list(made.valid) == [None, None]


def test_a_users_dispatch_never_sees_a_deferred_value() -> None:
    seen: list[Any] = []

    class Mine(Dispatch):
        def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Sequence[Mapping[str, Any]]:
            seen.append(arguments)
            return [arguments] * ranks.world_size

    class MyScatter(Scatter):
        def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Sequence[Mapping[str, Any]]:
            seen.append(arguments)
            return super().split(arguments, ranks)

    for dispatch in (Mine(), MyScatter("x")):
        made = plan(dispatch, {"x": Away([1, 2]), "y": [Away([3])]}, Ranks(2))
        assert seen.pop() == {"x": [1, 2], "y": [[3]]}
    assert list(made.valid) == [1, 1]


def test_broadcast_and_on_rank_send_one_mapping() -> None:
    arguments = {"x": [1, 2], "y": None}
    made = plan(Broadcast(), arguments, Ranks(4))
    assert all(part is arguments for part in made.arguments)
    assert list(made.targets) == [0, 1, 2, 3]
    assert list(made.valid) == list(made.padded) == [None] * 4
    made = plan(OnRank(2), arguments, Ranks(4))
    assert (list(made.targets), list(made.arguments), list(made.valid)) == ([2], [arguments], [None])


def test_a_call_can_name_its_ranks() -> None:
    for dispatch, expected in [
        (Broadcast(), [["a", "b"], ["a", "b"]]),
        (PerRank("x"), ["a", "b"]),
    ]:
        made = plan(dispatch, {"x": ["a", "b"]}, Ranks(4), [3, 1])
        assert list(made.targets) == [3, 1]
        assert [part["x"] for part in made.arguments] == expected
        assert list(made.valid) == [None, None]
    made = plan(OnRank(0), {"x": 1}, Ranks(4), [2])
    assert list(made.targets) == [2]


@pytest.mark.parametrize(
    ("dispatch", "select", "message"),
    [
        (Scatter("x"), [0], "only Broadcast, PerRank and OnRank take options(ranks=...)"),
        (Broadcast(), [4], "goes to rank 4, but the role has 4, from 0 to 3"),
        (Broadcast(), [-1], "goes to rank -1"),
        (Broadcast(), [], "name at least one"),
        (Broadcast(), [1, 1], "none twice"),
        (OnRank(0), [1, 2], "goes to one rank, but the call names 2"),
        (OnRank(7), None, "OnRank(7) goes to rank 7, but the role has 4"),
        (PerRank("x"), [1], "has 2 items for 1 ranks"),
    ],
)
def test_ranks_that_are_not_there(dispatch: Dispatch, select: Sequence[int] | None, message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        plan(dispatch, {"x": [1, 2]}, Ranks(4), select)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("dispatch", "arguments", "parameter", "message"),
    [
        (
            Scatter("x"),
            {"x": [1, 2]},
            "x",
            "'x' has 2 rows for 3 ranks along 'dp', and no rank is skipped: give more rows",
        ),
        (Scatter("x", pad=True), {"x": []}, "x", "'x' has 0 rows for 3 ranks"),
        (Scatter("x", "y"), {"x": None, "y": [1] * 2}, "y", "'y' has 2 rows for 3 ranks"),
        (Scatter("x"), {"x": {"a": [1] * 4, "b": [1] * 5}}, "x", "x['a'] has 4 rows but x['b'] has 5"),
        (Scatter("x"), {"x": "prompt"}, "x", "x (str) has no rows"),
        (Scatter("x", "y"), {"x": [1] * 4, "y": Away([1] * 5)}, "y", "'y' has 5 rows but 'x' has 4"),
        (
            Scatter("x", "y"),
            {"x": [1] * 4, "y": Away([1] * 4, [4, 0, 0])},
            "x",
            "some of the 3 ranks along 'dp' have none",
        ),
        (PerRank("x"), {"x": 5}, "x", "has to be a list with one item for each of the 3 ranks, not a int"),
        (Scatter("x", mesh="infer"), {"x": [1] * 3}, None, "no mesh 'infer'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    dispatch: Dispatch, arguments: dict[str, Any], parameter: str | None, message: str
) -> None:
    with pytest.raises(DispatchError) as caught:
        plan(dispatch, arguments, Ranks(3))
    assert message in str(caught.value)
    assert caught.value.parameter == parameter


def test_a_users_split_is_checked() -> None:
    @attrs.frozen
    class Fixed(Dispatch):
        given: Any
        only: tuple[int, ...] | None = None

        def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Any:
            return self.given

        def targets(self, ranks: Ranks) -> Sequence[int] | None:
            return self.only

    made = plan(Fixed(Parts([{"x": 1}, {"x": 2}], [3, 4]), (1,)), {}, Ranks(2))
    assert (list(made.arguments), list(made.targets), list(made.valid)) == ([{"x": 2}], [1], [4])
    mistakes: list[tuple[Any, Any, str]] = [
        ([{}], None, "split gave 1 mappings for 2 ranks"),
        (None, None, "split gave a NoneType for 2 ranks"),
        ([{}, 5], None, "split gave a int for a rank"),
        ([{}, {}], (2,), "goes to rank 2, but the role has 2"),
        ([{}, {}], (), "name at least one"),
    ]
    for wrong, only, message in mistakes:
        with pytest.raises(DispatchError) as caught:
            plan(Fixed(wrong, only), {}, Ranks(2))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Scatter(), ConfigError),
        (lambda: Scatter("x", "x"), ConfigError),
        (lambda: Scatter("x", pad="mask"), ConfigError),  # type: ignore[arg-type]
        (lambda: Scatter("x", pad=1), ConfigError),  # type: ignore[arg-type]
        (lambda: Scatter("x", empty="skip"), ConfigError),  # type: ignore[arg-type]
        (lambda: Scatter("x", axis="d p"), DispatchError),
        (lambda: Scatter("x", mesh=Mesh({"dp": 1})), ConfigError),  # type: ignore[arg-type]
        (lambda: PerRank(), ConfigError),
        (lambda: PerRank(0), ConfigError),  # type: ignore[arg-type]
        (lambda: OnRank(-1), ConfigError),
        (lambda: OnRank("0"), ConfigError),  # type: ignore[arg-type]
        (lambda: Scatter("x", rows_of=0), ConfigError),
        (lambda: Scatter("x", rows_of=True), ConfigError),
        (lambda: Scatter("x", rows_of=2.5), ConfigError),  # type: ignore[arg-type]
        (lambda: Scatter("x", rows_of=2, pad=True), ConfigError),
    ],
)
def test_declarations_that_cannot_be_meant(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_dispatches_are_values_that_read_as_written() -> None:
    written = [
        "Broadcast()",
        "OnRank(3)",
        "PerRank('a', 'b')",
        "Scatter('x')",
        "Scatter('x', 'y', axis='tp', pad='masked', empty='run', mesh='infer')",
        "Scatter('x', rows_of=8)",
    ]
    for text in written:
        dispatch = eval(text)
        assert repr(dispatch) == text
        assert dispatch == eval(text)
        assert hash(dispatch) == hash(eval(text))
        assert pickle.loads(pickle.dumps(dispatch)) == dispatch
    assert Scatter("x") != Scatter("x", pad=True)


@LAWS
@given(sets=st.integers(1, 40), count=st.integers(1, 9), of=st.integers(1, 8))
def test_rows_that_stay_together(sets: int, count: int, of: int) -> None:
    """Splits are at multiples, as even as can be; without `rows_of` nothing changes."""
    sizes = batch.even_sizes(sets * of, count, of)
    assert sum(sizes) == sets * of
    assert [size % of for size in sizes] == [0] * count
    assert max(sizes) - min(sizes) in (0, of)
    assert batch.even_sizes(sets, count, 1) == batch.even_sizes(sets, count)
