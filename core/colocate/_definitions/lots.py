"""Lots: definitions that travel together, and what each receiver has been sent of them.

Definitions that are met together go in one pickle, because classes name each other. With them go the values of the
globals that their code names, as they are then. A change is a name that has another object now; that is found by
identity, by looking at the names alone.
"""

from __future__ import annotations

import builtins
import io
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from colocate._definitions import known
from colocate._definitions.codec import pack, pickler_for, unpack
from colocate._definitions.explain import advice, deepest, kind_and_cause
from colocate._definitions.known import Definition, Global, Links, Need, Space
from colocate._definitions.making import Making, make_known
from colocate._definitions.names import MISSING, is_main, main_module
from colocate._definitions.packed import Packed
from colocate._definitions.pickler import Pickler
from colocate._definitions.same import same, where
from colocate._definitions.scout import Scout, code_last, is_code
from colocate._system.off_main import off_main
from colocate._system.rebuilding import rebuilding
from colocate.errors import ColocateError, SerializationError


class Lot:
    """What is sent to a receiver that lacks something.

    Attributes:
        body: The pickle.
        definitions: What is in it, by id.
        values: The globals whose values are in it.
        others: What it names that the receiver has been sent before, by id.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._named: list[Need] = []  # what code of the piece that is pickled now names
        self._named_by: dict[int, list[Need]] = {}  # the same of pieces that are in it, by their definitions' ids
        self.definitions: dict[int, Definition] = {}
        self.values: dict[Global, Any] = {}
        self.others: dict[int, Definition] = {}
        self.body = Packed(b"")

    @property
    def ids(self) -> tuple[int, ...]:
        """What its receiver knows then."""
        return tuple(self.definitions)

    @property
    def names(self) -> tuple[tuple[str | int, str], ...]:
        """The globals in it, as they are called there."""
        return tuple((self.key_of(name.space), name.name) for name in self.values)

    def key_of(self, space: Space) -> str | int:
        """What a space is called at its receiver."""
        return self._receiver.key_of(space)

    def has_to_have(self, definition: Definition) -> bool:
        """Whether a definition that is met travels in this lot; otherwise it is named."""
        if definition.id in self._receiver.knows:
            self.others[definition.id] = definition
            return False
        self.definitions[definition.id] = definition
        self._named_by[definition.id] = self._named
        return True

    def will_need(self, found: Need) -> None:
        """Something that what is in it refers to."""
        self._named.append(found)

    def take_named(self) -> list[Need]:
        """What was met so since this was asked last."""
        named, self._named = self._named, []
        return named

    def pack(self, needs: Iterable[Need]) -> None:
        """Make the body.

        Rebuilding a value runs code of its class (`__hash__`, `__setstate__`), so what that code names comes before
        the value, and the receiver binds each name as it comes. Where two need each other, one of them is the first.

        Raises:
            SerializationError: Something in it can't be pickled.
        """
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = pickler_for(file, buffers.append, self)
        begun: set[Need] = set()
        todo = [(need, False) for need in needs]  # the last comes first; whether what it is rebuilt with has come
        while todo:
            need, is_ready = todo.pop()
            if isinstance(need, Definition):
                if need.id in self.definitions or need.id in self._receiver.knows:
                    continue
                value, name = need.object, getattr(need.object, "__name__", "it")
                is_first = known.definition_of(value).id == need.id
                piece, what, words = value if is_first else _Also(need.id, value), _name(value), _words(value)
            else:
                if need in self.values or not self._receiver.lacks_value(need):
                    continue
                value, name, module = need.value, need.name, str(need.space.names.get("__name__", ""))
                piece = self.key_of(need.space), module, name, value
                what = words = f"the global {name!r} of {need.space.names.get('__name__')}, which {need.user} names,"
            if need not in begun:
                begun.add(need)
                todo.append((need, True))
                todo += ((each, False) for each in self._before(need, value, what, name))
            elif is_ready or is_code(value):  # otherwise it needs itself
                if isinstance(need, Global):
                    self.values[need] = value
                elif isinstance(piece, _Also):
                    self.definitions[need.id] = need
                self._named = []
                pickler.dump(words)
                _dump(pickler, piece, what, name)
                todo += ((each, False) for each in code_last(self._named))
        pickler.dump(None)
        self.body = Packed(file.getvalue(), tuple(buffer.raw() for buffer in buffers))
        links = Links(self.values, self.others.values())
        for definition in self.definitions.values():
            definition.links = links
        for name in self.values:
            name.links = links

    def _before(self, need: Need, value: Any, what: str, name: str) -> list[Need]:
        """What has to be there before something is rebuilt: the classes in it, and all that their code names."""
        scout = Scout(need if isinstance(need, Definition) else None)
        _dump(pickler_for(io.BytesIO(), lambda buffer: None, scout), value, what, name)
        found: list[Need] = []
        for each in scout.met:
            if isinstance(each, Global) or (each.id not in self._named_by and each.id not in self._receiver.knows):
                found.append(each)
            elif not (isinstance(need, Global) and is_code(value)):  # none of it runs when a name is bound to it
                # What was sent before may name something else now.
                found += self._named_by[each.id] if each.id in self._named_by else self._receiver.lacks((each,))
        return code_last(found)


class _Also:
    """Another id of what has one already: a class that several processes get of a generic one, each for itself."""

    def __init__(self, id: int, thing: Any) -> None:
        self._known = id, thing

    def __reduce__(self) -> Any:
        return make_known, self._known


def _words(thing: Any) -> str:
    """What a definition is called where it can't be rebuilt."""
    kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "object"
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"the {kind} {name} of {getattr(thing, '__module__', None)}"


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', thing)}"


def _dump(pickler: Pickler, thing: Any, what: str, name: str) -> None:
    try:
        pickler.dump(thing)
    except Exception as error:
        if isinstance(error, SerializationError):
            raise
        value = thing[-1] if isinstance(thing, tuple) else thing
        path, culprit, cause = deepest(value, name, error, _dump_alone)
        why = f"{type(error).__name__}: {error}"
        if culprit is not value:
            why = f"{path} is {kind_and_cause(culprit, cause)}"
        instead = advice(
            culprit, "Make it inside the role, or have it in a module beside the script, which the workers import"
        )
        raise SerializationError(
            f"{what} goes to the workers with the script's code, and can't be pickled: {why}. {instead}",
            argument=what,
            path=path,
        ) from error


def _dump_alone(thing: Any) -> None:
    """Pickle something with the definitions in it, but not the globals that they name."""
    pickler_for(io.BytesIO(), lambda buffer: None, Lot(Receiver("another"))).dump(thing)


# What the receiver of definitions is to the script: a worker, whose `__main__` is the script's; the driver that runs
# it, whose names nobody but the script itself sets; or another one, which has a script of its own.
Script: TypeAlias = Literal["is given it", "runs it", "another"]


class Receiver:
    """What one process has been sent, and therefore knows.

    Attributes:
        knows: The ids.
        values: What names were when they were last sent to it.
    """

    def __init__(self, script: Script) -> None:
        """Args: script: What it is to the script."""
        self.knows: set[int] = set()
        self.values: dict[Global, Any] = {}
        self._lost: set[Global] = set()
        self._is_script = script == "runs it"
        self._main: str | int = known.new_id() if script == "another" else "__main__"

    def key_of(self, space: Space) -> str | int:
        """What a space is called there."""
        return self._main if space.key == "__main__" else space.key

    def lacks_value(self, name: Global) -> bool:
        """Whether a name is something else there."""
        if self._is_script and name.space.key == "__main__":
            return False
        # self: nothing has been sent
        return self.values.get(name, self) is not name.value or name in self._lost

    def lacks(self, needs: Iterable[Need]) -> list[Need]:
        """What has to be sent before a message that needs this."""
        todo, found = list(needs), []
        seen: set[Links] = set()
        while todo:
            need = todo.pop()
            if need.id not in self.knows if isinstance(need, Definition) else self.lacks_value(need):
                found.append(need)
            elif (links := need.links) is not None and links not in seen:
                seen.add(links)
                todo += links.globals
                todo += [each for each in links.others if each.links is not None]
        return found

    def lot(self, lacking: Sequence[Need]) -> Lot:
        """What it lacks, to be sent to it."""
        lot = Lot(self)
        lot.pack(lacking)
        return lot

    def takes(self, lot: Lot) -> bool:
        """Whether a lot that was made for another one, which lacked the same, suits this one too."""
        return self.knows.issuperset(lot.others) and self.knows.isdisjoint(lot.definitions)

    def has_got(self, lot: Lot) -> None:
        """The lot has been sent to it."""
        self.knows.update(lot.definitions)
        self.values.update(lot.values)
        self._lost.difference_update(lot.values)

    def lost_all(self, ids: Iterable[int], names: Iterable[tuple[str | int, str]]) -> set[Global]:
        """A lot that was sent couldn't be rebuilt there; returns the globals in it."""
        self.knows.difference_update(ids)
        called = set(names)
        lost = {name for name in self.values if (self.key_of(name.space), name.name) in called}
        self._lost |= lost
        return lost


# -- what has come

Names: TypeAlias = "Sequence[tuple[str | int, str]]"  # of globals, with the keys of their spaces


class Arrived:
    """A lot that has come and is loaded when something of it is wanted.

    Attributes:
        ids: What is in it.
        held: Its definitions, once it is loaded, and those that it names: also what was here before.
        error: Why it couldn't be loaded.
    """

    def __init__(self, ids: Sequence[int], body: Packed, inbox: Inbox, names: Names = ()) -> None:
        self.ids = ids
        self._names = names
        self.error: BaseException | None = None
        self._body: Packed | None = body
        self._inbox = inbox
        self.held: list[Definition] = []
        self._is_loaded = self._is_loading = False

    def load(self) -> None:
        """Make its definitions and set its globals, once. Who wants something of it is told what has gone wrong."""
        if not self._is_loaded:
            off_main(self._load)

    def _load(self) -> None:
        with known.lock:
            body = self._body
            if body is None or self._is_loading:  # what is in it needs itself
                return
            self._is_loading = True
            bound = _Bound(self._inbox.binds)
            try:
                making = self._read(body, bound)
                already: list[Definition] = []
                if self._inbox.of_another:
                    bound.take_back()  # what is here already is compared as it was
                    already = self._inbox.had_already(making.made)
                    if already:  # what refers to these is to have the objects that were here
                        making = self._read(body, bound := _Bound(self._inbox.binds))
                    else:
                        bound.renew()
                made = [known.defined(id, thing) for id, thing in making.made.items()]
                self.held = [*already, *making.found, *made]
                for id, function in making.functions.items():
                    known.note_function(id, function)
            except BaseException as error:
                bound.take_back()
                self.error = error
                self._inbox.lost(self.ids, self._names)
                raise
            finally:
                self._is_loading = False
            self._inbox.spaces |= bound.spaces
            self._is_loaded, self._body, self.error = True, None, None

    def _read(self, body: Packed, bound: _Bound) -> Making:
        unpickler = pickle.Unpickler(io.BytesIO(body.data), buffers=iter(body.buffers))
        what = ""
        with Making() as making:
            while True:
                with rebuilding(what):
                    piece = unpickler.load()
                if piece is None:
                    break
                if type(piece) is str:  # what comes next
                    what = piece
                elif type(piece) is tuple:
                    bound.set(*piece)
        return making

    def find(self, id: int) -> Definition | None:
        """One of its definitions. Where it couldn't be rebuilt that is tried again: the reason may be gone."""
        self.load()
        return known.known(id)


class _Bound:
    """The globals that a lot sets: each as it comes, for rebuilding what follows may use it. None if the lot fails."""

    def __init__(self, into_own: bool) -> None:
        """Args: into_own: Whether those of this process's script are set, too."""
        self._into_own = into_own
        self._values: list[tuple[str | int, str, str, Any]] = []
        self._before: list[tuple[Space, str, Any, Any, Any]] = []

    def set(self, key: str | int, module: str, name: str, value: Any) -> None:
        """Set one, unless this process has set it to something else itself."""
        self._values.append((key, module, name, value))
        space = known.space_named(key, module)
        if not (space.foreign or self._into_own):
            return
        was, was_set = space.names.get(name, MISSING), space.set.get(name, self)
        self._before.append((space, name, was, was_set, value))
        if was_set is self or was is was_set:
            _put(space, name, value)
        space.set[name] = value

    @property
    def spaces(self) -> frozenset[Space]:
        """Those that they are in."""
        return frozenset(each[0] for each in self._before)

    def take_back(self) -> None:
        """Have them be what they were, but for what this process has set itself meanwhile."""
        while self._before:
            space, name, was, was_set, value = self._before.pop()
            if space.names.get(name, MISSING) is value:
                _put(space, name, was)
            if was_set is self:
                del space.set[name]
            else:
                space.set[name] = was_set

    def renew(self) -> None:
        """Set those again that were taken back."""
        values, self._values = self._values, []
        for value in values:
            self.set(*value)


def _put(space: Space, name: str, value: Any) -> None:
    if value is MISSING:
        space.names.pop(name, None)
    else:
        space.names[name] = value


_arrived: weakref.WeakValueDictionary[int, Arrived] = weakref.WeakValueDictionary()


def _find_arrived(id: int) -> Definition | None:
    """The definition from a lot that has come, if it is in one."""
    found = _arrived.get(id)
    return None if found is None else found.find(id)


known.find_arrived = _find_arrived
_setting: weakref.WeakValueDictionary[tuple[str | int, str], Arrived] = weakref.WeakValueDictionary()


def _load_into(key: str | int) -> None:
    """Load what has come that sets globals of a space. A function that no id leads to wants it."""
    for lot in [lot for (its, _), lot in list(_setting.items()) if its == key]:
        lot.load()


known.load_into = _load_into


class Inbox:
    """The lots that have come from one process, held as long as it may name what is in them."""

    def __init__(
        self, binds: bool, of_another: bool = False, lost: Callable[[Sequence[int], Names], None] = lambda *_: None
    ) -> None:
        """Make an empty one.

        Args:
            binds: Whether the globals in them are set in this process's script, too.
            of_another: They come from the script of another driver, and have to agree with this process's.
            lost: Told of a lot that couldn't be rebuilt: the ids in it, and the globals.
        """
        self.lost = lost
        self.binds = binds
        self.of_another = of_another
        self._former: dict[int, set[int]] | None = None  # earlier drivers that have defined a thing here, by its id()
        self.spaces: set[Space] = set()  # whose globals it has set: they aren't sent again
        self._lots: list[Arrived] = []
        self._before: set[Arrived] = set()  # by which another process, or the same one, has sent some of it before
        self._loaded = self._whole = 0
        self.count = 0

    def put(self, ids: Sequence[int], body: Packed, names: Names = ()) -> None:
        """A lot has come."""
        lot = Arrived(ids, body, self, names)
        self._lots.append(lot)
        for id in ids:
            first = _arrived.get(id)
            if first is None or first.error is not None:
                _arrived[id] = lot
            else:  # that is where it is found, for as long as this one may name it
                self._before.add(first)
        for name in names:
            _setting[name] = lot
        self.count += 1

    def load(self, count: int) -> None:
        """Load the first `count` lots: what was sent before a message is there when that is read.

        Raises:
            Exception: One of them can't be loaded; what needs it later is told again, and nothing else is.
        """
        if count > self._whole:
            off_main(lambda: self._load(count))

    def _load(self, count: int) -> None:
        with known.lock:
            while self._loaded < count:
                self._loaded += 1
                self._lots[self._loaded - 1].load()
            self._whole = max(self._whole, count)

    def had_already(self, made: Mapping[int, Any]) -> list[Definition]:
        """Those of the definitions that another driver's script has, too: its objects, by these ids as well.

        What the same driver has defined before is no other's: a cell that ran again makes a new class beside that.

        Raises:
            ColocateError: That has something else by such a name.
        """
        found: list[Definition] = []
        for id, thing in made.items() if self.of_another else ():
            there = self._in_script(thing)
            if there is MISSING or known.driver_of(id) in self._drivers_of(there):
                continue
            if not same(there, thing):
                name = thing.__qualname__
                sent = where(thing, [*known.beside(id), *made.values()])
                if self._former is None:
                    mine, other = where(there, file=getattr(main_module(), "__file__", None)), sent
                else:
                    mine, other = sent, where(there, known.beside(known.definition_of(there).id))
                raise ColocateError(
                    f"the scripts of two drivers define {name!r}, and not alike: this driver's at {mine}, "
                    f"a former one's at {other}. They share the workers of a group, where a name is one thing: rename "
                    "one of them"
                )
            found.append(known.also(id, there))
            if self._former is not None:  # this driver's own from now on, which it may define anew
                self._former[builtins.id(there)].add(known.driver_of(id))
        return found

    def _drivers_of(self, there: Any) -> set[int]:
        """The drivers that have defined what this process's script has."""
        return {known.this_driver()} if self._former is None else self._former[builtins.id(there)]

    def _in_script(self, thing: Any) -> Any:
        """What the other driver's script has of a definition's name; MISSING if nothing."""
        path: str = getattr(thing, "__qualname__", "<")
        if not is_main(getattr(thing, "__module__", None)) or "<" in path:
            return MISSING
        found: Any = main_module()
        for part in path.split("."):
            found = MISSING if found is MISSING else getattr(found, part, MISSING)
        return found if self._former is None or builtins.id(found) in self._former else MISSING

    def another_follows(self) -> None:
        """What comes from now on is of the next driver's script, and has to agree with what the former have defined."""
        self.of_another = True
        self._former = {}
        for each in [each for lot in self._lots for each in lot.held]:
            self._former.setdefault(builtins.id(each.object), set()).add(known.driver_of(each.id))


# -- for those who can ask nobody


def pack_whole(value: Any, what: str) -> bytes:
    """A value with all definitions that it names, for another script.

    Raises:
        SerializationError: It can't be pickled.
    """
    try:
        body = pack(value)
    except Exception as error:
        raise SerializationError(f"{what} can't be pickled: {type(error).__name__}: {error}", argument=what) from error
    lot = Receiver("another").lot(body.needs)
    return pickle.dumps((lot.ids, *_flat(lot.body), *_flat(body)), protocol=5)


def _flat(body: Packed) -> tuple[bytes, list[bytes]]:
    return bytes(body.data), [bytes(buffer) for buffer in body.buffers]


def unpack_whole(packed: bytes) -> tuple[Any, Inbox]:
    """The value, and what holds its definitions."""
    ids, data, buffers, value, its_buffers = pickle.loads(packed)
    inbox = Inbox(binds=True, of_another=True)
    inbox.put(ids, Packed(data, tuple(memoryview(bytearray(buffer)) for buffer in buffers)))
    inbox.load(1)
    return unpack(Packed(value, tuple(memoryview(bytearray(buffer)) for buffer in its_buffers))), inbox
