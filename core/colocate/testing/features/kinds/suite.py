"""Values of types that were registered: their rows, and how they travel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from colocate import ColocatedGroup
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, of_executor
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.probes.rows import Block, Own
from colocate.testing.probes.tensors import Packing, Tensors


class OwnRows(ExecutorCase):
    """`register_batch`."""

    def test_own_rows(self, pair: ColocatedGroup) -> None:
        """Types given to `register_batch` are split, padded and joined as everything with rows."""
        joined = pair.role("own", Own).tripled(Block([1, 2, 3], "mine"))
        assert (joined.rows, joined.name) == ([3, 6, 9], "mine tripled")
        with pair.role("own", Own).tripled.keep(Block([1, 2, 3], "mine")) as kept:
            assert pair.role("own", Own).tripled(kept.ref).rows == [9, 18, 27]


class OwnTypes(TensorCase):
    """Values of a type that `register_batch` was told the leaves of are looked into as dicts are."""

    @of_executor
    def test_own_types_sent(self, torch: Any, tensors: Tensors) -> None:
        """Values are sent as their leaves, without the graph, and find themselves on the worker's device."""
        mine = Packing({"x": torch.ones(4), "grad": torch.ones(4, requires_grad=True) * 2}, "mine")
        facts = {"rows": [2.0, 2.0], "name": "mine", "requires_grad": False, "device": True, "was_packed": False}
        assert tensors.facts_of_own_type(mine) == [facts] * 2
        assert mine.tensors["grad"].requires_grad
        back = tensors.made_of_own_type(2)
        assert (back.tensors["grad"].tolist(), back.name, back.was_packed) == ([0.0, 3.0] * 2, "made", False)
        assert not back.tensors["grad"].requires_grad

    @of_executor
    def test_own_types_kept(self, torch: Any, pair: ColocatedGroup, tensors: Tensors) -> None:
        """A kept one has no graph, its bytes are counted and its structure is told; other slots get its leaves."""
        with tensors.made_of_own_type.keep(2) as kept:
            assert kept.spec.bytes_per_rank == (16, 16)
            leaves = {"tensors": dict.fromkeys(("x", "grad"), "Tensor[2] float32"), "name": "str"}
            assert kept.spec.structure == {"Packing": leaves}
            facts = {"rows": [0.0, 3.0], "name": "made", "requires_grad": False, "device": True, "was_packed": False}
            assert tensors.facts_of_own_type(kept.ref) == [facts] * 2
            for side in ("left_tensors", "right_tensors"):
                found = pair.role(side, Tensors).facts_of_own_type(kept.ref)
                assert found == [facts | {"rows": [0.0, 3.0] * 2}]

    def test_own_types_written(self, tensors: Tensors) -> None:
        """Whoever writes into a kept one is named, as an argument and as what was returned."""
        with (
            tensors.made_of_own_type.keep(2) as kept,
            pytest.raises(RoleError, match=r"write_into_own_type changed in place a value that .*made_of_own_type"),
        ):
            tensors.write_into_own_type(kept.ref)
        with tensors.made_of_own_type.keep(2), pytest.raises(RoleError, match="write_into_what_it_returned changed"):
            tensors.write_into_what_it_returned()

    def test_own_types_written_strictly(self, torch: Any, copying: ColocatedGroup) -> None:
        """With `strict=True` so is whoever writes into an argument."""
        tensors, mine = copying.role("tensors", Tensors), Packing({"x": torch.ones(2), "grad": torch.ones(2)}, "mine")
        told = pytest.raises(RoleError, match="write_into_own_type changed its argument 'value' in place")
        with told if copying._node.services.strict else nullcontext():
            tensors.write_into_own_type(mine)
        assert mine.tensors["x"].tolist() == [1.0, 1.0]

    def test_own_types_without_leaves(self, tensors: Tensors) -> None:
        """Nobody looks into one that was registered without them; it can be kept, cut and joined."""
        with tensors.made_of_own_type.keep(2, opaque=True) as kept:
            assert kept.spec.bytes_per_rank == (0, 0)
            assert kept.spec.structure == "Opaque"
            assert kept.fetch().tensors["x"].tolist() == [0.0, 1.0] * 2


AREAS = [OwnRows, OwnTypes]
