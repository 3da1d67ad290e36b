"""The result types of calls, by dispatch and collect."""

from typing import Any, assert_type

import colocate
from colocate import Broadcast, Call, Concat, First, Gather, OnRank, PerRank, Reduce, Resident, Role, Scatter, method


class Actor(Role):
    def __init__(self, lr: float = 1e-5) -> None:
        self.lr = lr

    @method
    def bare(self, x: int) -> str:
        return str(x)

    @method()
    def empty(self, x: int) -> str:
        return str(x)

    @method(dispatch=Broadcast())
    def broadcast(self, x: int) -> str:
        return str(x)

    @method(collect=Gather())
    def gather(self, x: int) -> str:
        return str(x)

    @method(dispatch=Scatter("x"), collect=Concat())
    def concat(self, x: list[int], scale: float = 1.0) -> list[int]:
        return x

    @method(dispatch=Scatter("x"))
    def scattered(self, x: list[int]) -> list[int]:
        return x

    @method(dispatch=Scatter("x"), collect=Reduce("mean"))
    def reduce(self, x: list[int]) -> dict[str, float]:
        return {"mean": sum(x) / len(x)}

    @method(collect=First())
    def first(self) -> int:
        return 1

    @method(dispatch=OnRank(0))
    def on_rank(self) -> int:
        return 1

    @method(dispatch=OnRank(1), collect=Gather())
    def on_rank_gathered(self) -> int:
        return 1

    @method(dispatch=PerRank("x"))
    def per_rank(self, x: list[int]) -> int:
        return 1

    @method(collect=First(), host=("x",))
    def reads(self, x: int) -> None: ...

    @method
    async def bare_async(self, x: int) -> str:
        return str(x)

    @method(collect=First(), concurrency=4)
    async def first_async(self, x: int) -> str:
        return str(x)

    @method(dispatch=OnRank(0))
    async def on_rank_async(self) -> str:
        return ""

    @method(dispatch=Scatter("x"), collect=Gather())
    async def gather_async(self, x: list[int]) -> str:
        return ""


def results(group: colocate.ColocatedGroup) -> None:
    actor = group.role("actor", Actor)
    assert_type(actor, Actor)
    assert_type(group[Actor], Actor)
    assert_type(group.role("actor"), Any)
    assert_type(group["actor"], Any)

    assert_type(actor.bare(1), list[str])
    assert_type(actor.empty(1), list[str])
    assert_type(actor.broadcast(x=1), list[str])
    assert_type(actor.gather(1), list[str])
    assert_type(actor.concat([1]), list[int])
    assert_type(actor.concat([1], scale=2.0), list[int])
    assert_type(actor.scattered([1]), list[list[int]])
    assert_type(actor.reduce([1]), dict[str, float])
    assert_type(actor.first(), int)
    assert_type(actor.on_rank(), int)
    assert_type(actor.on_rank_gathered(), list[int])
    assert_type(actor.per_rank([1]), list[int])
    assert_type(actor.bare_async(1), list[str])
    assert_type(actor.first_async(1), str)
    assert_type(actor.on_rank_async(), str)
    assert_type(actor.gather_async([1]), list[str])

    assert_type(actor.first.submit(), Call[int])
    assert_type(actor.bare.submit(1), Call[list[str]])
    assert_type(actor.first_async.submit(1), Call[str])
    assert_type(actor.first.submit().result(timeout=1.0), int)
    assert_type(actor.first.submit().exception(), BaseException | None)
    assert_type(actor.concat.keep([1]), Resident[list[int]])
    assert_type(actor.concat.keep([1]).ref, list[int])
    assert_type(actor.concat.keep([1]).fetch(), list[int])

    assert_type(actor.first.options(timeout=1.0)(), int)
    assert_type(actor.first.options(ranks=[0]).submit(), Call[int])
    assert_type(actor.bare.options(timeout=1.0, ranks=[1, 2]).keep(1), Resident[list[str]])


async def awaited(actor: Actor) -> None:
    assert_type(await actor.first.submit(), int)
    assert_type(await actor.bare_async.submit(1), list[str])


def waiting(actor: Actor) -> None:
    calls = [actor.first.submit(), actor.on_rank.submit()]
    for call in colocate.as_completed(calls):
        assert_type(call.result(), int)
    done, pending = colocate.wait(calls, timeout=1.0)
    assert_type(done, set[Call[int]])
    assert_type(pending, set[Call[int]])
    actor.first.submit().add_done_callback(lambda call: assert_type(call.result(), int))


def wider(actor: Actor) -> None:
    """A call or resident of a type is accepted for one of a wider type."""
    call: Call[object] = actor.first.submit()
    resident: Resident[object] = actor.first.keep()
    wrong: Call[str] = actor.first.submit()  # E: an int is no str
    lost: Resident[str] = actor.first.keep()  # E: an int is no str


def standalone() -> None:
    """An object made outside any worker is called in the same way."""
    actor = Actor(lr=0.1)
    assert_type(actor.first(), int)
    assert_type(actor.concat.submit([1]), Call[list[int]])
