"""Several named meshes of one role, with pipeline stages; residents between them and between groups."""

from __future__ import annotations

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import DispatchError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, of_executor
from colocate.testing.executors._traffic import Traffic
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.meshes import Meshes
from colocate.testing.probes.rows import Axes, Rows

# Ranks of the square: train is (pp, dp) = (0, 0) (0, 1) (1, 0) (1, 1), infer is (dp, tp) in the same order.


class NamedMeshes(ExecutorCase):
    """A role that trains on one mesh and infers on another."""

    def test_named_coordinates(self, square: ColocatedGroup) -> None:
        """Each mesh lays the ranks out for itself; an axis that it lacks is of size 1."""
        meshes = square.role("meshes", Meshes)
        assert [place["train"] for place in meshes.places()] == [
            {"pp": (pp, 2), "dp": (dp, 2), "tp": (0, 1)} for pp in range(2) for dp in range(2)
        ]
        assert [place["infer"] for place in meshes.places()] == [
            {"pp": (0, 1), "dp": (dp, 2), "tp": (tp, 2)} for dp in range(2) for tp in range(2)
        ]
        assert colocate.inspect(meshes).meshes == {"train": {"pp": 2, "dp": 2}, "infer": {"dp": 2, "tp": 2}}

    def test_named_scatter(self, square: ColocatedGroup) -> None:
        """Rows are spread over the axis of the mesh that is named, and repeated along its other axes."""
        meshes = square.role("meshes", Meshes)
        assert meshes.train_seen([1, 2, 3]) == [[1, 2], [3], [1, 2], [3]]
        assert meshes.infer_seen([1, 2, 3]) == [[1, 2], [1, 2], [3], [3]]

    def test_named_collect(self, square: ColocatedGroup) -> None:
        """One copy each counts, from the first rank along the other axes and the last pipeline stage."""
        meshes = square.role("meshes", Meshes)
        assert meshes.reshard([1, 2, 3]) == [(1, 0), (2, 0), (1, 2), (2, 2)]
        assert meshes.along_others([1, 2, 3]) == [(1, 0), (2, 0), (1, 2), (2, 2)]
        assert (meshes.first_of_train(), meshes.first_of_infer()) == (2, 0)
        assert meshes.mean([1.0, 2.0, 6.0]) == 3.0
        assert meshes.stages() == 3
        assert meshes.padded([1, 2, 3]) == [1, 2, 3]

    def test_named_which(self, square: ColocatedGroup) -> None:
        """With several meshes a method, and role code, say which one they mean."""
        meshes = square.role("meshes", Meshes)
        with pytest.raises(DispatchError, match=r"several meshes \('train', 'infer'\): say which one with mesh="):
            meshes.which([1, 2])
        with pytest.raises(RoleError, match=r"several meshes: use ctx\.meshes"):
            meshes.only_mesh()

    @of_executor
    def test_named_residents_between_meshes(self, square: ColocatedGroup) -> None:
        """What one mesh has made is used by the other as its collected value would be."""
        meshes = square.role("meshes", Meshes)
        with meshes.train.keep([1, 2, 3]) as trained, meshes.infer.keep(trained.ref) as inferred:
            assert trained.fetch() == [2, 3, 4]
            assert inferred.fetch() == [4, 6, 8]
            for kept in (trained, inferred):
                assert meshes.train_seen(kept.ref) == meshes.train_seen(kept.fetch())
                assert meshes.infer_seen(kept.ref) == meshes.infer_seen(kept.fetch())
                assert meshes.mean(kept.ref) == pytest.approx(meshes.mean(kept.fetch()))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                assert meshes.padded(kept.ref) == kept.fetch()
        with meshes.train.keep([1]) as kept:  # the second part along dp has no rows
            assert meshes.infer(kept.ref) == [4]
            assert meshes.train(kept.ref) == [3]

    def test_named_stages(self, square: ColocatedGroup) -> None:
        """Ranks of earlier stages may return nothing: kept or not, theirs isn't what counts."""
        meshes = square.role("meshes", Meshes)
        assert meshes.staged([1, 2, 3]) == [-1, -2, -3]
        with meshes.staged.keep([1, 2, 3]) as kept:
            assert kept.fetch() == [-1, -2, -3]
            assert kept.spec.structure == ["int", "int"]
            assert meshes.train_seen(kept.ref) == [[-1, -2], [-3], [-1, -2], [-3]]  # type: ignore[arg-type]
            assert meshes.infer(kept.ref) == [-2, -4, -6]  # type: ignore[arg-type]

    def test_named_between_groups(
        self, pair: ColocatedGroup, square: ColocatedGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Residents go between groups of other slots, meshes and partitions; no value comes by the driver."""
        rows, meshes, axes = pair.role("rows", Rows), square.role("meshes", Meshes), square.role("axes", Axes)
        traffic = Traffic(pair, monkeypatch)
        count = 20_000
        with (
            rows.produce.keep(count) as made,
            meshes.train.keep(made.ref) as trained,
            meshes.infer.keep(trained.ref) as inferred,
            pair.role("right", Rows).double.keep(inferred.ref) as back,
            axes.doubled.keep(back.ref) as again,
        ):
            totals = rows.total(again.ref)
            through_the_driver = traffic.total_bytes()
            value = again.fetch()
        wanted = [8 * (row + 1) for rank in range(2) for row in range(100 * rank, 100 * rank + count)]
        assert value == wanted
        assert totals == {"sum": sum(wanted), "count": 2 * count}
        assert through_the_driver < 50_000
        if pair._node.services.executor.codec.name != "reference":
            assert traffic.total_bytes() > through_the_driver + count  # so that values would have been noticed

    @needs(OwnProcess)
    def test_named_process_groups(self, square: ColocatedGroup) -> None:
        """A process group goes along an axis of a mesh; where several meshes have it, the mesh is named too."""
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
        for axis, wanted in sums.items():
            assert named.sum_each(values, axis=axis) == wanted, axis  # type: ignore[arg-type]
        with pytest.raises(RoleError, match=r"say which: 'train\.dp' or 'infer\.dp'"):
            named.sum(1.0, axis="dp")
        with pytest.raises(RoleError, match=r"no mesh 'trian'.*did you mean 'train'"):
            named.sum(1.0, axis="trian.dp")
