"""Methods whose rows end one by one."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import torch

import colocate
from colocate import Call, ColocateError, Role, RowStream, Scatter, method


class Env(Role):
    @method(rows="prompt", concurrency=4)
    async def play(self, prompt: str, turns: int = 3, *, tools: bool = False) -> dict[str, float]:
        return {}

    @method(rows="row")
    async def tensor(self, row: torch.Tensor) -> int:
        return 1

    @method(dispatch=Scatter("prompts"))
    def generate(self, prompts: list[str], samples: int = 1) -> Iterator[tuple[int, float]]:
        yield 0, 1.0

    @method(dispatch=Scatter("prompts"))
    async def later(self, prompts: list[str]) -> AsyncIterator[tuple[int, float]]:
        yield 0, 1.0

    @method(dispatch=Scatter("prompts"))
    def plain(self, prompts: list[str]) -> list[str]:
        return prompts


def calls(group: colocate.ColocatedGroup) -> None:
    env = group.role("env", Env)
    assert_type(env.play(["a"]), list[dict[str, float]])
    assert_type(env.play(["a"], 2, tools=True), list[dict[str, float]])
    assert_type(env.play.submit(["a"]), Call[list[dict[str, float]]])
    assert_type(env.play.stream(["a"]), RowStream[dict[str, float]])
    assert_type(env.play.options(retry=1, sticky=len, timeout=1.0)(["a"]), list[dict[str, float]])
    assert_type(env.play.options(on_error="return")(["a"]), list[dict[str, float] | ColocateError])
    assert_type(env.tensor(torch.zeros(3, 2)), list[int])
    assert_type(env.generate(["a"]), list[float])
    assert_type(env.generate.stream(["a"], samples=2), RowStream[float])
    assert_type(env.later(["a"]), list[float])
    assert_type(env.later.stream(["a"]), RowStream[float])
    assert_type(env.plain(["a"]), list[list[str]])
    for index, value in env.play.stream(["a"]):
        assert_type(index, int)
        assert_type(value, dict[str, float])
    with env.generate.stream(["a"]) as rows:
        assert_type(next(rows), tuple[int, float])
    env.play()  # E: the rows are missing
    env.play([1])  # E: ints are no strs
    env.play(["a"], "2")  # E: a str is no int
    env.play(["a"], tool=True)  # E: misspelt
    env.play.stream([1])  # E: ints are no strs
    env.generate.stream("a")  # E: a str is no list
    env.play.options(on_error="ignore")  # E: no such mode
    env.play.options(retry="twice")  # E: a str is no int
    env.plain.stream(["a"])  # E: plain yields no rows


async def awaits(env: Env) -> Any:
    async for index, value in env.later.stream(["a"]):
        assert_type(index, int)
        assert_type(value, float)


class Declared(Role):
    @method(rows=1)  # E: the name of a parameter
    async def number(self, row: int) -> int:
        return row

    @method(rows="row")  # E: an async def
    def sync(self, row: int) -> int:
        return row

    @method(rows="row", dispatch=Scatter("row"))  # E: without a dispatch
    async def scattered(self, row: int) -> int:
        return row
