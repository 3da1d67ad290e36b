"""Messages: each travels as a head of plain builtins, whose places are known in one package only."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest

from colocate._protocol import commands, message, messages, parts
from colocate._protocol.message import Message, read

CORE = Path(message.__file__).parents[1]
KINDS = [
    kind
    for module in (messages, parts, commands)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
]


NESTED = {
    (messages.Batch, "calls"): [(messages.Call(1, "role", "method", 2, 3, True, (4,)), (0, 5, (1, 2)))],
    (messages.Failed, "failure"): messages.Failure("type", "text", "trace", True, False, "role", None),
    (messages.Fetched, "failure"): messages.Failure("type", "text", "trace", True, False, None, "an argument"),
    (messages.Ask, "question"): messages.Missing(7),
}


def fields(kind: Any) -> list[str]:
    return [field.name for field in attrs.fields(kind)]


def example(kind: Any) -> Message:
    """One, each of whose fields has another value."""
    made: Message = kind(**{name: NESTED.get((kind, name), f"{name} of {kind.__name__}") for name in fields(kind)})
    return made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_arrives_as_it_was_sent(kind: type[Message]) -> None:
    """What travels needs nothing of colocate to be unpickled."""
    sent = example(kind)
    data = pickle.dumps(sent.head())
    assert b"colocate" not in data
    arrived = read(pickle.loads(data))
    assert type(arrived) is kind
    assert arrived == sent


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_field_is_described(kind: type[Message]) -> None:
    assert kind.__doc__ is not None
    assert [name for name in fields(kind) if f"        {name}: " not in kind.__doc__] == []


def test_nobody_else_reads_a_head_by_its_places() -> None:
    """Outside the package a head is handed on whole, or read."""
    found = []
    for path in CORE.rglob("*.py"):
        if "_protocol" in path.parts or "wire" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            taken = node.value if isinstance(node, ast.Subscript | ast.Starred) else None
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                taken = node.value
            if isinstance(taken, ast.Name) and taken.id == "head":
                found.append(f"{path.relative_to(CORE)}:{taken.lineno}")
    assert found == []
