"""Send the script's definitions to a group's workers, and answer the workers' questions.

Each worker gets a definition once, before any message that names the definition.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from colocate._calls.pending import PendingCall
from colocate._definitions import ids, making, sources
from colocate._definitions.bundles import Bundle, ReceivedDefinitions, Table
from colocate._definitions.ids import Definition, Need
from colocate._definitions.names import get_script_names
from colocate._definitions.sources import ShippedModules
from colocate._protocol import from_worker, questions, to_worker
from colocate._protocol.message import Message
from colocate._system.jobs import format_error
from colocate._system.threads import Thread
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup

_LOOKS, _LOOK_S = 16, 1.0
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class DefinitionPublisher:
    """Sends definitions to a group's workers, and keeps these definitions alive for results that refer to them."""

    def __init__(self, link: WorkerGroup) -> None:
        self._link = link
        self._held: dict[int, Any] = {}
        self._received_definitions = ReceivedDefinitions()
        self._tried = Table("is given it")
        # Records the script's globals that sent code uses, with the values at the time of the send.
        self._sent: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._calls, self._due = 0, 0.0
        self.script = ids.get_origin()  # Identifies the process that runs the workers' script.
        self.shipped_modules = ShippedModules(link.name)  # Records the modules sent to the workers.

    def adopt_script(self, script: int, modules: Mapping[str, tuple[str, str]]) -> None:
        """Take over workers that have the script and modules of an earlier driver.

        Raises:
            ColocateError: A module differs here.
        """
        self.shipped_modules = ShippedModules(self._link.name, modules)
        self.script = script
        if script != ids.get_origin():
            for worker in self._link.workforce.workers:
                worker.table.script = "has another's"

    def start_generation(self) -> None:
        """Reset all records for new workers, which get the current script and modules."""
        self.shipped_modules = ShippedModules(self._link.name)
        self.script = ids.get_origin()
        self._sent.clear()

    # -- to the workers

    def check_changes(self, call: PendingCall, bodies: Iterable[Any]) -> None:
        """Compare the workers' modules and globals with the driver's before a call, and warn about changes.

        Modules are compared after an import. Python doesn't report new bindings of globals, so globals are compared
        at the first calls after a send and then once a second. The cost of a call then doesn't grow with their number.

        Raises:
            ColocateError: The driver has imported another version of a module than the workers have from an earlier
                driver.
        """
        if self.shipped_modules.news:
            self.shipped_modules.warn_of_changes(call.line)
        self._calls += 1
        if not self._sent or (self._calls > _LOOKS and time.monotonic() < self._due):
            return
        self._due, script = time.monotonic() + _LOOK_S, get_script_names()
        sent = self._sent.copy()
        other = compress(sent, map(operator.is_not, map(script.get, sent), sent.values()))
        changed = [name for name in other if not _are_equal(script.get(name), sent[name])]
        needs = (need for body in bodies for need in getattr(body, "needs", ()) if isinstance(need, Definition))
        if not changed or any(need.id not in self._held for need in needs):
            return  # Don't warn yet: this call's new definitions may bring the globals' new values.
        for name in changed:
            self._sent.pop(name, None)  # Another thread may have removed the name already.
        self._warned.update(changed)
        text = (
            f"the script has assigned {', '.join(changed)} again since the workers of group {self._link.name!r} "
            "received code that uses the old value. The workers keep the old value: pass the new value as an argument, "
            "define that code again, or spawn the group again"
        )
        warnings.warn_explicit(text, RuntimeWarning, *call.line)

    def send_definitions(self, slots: Iterable[int], bodies: Iterable[Any]) -> None:
        """Send the definitions that workers lack for the next messages. The caller holds `CallOrder.lock`.

        Raises:
            SerializationError: A definition, or a global that its code names, can't be sent.
        """
        if needs := {need[0]: need for body in bodies for need in getattr(body, "needs", ())}:
            self._send_missing(slots, list(needs.values()))

    def _send_missing(self, slots: Iterable[int], needs: Sequence[Need]) -> None:
        executor, workers = self._link.services.executor, self._link.workforce.workers
        if executor.in_process:  # Nothing is sent within one process, but `strict=True` checks the pickling.
            if lacking := self._tried.list_lacking(needs):
                self._tried.mark_sent(self._tried.create_bundle(lacking))
            return
        prepared: tuple[list[Need], Bundle, Any] | None = None
        try:
            for slot in slots:
                table = workers[slot].table
                lacking = table.list_lacking(needs)
                if not lacking:
                    continue
                if prepared is None or prepared[0] != lacking or not table.can_take(prepared[1]):
                    bundle = table.create_bundle(lacking)
                    if prepared is not None:
                        executor.discard(prepared[2])
                    new = [thing for id, thing in bundle.definitions.items() if id not in self._held]
                    making.warn_of_lost_options(new)
                    definition_message = to_worker.Define(tuple(bundle.definitions), tuple(bundle.names))
                    prepared = lacking, bundle, executor.frame(definition_message.head(), bundle.body)
                self._record_bundle(prepared[1])
                workers[slot].host.send(prepared[2])
                table.mark_sent(prepared[1])  # Recorded after the send, so that a failed send is repeated.
        finally:
            if prepared is not None:
                executor.discard(prepared[2])

    def _record_bundle(self, bundle: Bundle) -> None:
        self._held.update(bundle.definitions)
        for name, value in bundle.names.items():
            if name in self._sent or (name in bundle.users and name not in self._warned):
                self._sent[name] = value
        self._calls = 0

    # -- from the workers

    def on_bundle_failed(self, worker: Worker, lost: from_worker.BundleFailed) -> None:
        """Record that a worker couldn't rebuild a bundle, and so lacks all of the bundle's definitions."""
        with self._link.order.lock:
            worker.table.mark_lost(lost.ids, lost.names)

    def on_definitions(self, worker: Worker, told: to_worker.Define, body: Any) -> None:
        worker.table.sent_ids.update(told.ids)
        self._received_definitions.add_bundle(told.ids, told.names, body)

    def answer_question(self, worker: Worker, question: Message, tell: Callable[[Any, str | None], None]) -> None:
        """Answer a question about definitions on a new thread, because the answer may import modules and read files."""

        def answer() -> None:
            try:
                result = self._answer(worker, question)
            except Exception as error:
                tell(None, error.message if isinstance(error, ColocateError) else f"{type(error).__name__}: {error}")
            else:
                tell(result, None)

        try:
            Thread(target=answer, name="colocate-definitions").start()
        except RuntimeError as error:  # No thread is available, so the asking call fails with this error.
            tell(None, f"the driver can't answer: {format_error(error)}")

    def _answer(self, worker: Worker, question: Message) -> Any:
        if isinstance(question, questions.Source):
            answer = sources.collect_sources(question.module)
            self.shipped_modules.add_modules(sources.list_digests(answer))
            return {name: attrs.astuple(source) for name, source in answer.items()}
        if isinstance(question, questions.Compare):
            if (why := sources.find_other_content(question.modules)) is not None:
                raise ColocateError(why)
            return sources.list_shadowing()
        assert isinstance(question, questions.MissingParts)
        definition = Definition(question.id, ids.find_thing(question.id))
        with self._link.order.lock:
            self._send_missing([worker.slot], [definition])
        return None


def _are_equal(now: Any, was: Any) -> bool:
    return type(now) in _PLAIN and type(now) is type(was) and (now == was or now != now)


Tell: TypeAlias = Callable[[Any, str | None], None]


@attrs.define
class _Meeting:
    """A rendezvous of ranks: the ranks that have arrived, and the value that one rank has passed."""

    callbacks: list[Tell] = attrs.field(factory=list)
    slots: set[int] = attrs.field(factory=set)
    value: Any = None
    refusal: str | None = None


class Questions:
    """Answers the questions that a group's workers ask the driver."""

    def __init__(self, link: WorkerGroup) -> None:
        self._link = link
        self._meetings: dict[str, _Meeting] = {}

    def on_question(self, worker: Worker, asked: from_worker.Ask) -> None:
        def tell(answer: Any, error: str | None = None) -> None:
            worker.send(to_worker.Answer(asked.token, answer, error))

        match asked.question:
            case questions.GetPeerAddress() as question:
                self._locate(question, tell)
            case questions.FindAligned() as question:
                self._find_aligned(question, tell)
            case questions.Flush():
                tell(None)
            case questions.JoinRendezvous() as question:
                self._join_rendezvous(worker.slot, question, tell)
            case question:
                self._link.published.answer_question(worker, question, tell)

    def _locate(self, asked: questions.GetPeerAddress, tell: Tell) -> None:
        group = asked.group
        found = self._link.home.connection.worker_groups.get(group)
        if found is None or not found.alive or found.number != asked.number:
            tell(None, f"group {group!r} is closed")
            return
        if found.generation != asked.generation:
            tell(None, f"group {group!r} has been restarted")
            return

        def located(address: str | None, why: str) -> None:
            words = f"worker {asked.slot} of group {group!r} can't be reached by others: {why}"
            tell(address, None if address is not None else words)

        found.workforce.workers[asked.slot].locate(located)

    def _join_rendezvous(self, slot: int, asked: questions.JoinRendezvous, tell: Tell) -> None:
        """Answer all ranks of a rendezvous with one rank's value once all have arrived, or at once with a refusal.

        After a failed call no more ranks arrive. The hold then ends the wait in the worker.
        """
        with self._link.order.lock:
            meeting = self._meetings.setdefault(asked.rendezvous_key, _Meeting())
            meeting.callbacks.append(tell)
            meeting.slots.add(slot)
            meeting.refusal = meeting.refusal or asked.refusal
            if asked.value is not None:
                meeting.value = asked.value
            if meeting.refusal is not None or len(meeting.slots) == asked.members:
                for callback in meeting.callbacks:
                    callback(meeting.value, meeting.refusal)
                meeting.callbacks.clear()
            if len(meeting.slots) == asked.members:
                del self._meetings[asked.rendezvous_key]

    def _find_aligned(self, asked: questions.FindAligned, tell: Tell) -> None:
        """Answer which residents of a call have the same partition as the first one, once all are computed."""
        call = self._link.order.pending.get(asked.seq)
        uses = {use._kept.source.key: use._kept for use in call.uses} if call is not None else {}
        if asked.key not in uses:
            tell(None, "the call has failed on another rank")
            return
        records = [uses[asked.key], *(uses[other] for other in asked.other_keys)]

        def answer() -> None:
            failed = next((item.call._error for item in records if item.call._error is not None), None)
            if failed is not None:
                tell(None, f"{type(failed).__name__}: {failed}")
                return
            sizes = [item.sizes() for item in records]
            tell(
                [
                    other
                    for other, other_sizes in zip(asked.other_keys, sizes[1:], strict=True)
                    if other_sizes == sizes[0]
                ],
                None,
            )

        pending_calls = [item.call for item in records if not item.call.done()]
        waiting = len(pending_calls)

        def made(_: PendingCall) -> None:  # The timers' thread runs these callbacks one at a time.
            nonlocal waiting
            waiting -= 1
            if not waiting:
                answer()

        for item in pending_calls:
            item._add_callback(made)
        if not pending_calls:
            answer()
