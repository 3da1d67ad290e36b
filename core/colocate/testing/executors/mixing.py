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
from colocate.testing.probes.plain import Echo
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

    def test_plain_rows_beside_an_uncomputed_resident(self, pair: ColocatedGroup) -> None:
        """They are cut as the resident lies, as they are when it is there already."""
        rows, left, echo = pair.role("rows"), pair.role("left", Rows), pair.role("echo", Echo)
        with busy(pair):
            own = rows.produce_each.keep([1, 4])
            even, elsewhere = rows.double.keep([1, 2, 3, 4, 5]), left.produce.keep(5)
            first = echo.first.keep([5, 6, 7, 8, 9])
            plain = [1, 2, 3, 4, 5]
            calls = [
                rows.zipped.submit(plain, own.ref),
                rows.seen.submit({"x": own.ref, "y": plain, "z": None}),
                rows.seen.submit({"y": [plain, plain, [own.ref], plain, plain], "x": own.ref}),
                rows.seen.submit((plain, even.ref, own.ref, elsewhere.ref)),
                rows.seen.submit((plain, own.ref, elsewhere.ref, first.ref)),
                rows.seen.submit((elsewhere.ref, plain, own.ref)),
                rows.masked.submit((own.ref, plain)),
                rows.masked.submit({"x": first.ref, "y": plain}),
                rows.maybe_empty.submit((rows.keep_rows.keep([7]).ref, [8])),
            ]
            kept = rows.zipped.keep(plain, elsewhere.ref)
            assert not any(call.done() for call in calls)
        far = [100, 101, 102, 103]
        results = [call.result(PATIENCE_S) for call in calls]
        assert results[0] == list(zip(plain, [0, *far], strict=True))
        assert results[1] == [({"x": [0], "y": [1], "z": None}, 1), ({"x": far, "y": [2, 3, 4, 5], "z": None}, 1)]
        assert results[2][1][0]["y"] == [plain, [[0, *far]], plain, plain]
        assert results[3] == [
            (([1, 2, 3], [2, 4, 6], [0, 100, 101], [0, 1, 2]), 1),
            (([4, 5], [8, 10], far[2:], [3, 4]), 1),
        ]
        assert results[4] == [(([1], [0], [0], [5]), 1), (([2, 3, 4, 5], far, [1, 2, 3, 4], [6, 7, 8, 9]), 1)]
        assert results[5] == [(([0, 1, 2], [1, 2, 3], [0, 100, 101]), 1), (([3, 4], [4, 5], far[2:]), 1)]
        assert results[6] == [(([0, 100, 101], [1, 2, 3]), 3), (([102, 103, 103], [4, 5, 5]), 2)]
        assert results[8] == [(([7], [8]), 1), (([], []), 0)]
        assert kept.fetch() == list(zip(plain, range(5), strict=True))
        # The same, now that all is there.
        again = [
            rows.zipped(plain, own.ref),
            rows.seen({"x": own.ref, "y": plain, "z": None}),
            rows.seen({"y": [plain, plain, [own.ref], plain, plain], "x": own.ref}),
            rows.seen((plain, even.ref, own.ref, elsewhere.ref)),
            rows.seen((plain, own.ref, elsewhere.ref, first.ref)),
            rows.seen((elsewhere.ref, plain, own.ref)),
            rows.masked((own.ref, plain)),
            rows.masked({"x": first.ref, "y": plain}),
        ]
        assert again == results[:-1]

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
