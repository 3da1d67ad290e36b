"""Two scripts define the same when it says the same, wherever it stands."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from colocate._definitions.same import same, where

HEAD = "import abc, dataclasses, enum, functools\n"


def thing(text: str) -> Any:
    """What a script has as `Thing`."""
    module = ModuleType("__main__")
    exec(compile(HEAD + text, "script.py", "exec"), module.__dict__)
    return module.Thing


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
    ],
)
def test_same(text: str) -> None:
    """What is said twice, at other lines and in either order of comparison."""
    one, other = thing(text), thing("\n\nmoved = 1\n" + text)
    assert one is not other
    assert same(one, other)
    assert same(other, one)


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
