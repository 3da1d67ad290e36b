"""What a receiver of definitions is sent: once, and again only what has changed."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from colocate import wire
from colocate._definitions.bundles import Bundle, ReceivedDefinitions, Table
from colocate._definitions.sources import Refused, Source, answer
from colocate._protocol.message import Message
from colocate._protocol.questions import HeardAll
from colocate._protocol.to_worker import Define
from colocate.worker.serving.definitions import Definitions

SCRIPT = """
LIMIT = 1

class Batch:
    def over(self):
        return LIMIT, Other

class Other:
    def back(self):
        return Batch
"""


class Script:
    """The names of a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str = SCRIPT) -> None:
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        self.names: dict[str, Any] = module.__dict__
        exec(text, self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


held: list[Bundle] = []  # what a group does


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    held.clear()


def send(table: Table, value: Any) -> Bundle | None:
    """What has to be sent before the value."""
    lacking = table.lacks(wire.pack(value).needs)
    if not lacking:
        return None
    bundle = table.bundle(lacking)
    table.has_got(bundle)
    held.append(bundle)
    return bundle


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class goes with all that it leads to; after that it and those are only named, whatever globals are."""
    script, table = Script(monkeypatch), Table("is given it")
    bundle = send(table, script.Batch())
    assert bundle is not None
    assert {"LIMIT", "Other", "Batch"} <= {*bundle.names}
    assert {script.Batch, script.Other} <= {*bundle.definitions.values()}
    script.names["LIMIT"] = 2
    assert send(table, [script.Batch(), script.Other, script.Batch().over]) is None


def test_driver_is_told_no_names_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sends its driver the class that was made in it, and no global of the script."""
    script = Script(monkeypatch)
    exec("def make():\n class Local:\n  def f(self): return LIMIT\n return Local", script.names)
    bundle = send(Table("runs it"), script.make()())
    assert bundle is not None
    assert not bundle.names
    assert len(bundle.definitions) == 1


# A value that takes long to rebuild: code of its class runs then.
SLOW = """
class Slow:
    def __setstate__(self, state):
        import gate_of_the_test
        gate_of_the_test.reached.set()
        assert gate_of_the_test.opened.wait(60)
"""


def test_two_threads_load_a_bundle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's lane and its transfer thread want one that neither has loaded: each gets the one class, whole."""
    gate: Any = SimpleNamespace(reached=threading.Event(), opened=threading.Event())
    monkeypatch.setitem(sys.modules, "gate_of_the_test", gate)
    text = SLOW + "KEPT = Slow(); KEPT.x = 1\nclass Batch:\n kept = KEPT\n def over(self): return KEPT, Batch\n"
    script = Script(monkeypatch, text)
    bundle = send(Table("is given it"), script.Batch())
    assert bundle is not None
    ids, names, packed = (*bundle.definitions,), (*bundle.names,), bundle.body.copy()
    # The bytes alone, as they come to another process, which holds nothing of this one's.
    body = wire.Packed(bytes(wire.pack(script.Batch()).data))
    held.clear()
    script.names.clear()
    del bundle
    gc.collect()
    here = Script(monkeypatch, "")
    received_definitions = ReceivedDefinitions()
    received_definitions.put(ids, names, packed)

    def want() -> Any:
        received_definitions.load(1)
        value = wire.unpack(body)
        return value, value.kept, value.over()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(want)
        assert gate.reached.wait(60)
        second = threads.submit(want)
        assert not wait([second], timeout=0.3).done  # it gets nothing that isn't whole
        gate.opened.set()
        (one, its, seen), (other, others, seen_there) = first.result(60), second.result(60)
    assert type(one) is type(other) is here.Batch
    assert its is others is here.KEPT
    assert vars(here.KEPT) == {}  # its class has set the state as it wants to
    assert seen == seen_there == (here.KEPT, here.Batch)


def test_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's source comes with those that it imports in turn, wherever its imports stand; others have words."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "first_of_all.py").write_text("import json, attrs\ndef f():\n    from pack_of_two import inner\n")
    (tmp_path / "pack_of_two").mkdir()
    (tmp_path / "pack_of_two" / "__init__.py").write_text("")
    (tmp_path / "pack_of_two" / "inner.py").write_text("from . import other\n")
    (tmp_path / "pack_of_two" / "other.py").write_text("")
    found = answer("first_of_all")
    assert list(found) == ["first_of_all", "pack_of_two", "pack_of_two.inner", "pack_of_two.other"]
    package = found["pack_of_two"]
    assert isinstance(package, Source)
    assert package.package
    assert answer("attrs") == answer("json") == answer("there_is_none") == {}
    (tmp_path / "compiled_one.so").write_bytes(b"")
    (extension,) = answer("compiled_one").values()
    assert isinstance(extension, Refused)
    assert "compiled_one.so, which isn't Python source" in extension.why
    monkeypatch.setattr("colocate._definitions.sources.LIMIT_BYTES", 1 << 20)
    (tmp_path / "large_one.py").write_text(f"# {'x' * (1 << 20)}\n")
    (large,) = answer("large_one").values()
    assert isinstance(large, Refused)
    assert "more than 1 MiB of source" in large.why


def test_what_a_peer_is_sent_was_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has heard that its driver has a class of its own before another worker may ask for that, whoever was the
    first to send one."""
    script = Script(monkeypatch)
    said: list[type[Message]] = []
    definitions = Definitions(
        lambda question: said.append(type(question)), lambda message, body: said.append(type(message)), in_process=False
    )
    body = wire.pack(script.Batch())
    definitions.tell(body)
    assert said == [Define]
    definitions.tell(body, wait=True)
    definitions.tell(body, wait=True)
    definitions.tell(wire.pack(1), wait=True)
    assert said == [Define, HeardAll]
    definitions.tell(wire.pack(type("Made", (), {})()), wait=True)
    assert said == [Define, HeardAll] * 2
