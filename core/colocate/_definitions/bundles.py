"""Pack definitions into bundles, and record the definitions that the other end of each connection has.

A message's body only refers to definitions. Before the body, the receiver gets the missing definitions in one pickle,
with all definitions that these refer to, and with the script's globals that the code uses, in their present values.
Later bodies refer to sent definitions by id, so a rebound global is sent again only with a new definition.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from colocate._definitions import ids
from colocate._definitions.codec import (
    TensorPickler,
    create_pickler,
    describe_fault,
    find_deepest,
    get_advice,
    pack,
    unpack,
)
from colocate._definitions.ids import Definition, Name, Need, get_id
from colocate._definitions.making import Making, bind
from colocate._definitions.names import MISSING, get_script_names, is_main
from colocate._definitions.packed import Packed
from colocate._system.tracebacks import drop_own_traceback, rebuilding
from colocate.errors import SerializationError

if TYPE_CHECKING:
    import torch

Script: TypeAlias = Literal["is given it", "runs it", "another", "has another's"]
"""The receiver's relation to this process's script.

"is given it" is a worker with the script as `__main__`. "runs it" is the driver that runs the script, where only the
script sets names. "another" is a driver with another script. "has another's" is a worker with another driver's script.
"""


class Table:
    """A record of the definitions and globals that the other end of a connection has.

    Attributes:
        script: The receiver's relation to the script.
        sent_ids: The ids of sent definitions.
        names: The sent globals of the script, with their values at that time.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.sent_ids: set[int] = set()
        self.names: dict[str, Any] = {}

    def list_lacking(self, needs: Iterable[Need]) -> list[Need]:
        """Return the needed definitions and globals that the receiver lacks.

        Raises:
            SerializationError: A need is a global of this process's script, and the receiver has another script.
        """
        lacking: list[Need] = []
        for need in needs:
            if isinstance(need, Definition):
                if need.id not in self.sent_ids:
                    lacking.append(need)
            elif self.script == "has another's":
                raise _make_script_error(f"{need.user}, which names the global {need.name!r},")
            elif self.script == "is given it" and self.is_value_lacking(need.name):
                lacking.append(need)
        return lacking

    def is_value_lacking(self, name: str) -> bool:
        """Return whether the receiver lacks the current value of a global of the script."""
        value = get_script_names().get(name, MISSING)
        return value is not MISSING and self.names.get(name, MISSING) is not value

    def create_bundle(self, lacking: Sequence[Need]) -> Bundle:
        """Pack the missing definitions and globals for this receiver."""
        bundle = Bundle(self)
        bundle.pack(lacking)
        return bundle

    def can_take(self, bundle: Bundle) -> bool:
        """Return whether a bundle packed for another receiver also suits this receiver."""
        return (
            self.sent_ids.issuperset(bundle.former_ids)
            and self.sent_ids.isdisjoint(bundle.definitions)
            and all(self.names.get(name, MISSING) is value for name, value in bundle.former_names.items())
            # Setting a global again would undo the changes that a role has made to the value in place.
            and not any(self.names.get(name, MISSING) is value for name, value in bundle.names.items())
        )

    def mark_sent(self, bundle: Bundle) -> None:
        self.sent_ids.update(bundle.definitions)
        self.names.update(bundle.names)

    def mark_lost(self, ids: Iterable[int], names: Iterable[str]) -> None:
        """Mark the contents of a bundle as missing, because the receiver couldn't rebuild the bundle."""
        self.sent_ids.difference_update(ids)
        for name in names:
            self.names.pop(name, None)


class Bundle:
    """A pickle of definitions and globals for one receiver.

    Attributes:
        body: The pickle.
        definitions: The packed definitions, by id.
        names: The packed globals of the script, with their values.
        users: The globals named by packed code, each with an example of such code.
        former_ids: The ids of definitions that the bundle refers to and the receiver has already.
        former_names: The globals that the receiver has, with their values.
    """

    def __init__(self, table: Table, alone: bool = False) -> None:
        self._table = table
        self._alone = alone  # True leaves out the globals that packed code uses.
        # For a receiver with another script, functions are packed together with the globals that the code uses.
        self.anonymous = table.script in ("another", "has another's")
        self.definitions: dict[int, Any] = {}
        self.names: dict[str, Any] = {}
        self.users: dict[str, str] = {}
        self.former_ids: set[int] = set()
        self.former_names: dict[str, Any] = {}
        self.body = Packed(b"")
        # Lists the packed objects as (description, name, object); an object's parts follow the object.
        self.contents: list[tuple[str, str, Any]] = []

    def add_definition(self, definition: Definition) -> bool:
        """Return whether to pack a definition by value; False if a reference by id is enough."""
        id, thing = definition
        if id in self.definitions:
            return False
        if id in self._table.sent_ids:
            self.former_ids.add(id)
            return False
        name = getattr(thing, "__qualname__", str(thing))
        if self._table.script == "has another's" and ids.is_of_this_process(id) and is_main(_get_module(thing)):
            raise _make_script_error(name)
        self.definitions[id] = thing
        self.contents.append((f"{name} of {_get_module(thing)}", getattr(thing, "__name__", "it"), thing))
        return True

    def add_names(self, names: Iterable[str], user: str) -> dict[str, Any]:
        """Return the named globals of the script for which the receiver lacks the current value."""
        values: dict[str, Any] = {}
        script = get_script_names() if self._table.script == "is given it" and not self._alone else {}
        for name in names:
            value = script.get(name, MISSING)
            if value is MISSING:
                continue
            self.users.setdefault(name, user)
            if not self._table.is_value_lacking(name):
                self.former_names[name] = value
            elif self.names.get(name, MISSING) is not value:
                values[name] = self.names[name] = value
                self.contents.append((f"the global {name!r} of __main__, which {user} names,", name, value))
        return values

    def pack(self, needs: Iterable[Need]) -> None:
        """Pickle the needed definitions and globals into `body`.

        Raises:
            SerializationError: A part can't be pickled.
        """
        file, things, names, also = io.BytesIO(), [], list[Name](), dict[int, Any]()
        buffers: list[pickle.PickleBuffer] = []
        pickler = create_pickler(file, buffers.append, self)
        for need in needs:
            if isinstance(need, Name):
                names.append(need)
                continue
            things.append(need.thing)
            # If several processes create the same parametrised generic class, each process assigns a different id.
            if get_id(need.thing) != need.id:
                also[need.id] = need.thing
        try:
            pickler.dump((things, pickler.reduce_script_globals(names)))
            self.definitions.update(also)
            script_things: dict[str, Any] = {}
            if self._table.script == "is given it":  # Plain pickle looks up names in the script's globals.
                script = get_script_names()
                qualnames = {getattr(thing, "__qualname__", ""): thing for thing in self.definitions.values()}
                script_things = {name: thing for name, thing in qualnames.items() if script.get(name, MISSING) is thing}
                self.names.update(script_things)
            pickler.dump((also, script_things))
        except SerializationError:
            raise
        except Exception as error:
            raise self._explain(error) from drop_own_traceback(error)
        self.body = Packed(file.getvalue(), tuple(buffer.raw() for buffer in buffers))

    def _explain(self, error: Exception) -> SerializationError:
        def dump(thing: Any) -> None:
            create_pickler(io.BytesIO(), lambda buffer: None, _make_lone_bundle()).dump(thing)

        label, name, value = "it", "it", None
        for entry in reversed(self.contents):
            try:
                dump(entry[2])
            except Exception:
                label, name, value = entry
                break
        path, culprit, cause = find_deepest(value, name, error, dump)
        why = f"{type(error).__name__}: {error}"
        if culprit is not value:
            why = f"{path} is {describe_fault(culprit, cause)}"
        instead = get_advice(
            culprit, "Make it inside the role, or have it in a module beside the script, which the workers import"
        )
        to_driver = self._table.script in ("runs it", "another")
        goes = "goes to the driver" if to_driver else "goes to the workers with the script's code"
        return SerializationError(
            f"{label} {goes}, and can't be pickled: {why}. {instead}",
            argument=label,
            path=path,
        )


def _get_module(thing: Any) -> Any:
    return getattr(thing, "__module__", None)


def _make_script_error(what: str) -> SerializationError:
    return SerializationError(
        f"{what} is of this driver's script, and can't go to workers that another driver has spawned: their script is "
        "that one's. Have it in a module beside the script, which the workers import",
        argument=what,
    )


def _make_lone_bundle() -> Bundle:
    return Bundle(Table("is given it"), alone=True)


# -- what has come

_lock = threading.RLock()  # Prevents other threads from finding a half-built definition.
_arrived: weakref.WeakValueDictionary[int, ReceivedBundle] = weakref.WeakValueDictionary()


def _find_arrived(id: int) -> Any:
    thing = ids.get_thing(id)
    if thing is None and (arrived := _arrived.get(id)) is not None:
        arrived.load_definitions()
        thing = ids.get_thing(id)
    return thing


ids.find_arrived = _find_arrived


class ReceivedBundle:
    """A received bundle, loaded on first use.

    Attributes:
        error: The exception of a failed load; None otherwise.
    """

    def __init__(self, ids: Sequence[int], names: Sequence[str], body: Packed, lost: Callable[..., None]) -> None:
        self._lost_args = ids, names
        self._body: Packed | None = body
        self._lost = lost
        self._held: dict[int, Any] = {}
        self._is_loading = False
        self.error: BaseException | None = None

    def load_definitions(self) -> None:
        """Rebuild the definitions at the first call. After a failure, each call raises the same error."""
        if self.error is not None:
            raise self.error
        if self._body is not None:
            self._load_locked()

    def _load_locked(self) -> None:
        with _lock:
            # The call is recursive if one definition in the bundle refers to another definition.
            if (body := self._body) is None or self._is_loading:
                return
            self._is_loading = True
            try:
                unpickler = pickle.Unpickler(io.BytesIO(body.data), buffers=iter(body.buffers))
                with Making() as making, rebuilding(lambda: _describe_innermost(making)):
                    unpickler.load()
                    also, script_things = unpickler.load()
                bind(get_script_names(), script_things)
                self._held = {**making.definitions, **also}
                for id, thing in self._held.items():
                    ids.register_id(id, thing)
            except BaseException as error:
                self.error = error
                self._lost(*self._lost_args)
                raise
            finally:
                self._is_loading, self._body = False, None


def _describe_innermost(making: Making) -> str:
    """Describe the definition or global that was being rebuilt when an error occurred."""
    thing = next(reversed(making.unfilled.values()), "what was sent with it")
    if isinstance(thing, str):
        return thing
    kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "object"
    return f"the {kind} {getattr(thing, '__qualname__', type(thing).__qualname__)} of {_get_module(thing)}"


class ReceivedDefinitions:
    """The bundles received from one process, kept alive as long as the process may refer to the definitions."""

    def __init__(self, lost: Callable[..., None] = lambda *_: None) -> None:
        """Create an empty collection.

        Args:
            lost: Called with the ids and the names of globals in a bundle that couldn't be rebuilt.
        """
        self._lost = lost
        self._bundles: list[ReceivedBundle] = []
        self._former: set[ReceivedBundle] = set()  # Keeps earlier bundles with the same definitions alive.
        self._loaded = self._loaded_count = 0
        self.count = 0

    def add_bundle(self, ids: Sequence[int], names: Sequence[str], body: Packed) -> None:
        bundle = ReceivedBundle(ids, names, body, self._lost)
        self._bundles.append(bundle)
        for id in ids:
            first = _arrived.get(id)
            if first is None or first.error is not None:
                _arrived[id] = bundle
            else:  # Keep the bundle that came first alive, because the definition is loaded from there.
                self._former.add(first)
        self.count += 1

    def load_bundles(self, count: int) -> None:
        """Load the first `count` bundles, which were sent before a message that is about to be read."""
        if count > self._loaded_count:
            self._load_locked(count)

    def _load_locked(self, count: int) -> None:
        with _lock:
            while self._loaded < count:
                self._loaded += 1
                bundle = self._bundles[self._loaded - 1]
                if bundle.error is None:  # A failed load has already raised the error.
                    bundle.load_definitions()
            self._loaded_count = max(self._loaded_count, count)


# -- for those who can ask nobody: a record that another driver reads


def pack_whole(value: Any, what: str) -> bytes:
    """Pack a value together with all definitions into bytes, for a process with another script."""
    try:
        body = pack(value)
    except Exception as error:
        raise SerializationError(f"{what} can't be pickled: {type(error).__name__}: {error}", argument=what) from error
    table = Table("another")
    bundle = table.create_bundle(table.list_lacking(body.needs))
    return pickle.dumps((tuple(bundle.definitions), *_flatten(bundle.body), *_flatten(body)), protocol=5)


def _flatten(body: Packed) -> tuple[bytes, list[bytes]]:
    return bytes(body.data), [bytes(buffer) for buffer in body.buffers]


def unpack_whole(packed: bytes) -> tuple[Any, ReceivedDefinitions]:
    """Return the value packed by `pack_whole`, and an object that keeps the value's definitions alive."""
    ids, data, buffers, value, its_buffers = pickle.loads(packed)
    received_definitions = ReceivedDefinitions()
    received_definitions.add_bundle(ids, (), Packed(data, tuple(memoryview(bytearray(buffer)) for buffer in buffers)))
    received_definitions.load_bundles(1)
    return unpack(Packed(value, tuple(memoryview(bytearray(buffer)) for buffer in its_buffers))), received_definitions


# -- parameters that would be two where they arrive: one among a call's arguments, one in the code that the call runs


def check_shared_parameters(arguments: Mapping[str, Any], code: Iterable[Need], what: str) -> None:
    """Refuse arguments that share a torch parameter with the globals, closures or classes of the called code.

    Values that travel together keep shared parameters shared. Globals, closures of definitions and attributes of
    classes travel with the script's code, once, but arguments travel with each call.

    Args:
        arguments: Arguments by name, with tensors that require gradients among them.
        code: The needs of the arguments and of the code.
        what: The call, for the error text.

    Raises:
        SerializationError: A parameter is shared; the message names both places.
    """
    bundle = Bundle(Table("is given it"))
    looking = _TensorFinder(bundle)
    for need in code:
        with contextlib.suppress(Exception):  # Sending the definition will raise the same error.
            looking.dump(need.thing if isinstance(need, Definition) else bundle.add_names((need.name,), need.user))
    tensor_ids = {id(tensor) for tensor in looking.tensors}
    for name, value in arguments.items() if tensor_ids else ():
        for tensor in _list_trained(value):
            if id(tensor) in tensor_ids:
                users = (
                    entry
                    for entry in bundle.contents
                    if any(other_tensor is tensor for other_tensor in _list_trained(entry[2], _make_lone_bundle()))
                )
                where, its_name, its_value = next(users)
                path, other = (
                    _find_path(value, name, tensor),
                    _find_path(its_value, its_name, tensor, _make_lone_bundle),
                )
                raise SerializationError(
                    f"{what}: {path}, an argument's, is the same parameter as {other}, of {where.rstrip(',')}. That "
                    "travels with the script's code, apart from arguments, so the workers would have two in place of "
                    "one, and an optimizer of one would never train the other. Give both as arguments, or neither; "
                    "where its values are enough, give a state_dict()",
                    argument=name,
                    path=path,
                )


class _TensorFinder(TensorPickler):
    """A pickler that collects a value's leaf tensors with `requires_grad`, without copying memory."""

    def __init__(self, bundle: Bundle | None = None) -> None:
        super().__init__(io.BytesIO(), lambda buffer: None, bundle)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, sys.modules["torch"].Tensor):
            return super().reducer_override(obj)
        if obj.requires_grad and obj.is_leaf:
            self.tensors.append(obj)
        return dict, ()


def _list_trained(value: Any, bundle: Bundle | None = None) -> list[torch.Tensor]:
    looking = _TensorFinder(bundle)
    looking.dump(value)
    return looking.tensors


def _find_path(value: Any, name: str, tensor: torch.Tensor, bundle: Callable[[], Bundle | None] = lambda: None) -> str:
    """Return the path to a tensor inside a value, in Python syntax."""

    def look(part: Any) -> None:
        if any(candidate is tensor for candidate in _list_trained(part, bundle())):
            raise LookupError

    path, _, _ = find_deepest(value, name, LookupError(), look)
    return re.sub(r"\._(?:parameters|modules)\['([^']*)'\]", r".\1", path)
