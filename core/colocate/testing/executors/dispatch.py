"""Tests of dispatch and collect on real workers: which rows reach which rank, and how results are joined."""

from __future__ import annotations

import pytest

from colocate import ColocatedGroup
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.probes.meshes import Meshes
from colocate.testing.probes.rows import Rows


class Dispatching(ExecutorCase):
    """Tests of how arguments are split between the ranks, and how results are joined."""

    @smoke
    def test_scatter_then_concat(self, pair: ColocatedGroup) -> None:
        """`Scatter` followed by `Concat` keeps the order of the rows, for different numbers of rows."""
        rows = pair.role("rows", Rows)
        for count in range(2, 9):
            assert rows.double(list(range(count))) == [2 * row for row in range(count)]


# In the square group, ranks 0 to 3 are (0, 0) (0, 1) (1, 0) (1, 1): as (pp, dp) in train, as (dp, tp) in infer.


class NamedMeshes(ExecutorCase):
    """Tests of a role that trains on one mesh and infers on another mesh."""

    def test_named_residents_between_meshes(self, square: ColocatedGroup) -> None:
        """A resident of one mesh, used on another mesh, gives the same result as its collected value."""
        meshes = square.role("meshes", Meshes)
        with meshes.train.keep([1, 2, 3]) as trained, meshes.infer.keep(trained.ref) as inferred:
            assert trained.fetch() == [2, 3, 4]
            assert inferred.fetch() == [4, 6, 8]
            for resident in (trained, inferred):
                assert meshes.train_seen(resident.ref) == meshes.train_seen(resident.fetch())
                assert meshes.infer_seen(resident.ref) == meshes.infer_seen(resident.fetch())
                assert meshes.mean(resident.ref) == pytest.approx(meshes.mean(resident.fetch()))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                assert meshes.padded(resident.ref) == resident.fetch()
        with meshes.train.keep([1]) as resident:  # The second part along dp has no rows.
            assert meshes.infer(resident.ref) == [4]
            assert meshes.train(resident.ref) == [3]
