"""Messages travel as heads of plain builtins, and only `_protocol` and `wire` read a head by its places."""

from __future__ import annotations

import pickle
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

from colocate._protocol import commands, from_worker, message, parts, questions, to_worker
from colocate._protocol.message import Message, decode_head
from colocate.features import FEATURES
from colocate.features.checkpoints import messages as of_checkpoints
from colocate.features.memory import messages as of_memory
from colocate.features.process_groups import messages as of_groups
from colocate.features.rows import messages as of_rows
from colocate_ray import terms

CORE = Path(message.__file__).parents[1]
EXECUTORS = CORE.parents[1] / "executors"
OF_FEATURES = [import_module(f"colocate.features.{name}.messages") for name, each in FEATURES.items() if each.messages]
KINDS = [
    kind
    for module in (to_worker, from_worker, questions, parts, commands, terms, *OF_FEATURES)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
]


NESTED = {
    (to_worker.Batch, "calls"): [(to_worker.Call(1, "role", "method", 2, 3, True, (4,)), (0, 5, (1, 2)))],
    (from_worker.Failed, "failure"): from_worker.Failure("type", "text", "trace", True, False, "role", None),
    (of_rows.RowEnded, "failure"): from_worker.Failure("type", "text", "trace", True, False, "role", None),
    (of_groups.GroupsDropped, "failure"): from_worker.Failure("type", "text", "trace", True, False, "role", None),
    (of_memory.LedgerReport, "ledger"): of_memory.Ledger(
        *({"role": {("gradients", "cpu"): 1}}, {"role": 2}, {"role": 6}, {"role": {"why": 8}}, ("role",), {"empty": 3}),
        *({"used": 5}, {"role.method": 7}),
    ),
    (from_worker.Fetched, "failure"): from_worker.Failure("type", "text", "trace", True, False, None, "an argument"),
    (of_checkpoints.SavedState, "failure"): from_worker.Failure("type", "text", "trace", True, False, "role", None),
    (from_worker.Ask, "question"): questions.MissingParts(7),
}


def fields(kind: Any) -> list[str]:
    return [field.name for field in attrs.fields(kind)]


def example(kind: Any) -> Message:
    """Make a message whose fields all have different values."""
    made: Message = kind(**{name: NESTED.get((kind, name), f"{name} of {kind.__name__}") for name in fields(kind)})
    return made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_messages_arrive_equal(kind: type[Message]) -> None:
    """A message pickles without colocate's classes, and arrives equal."""
    sent = example(kind)
    data = pickle.dumps(sent.head())
    assert b"colocate" not in data
    arrived = decode_head(pickle.loads(data))
    assert type(arrived) is kind
    assert arrived == sent


# Ways to read a head by its places: an index, a star, an unpacking.
BY_PLACES = re.compile(r"\b(head|head\(\)|message)\[|\*(head|message)\b(?!\.)|^[^\"]*, .* = (head|message)$")


@pytest.mark.parametrize("folder", [CORE, EXECUTORS], ids=lambda folder: folder.name)
def test_heads_are_indexed_only_by_protocol(folder: Path) -> None:
    """Code outside `_protocol` and `wire` never indexes or unpacks a head."""
    assert all(map(BY_PLACES.search, ["head[0]", "x.head()[1:]", "what, number = head", "f(*message)"]))
    found = [
        f"{path.relative_to(folder)}:{number}"
        for path in sorted(folder.rglob("*.py"))
        if "_protocol" not in path.parts and "wire" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BY_PLACES.search(line)
    ]
    assert found == []


def test_reimported_module_replaces_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module imported again replaces its messages; a message of another module can't have the same name."""
    monkeypatch.setattr(message, "_kinds", dict(message._kinds))

    def imported(name: str) -> type[Message]:
        return message.message(type("Interrupted", (Message,), {"__module__": name, "__annotations__": {"seq": int}}))

    imported("first")
    again = imported("first")
    assert type(decode_head(again(3).head())) is again  # type: ignore[call-arg]
    with pytest.raises(AssertionError, match="two messages are called Interrupted"):
        imported("second")
