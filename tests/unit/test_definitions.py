"""Definitions of a script that reach a worker on two ways at once, or are passed on to another worker."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from colocate import wire
from colocate._definitions.bundles import ReceivedDefinitions, Table
from colocate._protocol.message import Message
from colocate._protocol.questions import Flush
from colocate._protocol.to_worker import Define
from colocate.errors import SerializationError
from colocate.worker.serving.definitions import Definitions


class Script:
    """A script, with its names as attributes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        self.names: dict[str, Any] = module.__dict__
        exec(text, self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


# A value that takes long to rebuild, in code of its class.
SLOW = """
class Slow:
    def __setstate__(self, state):
        import gate_of_the_test
        gate_of_the_test.reached.set()
        assert gate_of_the_test.opened.wait(60)
"""


def test_two_threads_load_a_bundle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that load a bundle at once get the same class, complete."""
    gate: Any = SimpleNamespace(reached=threading.Event(), opened=threading.Event())
    monkeypatch.setitem(sys.modules, "gate_of_the_test", gate)
    text = SLOW + "KEPT = Slow(); KEPT.x = 1\nclass Batch:\n kept = KEPT\n def over(self): return KEPT, Batch\n"
    script = Script(monkeypatch, text)
    table = Table("is given it")
    bundle = table.create_bundle(table.list_lacking(wire.pack(script.Batch()).needs))
    ids, names, packed = (*bundle.definitions,), (*bundle.names,), bundle.body.copy()
    # Another process gets the bytes alone, and none of this one's objects.
    body = wire.Packed(bytes(wire.pack(script.Batch()).data))
    script.names.clear()
    del bundle
    gc.collect()
    here = Script(monkeypatch, "")
    received_definitions = ReceivedDefinitions()
    received_definitions.add_bundle(ids, names, packed)

    def want() -> Any:
        received_definitions.load_bundles(1)
        value = wire.unpack(body)
        return value, value.kept, value.over()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(want)
        assert gate.reached.wait(60)
        second = threads.submit(want)
        assert not wait([second], timeout=0.3).done  # The second thread gets no incomplete class.
        gate.opened.set()
        (one, its, seen), (other, others, seen_there) = first.result(60), second.result(60)
    assert type(one) is type(other) is here.Batch
    assert its is others is here.KEPT
    assert vars(here.KEPT) == {}  # The class's own `__setstate__` has set no state.
    assert seen == seen_there == (here.KEPT, here.Batch)


def test_driver_is_notified_before_peer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker notifies its driver of a class, and waits for the answer, before a peer may ask for the class."""
    script = Script(monkeypatch, "class Batch:\n    pass\n")
    said: list[type[Message]] = []
    definitions = Definitions(
        lambda question: said.append(type(question)), lambda message, body: said.append(type(message)), in_process=False
    )
    body = wire.pack(script.Batch())
    definitions.send_lacking(body)
    assert said == [Define]
    definitions.send_lacking(body, wait=True)
    definitions.send_lacking(body, wait=True)
    definitions.send_lacking(wire.pack(1), wait=True)
    assert said == [Define, Flush]
    definitions.send_lacking(wire.pack(type("Made", (), {})()), wait=True)
    assert said == [Define, Flush] * 2


@pytest.mark.skipif(sys.version_info < (3, 12), reason="such statements are Python 3.12's")
@pytest.mark.parametrize("text", ["type Tree[T] = T | list[Tree[T]]", "class Tree[T: Tree]: pass"])
def test_self_referring_definition_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A definition that refers to itself is refused when it is sent: no worker could make it."""
    script = Script(monkeypatch, text)
    definitions = Definitions(lambda question: None, lambda message, body: None, in_process=False)
    with pytest.raises(SerializationError, match=r"Tree\S* is made of leads to itself"):
        definitions.send_lacking(wire.pack(script.Tree))
