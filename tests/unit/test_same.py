"""Two scripts define the same when it says the same, wherever it stands."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from colocate._definitions.same import same, where

HEAD = "import abc, dataclasses, enum, functools; from colocate import Reduce, Role, Scatter, method\n"


def thing(text: str) -> Any:
    """What a script has as `Thing`."""
    module = ModuleType("__main__")
    exec(compile(HEAD + text, "script.py", "exec"), module.__dict__)
    return module.Thing


WRAPS = """
def twice(times=2):
    def decorate(function):
        @functools.wraps(function)
        def call(*args):
            return [function(*args) for _ in range(times)]
        return call
    return decorate

class Mark:
    def __init__(self, function):
        functools.update_wrapper(self, function)
"""
METHOD = (
    "class Thing(Role):\n    @method(dispatch=Scatter('x'), collect=Reduce('mean'))\n    def f(self, x): return x + 1\n"
)
WRAPPED = WRAPS + "class Thing:\n    @twice(3)\n    def f(self, x): return x + 1\n"
PARTIAL = "class Thing:\n    def g(self, x): return x + 1\n    f = functools.partialmethod(g, 1)\n"
DECORATED = [  # a text, and what makes another one of it
    ("class Thing(Role):\n    @method\n    def f(self, x): return x + 1\n", "x + 1", "x + 2"),
    (METHOD, "x + 1", "x - 1"),
    (METHOD, "Scatter('x')", "Scatter('x', axis='tp')"),
    (METHOD, "'mean'", "'sum'"),
    (METHOD, "collect", "awake=('weights',), collect"),
    (WRAPPED, "x + 1", "x + 2"),
    (WRAPPED, "twice(3)", "twice(4)"),
    (WRAPS + "class Thing:\n    @Mark\n    def f(self, x): return x + 1\n", "x + 1", "x + 2"),
    ("class Thing:\n    @staticmethod\n    def _f(x): return x + 1\n", "x + 1", "x + 2"),
    ("class Thing:\n    @property\n    def _f(self): return 1\n", "return 1", "return 2"),
    (PARTIAL, "x + 1", "x + 2"),
    (PARTIAL, "(g, 1)", "(g, 2)"),
    ("class Thing:\n    def f(self, *, x=1): return x\n", "x=1", "x=2"),
    ("class Thing:\n    def f(self, x, y): return x\n", "x, y", "x, *, y"),
    ("class Thing(enum.Enum):\n    A = 1\n", "A = 1", "A = 2"),
    ("class Thing(str, enum.Enum):\n    A = 'a'\n", "'a'", "'b'"),
    (
        "@dataclasses.dataclass\nclass Thing:\n    x: list = dataclasses.field(default_factory=lambda: [1])\n",
        *("[1]", "[2]"),
    ),
    ("def decorated(x):\n    return lambda: x\nThing = decorated(1)\n", "decorated(1)", "decorated(2)"),
]

PLAIN = "class Thing:\n    SIZE = 1\n    def over(self, x=2):\n        return x > 3\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "@dataclasses.dataclass(slots=True)\nclass Thing:\n    x: int = 1\n"
        "    y: list = dataclasses.field(default_factory=list)\n",
        "class Thing(enum.Enum):\n    A = 1\n    B = 'b'\n",
        "class Base(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
        "class Thing(Base):\n    def f(self): return super().f()\n",
        "class Thing:\n    @functools.lru_cache\n    def f(self): return {1, 2}\n"
        "    @functools.cached_property\n    def p(self): return 1\n"
        "    @property\n    def q(self): return 2\n    @staticmethod\n    def s(): return 3\n"
        "    @classmethod\n    def c(cls): return cls\n",
        "def Thing(x=(1, 2)):\n    def inner(): return x\n    return inner\n",
        "class Thing:\n    class Inner:\n        def back(self): return Thing\n",
        *(text for text, _, _ in DECORATED),
    ],
)
def test_same(text: str) -> None:
    """What is said twice, at other lines and in either order of comparison."""
    one, other = thing(text), thing("\n\nmoved = 1\n" + text)
    assert one is not other
    assert same(one, other)
    assert same(other, one)


def test_imports_of_the_script() -> None:
    """What else the script imports makes no difference, though the bytecode is another one by that."""
    text = "def Thing(x):\n    import json\n    while x:\n        x = json.loads(x)\n    return json.dumps(x)\n"
    assert same(thing(text), thing("import json\n" + text))
    assert not same(thing(text), thing("import json\n" + text.replace("loads", "load")))


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("SIZE = 1", "SIZE = 2"),
        PLAIN.replace("SIZE = 1", "SIZE = 1.0"),
        PLAIN.replace("x=2", "x=1"),
        PLAIN.replace("> 3", ">= 3"),
        PLAIN.replace("> 3", "> 4"),
        PLAIN.replace("over", "above"),
        PLAIN + "    def more(self): ...\n",
        PLAIN.replace("class Thing", "class Thing(dict)"),
        PLAIN.replace("    def over", "    @staticmethod\n    def over"),
        PLAIN.replace("    def over", "    @functools.lru_cache\n    def over"),
        "class Base: X = 1\n" + PLAIN.replace("class Thing", "class Thing(Base)"),
        "def Thing(): ...\n",
    ],
)
def test_other_content(text: str) -> None:
    """Anything that may make a difference does."""
    assert not same(thing(PLAIN), thing(text))
    assert not same(thing(text), thing(PLAIN))


@pytest.mark.parametrize(("text", "was", "becomes"), DECORATED)
def test_what_decorators_have_made(text: str, was: str, becomes: str) -> None:
    """What a decorator has made of a function says what that says, and what the decorator was told."""
    assert not same(thing(text), thing(text.replace(was, becomes)))
    assert not same(thing(text.replace(was, becomes)), thing(text))


def test_where() -> None:
    """An error can say where each of them is."""
    assert where(thing(PLAIN)) == "script.py:4"
    head = "@dataclasses.dataclass\nclass Thing:\n    x: int\n"
    generated = thing(head + "    @property\n    def p(self): return self.x\n")
    assert where(generated) == "script.py:5"
    plain = thing(head)
    assert where(plain, [generated, int]) == "script.py"
    assert where(plain, file="here.py") == "here.py"
    assert where(plain, [int]) == "some line of its script"
    assert where(thing("import typing\nclass Thing(typing.NamedTuple):\n    x: int\n"), [generated]) == "script.py"
