"""`WorkerContext`: a worker as the parts of it know it."""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from colocate._protocol import from_worker, questions
from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._protocol.uses import Peers
from colocate._role.context import Context, running_call
from colocate._system.recent import RecentSpans
from colocate._values.codec import Codec
from colocate._values.leaving import gpu_is_used
from colocate.errors import SerializationError
from colocate.executor import Boot
from colocate.worker.background import Background
from colocate.worker.children import Children
from colocate.worker.device import Device
from colocate.worker.handed import HANDED
from colocate.worker.inlet import Inlet
from colocate.worker.lane import Lane
from colocate.worker.memory.context import ProcessMemory
from colocate.worker.memory.ledger import Accounts
from colocate.worker.memory.sleep import Sleeper
from colocate.worker.memory.turns import Residency
from colocate.worker.residents.store import Store
from colocate.worker.serving.definitions import Definitions
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.saver import Saver
from colocate.worker.serving.scope import Scope
from colocate.worker.torch_groups.groups import ProcessGroups
from colocate.worker.torch_groups.settings import Setting
from colocate.worker.weights import WeightSyncs

Send: TypeAlias = Callable[[Any, Any], None]
"""Of a head, or within one process of the message itself, and the body."""
_OF_CODE = (questions.Missing, questions.Source, questions.Compare)


class WorkerContext:
    """What the parts of a worker share: its roles, what they keep, and what they ask the driver.

    Attributes:
        boot: Who it is.
        codec: How values travel.
        in_process: Whether the other workers are threads of this process.
        store: What it keeps.
        roles: Those of its slot, by what messages call them.
        instances: The same by name, as their contexts know each other.
        scope: Which calls may wait for others.
        groups: The process groups of its roles.
        device: What its slot computes on.
        setting: What makes torch's settings.
        sleeper: What of its roles' memory sleeps.
        accounts: What they have, and may have.
        residency: Who is awake, where they take turns.
        weights: Brings weights of roles to others.
        children: The processes that its roles have started.
        spill_dir: Where that goes; None for where there is room.
        definitions: What it and its driver know of each other's classes and functions.
        saver: Writes checkpoints beside the calls.
        lane: Where role code runs, but for that of background roles.
        background: Those of their lanes, by role.
        peers: How it gets at other workers' residents.
        process: What its process has besides; None where that is the driver's.
        recent: When its roles were busy; None where nobody but the driver asks, who knows.
        inlets: What is said of rows that end one by one, by their calls, as long as these are there.
    """

    lane: Lane
    peers: Peers
    children: Children
    process: ProcessMemory | None = None
    spill_dir: str | None = None
    recent: RecentSpans[str] | None = None

    def __init__(self, boot: Boot, codec: Codec, send: Send, in_process: bool) -> None:
        self.boot = boot
        self.codec = codec
        self._send = send
        self.in_process = in_process
        self.background: dict[str, Background] = {}
        self.scope = Scope(self._lane_of)
        self.store = Store(boot.strict, self.scope, boot.device)
        self.roles: dict[Any, RoleInstance] = {}
        self.instances: dict[str, object] = {}
        self.device = Device(boot.device, in_process)
        self.setting = Setting(boot.device, in_process, self.device.leaves)
        self.groups = ProcessGroups(self, in_process, boot.group, boot.slot, boot.host, boot.device, boot.ports)
        self.sleeper = Sleeper(self)
        self.accounts = Accounts(self, self.sleeper)
        self.residency = Residency(self, self.sleeper, self.accounts)
        self.weights = WeightSyncs(self)
        self.definitions = Definitions(self.ask, self.say, in_process)
        self.saver = Saver(boot.worker, self.device, codec, self.definitions, self.say)
        self._questions: Requests[None, Any] = Requests()
        self.scope.ends(lambda concerns, reason: self._questions.fail_those(concerns, lambda: Consequence(reason)))
        self.scope.ends(self.groups.end_waits)
        self.scope.ends(self._end_peers)
        self.inlets: weakref.WeakValueDictionary[int, Inlet] = weakref.WeakValueDictionary()
        self.scope.ends(self._end_inlets)

    def reach(self, asking: Context, name: str, *awake: Any) -> None:
        """A role's object is wanted by role code with a context; see `Residency.reach`.

        Raises:
            ChildDied: What that role had started has ended.
        """
        if asking.role is not None and self.children.dead and (role := self.roles.get(name)) is not None:
            self.children.check(role)
        self.residency.reach(name, *awake)

    @property
    def moves_tensors(self) -> bool:
        """Whether tensors that arrive may be elsewhere than on the slot's device."""
        return self.boot.device != "cpu" or (self.in_process and gpu_is_used())

    @property
    def lanes(self) -> list[Lane]:
        """All of its lanes, the main one first."""
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
            if (inlet := self.inlets.get(seq)) is not None and inlet.lane is each.lane:  # it may not have begun
                return name
        return ""

    def _end_peers(self, concerns: Callable[[int], bool], reason: str) -> None:
        if self.scope.closed is not None or any(concerns(seq) for lane in self.lanes for seq in list(lane.running)):
            self.peers.abort(reason)

    def _end_inlets(self, concerns: Callable[[int], bool], reason: str) -> None:
        for number, inlet in list(self.inlets.items()):
            if concerns(number):
                inlet.end(reason)
                inlet.lane.do(inlet.wake)

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

    def hand_over(self, value: Any) -> Any:
        """A value that comes from another slot or the driver, or goes there, perhaps by reference."""
        if self.in_process and self.codec.name == "reference":
            HANDED.note(value, self.boot.device)
        return value

    def packed(self, result: Any, label: str, wait: bool = False) -> Any:
        """What a role has returned, as it travels; a SerializationError names the method. `wait`: see `tell`."""
        self.hand_over(result)
        on_lane = threading.current_thread() in [lane.thread for lane in self.lanes]
        with contextlib.nullcontext() if on_lane else self.device.aside():
            body = self.codec.pack_named(result, "result", f"the result of {label}")
        self.definitions.tell(body, wait)
        return body

    def report(self, ctx: Context, done: int, total: int | None) -> None:
        """A role's progress."""
        self.say(from_worker.Progress(ctx.role, _plain(done), None if total is None else _plain(total)))


def _plain(number: Any) -> int | float:
    """A number as the driver can take it up: without whatever class the role has for it."""
    return float(number) if isinstance(number, float) else operator.index(number)
