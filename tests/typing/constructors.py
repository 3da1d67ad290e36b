"""`colocate.role` checks constructor arguments; `on` places a role."""

from typing import Any, assert_type

import colocate
from colocate import First, Role, RoleSpec, method


class Actor(Role):
    def __init__(self, lr: float, *, layers: int = 2, name: str | None = None) -> None:
        self.lr = lr

    @method(collect=First())
    def step(self) -> int:
        return 0


class Plain:
    @method(collect=First())
    def step(self) -> int:
        return colocate.context().rank


def declare(pool: colocate.Pool) -> None:
    assert_type(colocate.role(Actor, 0.1), RoleSpec[Actor])
    assert_type(colocate.role(Actor, lr=0.1, layers=4), RoleSpec[Actor])
    assert_type(colocate.role(Actor, 0.1).on(slots=[0]), RoleSpec[Actor])
    assert_type(colocate.role(Plain), RoleSpec[Plain])
    assert_type(colocate.role("acme.reward", threshold=0.5), RoleSpec[Any])
    colocate.role(Actor)  # E: lr is missing
    colocate.role(Actor, "fast")  # E: a str is no float
    colocate.role(Actor, 0.1, 2)  # E: layers by name only
    colocate.role(Actor, 0.1, layer=2)  # E: misspelt
    colocate.role(Actor, lr=0.1, name=3)  # E: an int is no str
    colocate.role(Plain, 1)  # E: Plain takes no arguments
    colocate.role("acme.reward", 0.5)  # E: by name only
    colocate.role()  # E: the class is missing
    colocate.role(Actor, 0.1).on(slots=0)  # E: an int is no sequence
    colocate.role(Actor, 0.1).on(slot=[0])  # E: misspelt
    colocate.role(Actor, 0.1).on(mesh={"dp": 2, "tp": 4})
    colocate.role(Actor, 0.1).on(mesh={"train": {"dp": 8}, "infer": {"dp": 2, "tp": 4}})
    colocate.role(Actor, 0.1).on(mesh={"dp": "all"})  # E: a size is a number

    group = pool.spawn({"actor": colocate.role(Actor, 0.1), "plain": colocate.role(Plain)}, name="policy")
    assert_type(group, colocate.ColocatedGroup)
    pool.spawn({"actor": Actor})  # E: wrap the class: colocate.role(...)
    pool.spawn({"actor": Actor(0.1)})  # E: wrap the class: colocate.role(...)
    assert_type(pool[0:2].spawn({"actor": colocate.role(Actor, 0.1)}), colocate.ColocatedGroup)
    assert_type(colocate.spawn({"actor": colocate.role(Actor, 0.1)}, slots=2, processes=True), colocate.ColocatedGroup)
    colocate.spawn({"actor": Actor})  # E: wrap the class: colocate.role(...)
    colocate.spawn({"actor": colocate.role(Actor, 0.1)}, slots="2")  # E: a number


def blocks() -> None:
    with colocate.connect("local", seed=1, processes=True) as runtime:
        assert_type(runtime, colocate.Runtime)
        with runtime.reserve(slots=2, timeout=1.0) as pool:
            assert_type(pool, colocate.Pool)
            with pool.spawn({"plain": colocate.role(Plain)}) as group:
                assert_type(group, colocate.ColocatedGroup)
                assert_type(group[Plain].step(), int)
        runtime.reserve(slots="2")  # E: a str is no int
