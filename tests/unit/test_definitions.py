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

from colocate import SerializationError, connect, wire
from colocate._definitions.bundles import Bundle, ReceivedDefinitions, Table, pack_whole, unpack_whole
from colocate._definitions.ids import Definition, find, id_of, note, thing_of
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


def came(body: wire.Packed) -> wire.Packed:
    """The bytes alone, as they come to another process, which holds nothing of this one's."""
    return wire.Packed(bytes(body.data))


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class goes with all that it leads to; after that it and those are only named, whatever globals are."""
    script, table = Script(monkeypatch), Table("is given it")
    bundle = send(table, script.Batch())
    assert bundle is not None
    assert {"LIMIT", "Other", "Batch"} <= {*bundle.names}
    assert {script.Batch, script.Other} <= {*bundle.definitions.values()}
    script.names["LIMIT"] = 2
    assert send(table, [script.Batch(), script.Other, script.Batch().over]) is None


def test_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was defined anew is another one, and comes with what its globals are then; the old keeps its id."""
    script, table = Script(monkeypatch), Table("is given it")
    old = script.Batch
    send(table, old())
    exec(SCRIPT.replace("LIMIT = 1", "LIMIT = 2"), script.names)
    assert send(table, old()) is None
    bundle = send(table, script.Batch())
    assert bundle is not None
    assert bundle.names["LIMIT"] == 2
    assert script.Batch in bundle.definitions.values()
    assert old not in bundle.definitions.values()
    assert id_of(old) != id_of(script.Batch)


def test_driver_is_told_no_names_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sends its driver the class that was made in it, and no global of the script."""
    script = Script(monkeypatch)
    exec("def make():\n class Local:\n  def f(self): return LIMIT\n return Local", script.names)
    bundle = send(Table("runs it"), script.make()())
    assert bundle is not None
    assert not bundle.names
    assert len(bundle.definitions) == 1


def test_ids_do_not_outlive_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script defines keeps its ids while it exists, and no longer."""
    script = Script(monkeypatch, "def look():\n    return 1\n")
    id = id_of(script.look)
    assert note(7, script.look) == id
    assert id_of(script.look) == id
    assert thing_of(id) is thing_of(7) is script.look
    del script.names["look"]
    assert thing_of(id) is thing_of(7) is None


def test_id_of_what_is_known_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that two processes have named, each by an id of its own, is sent by both to whom asks for either."""
    script, table = Script(monkeypatch), Table("is given it")
    id_of(script.Batch)
    note(7, script.Batch)
    bundle = table.bundle([Definition(7, script.Batch)])
    assert {7, id_of(script.Batch)} <= {*bundle.definitions}
    received_definitions = ReceivedDefinitions()
    received_definitions.put((*bundle.definitions,), (*bundle.names,), bundle.body)
    received_definitions.load(1)
    assert find(7) is script.Batch


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
    body = came(wire.pack(script.Batch()))
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


def test_global_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with what names it."""
    script = Script(monkeypatch, "import threading\nLOCK = threading.Lock()\nclass A:\n def f(self): return LOCK\n")
    body = wire.pack(script.A())
    table = Table("is given it")
    with pytest.raises(SerializationError, match=r"the global 'LOCK' of __main__, which A\.f names, .*lock"):
        table.bundle(table.lacks(body.needs))


def test_global_of_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group or runtime that a role's code names isn't to be made there: it is said what to do instead."""
    with connect("local") as runtime:
        script = Script(monkeypatch, "class A:\n    def f(self):\n        return RUNTIME\n")
        script.names["RUNTIME"] = runtime
        with pytest.raises(SerializationError, match=r"the global 'RUNTIME' of __main__, which A\.f names") as caught:
            send(Table("is given it"), script.A())
    assert "it is given as an argument: a value, or a resident" in str(caught.value)
    assert "Make it inside the role" not in str(caught.value)


def test_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value with all that it needs leaves the names of the script that reads it alone."""
    script = Script(monkeypatch)
    packed = pack_whole(script.Batch(), "it")
    other = Script(monkeypatch, "LIMIT = 5")
    value, _ = unpack_whole(packed)
    assert type(value).__qualname__ == "Batch"
    assert value.over()[0] == 1
    assert value.over()[1]().back() is type(value)
    assert "Batch" not in other.names
    assert other.LIMIT == 5


def test_what_came_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come on two ways is known for as long as either of them may name it."""
    packed = pack_whole(Script(monkeypatch).Batch(), "it")
    gc.collect()
    Script(monkeypatch, "")
    came = [unpack_whole(packed) for _ in range(2)]
    assert type(came[0][0]) is type(came[1][0])
    id = id_of(type(came[0][0]))
    del came[0]
    gc.collect()
    assert find(id) is type(came[0][0])


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
