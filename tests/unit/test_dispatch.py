"""Dispatch: what is refused before anything is sent; who gets which rows is in the suite and in tests/laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from colocate._values.dispatch import Dispatch, Parts, Scatter, plan
from colocate._values.mesh import Ranks
from colocate.errors import DispatchError


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


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 9), max_size=12),
    st.sampled_from(["same", "fewer", "none", "missing"]),
    st.sampled_from(["error", "run"]),
)
def test_plain_lists_are_split_as_arrays_are(count: int, rows: list[int], other: str, empty: Any) -> None:
    """Rows, what is real and what isn't, and errors: there is a short way for lists of numbers."""
    others: dict[str, Any] = {"same": rows, "fewer": rows[1:], "none": None}
    lists = {"a": rows, "whole": "x", **({"b": others[other]} if other in others else {})}
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in lists.items()}
    dispatch = Scatter("a", "b", empty=empty)
    said: list[Any] = []
    for arguments in (lists, arrays):
        try:
            parts = dispatch.split(arguments, Ranks(count))
        except DispatchError as error:
            said.append(str(error))
            continue
        assert isinstance(parts, Parts)
        plain = [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in part.items()} for part in parts]
        said.append((plain, parts.valid and [*parts.valid], parts.padded, parts.partition))
    assert said[0] == said[1]
