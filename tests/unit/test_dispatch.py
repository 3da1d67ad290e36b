"""Dispatch: what is refused before anything is sent; who gets which rows is in the suite and in tests/laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

import colocate
from colocate import Role, method
from colocate._values.dispatch import Dispatch, OnRank, Parts, PerRank, Scatter, plan
from colocate._values.mesh import Mesh, Ranks
from colocate.errors import ConfigError, DispatchError


class Noting(Dispatch):
    """A user's own, which notes what it was given."""

    seen: Any = None

    def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Sequence[Mapping[str, Any]]:
        self.seen = dict(arguments)
        return [arguments] * ranks.world_size


NOTING = Noting()


class Taking(Role):
    @method(collect=colocate.First())
    def make(self) -> list[int]:
        return [1, 2]

    @method(dispatch=colocate.PerRank("count"), collect=colocate.Concat())
    def produce(self, count: int) -> list[int]:
        return [0] * count

    @method(dispatch=Scatter("x", "y"))
    def both(self, x: list[int], y: list[int]) -> tuple[list[int], list[int]]:
        return x, y

    @method(dispatch=NOTING, collect=colocate.First())
    def take(self, x: list[int], y: list[list[int]]) -> list[int]:
        return [*x, *y[0]]


def test_a_users_dispatch_never_sees_a_resident() -> None:
    with colocate.connect() as runtime, runtime.reserve() as pool:
        taking = pool.spawn({"taking": colocate.role(Taking)}).role("taking", Taking)
        kept = taking.make.keep()
        assert taking.take(kept.ref, [kept.ref]) == [1, 2, 1, 2]
    assert NOTING.seen == {"x": [1, 2], "y": [[1, 2]]}


def test_where_a_resident_lies_governs() -> None:
    """What is scattered beside it is split as it lies, however uneven that is."""
    with colocate.connect() as runtime, runtime.reserve(2) as pool:
        taking = pool.spawn({"taking": colocate.role(Taking)}).role("taking", Taking)
        for counts in ([1, 3], [4, 0]):
            kept = taking.produce.keep(counts)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            kept.fetch()
            if all(counts):
                assert taking.both([1, 2, 3, 4], kept.ref) == [([1], [0]), ([2, 3, 4], [0, 0, 0])]
            else:
                with pytest.raises(DispatchError, match="some of the 2 ranks along 'dp' have none"):
                    taking.both([1, 2, 3, 4], kept.ref)


@pytest.mark.parametrize(
    ("dispatch", "arguments", "parameter", "message"),
    [
        (Scatter("x", pad=True), {"x": []}, "x", "'x' has 0 rows for 3 ranks"),
        (Scatter("x", "y"), {"x": None, "y": [1] * 2}, "y", "'y' has 2 rows for 3 ranks"),
        (Scatter("x"), {"x": {"a": [1] * 4, "b": [1] * 5}}, "x", "x['a'] has 4 rows but x['b'] has 5"),
        (Scatter("x"), {"x": "prompt"}, "x", "x (str) has no rows"),
        (PerRank("x"), {"x": 5}, "x", "has to be a list with one item for each of the 3 ranks, not a int"),
        (Scatter("x", mesh="infer"), {"x": [1] * 3}, None, "no mesh 'infer'"),
        (OnRank(7), {"x": 1}, None, "OnRank(7) goes to rank 7, but the role has 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    dispatch: Dispatch, arguments: dict[str, Any], parameter: str | None, message: str
) -> None:
    with pytest.raises(DispatchError) as caught:
        plan(dispatch, arguments, Ranks(3))
    assert message in str(caught.value)
    assert caught.value.parameter == parameter


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


def test_declarations_that_cannot_be_meant() -> None:
    unchecked: Any = Scatter  # what a type checker would refuse
    for names, options in (
        ((), {}),
        (("x", "x"), {}),
        (("x",), {"pad": "mask"}),
        (("x",), {"empty": "skip"}),
        (("x",), {"mesh": Mesh({"dp": 1})}),
        (("x",), {"rows_of": 0}),
        (("x",), {"rows_of": True}),
        (("x",), {"rows_of": 2, "pad": True}),
    ):
        with pytest.raises(ConfigError):
            unchecked(*names, **options)
    with pytest.raises(DispatchError):
        Scatter("x", axis="d p")
    with pytest.raises(ConfigError):
        PerRank()
    with pytest.raises(ConfigError):
        OnRank(-1)


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
