"""Dispatch and collect through real workers, along one mesh or several named meshes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.suite.probes.rows import Sets
from tests.suite.traffic import Traffic

import colocate
from colocate import ColocatedGroup
from colocate.errors import ConfigError, DispatchError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors import dispatch
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.meshes import Meshes
from colocate.testing.probes.rows import Axes, Own, Rows
from colocate.testing.waiting import PATIENCE_S


class Dispatching(dispatch.Dispatching):
    """Built-in and custom dispatches and collects, and meshes."""

    def test_scatter(self, pair: ColocatedGroup) -> None:
        """Scatter splits rows contiguously, unevenly if need be; other arguments go to every rank."""
        rows = pair.role("rows", Rows)
        assert rows.seen([1, 2, 3], factor=7) == [([1, 2], 7), ([3], 7)]
        assert rows.seen([1, 2]) == [([1], 1), ([2], 1)]

    def test_scatter_of_containers(self, pair: ColocatedGroup) -> None:
        """Scatter splits the values inside tuples and dicts, and sends None to every rank."""
        batch = {"a": [1, 2, 3], "b": ([4, 5, 6], None)}
        assert pair.role("rows", Rows).seen(batch) == [
            ({"a": [1, 2], "b": ([4, 5], None)}, 1),
            ({"a": [3], "b": ([6], None)}, 1),
        ]

    def test_several_parameters(self, pair: ColocatedGroup) -> None:
        """Parameters scattered together are split alike; different row counts raise DispatchError."""
        rows = pair.role("rows", Rows)
        assert rows.zipped([1, 2, 3], [4, 5, 6]) == [(1, 4), (2, 5), (3, 6)]
        with pytest.raises(DispatchError, match="'right' has 2 rows but 'left' has 3") as caught:
            rows.zipped([1, 2, 3], [4, 5])
        assert caught.value.parameter == "right"

    def test_invalid_rows_and_lists_are_refused(self, pair: ColocatedGroup) -> None:
        """Too few rows, a leaf without rows or a list of a wrong length raises DispatchError with the parameter."""
        rows = pair.role("rows", Rows)
        for call, words, parameter in (
            (lambda: rows.double([1]), "'batch' has 1 row for 2 ranks", "batch"),
            (lambda: rows.seen({"x": [1, 2], "n": 3}), r"batch\['n'\] \(int\) has no rows", "batch"),
            (lambda: rows.each(["a", "b", "c"]), r"'item' .* has 3 items for 2 ranks", "item"),
        ):
            with pytest.raises(DispatchError, match=words) as caught:
                call()
            assert caught.value.parameter == parameter

    def test_rows_of(self, spawn: Spawn) -> None:
        """`rows_of` keeps sets of rows on one rank, for the caller's values and for residents of any slot."""
        group = spawn({"sets": colocate.role(Sets), "one": colocate.role(Sets).on(slots=[1])})
        sets, one = group.role("sets", Sets), group.role("one", Sets)
        rows = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
        expected = [(rows[:8], None, 8), (rows[8:], None, 4)]
        assert sets.seen(rows) == expected
        assert sets.seen(rows, [*range(12)]) == [(rows[:8], [*range(8)], 8), (rows[8:], [*range(8, 12)], 4)]
        for view in (sets, one):
            resident = view.sample.keep([0, 1, 2])
            assert sets.seen(resident.ref) == expected  # The driver doesn't know the row count yet.
            assert sets.seen(resident.ref) == expected
            assert sets.seen(rows, resident.ref) == [(rows[:8], rows[:8], 8), (rows[8:], rows[8:], 4)]
            assert sets.seen(rows, view.sample.keep([0, 1, 2]).ref) == [
                (rows[:8], rows[:8], 8),
                (rows[8:], rows[8:], 4),
            ]

    def test_empty_runs(self, pair: ColocatedGroup) -> None:
        """With empty="run" a rank without rows runs the method on an empty batch."""
        rows = pair.role("rows", Rows)
        assert rows.maybe_empty([1]) == [([1], 1), ([], 0)]
        assert rows.maybe_empty([]) == [([], 0), ([], 0)]
        assert rows.keep_rows([5]) == [5]
        assert rows.keep_rows([]) == []

    def test_padding(self, pair: ColocatedGroup) -> None:
        """With pad=True every rank gets the same number of rows, and the result has no padding."""
        rows = pair.role("rows", Rows)
        assert rows.padded([1, 2, 3]) == [(1, 2), (2, 2), (3, 2)]
        assert rows.padded([1]) == [(1, 1)]
        assert rows.padded.submit([1, 2]).result() == [(1, 1), (2, 1)]

    def test_masked(self, pair: ColocatedGroup) -> None:
        """With pad="masked" the last row is repeated, and ctx.valid_rows counts the real rows."""
        rows = pair.role("rows", Rows)
        assert rows.masked([1, 2, 3]) == [([1, 2], 2), ([3, 3], 1)]
        assert rows.masked([1]) == [([1], 1), ([1], 0)]

    def test_no_rows_to_join(self, pair: ColocatedGroup) -> None:
        """Concat of results without rows raises DispatchError with the rank and a remedy."""
        with pytest.raises(DispatchError, match=r"rank 0 returned.*Gather, First or Reduce"):
            pair.role("rows", Rows).no_rows()

    def test_per_rank(self, pair: ColocatedGroup) -> None:
        """PerRank sends item i of a list to rank i; other arguments go to every rank."""
        rows = pair.role("rows", Rows)
        assert rows.each(["a", "b"], shared=1) == [(0, "a", 1), (1, "b", 1)]

    def test_on_rank(self, pair: ColocatedGroup) -> None:
        """OnRank runs a call on one rank, whose value is the result."""
        assert pair.role("rows", Rows).on_one("x") == (1, "x")

    def test_reduce(self, pair: ColocatedGroup) -> None:
        """Reduce combines the ranks' numbers into one, leaf by leaf."""
        rows = pair.role("rows", Rows)
        assert rows.total([1, 2, 3]) == {"sum": 6, "count": 3}
        assert rows.highest() == 1
        assert rows.lowest() == 0

    def test_reduce_weights(self, pair: ColocatedGroup) -> None:
        """A mean weights ranks by their rows by default; a rank without rows adds nothing, not even NaN."""
        rows = pair.role("rows", Rows)
        assert rows.mean([1.0, 2.0, 6.0]) == {"mean": 3.0}
        assert rows.unweighted([1.0, 2.0, 6.0]) == (1.5 + 6.0) / 2
        assert rows.mean([4.0]) == {"mean": 4.0}

    def test_own_dispatch_and_collect(self, pair: ColocatedGroup) -> None:
        """A custom dispatch and collect decide each rank's arguments and the result."""
        assert pair.role("own", Own).swapped() == {0: (0, 1), 1: (1, 0)}

    def test_mesh_collect(self, square: ColocatedGroup) -> None:
        """Concat and Reduce take one copy of each part, from the first rank along the other axes."""
        axes = square.role("axes", Axes)
        assert axes.tagged([1, 2, 3]) == [(1, 0), (2, 0), (3, 2)]
        assert axes.count([1, 2, 3]) == 3
        assert axes.first_rank([1, 2]) == 0

    @pytest.mark.parametrize(
        ("mesh", "message"),
        [({"dp": 3}, "makes 3 ranks, but the role has 2 slots"), ({"dp": 0}, "from 1 up"), ({"d p": 2}, "no name")],
    )
    def test_wrong_mesh(self, spawn: Spawn, mesh: Any, message: str) -> None:
        """A mesh with a wrong product, size or axis name raises ConfigError."""
        with pytest.raises(ConfigError, match=message):
            spawn({"axes": colocate.role(Axes).on(mesh=mesh)})

    def test_unknown_axis(self, spawn: Spawn) -> None:
        """A dispatch along an unknown axis is refused at spawn, with the closest known name."""

        class Lost(colocate.Role):
            @colocate.method(dispatch=colocate.Scatter("batch", axis="ddp"))
            def take(self, batch: list[int]) -> None: ...

        with pytest.raises(DispatchError, match=r"names the axis 'ddp'.*did you mean 'dp'"):
            spawn({"lost": colocate.role(Lost)})

    def test_declaration_errors(self) -> None:
        """An unknown parameter, or padding that would show in the result, raises DispatchError at the declaration."""
        with pytest.raises(DispatchError, match=r"names 'bach'.*did you mean 'batch'"):

            @colocate.method(dispatch=colocate.Scatter("bach"))
            def take(self: Any, batch: list[int]) -> None: ...

        with pytest.raises(DispatchError, match="padding would show"):

            @colocate.method(dispatch=colocate.Scatter("batch", pad=True))
            def gathered(self: Any, batch: list[int]) -> None: ...


# Ranks of the square: train is (pp, dp) = (0, 0) (0, 1) (1, 0) (1, 1), infer is (dp, tp) in the same order.


class NamedMeshes(dispatch.NamedMeshes):
    """A role that trains on one mesh and infers on another."""

    def test_named_coordinates(self, square: ColocatedGroup) -> None:
        """Each mesh has its own coordinates for the ranks; an axis that a mesh lacks has size 1."""
        meshes = square.role("meshes", Meshes)
        assert [place["train"] for place in meshes.places()] == [
            {"pp": (pp, 2), "dp": (dp, 2), "tp": (0, 1)} for pp in range(2) for dp in range(2)
        ]
        assert [place["infer"] for place in meshes.places()] == [
            {"pp": (0, 1), "dp": (dp, 2), "tp": (tp, 2)} for dp in range(2) for tp in range(2)
        ]
        assert colocate.inspect(meshes).meshes == {"train": {"pp": 2, "dp": 2}, "infer": {"dp": 2, "tp": 2}}

    def test_named_scatter(self, square: ColocatedGroup) -> None:
        """Scatter spreads rows over the named mesh's axis, and repeats rows along the other axes."""
        meshes = square.role("meshes", Meshes)
        assert meshes.train_seen([1, 2, 3]) == [[1, 2], [3], [1, 2], [3]]
        assert meshes.infer_seen([1, 2, 3]) == [[1, 2], [1, 2], [3], [3]]

    def test_named_collect(self, square: ColocatedGroup) -> None:
        """A collect takes one copy of each part, from the first rank of other axes and the last pipeline stage."""
        meshes = square.role("meshes", Meshes)
        assert meshes.reshard([1, 2, 3]) == [(1, 0), (2, 0), (1, 2), (2, 2)]
        assert meshes.along_others([1, 2, 3]) == [(1, 0), (2, 0), (1, 2), (2, 2)]
        assert (meshes.first_of_train(), meshes.first_of_infer()) == (2, 0)
        assert meshes.mean([1.0, 2.0, 6.0]) == 3.0
        assert meshes.stages() == 3
        assert meshes.padded([1, 2, 3]) == [1, 2, 3]

    def test_named_which(self, square: ColocatedGroup) -> None:
        """With several meshes, a method or role code that names no mesh raises an error."""
        meshes = square.role("meshes", Meshes)
        with pytest.raises(DispatchError, match=r"several meshes \('train', 'infer'\): say which one with mesh="):
            meshes.which([1, 2])
        with pytest.raises(RoleError, match=r"several meshes: use ctx\.meshes"):
            meshes.only_mesh()

    def test_named_stages(self, square: ColocatedGroup) -> None:
        """Results of earlier pipeline stages are ignored, in called and in kept results."""
        meshes = square.role("meshes", Meshes)
        assert meshes.staged([1, 2, 3]) == [-1, -2, -3]
        with meshes.staged.keep([1, 2, 3]) as resident:
            assert resident.fetch() == [-1, -2, -3]
            assert resident.spec.structure == ["int", "int"]
            assert meshes.train_seen(resident.ref) == [[-1, -2], [-3], [-1, -2], [-3]]  # type: ignore[arg-type]
            assert meshes.infer(resident.ref) == [-2, -4, -6]  # type: ignore[arg-type]

    def test_named_between_groups(
        self, pair: ColocatedGroup, square: ColocatedGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Residents travel between groups of other slots, meshes and partitions without passing the driver."""
        rows, meshes, axes = pair.role("rows", Rows), square.role("meshes", Meshes), square.role("axes", Axes)
        traffic = Traffic(pair, monkeypatch)
        count = 20_000
        with (
            rows.produce.keep(count) as produced,
            meshes.train.keep(produced.ref) as trained,
            meshes.infer.keep(trained.ref) as inferred,
            pair.role("right", Rows).double.keep(inferred.ref) as back,
            axes.doubled.keep(back.ref) as again,
        ):
            totals = rows.total(again.ref)
            through_the_driver = traffic.total_bytes()
            value = again.fetch()
        expected = [8 * (row + 1) for rank in range(2) for row in range(100 * rank, 100 * rank + count)]
        assert value == expected
        assert totals == {"sum": sum(expected), "count": 2 * count}
        assert through_the_driver < 50_000
        if pair._node.services.executor.codec.name != "reference":
            assert traffic.total_bytes() > through_the_driver + count  # The fetch shows that values are counted.

    @needs(OwnProcess)
    def test_named_process_groups(self, square: ColocatedGroup) -> None:
        """A process group spans one axis of a mesh; an axis of several meshes needs the mesh's name, too."""
        pytest.importorskip("torch")
        named = square.role("named", Collective)
        values: list[float] = [1.0, 2.0, 3.0, 4.0]
        sums = {
            "pp": [4.0, 6.0, 4.0, 6.0],
            "train.pp": [4.0, 6.0, 4.0, 6.0],
            "train.dp": [3.0, 3.0, 7.0, 7.0],
            "infer.dp": [4.0, 6.0, 4.0, 6.0],
            "tp": [3.0, 3.0, 7.0, 7.0],
            "train.tp": values,
        }
        for axis, expected in sums.items():
            assert named.sum_each(values, axis=axis) == expected, axis  # type: ignore[arg-type]
        with pytest.raises(RoleError, match=r"say which: 'train\.dp' or 'infer\.dp'"):
            named.sum(1.0, axis="dp")
        with pytest.raises(RoleError, match=r"no mesh 'trian'.*did you mean 'train'"):
            named.sum(1.0, axis="trian.dp")


@contextmanager
def hold_rank(group: ColocatedGroup) -> Iterator[None]:
    """Delay the calls of a block until its end."""
    with Gate() as gate:
        group.role("faulty", Faulty).wait.submit(gate.address)
        yield


class Mixing(ExecutorCase):
    """`submit` and `keep` never wait for residents in their arguments; errors come with the call."""

    def test_rows_that_turn_out_to_be_too_few(self, pair: ColocatedGroup) -> None:
        """Residents with unequal rows raise the call's DispatchError, worded as for a value that is known at once.

        A list with as many rows as the resident is split along the resident's uneven parts.
        """
        rows, left_rows = pair.role("rows"), pair.role("left", Rows)
        with hold_rank(pair):
            uneven = rows.produce_each.keep([1, 4])
            elsewhere = left_rows.produce.keep(5)
            calls = [
                rows.zipped.submit([1, 2], uneven.ref),
                rows.zipped.submit([1, 2, 3], elsewhere.ref),
                rows.padded.submit({"y": [1, 2], "x": uneven.ref}),
            ]
            fits = rows.zipped.submit([1, 2, 3, 4, 5], uneven.ref)
            after = rows.double.submit([1, 2])
            with pytest.raises(DispatchError, match="1 row for 2 ranks"):
                rows.zipped.submit([1], uneven.ref)
        for call, words in zip(
            calls,
            (
                "the parameter 'right' has 5 rows but 'left' has 2: what is scattered",
                "the parameter 'right' has 5 rows but 'left' has 3: what is scattered",
                "has 5 rows but 'batch' has 2: what is scattered",
            ),
            strict=True,
        ):
            error = call.exception(PATIENCE_S)
            assert isinstance(error, DispatchError)
            assert words in str(error)
            assert error.method in ("zipped", "padded")
        assert fits.result(PATIENCE_S) == [(1, 0), (2, 100), (3, 101), (4, 102), (5, 103)]
        assert after.result(PATIENCE_S) == [2, 4]
        with pytest.raises(DispatchError, match="the parameter 'right' has 5 rows but 'left' has 2") as caught:
            rows.zipped([1, 2], uneven.ref)
        assert caught.value.parameter == "right"
