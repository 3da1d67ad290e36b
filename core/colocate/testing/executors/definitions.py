"""Tests of sending values, and of classes of the driver's script, which are the same class on all workers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.probes.plain import Echo

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
    """Tests of classes that are defined in the driver's script."""

    @pytest.fixture
    def script(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A module that replaces `__main__`, as if it were the driver's script."""
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(_SCRIPT, module.__dict__)
        return module

    @smoke
    def test_class_of_the_script(self, runtime: Runtime, script: Any) -> None:
        """A class of the script stays the same class in arguments, results, residents and errors."""
        with runtime.reserve(2) as pool:
            roles = {"worker": colocate.role(script.Worker, script.Batch(0))}
            first, second = (pool[i : i + 1].spawn(roles, name=f"definitions-{i}")["worker"] for i in range(2))
            assert first.look(script.Batch(2), script.Colour.RED) == [(True, True, True, True)]
            before = dict(vars(script.Batch))
            (batch,) = first.make(3)
            assert type(batch) is script.Batch
            assert dict(vars(script.Batch)) == before
            resident = first.make.keep(4)
            assert second.took(resident.ref) == [[True]]
            (one,), (other,) = first.make_class(), second.make_class()
            assert type(one) is not type(other)  # Each worker has defined its own class.
            assert [*first.made_it(one), *first.made_it(other), *second.made_it(other)] == [True, False, True]
            with pytest.raises(RoleError) as caught:
                first.fail(script.Batch(5))
            cause: Any = caught.value.__cause__
            assert type(cause) is script.Wrong
            assert type(cause.batch) is script.Batch


class Serialization(ExecutorCase):
    """Tests of sending values of all kinds and sizes."""

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            2**100,
            float("inf"),
            "text \u2713",
            b"\x00\xff",
            bytearray(b"x" * 100_000),
            {1, 2},
            frozenset({"a"}),
            (1, (2, [3, {"four": None}])),
            {("a", 1): {"b": ...}},
            range(3),
            ValueError("as a value"),
        ],
        ids=repr,
    )
    def test_values(self, pair: ColocatedGroup, value: Any) -> None:
        """Every value that Python can pickle can be sent to a role and back."""
        back = pair.role("echo", Echo).first(value)
        assert repr(back) == repr(value)
        assert type(back) is type(value)

    def test_large(self, pair: ColocatedGroup) -> None:
        """Several calls with arguments and results of many megabytes can run at once."""
        echo = pair.role("echo", Echo)
        blocks = [bytes([index]) * 5_000_000 for index in range(4)]
        calls = [echo.first.submit(block) for block in blocks]
        assert [call.result() for call in calls] == blocks
