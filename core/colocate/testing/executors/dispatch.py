"""Dispatch and collect through real workers: what reaches which rank, along which mesh, and what the results become."""

from __future__ import annotations

import pytest

from colocate import ColocatedGroup
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.probes.meshes import Meshes
from colocate.testing.probes.rows import Rows


class Dispatching(ExecutorCase):
    """Broadcast, Scatter, PerRank, OnRank and one's own; Gather, Concat, First, Reduce and one's own; meshes."""

    @smoke
    def test_scatter_then_concat(self, pair: ColocatedGroup) -> None:
        """Split, then concat, is the identity on the rows' order, for any number of rows from the ranks' up."""
        rows = pair.role("rows", Rows)
        for count in range(2, 9):
            assert rows.double(list(range(count))) == [2 * row for row in range(count)]


# Ranks of the square: train is (pp, dp) = (0, 0) (0, 1) (1, 0) (1, 1), infer is (dp, tp) in the same order.


class NamedMeshes(ExecutorCase):
    """A role that trains on one mesh and infers on another."""

    def test_named_residents_between_meshes(self, square: ColocatedGroup) -> None:
        """What one mesh has made is used by the other as its collected value would be."""
        meshes = square.role("meshes", Meshes)
        with meshes.train.keep([1, 2, 3]) as trained, meshes.infer.keep(trained.ref) as inferred:
            assert trained.fetch() == [2, 3, 4]
            assert inferred.fetch() == [4, 6, 8]
            for resident in (trained, inferred):
                assert meshes.train_seen(resident.ref) == meshes.train_seen(resident.fetch())
                assert meshes.infer_seen(resident.ref) == meshes.infer_seen(resident.fetch())
                assert meshes.mean(resident.ref) == pytest.approx(meshes.mean(resident.fetch()))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                assert meshes.padded(resident.ref) == resident.fetch()
        with meshes.train.keep([1]) as resident:  # the second part along dp has no rows
            assert meshes.infer(resident.ref) == [4]
            assert meshes.train(resident.ref) == [3]
