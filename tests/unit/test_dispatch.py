"""Wrong dispatches are refused before the send; the suite and tests/laws check which rank gets which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from colocate._values.dispatch import Dispatch, Parts, plan_call
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

    made = plan_call(Fixed(Parts([{"x": 1}, {"x": 2}], [3, 4]), (1,)), {}, Ranks(2))
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
            plan_call(Fixed(wrong, only), {}, Ranks(2))
        assert message in str(caught.value)
