"""Plain values and residents in one call, before anybody knows what the residents are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, PerRank, Role, method
from colocate.errors import DispatchError, RoleError
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


@contextmanager
def busy(group: ColocatedGroup) -> Iterator[None]:
    """No call made in the block begins before it ends."""
    with Gate() as gate:
        group.role("faulty", Faulty).wait.submit(gate.address)
        yield


class Mixing(ExecutorCase):
    """`submit` and `keep` never wait, whatever their arguments are; order and the workers do the rest."""

    def test_rows_that_turn_out_to_be_too_few(self, pair: ColocatedGroup) -> None:
        """Parts of unequal length are a DispatchError of that call, in the words of one that is known at once."""
        rows, left = pair.role("rows"), pair.role("left", Rows)
        with busy(pair):
            own = rows.produce_each.keep([1, 4])
            elsewhere = left.produce.keep(5)
            calls = [
                rows.zipped.submit([1, 2], own.ref),
                rows.zipped.submit([1, 2, 3], elsewhere.ref),
                rows.padded.submit({"y": [1, 2], "x": own.ref}),
            ]
            after = rows.double.submit([1, 2])
            with pytest.raises(DispatchError, match="1 row for 2 ranks"):
                rows.zipped.submit([1], own.ref)
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
        assert after.result(PATIENCE_S) == [2, 4]
        with pytest.raises(DispatchError, match="the parameter 'right' has 5 rows but 'left' has 2") as caught:
            rows.zipped([1, 2], own.ref)
        assert caught.value.parameter == "right"

    def test_per_rank_of_a_gathered_resident_is_by_reference(self, spawn: Spawn) -> None:
        """Each rank gets the very thing that it made, and writing into it is found and named."""
        torch = pytest.importorskip("torch")

        class Maker(Role):
            @method
            def make(self) -> Any:
                self.made = torch.arange(3.0)
                return self.made

            @method(dispatch=PerRank("item"))
            def is_mine(self, item: Any) -> bool:
                return bool(item.data_ptr() == self.made.data_ptr())

            @method(dispatch=PerRank("item"))
            def write(self, item: Any) -> None:
                item.add_(1.0)

        maker = spawn({"maker": colocate.role(Maker)}).role("maker", Maker)
        with maker.make.keep() as kept:
            assert maker.is_mine(kept.ref) == [True, True]
            with pytest.raises(RoleError, match=r"maker\.write changed in place a value that maker\.make had"):
                maker.write(kept.ref)
            with pytest.raises(RoleError, match=r"maker\.is_mine was given up .* changed in place by maker\.write; it"):
                maker.is_mine(kept.ref)
