"""`WorkerContext`: a worker as the parts of it know it."""

from __future__ import annotations

import abc
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from colocate import features
from colocate._protocol import from_worker, questions
from colocate._protocol.consequence import Consequence
from colocate._protocol.ledger import TAGS
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._role.context import Context, RowState, running_call
from colocate._system.imported import imported
from colocate._system.recent import RecentSpans
from colocate._values.codec import Codec
from colocate.errors import ConfigError, SerializationError
from colocate.executor import Boot
from colocate.gpus import KIND, in_use
from colocate.worker.background import Background
from colocate.worker.device import Device
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Lane
from colocate.worker.residents.store import Store
from colocate.worker.serving.definitions import Definitions
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.scope import Scope
from colocate.worker.settings import Setting

if TYPE_CHECKING:
    from colocate.worker.residents.peers import Peers

_OF_CODE = (questions.Missing, questions.Source, questions.Compare)
_CAUSE_EVERY_S = 0.01  # how often features are asked whether the cause of a failure is known


Send: TypeAlias = Callable[[Any, Any], None]
"""Of a head, or within one process of the message itself, and the body."""


class WorkerContext(abc.ABC):
    """What the parts of a worker share: its roles, what they keep, and what they ask the driver.

    Attributes:
        boot: Who it is.
        in_process: Whether the other workers are threads of this process.
        store: What it keeps.
        roles: Those of its slot, by what messages call them.
        scope: Which calls may wait for others.
        device: What its slot computes on.
        setting: What makes torch's settings.
        lane: Where role code runs, but for that of background roles.
        empty: The bytes that its process had before the first role; None where that is the driver's.
        slots: How many slots its group has.
        collective_timeout: Seconds that an operation of a process group may take.
        looking: Held by who looks at what roles hold beside the lane, and so keeps what a role lets go of.
        codec: How values travel.
        instances: Its roles by name, as their contexts know each other.
        definitions: What it and its driver know of each other's classes and functions.
        background: Those of their lanes, by role.
        peers: How it gets at other workers' residents.
        recent: When its roles were busy; None where nobody but the driver asks, who knows.
        parts: The halves of features that are there, by the names of these.
        begins: Of these halves `begins`, where they have one of their own; the others likewise.
    """

    lane: Lane
    peers: Peers
    empty: int | None = None
    slots = 1
    collective_timeout = 1800.0
    parts: Mapping[str, OfWorker] = MappingProxyType({})
    recent: RecentSpans[str] | None = None
    enters: tuple[Callable[..., None], ...] = ()
    leaves: tuple[Callable[..., None], ...] = ()
    begins: tuple[Callable[..., None], ...] = ()
    reaches: tuple[Callable[..., None], ...] = ()
    ends: tuple[Callable[..., None], ...] = ()
    rans: tuple[Callable[..., None], ...] = ()
    awaits: tuple[Callable[..., bool], ...] = ()
    blames: tuple[Callable[..., BaseException], ...] = ()
    finishes: tuple[Callable[..., Any], ...] = ()

    def __init__(self, boot: Boot, codec: Codec, send: Send, in_process: bool) -> None:
        self.boot = boot
        self._send = send
        self.in_process = in_process
        self.codec = codec
        self.scope = Scope(self._lane_of)
        self.store = Store(boot.strict, self.scope, boot.device)
        self.roles: dict[Any, RoleInstance] = {}
        self.device = Device(boot.device, in_process)
        self.setting = Setting(boot.device, in_process, self.device.leaves)
        self._questions: Requests[None, Any] = Requests()
        self.looking = threading.Lock()
        self.scope.ends(lambda concerns, reason: self._questions.fail_those(concerns, lambda: Consequence(reason)))
        self._making = threading.RLock()  # held while a half of a feature is made
        self.background: dict[str, Background] = {}
        self.instances: dict[str, object] = {}
        self.definitions = Definitions(self.ask, self.say, in_process)
        self.scope.ends(self._end_peers)

    def why_not(self) -> str | None:
        """Why the call that asks mustn't wait for another worker; None when it may."""
        return self.scope.why(self.asking())

    def asking(self) -> int | None:
        """The number of the call that asks; a thread that a role has started asks for the one that runs."""
        state = running_call.get()
        return state.seq if state is not None else max(list(self.lane.running), default=None)

    def say(self, message: Message, body: Any = None) -> None:
        """Tell the driver something; in order, from any thread."""
        self._send(message if self.in_process else message.head(), body)

    def ask(self, question: Message, apart: bool = False) -> Any:
        """Ask the driver something and wait; ColocateError says its refusal, or what broke the wait.

        Args:
            question: The question.
            apart: It isn't asked for any call: only the end of the worker breaks the wait.
        """
        seq = -1 if apart else self.asking()
        if seq == 0 and isinstance(question, _OF_CODE):
            seq = -1  # roles are constructed also when another rank's can't be, which has no part in this answer
        request = self._questions.open([None], seq or 0)
        reason = self.scope.why(seq)
        if reason is not None:
            self._questions.drop(request)
            raise Consequence(reason)
        self.lane.waits()  # a `__del__` may ask, at any time
        self.say(from_worker.Ask(request.token, question))
        return request.result()[0]

    def tell(self, question: Message) -> None:
        """Tell the driver something by a question, the answer to which isn't waited for. From any thread."""
        self.say(from_worker.Ask(self._questions.open([None], -1).token, question))

    def part(self, name: str) -> OfWorker:
        """Return this worker's half of a feature, which is made when it is first asked for.

        Raises:
            CapabilityError: There is no such feature here.
        """
        found = self.parts.get(name)
        if found is not None:
            return found
        with self._making:
            found = self.parts.get(name)
            if found is None:
                found = features.of_worker(name)(self)
                self.parts = {**self.parts, name: found}
                self.list_hooks()
            return found

    def list_hooks(self) -> None:
        """List what is asked per call of all halves: of those whose class overrides it, or that do so for a while."""
        self.enters, self.leaves = self._own("enters"), self._own("leaves")
        self.begins, self.reaches = self._own("begins"), self._own("reached")
        self.ends, self.blames, self.rans = self._own("ended"), self._own("blamed"), self._own("ran")
        self.awaits, self.finishes = self._own("awaits_cause"), self._own("finished")

    def _own(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Return a method of all halves that override it."""
        found = [getattr(part, name) for part in self.parts.values()]
        return tuple(each for each in found if getattr(each, "__func__", each) is not getattr(OfWorker, name))

    def blamed(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Return what is the cause of a failure in role code, as features know it."""
        for name in features.followers():
            self.part(name)
        for blames in self.blames:
            error = blames(error, role, row)
        return error

    def wait_for_cause(self, error: BaseException, role: str | None) -> None:
        """Wait until `blamed` can tell the cause of a failure, where nothing else can run meanwhile."""
        start = time.monotonic()
        while any(awaits(error, role, None, time.monotonic() - start, True) for awaits in self.awaits):
            time.sleep(_CAUSE_EVERY_S)

    async def await_cause(self, error: BaseException, role: str | None, row: RowState | None = None) -> None:
        """Wait for the cause in an event loop while other calls and rows go on. A cancellation ends the wait."""
        if not self.awaits:
            return
        import asyncio  # the caller has imported asyncio already

        start = time.monotonic()
        with suppress(asyncio.CancelledError):
            while any(awaits(error, role, row, time.monotonic() - start, False) for awaits in self.awaits):
                await asyncio.sleep(_CAUSE_EVERY_S)

    def told(self, says: Callable[[OfWorker], Any]) -> dict[str, Any]:
        """Return what features say to their halves in the driver, by their names."""
        return {name: plain for name, part in self.parts.items() if (plain := says(part)) is not None}

    def is_consequence(self) -> bool:
        """Return whether what fails on the main lane now may be the consequence of another rank's failure."""
        return any(part.is_consequence() for part in self.parts.values())

    def left(self, seq: int) -> None:
        """Hear that a call is over, however it has ended."""
        for leaves in self.leaves:
            leaves(seq)

    def ran(self, role: str | None, label: str, kept: Mapping[str, Any] | None = None) -> None:
        """Have features refuse what role code has made; see `OfWorker.ran`."""
        for ran in self.rans:
            ran(role, label, kept)

    def changed(self, role: str | None) -> None:
        """Tell features that what a role holds may have changed; None for any of them."""
        for part in self.parts.values():
            part.changed(role)

    def constructing(self, role: str) -> ExitStack:
        """Enter what features have around a role's construction, for a `with` to leave."""
        return entered(part.constructing(role) for part in self.parts.values())

    def making(self, role: str, plains: Mapping[str, Any]) -> ExitStack:
        """Enter what features have around a role's constructor; see `constructing`."""
        names = [*{**self.parts, **plains}]
        return entered(self.part(name).making(role, plains.get(name)) for name in names)

    def awake(self, role: RoleInstance, why: str) -> ExitStack:
        """Have all memory of a role be there in a block; see `constructing`."""
        return entered(part.awake(role, why) for part in self.parts.values())

    def have_awake(self, role: str, tags: Sequence[str]) -> None:
        """Have such memory of a role be there until what runs is over, or refuse that.

        Raises:
            ColocateError: It can't be.
        """
        for part in self.parts.values():
            part.have_awake(role, tags)

    def who_has_what(self) -> str:
        """Return who has how much memory, as a note to an error says it; by the feature "memory"."""
        found: str = self.part("memory").words()  # type: ignore[attr-defined]
        return found

    def reach(self, asking: Context, name: str, tags: Sequence[str] = tuple(TAGS)) -> None:
        """Hear that role code with a context wants a role's object, with that of its memory: it is awake then.

        Raises:
            ConfigError: There is no such memory.
            ColocateError: It can't be had, as a feature says.
        """
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise ConfigError(f"awake names {unknown[0]!r}; a role's memory is of {', '.join(TAGS)}")
        if self.reaches and (role := self.roles.get(name)) is not None:
            for reaches in self.reaches:
                reaches(asking, role, tags)
        self.have_awake(name, tags)

    @property
    def moves_tensors(self) -> bool:
        """Whether tensors that arrive may be elsewhere than on the slot's device."""
        return self.boot.device != "cpu" or bool(self.in_process and imported("torch") and in_use(KIND.device))

    @property
    def lanes(self) -> list[Lane]:
        """The worker's lanes, the main one first."""
        return [self.lane, *(each.lane for each in list(self.background.values()))]

    def lane_for(self, role: Any) -> Lane:
        """The lane on which a role's code runs; of functions, the main one."""
        found = self.background.get(role) if self.background else None
        return self.lane if found is None else found.lane

    def _lane_of(self, seq: int) -> str:
        """Of which role's own lane a call that runs is; "" where it is of the main one."""
        for name, each in self.background.items():
            if (work := each.lane.running.get(seq)) is not None and not work.stands:
                return name
        return ""

    def _end_peers(self, concerns: Callable[[int], bool], reason: str) -> None:
        if self.scope.closed is not None or any(concerns(seq) for lane in self.lanes for seq in list(lane.running)):
            self.peers.abort(reason)

    def say_result(self, message: Message, body: Any, label: str) -> None:
        """Tell the driver something with what a method has returned.

        Raises:
            SerializationError: This process has no descriptor, or no memory, to send it.
        """
        try:
            self.say(message, body)
        except OSError as error:  # which isn't the method's fault
            raise SerializationError(
                f"the result of {label} can't be sent: {error.strerror or error}", argument="result"
            ) from error

    def packed(self, result: Any, label: str, wait: bool = False) -> Any:
        """Return a role's result as it travels; a SerializationError names the method. `wait`: see `tell`."""
        pack = partial(self.codec.pack_named, result, "result", f"the result of {label}")
        if not self.device.is_gpu or threading.current_thread() in [lane.thread for lane in self.lanes]:
            body = pack()
        else:
            with self.device.aside():
                body = pack()
        self.definitions.tell(body, wait)
        return body

    @abc.abstractmethod
    def broken(self, reason: str, log_tail: str = "") -> None:
        """Leave, being of no use any more. Its group fails of that at once instead of waiting."""

    def report(self, ctx: Context, done: int, total: int | None) -> None:
        """A role's progress."""
        self.say(from_worker.Progress(ctx.role, _plain(done), None if total is None else _plain(total)))


def entered(blocks: Iterable[AbstractContextManager[object]]) -> ExitStack:
    """Enter blocks, and return what leaves them."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        return stack.pop_all()


def _plain(number: Any) -> int | float:
    """A number as the driver can take it up: without whatever class the role has for it."""
    return float(number) if isinstance(number, float) else operator.index(number)


def named(worker_context: WorkerContext) -> dict[str, RoleInstance]:
    """Return the roles of a worker by name, without what functions run in; on any thread."""
    return {role.name: role for role in list(worker_context.roles.values()) if role.name is not None}


def beside(worker_context: WorkerContext, name: str | None = None) -> list[object]:
    """Return the objects that aren't looked into with those of one role: the other roles', and what it sets apart."""
    found = [role.instance for each, role in named(worker_context).items() if each != name]
    return found if name is None else [*found, *worker_context.roles[name].apart()]
