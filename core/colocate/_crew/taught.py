"""What the workers of a group know of the script's definitions: each gets them once, before a message names them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from colocate._calls.link import Link
from colocate._crew.worker import Worker
from colocate._definitions import known, sources, subclasses
from colocate._definitions.codec import pack
from colocate._definitions.given import Given
from colocate._definitions.inbox import Inbox
from colocate._definitions.known import Definition, Global, Need
from colocate._definitions.lots import Lot, Receiver
from colocate._definitions.reached import reached
from colocate._protocol import from_worker, questions, to_worker
from colocate._protocol.message import Message
from colocate._role.info import RoleInfo
from colocate._system.at_work import Section
from colocate._system.jobs import error_text
from colocate.errors import ColocateError, SerializationError


class Taught:
    """Sends definitions to the workers of one group, and holds them: its results may name them as long as it exists."""

    def __init__(
        self,
        link: Link,
        lock: Section,
        workers: Callable[[], Sequence[Worker]],
        roles: Mapping[Any, RoleInfo],
    ) -> None:
        """Args: link: The group. lock: That of its calls. workers: Those that it has now. roles: By their keys."""
        self._link = link
        self._lock = lock
        self._workers = workers
        self._roles = roles
        self._held: dict[int, Definition] = {}
        self._sent: dict[Global, Any] = {}  # what all who were sent a name have of it; `self` where that differs
        self._withheld: dict[Global, SerializationError] = {}  # names that have changed to what can't be sent
        self._lost: set[Global] = set()  # names that some worker was sent and couldn't rebuild; what needs one sends it
        self._inbox = Inbox(binds=False)
        self._tried = Receiver("is given it")
        self._from_another = False  # what the workers know of the roles' code is from a driver before this one
        self.given = Given(link.name)

    def follows(self, modules: Mapping[str, tuple[str, str]]) -> None:
        """The workers have all they know from a driver before this one, whose script is another.

        Args:
            modules: The modules that they have got from it: file and digest, by name.

        Raises:
            ColocateError: One of them is another one here.
        """
        self.given = Given(self._link.name, modules)
        self._inbox = Inbox(binds=False, of_another=True)
        self._from_another = True

    def renew(self) -> None:
        """Its workers are new ones, which get the modules as they are now."""
        self.given = Given(self._link.name)
        self._from_another = False

    def has_news(self) -> bool:
        """Whether `before` may have something to do for a message whose body names no definition."""
        if self._withheld or self._lost or self._from_another:
            return True
        return bool(self._sent) and any(name.value is not value for name, value in list(self._sent.items()))

    def before(self, slots: Iterable[int], bodies: Iterable[Any], roles: Iterable[Any] = ()) -> None:
        """Have some workers know what bodies that are sent to them next only name. The order's lock is held.

        Args:
            slots: The workers.
            bodies: What is sent to them.
            roles: Whose code runs there then, by the keys that workers know roles by.

        Raises:
            SerializationError: A definition, or a global that its code names, can't be sent.
        """
        self._renew()
        needs = {id(need): need for body in bodies for need in getattr(body, "needs", ())}
        if self._withheld or self._lost:
            infos = [info for key in roles if (info := self._roles.get(key)) is not None]
            code = (need for info in infos for need in pack(info.cls).needs)
            for name in reached((*needs.values(), *code)):
                if name in self._withheld:
                    raise self._withheld[name]
                if name in self._lost:
                    needs[id(name)] = name
        if needs:
            self._give(slots, list(needs.values()))
        if self._from_another and any(key in self._roles for key in roles):
            self._say_code()

    def _say_code(self) -> None:
        """Have the workers know the roles' code as it is in this driver's script, with the globals that it names."""
        needs = {id(need): need for info in self._roles.values() for need in pack(info.cls).needs}
        self._give(self._link.live(), list(needs.values()))
        self._from_another = False

    def _renew(self) -> None:
        """Have the workers know what the names are now that they have been sent: whatever runs there may use them.

        They are compared by identity, so what is changed in place isn't followed. What can't be sent is withheld, and
        told by what needs it.
        """
        changed = [name for name, value in self._sent.items() if name.value is not value]
        self._withheld = {}
        if not changed:
            return
        receivers = self._receivers()
        concerned: dict[tuple[Global, ...], list[int]] = {}
        for slot, receiver in receivers.items():  # also those that this message isn't for
            having = tuple(name for name in changed if name in receiver.values)
            concerned.setdefault(having, []).append(slot)
        for names, slots in concerned.items():
            try:
                self._give(slots, names)
            except SerializationError:
                self._give_each(slots, names)
        for name in changed:
            had = [receiver.values[name] for receiver in receivers.values() if name in receiver.values]
            self._sent[name] = had[0] if had and all(each is had[0] for each in had) else self

    def _receivers(self) -> dict[int, Receiver]:
        if self._link.services.executor.in_process:
            return {0: self._tried}
        workers = self._workers()
        return {slot: workers[slot].receiver for slot in self._link.live()}

    def _give_each(self, slots: Sequence[int], names: Iterable[Global]) -> None:
        for name in names:
            try:
                self._give(slots, (name,))
            except SerializationError as error:
                self._withheld[name] = error

    def _note(self, lot: Lot) -> None:
        """A lot is sent to somebody; others may have something else of its names."""
        for name, value in lot.values.items():
            if self._sent.setdefault(name, value) is not value:
                self._sent[name] = self

    def _try(self, needs: Sequence[Need]) -> None:
        """Nothing travels within one process, but what couldn't is told there too (`strict=True`)."""
        if lacking := self._lacking(self._tried, needs):
            lot = self._tried.lot(lacking)
            self._tried.has_got(lot)
            self._note(lot)

    def _lacking(self, receiver: Receiver, needs: Sequence[Need]) -> list[Need]:
        lacking = receiver.lacks(needs)
        if self._withheld or self._lost:
            lacking = [need for need in lacking if need in needs or need not in {*self._withheld, *self._lost}]
        return lacking

    def _give(self, slots: Iterable[int], needs: Sequence[Need]) -> None:
        executor, workers = self._link.services.executor, self._workers()
        if executor.in_process:
            self._try(needs)
            return
        made: tuple[list[Need], Lot, Any] | None = None
        try:
            for slot in slots:
                receiver = workers[slot].receiver
                lacking = self._lacking(receiver, needs)
                if not lacking:
                    continue
                if made is None or made[0] != lacking or not receiver.takes(made[1]):
                    lot = receiver.lot(lacking)
                    if made is not None:
                        executor.discard(made[2])
                    subclasses.warn_of_untold(
                        each.object for each in lot.definitions.values() if each.id not in self._held
                    )
                    made = lacking, lot, executor.frame(to_worker.Define(lot.ids, lot.names).head(), lot.body)
                self._held.update(made[1].definitions)
                self._note(made[1])
                workers[slot].host.send(made[2])
                receiver.has_got(made[1])  # not before it was sent: a send that fails is made up for by the next
        finally:
            if made is not None:
                executor.discard(made[2])

    def lost(self, worker: Worker, lost: from_worker.Undefined) -> None:
        """A worker couldn't rebuild something of a lot, and has nothing of it: what needs it has it sent again."""
        with self._lock:
            self._lost |= worker.receiver.lost_all(lost.ids, lost.names)

    def told(self, worker: Worker, told: to_worker.Define, body: Any) -> None:
        """A worker has sent definitions of its own."""
        worker.receiver.knows.update(told.ids)
        self._inbox.put(told.ids, body, told.names)

    def asked(self, worker: Worker, question: Message, tell: Callable[[Any, str | None], None]) -> None:
        """A worker lacks a definition or a module. A thread of its own answers, for that may import and read."""

        def answer() -> None:
            try:
                found = self._answer(worker, question)
            except Exception as error:
                tell(None, error.message if isinstance(error, ColocateError) else f"{type(error).__name__}: {error}")
            else:
                tell(found, None)

        try:
            threading.Thread(target=answer, name="colocate-definitions", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had: what needs it fails of that
            tell(None, f"the driver can't answer: {error_text(error)}")

    def _answer(self, worker: Worker, question: Message) -> Any:
        if isinstance(question, questions.Source):
            answer = sources.answer(question.module)
            self.given.add(sources.contents(answer))
            return {name: attrs.astuple(found) for name, found in answer.items()}
        if isinstance(question, questions.Compare):
            if (why := sources.other_content(question.modules)) is not None:
                raise ColocateError(why)
            return sources.shadowing()
        assert isinstance(question, questions.Missing)
        definition = known.find(question.id)
        with self._lock:
            self._give([worker.slot], [definition])
        return None
