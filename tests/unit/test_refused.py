"""Invalid arguments are refused where they are given, in the caller's terms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import colocate
from colocate import Broadcast, ColocatedGroup, First, Gather, Role, Scatter, method
from colocate.errors import ConfigError, DispatchError, RoleStartError
from colocate.testing.probes.faulty import FailsToStart


class Echo(Role):
    @method(collect=First())
    def echo(self, value: Any) -> Any:
        return value

    @method
    def ranks(self) -> int:
        return self.ctx.rank


@pytest.fixture(scope="module")
def group() -> Iterator[ColocatedGroup]:
    with colocate.connect() as runtime, runtime.reserve(slots=3) as pool:
        yield pool.spawn({"echo": colocate.role(Echo)}, name="here")


def test_a_name_is_free_after_a_failed_start() -> None:
    """A name is free after a failed start; a real clash names the other group's line."""
    with colocate.connect() as runtime, runtime.reserve() as pool, runtime.reserve() as other:
        with pytest.raises(RoleStartError):
            pool.spawn({"faulty": colocate.role(FailsToStart, (0,))}, name="policy")
        pool.spawn({"echo": colocate.role(Echo)}, name="policy")
        words = r"there is a group 'policy' already, made at .*test_refused\.py:\d+"
        with pytest.raises(ConfigError, match=words):
            other.spawn({"echo": colocate.role(Echo)}, name="policy")


def test_only_calls_are_waited_for(group: ColocatedGroup) -> None:
    kept = group["echo"].echo.keep(1)
    for wait in (colocate.wait, colocate.as_completed):
        with pytest.raises(
            TypeError, match=r"takes calls, as submit\(\) gives them, not <Resident of echo.echo .* wait"
        ):
            wait([kept])
    with pytest.raises(TypeError, match=r"takes a function of the call, not 5"):
        group["echo"].echo.submit(1).add_done_callback(5)
    # NumPy asks with options of its own.
    with pytest.raises(TypeError, match=r"lives in the workers: \.ref only stands for it"):
        np.array(kept.ref)


def test_ranks_are_whatever_counts(group: ColocatedGroup) -> None:
    """Ranks may be any iterable of whole numbers; other values are refused."""
    view = group.role("echo", Echo)
    kinds: list[Any] = [iter((0, 2)), np.array([0, 2]), torch.tensor([0, 2]), [np.int64(0), np.int64(2)]]
    for ranks in kinds:
        some = view.ranks.options(ranks=ranks)
        assert (some(), some()) == ([0, 2], [0, 2])
    wrongs: list[Any] = [1, "01", [0.0], [None]]
    for wrong in wrongs:
        for each in (view, Echo()):
            with pytest.raises(DispatchError, match=r"give a list of ranks, which are numbers from 0 up"):
                each.ranks.options(ranks=wrong)


def test_invalid_group_roles_are_refused(group: ColocatedGroup) -> None:
    """A group is no sequence of roles; roles are given as a dict by name, and each is a class, not a union."""
    with pytest.raises(ConfigError, match=r"a role's name, or for its class, not for 0"):
        group[0]  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(TypeError, match="is not iterable"):
        list(group)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    roles: list[tuple[Any, str]] = [
        ([colocate.role(Echo)], "a group's roles are a dict, by name: .*, not a list"),
        ({5: colocate.role(Echo)}, "5 can't be a role's name"),
    ]
    for wrong, message in roles:
        with pytest.raises(ConfigError, match=message):
            group.owner.spawn(wrong)
    union: Any = Echo | None
    with pytest.raises(ConfigError, match="a role is a class or a plugin's name"):
        colocate.role(union)


def test_invalid_role_methods_are_refused() -> None:
    """`@method` refuses generators without a dispatch, and objects that are no functions."""

    def rows(self: Any) -> Iterator[int]:
        yield 1

    async def later(self: Any) -> AsyncIterator[int]:
        yield 1

    generator = "it has a `yield`, .* it has no dispatch. A generator can't leave its worker"
    kind = r"can't be made a role method: @method stands once, above a function"
    of_a_class: Any = classmethod
    wrongs = [5, property(lambda self: 1), staticmethod(len), of_a_class(len), method(lambda self: 1)]
    for wrong, words in [(rows, generator), (later, generator), *((wrong, kind) for wrong in wrongs)]:
        with pytest.raises(DispatchError, match=words):
            method(wrong)
    declared: Callable[..., Any] = method
    with pytest.raises(DispatchError, match="concurrency='2'; it is at least 1"):
        declared(concurrency="2")(lambda self: 1)


def test_unfit_row_method_options_are_refused() -> None:
    """Methods with `rows=` or a `yield` are refused at the class declaration if their options don't fit."""

    def batch(self: Any, rows: list[int]) -> list[int]:
        return rows

    async def one(self: Any, row: int, factor: int = 1) -> int:
        return row * factor

    async def none(self: Any) -> int:
        return 1

    def yields(self: Any, rows: list[int]) -> Iterator[tuple[int, int]]:
        yield 0, rows[0]

    declared: Callable[..., Any] = method
    for options, function, words in (
        ({"rows": "rows"}, batch, "rows='rows' is for an `async def` that takes one row"),
        ({"rows": "rows"}, yields, "rows='rows' is for an `async def` that takes one row"),
        ({"rows": "factor"}, one, "rows='factor' names the first parameter after self, which is 'row'"),
        ({"rows": "row"}, none, "rows='row' names the first parameter after self, which is missing"),
        ({"rows": "row", "dispatch": Scatter("row")}, one, "leave dispatch= and collect= out"),
        ({"rows": "row", "collect": Gather()}, one, "leave dispatch= and collect= out"),
        ({"dispatch": Broadcast()}, yields, r"by a Scatter without padding, and it has Broadcast\(\)"),
        ({"dispatch": Scatter("rows", pad=True)}, yields, r"and it has Scatter\('rows', pad=True\)"),
        ({"dispatch": Scatter("rows"), "collect": Gather()}, yields, "collected in order: leave collect= out"),
        ({"dispatch": Scatter("rows"), "concurrency": 2}, yields, "above 1 for async methods only"),
    ):
        with pytest.raises(DispatchError, match=words):
            declared(**options)(function)
