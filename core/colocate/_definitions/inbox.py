"""What has come of definitions: lots that are loaded when something of them is wanted."""

from __future__ import annotations

import builtins
import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from colocate._definitions import known
from colocate._definitions.known import Definition, Space
from colocate._definitions.making import Making
from colocate._definitions.names import MISSING, is_main, main_module
from colocate._definitions.packed import Packed
from colocate._definitions.same import same, where
from colocate._system.off_main import off_main
from colocate._system.rebuilding import rebuilding
from colocate.errors import ColocateError

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
