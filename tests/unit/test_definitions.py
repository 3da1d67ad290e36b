"""What a receiver of definitions is sent: once, and again only what has changed."""

from __future__ import annotations

import gc
import io
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any

import pytest

from colocate import SerializationError, connect, wire
from colocate._definitions.inbox import Inbox
from colocate._definitions.known import Definition, also, definition_of, find, known, new_id
from colocate._definitions.lots import Lot, Receiver
from colocate._definitions.names import path_of
from colocate._definitions.sources import Refused, Source, answer, other_content
from colocate._definitions.whole import pack_whole, unpack_whole
from colocate._protocol.message import Message
from colocate._protocol.questions import HeardAll
from colocate._protocol.to_worker import Define
from colocate.worker.definitions import Definitions

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


held: list[Lot] = []  # what a group does


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    held.clear()


def send(receiver: Receiver, value: Any) -> Lot | None:
    """What has to be sent before the value."""
    body = wire.pack(value)
    lacking = receiver.lacks(body.needs)
    if not lacking:
        return None
    lot = receiver.lot(lacking)
    receiver.has_got(lot)
    held.append(lot)
    return lot


def came(body: wire.Packed) -> wire.Packed:
    """The bytes alone, as they come to another process, which holds nothing of this one's."""
    return wire.Packed(bytes(body.data))


def names(lot: Lot | None) -> set[str]:
    assert lot is not None
    return {name.name for name in lot.values}


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class goes with all that it leads to; after that it and those are only named."""
    script, receiver = Script(monkeypatch), Receiver("is given it")
    lot = send(receiver, script.Batch())
    assert {"LIMIT", "Other", "Batch"} <= names(lot)
    assert lot is not None
    assert {script.Batch, script.Other} <= {each.object for each in lot.definitions.values()}
    assert send(receiver, [script.Batch(), script.Other, script.Batch().over]) is None


def test_change_is_found_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has another object now is sent again, alone; what was changed in place isn't."""
    script, receiver = Script(monkeypatch), Receiver("is given it")
    old = script.Batch
    send(receiver, old())
    script.names["LIMIT"] = 2
    lot = send(receiver, old())
    assert names(lot) == {"LIMIT"}
    assert lot is not None
    assert not lot.definitions
    script.Other.extra = 3
    assert send(receiver, old()) is None


def test_redefined_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was defined anew is another one; the old one keeps its id."""
    script, receiver = Script(monkeypatch), Receiver("is given it")
    old = script.Batch
    send(receiver, old())
    id_before = definition_of(old).id
    exec(SCRIPT, script.names)
    lot = send(receiver, old())
    assert lot is not None
    assert script.Batch in {each.object for each in lot.definitions.values()}
    assert old not in {each.object for each in lot.definitions.values()}
    assert definition_of(old).id == id_before != definition_of(script.Batch).id


def test_send_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wasn't sent after all is lacking still."""
    script, receiver = Script(monkeypatch), Receiver("is given it")
    needs = wire.pack(script.Batch()).needs
    receiver.lot(receiver.lacks(needs))
    assert receiver.lacks(needs)


def test_driver_is_told_no_names_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sends its driver the class that was made in it, and no global of the script."""
    script = Script(monkeypatch)
    exec("def make():\n class Local:\n  def f(self): return LIMIT\n return Local", script.names)
    lot = send(Receiver("runs it"), script.make()())
    assert lot is not None
    assert not lot.values
    assert len(lot.definitions) == 1


def test_ids_do_not_outlive_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script defines keeps its ids while it exists, even if nobody holds the definition, and no longer."""
    script = Script(monkeypatch, "def look():\n    return 1\n")
    body = wire.pack(script.look)
    (need,) = body.needs
    assert isinstance(need, Definition)
    id, elsewhere = need.id, new_id()
    assert known(id) is need
    also(elsewhere, script.look)
    del need, body
    for each in id, elsewhere:
        found = known(each)
        assert found is not None
        assert found.object is script.look
    del found
    assert definition_of(script.look).id == id
    del script.names["look"]
    assert known(id) is known(elsewhere) is None


def test_id_of_what_is_known_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that two processes have named, each by an id of its own, is sent by both to whom asks for them."""
    script, receiver = Script(monkeypatch), Receiver("is given it")
    second = also(new_id(), script.Batch)
    for need in second, definition_of(script.Batch), second:
        if lacking := receiver.lacks([need]):
            lot = receiver.lot(lacking)
            assert {second.id, definition_of(script.Batch).id} <= {*lot.ids}
            receiver.has_got(lot)
            inbox = Inbox(binds=False)
            inbox.put(lot.ids, lot.body, lot.names)
            inbox.load(1)
            assert find(second.id).object is script.Batch
    assert {second.id, definition_of(script.Batch).id} <= receiver.knows


def test_inner_function_is_the_very_one_while_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lambda goes by value each time, and comes back as itself."""
    script = Script(monkeypatch, "def make(x):\n return lambda y: x + y\n")
    function = script.make(1)
    body = wire.pack(function)
    assert wire.unpack(body.copy()) is function
    del function
    assert wire.unpack(body.copy())(2) == 3


class Gate:
    """What the first one to come waits at; the others pass."""

    def __init__(self) -> None:
        self._first = threading.Semaphore(1)
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        if self._first.acquire(blocking=False):
            self.reached.set()
            assert self.opened.wait(60)


# A value that can take long to rebuild: code of its class runs then.
SLOW = """
class Slow:
    def __setstate__(self, state):
        import gate_of_the_test
        gate_of_the_test.wait()
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate: Any = Gate()
    monkeypatch.setitem(sys.modules, "gate_of_the_test", gate)
    return gate  # type: ignore[no-any-return]


def test_two_threads_load_a_lot_at_once(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """A worker's lane and its transfer thread want a lot that neither has loaded: each gets the one class, whole."""
    text = SLOW + "KEPT = Slow(); KEPT.x = 1\nclass Batch:\n kept = KEPT\n def over(self): return KEPT, Batch\n"
    script = Script(monkeypatch, text)
    lot = send(Receiver("is given it"), script.Batch())
    assert lot is not None
    ids, names, lots, body = lot.ids, lot.names, lot.body.copy(), came(wire.pack(script.Batch()))
    held.clear()
    script.names.clear()
    del lot
    gc.collect()
    here = Script(monkeypatch, "")
    inbox = Inbox(binds=True)
    inbox.put(ids, lots, names)

    def want() -> Any:
        inbox.load(1)
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


def test_function_that_two_threads_make_at_once(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """A lambda that comes to a process on two ways for the first time is whole on each of them."""
    text = SLOW + "def make(x):\n slow = Slow(); slow.x = x\n return lambda y: (type(slow), x + y)\n"
    script = Script(monkeypatch, text)
    function = script.make(1)
    body = came(wire.pack(function))
    del function
    gc.collect()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(wire.unpack, body)
        assert gate.reached.wait(60)
        try:
            assert threads.submit(wire.unpack, body).result(60)(2) == (script.Slow, 3)
        finally:
            gate.opened.set()
        assert first.result(60)(3) == (script.Slow, 4)


def test_function_of_another_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lambda that came with another driver's definitions refers to the objects that were here, as those do."""
    text = "class Batch: pass\ndef make(cls): return lambda: cls\n"
    script = Script(monkeypatch, text + "class Extra:\n own = staticmethod(make(Batch))\n")
    lot, body = Receiver("another").lot(wire.pack(script.Extra()).needs), came(wire.pack(script.Extra()))
    ids, names, lots = lot.ids, lot.names, lot.body.copy()
    del lot
    script.names.clear()
    gc.collect()
    monkeypatch.setattr("colocate._definitions.known._origin", new_id())  # of another process
    here = Script(monkeypatch, text)
    inbox = Inbox(binds=True, of_another=True)
    inbox.put(ids, lots, names)
    inbox.load(1)
    assert wire.unpack(body).own() is here.Batch


def test_global_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with what names it."""
    script = Script(monkeypatch, "import threading\nLOCK = threading.Lock()\nclass A:\n def f(self): return LOCK\n")
    body = wire.pack(script.A())
    receiver = Receiver("is given it")
    with pytest.raises(SerializationError, match=r"the global 'LOCK' of __main__, which A\.f names, .*lock"):
        receiver.lot(receiver.lacks(body.needs))


def test_global_of_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group or runtime that a role's code names isn't to be made there: it is said what to do instead."""
    with connect("local") as runtime:
        script = Script(monkeypatch, "class A:\n    def f(self):\n        return RUNTIME\n")
        script.names["RUNTIME"] = runtime
        with pytest.raises(SerializationError, match=r"the global 'RUNTIME' of __main__, which A\.f names") as caught:
            send(Receiver("is given it"), script.A())
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
    id = definition_of(type(came[0][0])).id
    del came[0]
    gc.collect()
    assert find(id).object is type(came[0][0])


def test_what_leads_to_a_thing() -> None:
    """Only a name that leads to the very thing in any process is one."""
    assert path_of(io.BytesIO) == ("_io", "BytesIO")
    assert path_of(Script) == (__name__, "Script")
    assert path_of(lambda: None) is None
    assert path_of(type("Script", (), {"__module__": __name__})) is None


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


def test_other_content(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a worker has already, with other content than the driver's, is named with both files."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_of_two.py").write_text("X = 1\n")
    assert other_content({"one_of_two": ("/there.py", "0")}) is None  # the driver doesn't use its own
    import one_of_two  # type: ignore[import-not-found]  # noqa: F401

    assert other_content({"one_of_two": ("/there.py", "0")}) is not None
    monkeypatch.delitem(sys.modules, "one_of_two")


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
