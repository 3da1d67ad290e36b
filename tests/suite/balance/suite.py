"""Rows that are spread by cost."""

from __future__ import annotations

import pytest
from tests.suite.probes.rows import Costs

import colocate
from colocate import ColocatedGroup
from colocate.errors import DispatchError, RoleError
from colocate.testing.executors._base import ExecutorCase, Spawn


class Balance(ExecutorCase):
    """`Scatter(balance=...)`."""

    def test_balance(self, spawn: Spawn) -> None:
        """Ranks get rows of similar cost, and results, also kept ones, are in the order of the input."""
        group = spawn({"costs": colocate.role(Costs), "one": colocate.role(Costs).on(slots=[1])})
        costs, one = group.role("costs", Costs), group.role("one", Costs)
        rows, tokens = [*"abcde"], [9, 9, 1, 2, 3]
        lies = [(["a", "e"], [9, 3]), (["b", "c", "d"], [9, 1, 2])]
        assert costs.seen(rows, tokens) == lies
        assert costs.seen(rows) == [(["a", "b", "c"], None), (["d", "e"], None)]
        assert costs.seen(costs.same.keep(rows).ref, None) == [(["a", "b", "c"], None), (["d", "e"], None)]
        assert costs.same(rows, tokens) == rows
        resident = costs.same.keep(rows, tokens)
        assert resident.fetch() == rows
        assert costs.lies(resident.ref) == [(["a", "e"], None), (["b", "c", "d"], None)]
        numbers = [*range(5)]
        pairs = [*zip(rows, numbers, strict=True)]
        for view in (costs, one):  # Differently placed arguments are aligned by row.
            plain, chosen = view.tokens.keep(rows, numbers), view.same.keep(numbers, [5, 4, 3, 2, 1])
            for rows_beside in (numbers, plain.ref, chosen.ref):
                assert costs.zipped(resident.ref, rows_beside) == pairs
                assert view.zipped(rows, rows_beside) == pairs
                assert costs.seen(rows_beside, tokens) == [([0, 4], [9, 3]), ([1, 2, 3], [9, 1, 2])]
        again = costs.zipped.keep(resident.ref, numbers)
        assert again.fetch() == pairs
        assert costs.seen(rows, costs.tokens.keep(rows, tokens).ref) == lies  # Fetched: the driver assigns the rows.
        # Sets of two rows stay together, or are joined again.
        even = [0, 0, 1, 1, 2, 2]
        assert costs.balanced_sets(even, [9, 9, 9, 9, 1, 1]) == [[0, 0], [1, 1, 2, 2]]
        assert costs.sets(costs.same.keep(even, [9, 9, 1, 2, 3, 4]).ref) == [[0, 0, 1, 1], [2, 2]]

    def test_balance_refused(self, pair: ColocatedGroup, spawn: Spawn) -> None:
        """Costs that aren't a whole number for each row, and results that can't be reordered, are clear errors."""
        costs = spawn({"costs": colocate.role(Costs)}).role("costs", Costs)
        for tokens, words in (
            ([1.5, 2, 3], "'tokens' says what each row costs, so it has to be whole numbers"),
            ([1, 2, -3], "whole numbers from 0 up"),
            ("abc", "not a str"),
            ([1, 2], "'batch' has 3 rows but 'tokens' has 2|'tokens' has 2 rows but 'batch' has 3"),
        ):
            with pytest.raises(DispatchError, match=words):
                costs.same([1, 2, 3], tokens)
        with pytest.raises(DispatchError, match="has 1 row for 2 ranks"):
            costs.same([1], [1])
        resident = costs.same.keep([1, 2, 3, 4], [9, 9, 1, 1])
        with pytest.raises(DispatchError, match=r"given 2 rows that were chosen by what they cost, and returned 4"):
            costs.twice(resident.ref)
        with pytest.raises((DispatchError, RoleError), match="nobody can put them back in order"):
            costs.lies(costs.twice.keep(resident.ref).ref)


AREAS = [Balance]
