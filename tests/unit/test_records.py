"""Records are made anew where something in them changes; none is itself changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from typing import Any

import attrs
import pytest

from colocate._values.leaves import map_leaves
from colocate._values.leaving import CopyError, Records


@dataclasses.dataclass(eq=False)
class Node:
    value: Any
    parent: Any = None
    children: list[Any] = dataclasses.field(default_factory=list)


@attrs.define(eq=False)
class Slots:
    value: Any
    unset: Any = attrs.field(init=False)


@dataclasses.dataclass
class Failure(Exception):
    value: Any


class Doubled:
    """Numbers become twice what they are, in records, too; `looks` counts how often it was asked."""

    def __init__(self, by_itself: Any = None) -> None:
        self.records = Records(by_itself)
        self.looks = 0

    def __call__(self, value: Any) -> Any:
        return map_leaves(value, self.leaf)

    def leaf(self, item: Any) -> Any:
        self.looks += 1
        if isinstance(item, int):
            return 2 * item
        if not isinstance(item, (Node, Slots, Failure, UserDict)):
            return item
        return self.records.of(item, functools.partial(map_leaves, leaf=self.leaf))


def test_what_changes() -> None:
    """It alone is made anew, once, with all that it has besides; what nothing changes in stays."""
    shared, plain = Node(1), Node("text")
    slots = Slots([shared, shared, plain])
    shared.extra = "kept"  # type: ignore[attr-defined]
    found = Doubled()([slots, shared, plain, UserDict(a=3)])
    assert found[1].value == 2
    assert found[1].extra == "kept"
    assert found[0].value == [found[1], found[1], plain]
    assert not hasattr(found[0], "unset")
    assert found[2] is plain
    assert found[3] == {"a": 6}
    assert (slots.value, shared.value) == ([shared, shared, plain], 1)


@pytest.mark.parametrize("by_itself", [None, copy.copy])
def test_loops(by_itself: Any) -> None:
    """What leads to itself does so again, wherever it is met first; where nothing changes in it, it stays."""
    root = Node(1)
    root.children = [Node(2, root), Node("text", root)]
    own: Any = UserDict(n=1)
    own["self"] = own
    for first in (root, root.children[0], root.children[1]):
        doubled = Doubled(by_itself)
        found, again = doubled([first, root])
        made = found if first is root else found.parent
        assert made is again
        assert made is not root
        assert (made.value, made.children[0].value, made.children[1].value) == (2, 4, "text")
        assert all(child.parent is made for child in made.children)
    found = Doubled(by_itself)(own)
    assert (found["n"], found["self"] is found) == (2, True)
    assert (root.value, [child.parent for child in root.children]) == (1, [root, root])
    assert (own["n"], own["self"] is own) == (1, True)
    still = Node("text")
    still.parent = [Node("text", still)]
    assert Doubled(by_itself)(still) is still


@pytest.mark.parametrize("value", [1, "text"])
def test_many_that_lead_back(value: Any) -> None:
    """Each is looked at twice at most."""
    root = Node(value)
    root.children = [Node(value, root, [Node(value, root)]) for _ in range(300)]
    doubled = Doubled()
    found = doubled(root)
    assert doubled.looks <= 2 * 4 * 601
    assert (found is root) is (value == "text")
    assert all(child.parent is found and child.children[0].parent is found for child in found.children)


def test_what_can_not_be_copied() -> None:
    """It stays as it is, and who has asked is told; some can be in their own way."""
    failure = Failure(1)
    doubled = Doubled()
    with pytest.raises(CopyError, match=r"not safe"):
        doubled(failure)
    assert doubled(failure) is failure
    assert failure.value == 1
    found = Doubled(copy.copy)(failure)
    assert (type(found), found.value, failure.value) == (Failure, 2, 1)


def test_what_is_falsy() -> None:
    """A copy counts, also where it is empty."""

    class Empty(UserDict[str, Any]):
        def __bool__(self) -> bool:
            return False

    value = Empty(n=1)
    value["self"] = value
    found = Doubled()(value)
    assert (found["n"], found["self"] is found) == (2, True)
