"""`WorkerContext` is a worker's shared state, which roles, features and lanes use."""

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
from colocate._system.imported import find_imported
from colocate._system.recent import RecentSpans
from colocate._values.codec import Codec
from colocate.errors import ConfigError, SerializationError
from colocate.executor import Boot
from colocate.gpus import KIND, in_use
from colocate.worker.background import Background
from colocate.worker.device import Device
from colocate.worker.hooks import WorkerFeature
from colocate.worker.lane import Lane
from colocate.worker.residents.store import Store
from colocate.worker.serving.definitions import Definitions
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.scope import Scope
from colocate.worker.settings import Setting

if TYPE_CHECKING:
    from colocate.worker.residents.peers import Peers

_OF_CODE = (questions.MissingParts, questions.Source, questions.Compare)
_CAUSE_EVERY_S = 0.01  # Interval, in seconds, at which features are asked for the cause of a failure.


Send: TypeAlias = Callable[[Any, Any], None]
"""Sends a head (within one process, the message itself) and a body."""


class WorkerContext(abc.ABC):
    """State shared by the parts of a worker: roles, residents, and questions to the driver.

    Attributes:
        boot: The worker's boot message.
        in_process: Whether the other workers are threads of this process.
        store: The worker's residents.
        roles: The roles of the slot, by their names in messages.
        scope: Which calls may wait for other ranks.
        device: The slot's device.
        setting: Reads and sets torch's settings.
        lane: The main lane, which runs all role code except that of background roles.
        baseline_bytes: Bytes of the process before the first role; None if the process is the driver's.
        slots: Number of slots of the group.
        collective_timeout: Timeout of a process group's operations, in seconds.
        inspection_lock: Lock held while another thread than the lane inspects roles' objects, which keeps dropped
            objects alive.
        codec: Serializes values.
        instances: Role instances by name, for `ctx.sibling`.
        definitions: Classes and functions known to the worker and its driver.
        background: Background lanes, by role.
        peers: Access to other workers' residents.
        recent: Busy times of roles; None if only the driver asks, which has its own record.
        parts: The worker's halves of features, by feature.
        begin_checks: The `check_begin` methods of all halves that override this hook. The other tuples hold other
            hooks.
    """

    lane: Lane
    peers: Peers
    baseline_bytes: int | None = None
    slots = 1
    collective_timeout = 1800.0
    parts: Mapping[str, WorkerFeature] = MappingProxyType({})
    recent: RecentSpans[str] | None = None
    before_call_hooks: tuple[Callable[..., None], ...] = ()
    after_call_hooks: tuple[Callable[..., None], ...] = ()
    begin_checks: tuple[Callable[..., None], ...] = ()
    sibling_checks: tuple[Callable[..., None], ...] = ()
    end_checks: tuple[Callable[..., None], ...] = ()
    result_checks: tuple[Callable[..., None], ...] = ()
    cause_waits: tuple[Callable[..., bool], ...] = ()
    explain_hooks: tuple[Callable[..., BaseException], ...] = ()
    report_hooks: tuple[Callable[..., Any], ...] = ()

    def __init__(self, boot: Boot, codec: Codec, send: Send, in_process: bool) -> None:
        self.boot = boot
        self._send = send
        self.in_process = in_process
        self.codec = codec
        self.scope = Scope(self._get_lane_name)
        self.store = Store(boot.strict, self.scope, boot.device)
        self.roles: dict[Any, RoleInstance] = {}
        self.device = Device(boot.device, in_process)
        self.setting = Setting(boot.device, in_process, self.device.on_stream_left)
        self._questions: Requests[None, Any] = Requests()
        self.inspection_lock = threading.Lock()
        self.scope.add_ender(
            lambda concerns, reason: self._questions.fail_matching(concerns, lambda: Consequence(reason))
        )
        self._feature_lock = threading.RLock()  # Held while a feature's half is created.
        self.background: dict[str, Background] = {}
        self.instances: dict[str, object] = {}
        self.definitions = Definitions(self.ask_driver, self.send_message, in_process)
        self.scope.add_ender(self._abort_peers)

    def get_wait_refusal(self) -> str | None:
        """Return the reason why the current call mustn't wait for another worker; None if the call may."""
        return self.scope.get_wait_refusal(self.get_current_seq())

    def get_current_seq(self) -> int | None:
        """Return the current call's number; on a thread that a role has started, the last running call's."""
        state = running_call.get()
        return state.seq if state is not None else max(list(self.lane.running), default=None)

    def send_message(self, message: Message, body: Any = None) -> None:
        """Send a message to the driver; messages stay in order. May be called from any thread."""
        self._send(message if self.in_process else message.head(), body)

    def ask_driver(self, question: Message, apart: bool = False) -> Any:
        """Ask the driver a question, and wait for the answer. A refusal or an ended wait raises a `ColocateError`.

        Args:
            question: The question.
            apart: Whether the question belongs to no call, so that only the worker's end breaks the wait.
        """
        seq = -1 if apart else self.get_current_seq()
        if seq == 0 and isinstance(question, _OF_CODE):
            # A failed constructor on another rank doesn't stop constructors here, so the question belongs to no call.
            seq = -1
        request = self._questions.open([None], seq or 0)
        reason = self.scope.get_wait_refusal(seq)
        if reason is not None:
            self._questions.drop_request(request)
            raise Consequence(reason)
        self.lane.on_waiting()  # A `__del__` method may ask at any time, even after `on_call_ending`.
        self.send_message(from_worker.Ask(request.token, question))
        return request.result()[0]

    def notify_driver(self, question: Message) -> None:
        """Send the driver a question, and ignore the answer. May be called from any thread."""
        self.send_message(from_worker.Ask(self._questions.open([None], -1).token, question))

    def get_feature(self, name: str) -> WorkerFeature:
        """Return this worker's half of a feature, which is created at the first use.

        Raises:
            CapabilityError: This worker has no such feature.
        """
        feature = self.parts.get(name)
        if feature is not None:
            return feature
        with self._feature_lock:
            feature = self.parts.get(name)
            if feature is None:
                feature = features.worker_class(name)(self)
                self.parts = {**self.parts, name: feature}
                self.list_hooks()
            return feature

    def list_hooks(self) -> None:
        """Rebuild the tuples of per-call hooks from the features' halves that override each hook."""
        self.before_call_hooks, self.after_call_hooks = (
            self._list_overrides("before_call"),
            self._list_overrides("after_call"),
        )
        self.begin_checks, self.sibling_checks = (
            self._list_overrides("check_begin"),
            self._list_overrides("check_sibling"),
        )
        self.end_checks, self.explain_hooks, self.result_checks = (
            self._list_overrides("check_end"),
            self._list_overrides("explain_failure"),
            self._list_overrides("check_result"),
        )
        self.cause_waits, self.report_hooks = self._list_overrides("awaits_cause"), self._list_overrides("call_report")

    def _list_overrides(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Return a hook's methods from all halves that override the hook."""
        methods = [getattr(part, name) for part in self.parts.values()]
        return tuple(
            method for method in methods if getattr(method, "__func__", method) is not getattr(WorkerFeature, name)
        )

    def explain_failure(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Return the cause of a failure in role code, as far as features know the cause."""
        for name in features.list_followers():
            self.get_feature(name)
        for hook in self.explain_hooks:
            error = hook(error, role, row)
        return error

    def wait_for_cause(self, error: BaseException, role: str | None) -> None:
        """Block the lane until features know the cause of a failure, or can't find the cause."""
        start = time.monotonic()
        while any(awaits(error, role, None, time.monotonic() - start, True) for awaits in self.cause_waits):
            time.sleep(_CAUSE_EVERY_S)

    async def await_cause(self, error: BaseException, role: str | None, row: RowState | None = None) -> None:
        """Wait in an event loop until features know the cause of a failure. Other calls and rows continue.

        A cancellation ends the wait.
        """
        if not self.cause_waits:
            return
        import asyncio  # The caller has imported asyncio already.

        start = time.monotonic()
        with suppress(asyncio.CancelledError):
            while any(awaits(error, role, row, time.monotonic() - start, False) for awaits in self.cause_waits):
                await asyncio.sleep(_CAUSE_EVERY_S)

    def collect_reports(self, says: Callable[[WorkerFeature], Any]) -> dict[str, Any]:
        """Collect reports from all features for their halves in the driver, by feature name."""
        return {name: plain for name, part in self.parts.items() if (plain := says(part)) is not None}

    def is_consequence(self) -> bool:
        """Return whether a failure on the main lane may follow from another rank's failure."""
        return any(part.is_consequence() for part in self.parts.values())

    def after_call(self, seq: int) -> None:
        """Call the features' `after_call` hooks at the end of a call, successful or not."""
        for hook in self.after_call_hooks:
            hook(seq)

    def check_result(self, role: str | None, label: str, kept: Mapping[str, Any] | None = None) -> None:
        """Check a result of role code with the features' `check_result` hooks, which may raise."""
        for check in self.result_checks:
            check(role, label, kept)

    def on_holdings_changed(self, role: str | None) -> None:
        """Notify features that a role's memory may have changed, or any role's memory if `role` is None."""
        for part in self.parts.values():
            part.on_holdings_changed(role)

    def around_construction(self, role: str) -> ExitStack:
        """Enter the features' context managers for a role's construction. The caller closes the returned stack."""
        return enter_blocks(part.around_construction(role) for part in self.parts.values())

    def around_constructor(self, role: str, plains: Mapping[str, Any]) -> ExitStack:
        """Enter the features' context managers that last only for a role's constructor. The caller closes the stack."""
        names = [*{**self.parts, **plains}]
        return enter_blocks(self.get_feature(name).around_constructor(role, plains.get(name)) for name in names)

    def keep_awake(self, role: RoleInstance, why: str) -> ExitStack:
        """Enter the features' context managers that keep a role's memory on the device. The caller closes the stack."""
        return enter_blocks(part.keep_awake(role, why) for part in self.parts.values())

    def wake_memory(self, role: str, tags: Sequence[str]) -> None:
        """Wake parts of a role's memory until the running call is over.

        Raises:
            ColocateError: The memory isn't available.
        """
        for part in self.parts.values():
            part.wake_memory(role, tags)

    def describe_memory(self) -> str:
        """Return each role's memory as a note for an error, from the feature "memory"."""
        text: str = self.get_feature("memory").describe()  # type: ignore[attr-defined]
        return text

    def wake_sibling(self, asking: Context, name: str, tags: Sequence[str] = tuple(TAGS)) -> None:
        """Wake a sibling role before role code gets the role's object.

        Raises:
            ConfigError: A tag is unknown.
            ColocateError: A feature refuses.
        """
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise ConfigError(f"awake names {unknown[0]!r}; a role's memory is of {', '.join(TAGS)}")
        if self.sibling_checks and (role := self.roles.get(name)) is not None:
            for check in self.sibling_checks:
                check(asking, role, tags)
        self.wake_memory(name, tags)

    @property
    def moves_tensors(self) -> bool:
        """Whether tensors may arrive on a device other than the slot's device."""
        return self.boot.device != "cpu" or bool(self.in_process and find_imported("torch") and in_use(KIND.device))

    @property
    def lanes(self) -> list[Lane]:
        """The worker's lanes, the main one first."""
        return [self.lane, *(background.lane for background in list(self.background.values()))]

    def lane_for(self, role: Any) -> Lane:
        """Return the lane that runs a role's code. Functions run on the main lane."""
        background = self.background.get(role) if self.background else None
        return self.lane if background is None else background.lane

    def _get_lane_name(self, seq: int) -> str:
        """Return the background role whose lane runs a call; "" for the main lane."""
        for name, background in self.background.items():
            if (work := background.lane.running.get(seq)) is not None and not work.is_barrier:
                return name
        return ""

    def _abort_peers(self, concerns: Callable[[int], bool], reason: str) -> None:
        if self.scope.closed is not None or any(concerns(seq) for lane in self.lanes for seq in list(lane.running)):
            self.peers.abort(reason)

    def send_result(self, message: Message, body: Any, label: str) -> None:
        """Send the driver a message with a method's result.

        Raises:
            SerializationError: This process has no descriptor, or no memory, for the send.
        """
        try:
            self.send_message(message, body)
        except OSError as error:  # This is an error of the operating system, not of the method.
            raise SerializationError(
                f"the result of {label} can't be sent: {error.strerror or error}", argument="result"
            ) from error

    def pack_result(self, result: Any, label: str, wait: bool = False) -> Any:
        """Serialize a role's result.

        A `SerializationError` names the method; `wait` is that of `Definitions.send_lacking`.
        """
        pack = partial(self.codec.pack_named, result, "result", f"the result of {label}")
        if not self.device.is_gpu or threading.current_thread() in [lane.thread for lane in self.lanes]:
            body = pack()
        else:
            with self.device.use_side_stream():
                body = pack()
        self.definitions.send_lacking(body, wait)
        return body

    @abc.abstractmethod
    def report_broken(self, reason: str, log_tail: str = "") -> None:
        """Report this worker as broken and close the lanes, so that the group fails at once instead of waiting."""

    def report_progress(self, ctx: Context, done: int, total: int | None) -> None:
        """Report a role's progress to the driver."""
        self.send_message(
            from_worker.Progress(ctx.role, _to_plain_number(done), None if total is None else _to_plain_number(total))
        )


def enter_blocks(blocks: Iterable[AbstractContextManager[object]]) -> ExitStack:
    """Enter context managers on an `ExitStack`, and return the stack, which the caller must close."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        return stack.pop_all()


def _to_plain_number(number: Any) -> int | float:
    """Convert a role's number to a plain int or float for the driver."""
    return float(number) if isinstance(number, float) else operator.index(number)


def get_roles_by_name(worker_context: WorkerContext) -> dict[str, RoleInstance]:
    """Return a worker's roles by name, without the nameless one that runs functions. May be called from any thread."""
    return {role.name: role for role in list(worker_context.roles.values()) if role.name is not None}


def list_excluded_objects(worker_context: WorkerContext, name: str | None = None) -> list[object]:
    """Return objects that don't count as a role's memory: other roles' instances, and what its hook `apart` lists."""
    found = [role.instance for each, role in get_roles_by_name(worker_context).items() if each != name]
    return found if name is None else [*found, *worker_context.roles[name].list_excluded()]
