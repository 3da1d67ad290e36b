"""A resident is refused in place of its value; `.ref` is accepted."""

from typing import assert_type

import colocate
from colocate import Concat, First, Resident, ResidentSpec, Role, Scatter, method


class Actor(Role):
    @method(dispatch=Scatter("prompts"), collect=Concat())
    def generate(self, prompts: list[str]) -> list[str]:
        return prompts


class Critic(Role):
    @method(dispatch=Scatter("texts"), collect=Concat())
    def value(self, texts: list[str], scale: float = 1.0) -> list[float]:
        return [scale for _ in texts]

    @method(collect=First())
    def count(self, batch: dict[str, list[str]]) -> int:
        return len(batch)


def chain(group: colocate.ColocatedGroup) -> None:
    actor, critic = group.role("actor", Actor), group.role("critic", Critic)
    kept = actor.generate.keep(["a"])
    assert_type(kept, Resident[list[str]])
    assert_type(kept.ref, list[str])
    assert_type(kept.spec, ResidentSpec)
    assert_type(critic.value(kept.ref), list[float])
    assert_type(critic.value.keep(texts=kept.ref), Resident[list[float]])
    critic.count({"texts": kept.ref})
    critic.value(kept)  # E: a resident is no value
    critic.value.submit(kept)  # E: a resident is no value
    critic.value.keep(texts=kept)  # E: a resident is no value
    critic.count({"texts": kept})  # E: a resident is no value
    critic.value(actor.generate.submit(["a"]))  # E: nor is a call
    actor.generate(critic.value.keep(["a"]).ref)  # E: floats are no strs
    kept.value  # E: no such attribute
    kept.ref = ["b"]  # E: .ref can't be set
    with kept as same:
        assert_type(same, Resident[list[str]])
    with group.scope():
        actor.generate.keep(["a"])
    kept.free()
