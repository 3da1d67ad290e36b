"""Values of registered types: their rows and their transport."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import attrs
import pytest
from tests.suite.kinds.probes import Block, Blocks, Packed, Packing
from tests.suite.marks import mark_executor_part

import colocate
from colocate import ColocatedGroup
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, Shared, Spawn
from colocate.testing.executors.tensors import TensorCase


class OwnRows(ExecutorCase):
    """`register_batch`."""

    def test_own_rows(self, spawn: Spawn) -> None:
        """Types given to `register_batch` are split, padded and joined like all types with rows."""
        blocks = spawn({"blocks": colocate.role(Blocks)}).role("blocks", Blocks)
        joined = blocks.tripled(Block([1, 2, 3], "mine"))
        assert (joined.rows, joined.name) == ([3, 6, 9], "mine tripled")
        with blocks.tripled.keep(Block([1, 2, 3], "mine")) as resident:
            assert blocks.tripled(resident.ref).rows == [9, 18, 27]


def _make_packed_roles(pair: Shared) -> Shared:
    """Return two slots of the same runtime with roles for types that hold tensors."""
    packed = colocate.role(Packed)
    roles = {"tensors": packed, "left_tensors": packed.on(slots=[0]), "right_tensors": packed.on(slots=[1])}
    return attrs.evolve(pair, roles=roles, name="packed", warm_up=lambda group: None, pool=None, group=None)


class OwnTypes(TensorCase):
    """Values of a type that is registered with leaves are traversed like dicts."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_packed(cls, shared_pair: Shared) -> Shared:
        return _make_packed_roles(shared_pair)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_packed_copying(cls, shared_packed: Shared, shared_copying: Shared) -> Shared:
        return shared_packed if shared_copying.runtime is shared_packed.runtime else _make_packed_roles(shared_copying)

    @pytest.fixture
    def packed(self, torch: Any, no_leaks: None, shared_packed: Shared) -> ColocatedGroup:
        """Return two slots that the test leaves unchanged."""
        return shared_packed.get()

    @pytest.fixture
    def packed_tensors(self, packed: ColocatedGroup) -> Packed:
        return packed.role("tensors", Packed)

    @mark_executor_part
    def test_own_types_sent(self, torch: Any, packed_tensors: Packed) -> None:
        """Values travel as their leaves, without the graph, and arrive on the worker's device."""
        mine = Packing({"x": torch.ones(4), "grad": torch.ones(4, requires_grad=True) * 2}, "mine")
        facts = {"rows": [2.0, 2.0], "name": "mine", "requires_grad": False, "device": True, "was_packed": False}
        assert packed_tensors.facts_of_own_type(mine) == [facts] * 2
        assert mine.tensors["grad"].requires_grad
        back = packed_tensors.made_of_own_type(2)
        assert (back.tensors["grad"].tolist(), back.name, back.was_packed) == ([0.0, 3.0] * 2, "made", False)
        assert not back.tensors["grad"].requires_grad

    @mark_executor_part
    def test_own_types_kept(self, packed: ColocatedGroup, packed_tensors: Packed) -> None:
        """A kept value has no graph, and its bytes and structure are known; other slots receive its leaves."""
        with packed_tensors.made_of_own_type.keep(2) as resident:
            assert resident.spec.bytes_per_rank == (16, 16)
            leaves = {"tensors": dict.fromkeys(("x", "grad"), "Tensor[2] float32"), "name": "str"}
            assert resident.spec.structure == {"Packing": leaves}
            facts = {"rows": [0.0, 3.0], "name": "made", "requires_grad": False, "device": True, "was_packed": False}
            assert packed_tensors.facts_of_own_type(resident.ref) == [facts] * 2
            for side in ("left_tensors", "right_tensors"):
                result = packed.role(side, Packed).facts_of_own_type(resident.ref)
                assert result == [facts | {"rows": [0.0, 3.0] * 2}]

    def test_own_types_written(self, packed_tensors: Packed) -> None:
        """A method that writes into a kept value is named, for an argument and for an earlier result."""
        with (
            packed_tensors.made_of_own_type.keep(2) as resident,
            pytest.raises(RoleError, match=r"write_into_own_type changed in place a value that .*made_of_own_type"),
        ):
            packed_tensors.write_into_own_type(resident.ref)
        with (
            packed_tensors.made_of_own_type.keep(2),
            pytest.raises(RoleError, match="write_into_what_it_returned changed"),
        ):
            packed_tensors.write_into_what_it_returned()

    def test_own_types_written_strictly(self, torch: Any, shared_packed_copying: Shared) -> None:
        """With `strict=True` a method that writes into an argument is named, too."""
        copying = shared_packed_copying.get()
        tensors, mine = copying.role("tensors", Packed), Packing({"x": torch.ones(2), "grad": torch.ones(2)}, "mine")
        expectation = pytest.raises(RoleError, match="write_into_own_type changed its argument 'value' in place")
        with expectation if copying._node.services.strict else nullcontext():
            tensors.write_into_own_type(mine)
        assert mine.tensors["x"].tolist() == [1.0, 1.0]

    def test_own_types_without_leaves(self, packed_tensors: Packed) -> None:
        """A type without leaves isn't inspected, but can be kept, split and joined."""
        with packed_tensors.made_of_own_type.keep(2, opaque=True) as resident:
            assert resident.spec.bytes_per_rank == (0, 0)
            assert resident.spec.structure == "Opaque"
            assert resident.fetch().tensors["x"].tolist() == [0.0, 1.0] * 2


AREAS = [OwnRows, OwnTypes]
