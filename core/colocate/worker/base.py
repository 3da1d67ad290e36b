"""`Worker`: what the parts of a worker know of it, whatever else it is made of."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from colocate._protocol import from_worker, questions
from colocate._protocol.consequence import Consequence
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._role.context import running_call
from colocate.executor import Boot
from colocate.worker.device import Device
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Lane
from colocate.worker.residents.store import Store
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.scope import Scope
from colocate.worker.settings import Setting

Send: TypeAlias = Callable[[Any, Any], None]
"""Of a head, or within one process of the message itself, and the body."""
_OF_CODE = (questions.Missing, questions.Source, questions.Compare)


class Worker(abc.ABC):
    """A worker as its parts know it: its roles, what it keeps, where it computes, and the way to the driver.

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
        parts: The halves of features that are there, by the names of these.
    """

    lane: Lane
    empty: int | None = None
    slots = 1
    collective_timeout = 1800.0
    parts: Mapping[str, OfWorker] = MappingProxyType({})

    def __init__(self, boot: Boot, send: Send, in_process: bool) -> None:
        self.boot = boot
        self._send = send
        self.in_process = in_process
        self.scope = Scope(self._lane_of)
        self.store = Store(boot.strict, self.scope, boot.device)
        self.roles: dict[Any, RoleInstance] = {}
        self.device = Device(boot.device, in_process)
        self.setting = Setting(boot.device, in_process, self.device.leaves)
        self._questions: Requests[None, Any] = Requests()
        self.looking = threading.Lock()
        self.scope.ends(lambda concerns, reason: self._questions.fail_those(concerns, lambda: Consequence(reason)))

    @abc.abstractmethod
    def _lane_of(self, seq: int) -> str:
        """Return the role whose own lane a call that runs is of; "" where it is of the main one."""

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


def named(worker_context: Worker) -> dict[str, RoleInstance]:
    """Return the roles of a worker by name, without what functions run in; on any thread."""
    return {role.name: role for role in list(worker_context.roles.values()) if role.name is not None}


def beside(worker_context: Worker, name: str | None = None) -> list[object]:
    """Return the objects that aren't looked into with those of one role: the other roles', and what it sets apart."""
    found = [role.instance for each, role in named(worker_context).items() if each != name]
    return found if name is None else [*found, *worker_context.roles[name].apart()]
