"""What can't be meant is refused where it is given, in words of who gave it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import colocate
from colocate import ColocatedGroup, First, Role, method
from colocate.errors import ConfigError, DispatchError


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


def test_only_calls_are_waited_for(group: ColocatedGroup) -> None:
    kept = group["echo"].echo.keep(1)
    for wait in (colocate.wait, colocate.as_completed):
        with pytest.raises(
            TypeError, match=r"takes calls, as submit\(\) gives them, not <Resident of echo.echo .* wait"
        ):
            wait([kept])
    with pytest.raises(TypeError, match=r"takes a function of the call, not 5"):
        group["echo"].echo.submit(1).add_done_callback(5)


@pytest.mark.parametrize(
    "ranks", [(rank for rank in (0, 2)), np.array([0, 2]), torch.tensor([0, 2]), [np.int64(0), np.int64(2)]]
)
def test_ranks_are_whatever_counts(group: ColocatedGroup, ranks: Any) -> None:
    """Also where the method of some ranks is called twice."""
    some = group.role("echo", Echo).ranks.options(ranks=ranks)
    assert (some(), some()) == ([0, 2], [0, 2])


@pytest.mark.parametrize("ranks", [1, "01", [0.0], [None]])
def test_what_is_no_list_of_ranks(group: ColocatedGroup, ranks: Any) -> None:
    for view in (group.role("echo", Echo), Echo()):
        with pytest.raises(DispatchError, match=r"give a list of ranks, which are numbers from 0 up"):
            view.ranks.options(ranks=ranks)


def test_a_group_is_not_its_roles(group: ColocatedGroup) -> None:
    with pytest.raises(ConfigError, match=r"a role's name, or for its class, not for 0"):
        group[0]  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(TypeError, match="is not iterable"):
        list(group)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([colocate.role(Echo)], "a group's roles are a dict, by name: .*, not a list"),
        ({5: colocate.role(Echo)}, "5 can't be a role's name"),
    ],
)
def test_roles_have_names(roles: Any, message: str) -> None:
    with colocate.connect() as runtime, pytest.raises(ConfigError, match=message):
        runtime.reserve(slots=1).spawn(roles)


def test_a_reference_is_no_array(group: ColocatedGroup) -> None:
    """NumPy asks with options of its own."""
    with pytest.raises(TypeError, match=r"lives in the workers: \.ref only stands for it"):
        np.array(group.role("echo", Echo).echo.keep(1).ref)


@pytest.mark.parametrize(
    "wrong", [5, property(lambda self: 1), staticmethod(len), classmethod(len), method(lambda self: 1)]
)
def test_what_is_no_function_of_a_class(wrong: Any) -> None:
    with pytest.raises(DispatchError, match=r"can't be made a role method: @method stands once, above a function"):
        method(wrong)


def test_generators() -> None:
    """What they give can't be sent; on threads they would run on the driver's."""

    def rows(self: Any) -> Iterator[int]:
        yield 1

    async def later(self: Any) -> AsyncIterator[int]:
        yield 1

    for wrong in (rows, later):
        with pytest.raises(DispatchError, match="it has a `yield`, and a generator can't leave its worker"):
            method(wrong)


def test_a_union_is_no_class() -> None:
    """Unlike a class with type arguments, it names none that could be made."""
    wrong: Any = Echo | None
    with pytest.raises(ConfigError, match="a role is a class or a plugin's name"):
        colocate.role(wrong)


def test_a_concurrency_is_a_number() -> None:
    declared: Callable[..., Any] = method
    with pytest.raises(DispatchError, match="concurrency='2'; it is at least 1"):
        declared(concurrency="2")(lambda self: 1)
