"""Calls with wrong arguments, and the names of a view."""

import colocate
from colocate import Concat, First, Role, Scatter, method


class Actor(Role):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    @method(dispatch=Scatter("prompts"), collect=Concat())
    def generate(self, prompts: list[str], temperature: float = 1.0) -> list[str]:
        return prompts

    @method(collect=First())
    def step(self, *, loss: float) -> int:
        return 0

    @method(collect=First())
    async def save(self, path: str) -> None: ...

    def helper(self, x: int) -> int:
        return x


def calls(group: colocate.ColocatedGroup) -> None:
    actor = group.role("actor", Actor)
    actor.generate(["a"], 0.5)
    actor.generate(prompts=["a"], temperature=0.5)
    actor.generate()  # E: prompts is missing
    actor.generate("a")  # E: a str is no list
    actor.generate(["a"], "hot")  # E: a str is no float
    actor.generate(["a"], temprature=0.5)  # E: misspelt
    actor.generate(["a"], 0.5, 1)  # E: one too many
    actor.generate.submit([1])  # E: ints are no strs
    actor.generate.submit()  # E: prompts is missing
    actor.generate.keep(["a"], 0.5, top_k=3)  # E: no such parameter
    actor.generate.options(timeout=1.0)(1)  # E: an int is no list
    actor.generate.options(timeout=1.0).submit(1)  # E: an int is no list
    actor.generate.options(timeout="soon")  # E: a str is no float
    actor.generate.options(1.0)  # E: by name only
    actor.generate.options(deadline=1.0)  # E: no such option
    actor.generate.options(ranks=0)  # E: an int is no sequence
    actor.generate.later(["a"])  # E: no such way to call
    actor.step(loss=0.1)
    actor.step(0.1)  # E: by name only
    actor.save("x")
    actor.save(1)  # E: an int is no str
    text: str = actor.generate(["a"])  # E: a list is no str
    number: int = actor.save("x")  # E: None is no int

    actor.generat(["a"])  # E: no such method
    group[Actor].step(loss="high")  # E: a str is no float
    group.role("actor", Actor).step()  # E: loss is missing
    group.role(Actor)  # E: the name is missing
    group[1]  # E: neither a name nor a class

    # Undecorated attributes type-check; at run time a view lists the methods there are.
    actor.helper(1)
    actor.lr = 0.5
    actor.ctx.rank
    actor.helper("a")  # E: a str is no int


def syncs(group: colocate.ColocatedGroup) -> None:
    actor = group.role("actor", Actor)
    version: int = colocate.sync_weights(actor, group["rollout"], dtype="bfloat16").version
    later: colocate.Call[colocate.WeightSync] = colocate.sync_weights.submit(actor, group["rollout"], timeout=1.0)
    colocate.sync_weights(actor)  # E: the target is missing
    colocate.sync_weights(actor, actor, True)  # E: by name only
    colocate.sync_weights(actor, actor, timeout="soon")  # E: a str is no float
    colocate.sync_weights.submit(actor, actor, bucket=1.5)  # E: neither a size as text nor bytes
