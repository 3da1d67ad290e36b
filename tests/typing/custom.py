"""Dispatches and collects of the user's own."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, assert_type

import colocate
from colocate import Broadcast, Call, Collect, Concat, Dispatch, First, Gather, OnRank, Ranks, Reduce, Role, Scatter, method

T = TypeVar("T", covariant=True)


class RoundRobin(Dispatch):
    def split(self, arguments: Mapping[str, Any], ranks: Ranks) -> Sequence[Mapping[str, Any]]:
        return [arguments] * ranks.world_size


class Longest(Collect):
    def join(self, results: Sequence[Any], ranks: Ranks) -> Any:
        return max(results, key=len)


class Widest(Collect[int]):
    def join(self, results: Sequence[str], ranks: Ranks) -> int:
        return max(map(len, results))


class Best(Collect[T]):
    def join(self, results: Sequence[T], ranks: Ranks) -> T:
        return results[0]


class Shape(First):
    def __init__(self, places: int) -> None:
        super().__init__()


class WorkerBroken(Collect[int]):
    def join(self, results: Sequence[Any], ranks: Ranks) -> str:  # E: the collect is of int
        return ""


class Wrong(Dispatch):
    def split(self, arguments: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:  # E: ranks is missing
        return []


class Actor(Role):
    @method(dispatch=RoundRobin())
    def own_dispatch(self, x: int) -> int:
        return x

    @method(dispatch=RoundRobin(), collect=Gather())
    def own_gathered(self, x: int) -> int:
        return x

    @method(dispatch=RoundRobin(), collect=First())
    def own_first(self, x: int) -> int:
        return x

    @method(collect=Longest())
    def own_collect(self, x: int) -> str:
        return ""

    @method(dispatch=RoundRobin(), collect=Longest())
    async def own_both(self, x: int) -> str:
        return ""

    @method(collect=Widest())
    def own_typed(self, x: int) -> str:
        return ""

    @method(dispatch=Scatter("x"), collect=Widest(), concurrency=2)
    async def own_typed_async(self, x: list[int]) -> str:
        return ""

    @method(collect=Best[dict[str, int]]())
    def own_generic(self, x: int) -> dict[str, int]:
        return {}

    @method(collect=Shape(1))
    def own_like_first(self, x: int) -> bytes:
        return b""

    @method(dispatch=OnRank(0), collect=Widest())
    def one_typed(self, x: int) -> str:
        return ""

    @method(dispatch=OnRank(0), collect=Longest())
    def one(self, x: int) -> str:
        return ""


def calls(actor: Actor) -> None:
    assert_type(actor.own_dispatch(1), list[int])
    assert_type(actor.own_gathered(1), list[int])
    assert_type(actor.own_first(1), int)
    assert_type(actor.own_collect(1), Any)
    assert_type(actor.own_both(1), Any)
    assert_type(actor.one(1), Any)
    actor.own_collect("a")  # E: a str is no int
    assert_type(actor.own_typed(1), int)
    assert_type(actor.own_typed.submit(1), Call[int])
    assert_type(actor.own_typed.keep(x=1).fetch(), int)
    assert_type(actor.own_typed.options(timeout=1)(1), int)
    assert_type(actor.own_typed_async([1]), int)
    assert_type(actor.own_generic(1), dict[str, int])
    assert_type(actor.own_like_first(1), bytes)
    assert_type(actor.one_typed(1), int)
    actor.own_typed("a")  # E: a str is no int


class Declared(Role):
    @method(dispatch=Broadcast)  # E: the parentheses are missing
    def class_as_dispatch(self) -> None: ...

    @method(collect=Concat)  # E: the parentheses are missing
    def class_as_collect(self) -> None: ...

    @method(collect=Reduce("median"))  # E: no such operation
    def unknown_operation(self) -> float:
        return 0.0

    @method(dispatch=Scatter("x", pad="always"))  # E: no such padding
    def unknown_padding(self, x: list[int]) -> None: ...

    @method(collect=Broadcast())  # E: a dispatch is no collect
    def swapped(self) -> None: ...

    @method(concurency=2)  # E: misspelt
    async def misspelt(self) -> None: ...


ranks: Ranks
colocate.register_batch(list, length=len, split=lambda value, sizes: [value], concat=lambda parts: parts[0])
colocate.register_batch(list, length=len)  # E: split and concat are missing
