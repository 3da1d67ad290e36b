"""Definitions: a class of the script is one class everywhere."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest

import colocate
from colocate import RoleError
from colocate._api.runtime import Runtime
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.waiting import wait_until

_SCRIPT = """
import enum
from colocate import Role, method

LIMIT = 1

import math

SALT = 3

class Key:
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash((self.number, SALT))

    def __eq__(self, other):
        return self.number == other.number

class Vector:
    def __init__(self, x):
        self.x, self.root = x, math.sqrt(x)

    def __reduce__(self):
        return Vector, (self.x,)

    def origin(self):
        return ORIGIN, SALT

ORIGIN = Vector(4)
TABLE = {Key(1): ORIGIN}

class Grid:
    default = {Key(2): Vector(9)}

class Other(Role):
    @method
    def echo(self, value):
        return value

class Colour(enum.Enum):
    RED = 1

class Batch:
    def __init__(self, size):
        self.size = size

    def over(self):
        return self.size > LIMIT

class Wrong(Exception):
    def __init__(self, one, other):
        super().__init__("wrong")
        self.batch = one

class Worker(Role):
    def __init__(self, batch):
        self.made = None
        self.is_one = type(batch) is Batch

    @method
    def look(self, batch, colour):
        return self.is_one, type(batch) is Batch, colour is Colour.RED, batch.over()

    @method
    def make(self, size):
        return Batch(size)

    @method
    def took(self, batches):
        return [type(batch) is Batch for batch in batches]

    @method
    def fail(self, batch):
        raise Wrong(batch, None)

    @method
    def make_class(self):
        class Made:
            pass
        self.made = Made
        return Made()

    @method
    def make_apart(self):
        names = {"__name__": "apart"}
        exec("class Held: pass\\nclass Apart:\\n    def held(self): return Held", names)
        return names["Apart"]()

    @method
    def make_functions(self, number):
        names = {"__name__": "apart", "NUMBER": number, "twice": lambda x: 2 * x}
        exec("def inner(): return lambda: twice(NUMBER)", names)
        return eval("lambda: NUMBER", names), names["inner"]

    @method
    def made_it(self, thing):
        return type(thing) is self.made

    @method
    def kind(self, thing):
        return type(thing).__name__

    @method
    def kinds(self, things):
        return [type(thing).__name__ for thing in things]

    @method
    def root(self, number):
        return {**TABLE, **Grid.default}[Key(number)].root

    @method
    def limit(self):
        return LIMIT
"""


class Definitions(ExecutorCase):
    """What is defined in the script."""

    @pytest.fixture
    def script(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The names of a script, in place of the one that runs the tests."""
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(_SCRIPT, module.__dict__)
        return module

    @smoke
    def test_class_of_the_script(self, runtime: Runtime, script: Any) -> None:
        """It is one class in the constructor, arguments, results, residents of other groups and errors."""
        with runtime.reserve(2) as pool:
            roles = {"worker": colocate.role(script.Worker, script.Batch(0))}
            first, second = (pool[i : i + 1].spawn(roles, name=f"definitions-{i}")["worker"] for i in range(2))
            assert first.look(script.Batch(2), script.Colour.RED) == [(True, True, True, True)]
            before = dict(vars(script.Batch))
            (made,) = first.make(3)
            assert type(made) is script.Batch
            assert dict(vars(script.Batch)) == before
            kept = first.make.keep(4)
            assert second.took(kept.ref) == [[True]]
            with pytest.raises(RoleError) as caught:
                first.fail(script.Batch(5))
            cause: Any = caught.value.__cause__
            assert type(cause) is script.Wrong
            assert type(cause.batch) is script.Batch

    def test_names_of_the_script(self, runtime: Runtime, script: Any) -> None:
        """A class that is defined anew is another one beside the old, and comes with the names of its code."""
        with runtime.reserve(1) as pool:
            worker = pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))})["worker"]
            old, kept = script.Batch, worker.make.keep(1)
            assert type(kept.fetch()[0]) is old
            exec("class Batch:\n    def over(self):\n        return NEW\n", script.__dict__)
            script.NEW = "new"
            assert worker.look(script.Batch(), script.Colour.RED) == [(True, True, True, "new")]
            assert worker.look(old(2), script.Colour.RED) == [(True, False, True, True)]
            assert type(kept.fetch()[0]) is old

    def test_a_name_that_is_bound_anew(self, runtime: Runtime, script: Any) -> None:
        """Code that was sent goes on with what it was, which one call warns of; new code has what it is."""
        with runtime.reserve(2) as pool:
            group = pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))})
            worker = group["worker"]
            assert worker.limit() == [1, 1]
            script.LIMIT = 2
            if not runtime._node.services.executor.in_process:
                with pytest.warns(RuntimeWarning, match="has bound LIMIT anew"):
                    assert worker.limit() == [1, 1]
                assert worker.limit() == [1, 1]
            exec("def limit(ctx):\n    return LIMIT\n", script.__dict__)
            assert group.run(script.limit) == worker.limit() == [2, 2]

    def test_functions_made_in_a_worker(self, runtime: Runtime, script: Any) -> None:
        """A function of other globals than a module's has those that it names, and the new ones of a later one."""
        with runtime.reserve(1) as pool:
            worker = pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))})["worker"]
            ((first, inner),) = worker.make_functions(5)
            assert (first(), inner()()) == (5, 10)
            ((second, _),) = worker.make_functions(6)
            assert (first(), second()) == (5, 6)

    def test_nothing_is_left_of_a_closed_group(self, runtime: Runtime, script: Any) -> None:
        """Neither the group nor a class that travelled for it, nor what its code names, while the pool is open."""
        with runtime.reserve(1) as pool:

            def use() -> list[weakref.ref[Any]]:
                with pool.spawn({"worker": colocate.role(script.Worker, script.Batch(0))}) as group:
                    worker = group["worker"]
                    worker.look(script.Batch(2), script.Colour.RED)
                    (made,), (inner,), (apart,) = worker.make(3), worker.make_class(), worker.make_apart()
                    assert worker.took([made, made]) == [[True, True]]
                    worker.kind({"it": (inner, apart)})
                    found = group, script.Worker, script.Batch, script.Colour, type(inner), type(apart), apart.held()
                return [weakref.ref(each) for each in found]

            left = use()
            script.__dict__.clear()

            def gone() -> bool:
                gc.collect()
                return not any(each() for each in left)

            wait_until(gone, "all of it is gone")
