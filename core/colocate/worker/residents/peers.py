"""How a worker reads residents: from its own store, from another worker of its process, or through a peer channel."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from colocate import wire
from colocate._devices.lending import Borrower, Lender, NotLentError, place
from colocate._protocol import parts
from colocate._protocol.consequence import Consequence, Poisoned
from colocate._protocol.message import Head, Message, read
from colocate._protocol.questions import WhereIs
from colocate._protocol.taken import Taken
from colocate._protocol.uses import Peers, Source, Written
from colocate._role.context import running_call
from colocate._values import batch
from colocate._values.leaving import tensor_bytes, tensors
from colocate.errors import SerializationError
from colocate.worker.lane import Work
from colocate.worker.residents.store import Entry, Store

if TYPE_CHECKING:
    from colocate.worker.serving.host import WorkerHost

Find = Callable[[str, int], "WorkerHost"]


class _HostPeers(Peers):
    """What lies in this very worker is taken from its store, on whichever device it is.

    Arguments are brought to the slot's device when they are complete.
    """

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def part(self, source: Source, rank: int, taken: list[Taken] | None) -> Any:
        """The whole part of a rank."""
        if self._is_here(source, rank):
            entry = self._own(source)
            if taken is not None:
                taken.append((source.key, rank, entry.nbytes, 0.0, 0.0, 0, ""))
            return entry.value
        return self._part(source, rank, taken)

    def rows(self, source: Source, rank: int) -> int:
        """How many rows it has."""
        if self._is_here(source, rank):
            return self._own(source).rows(source.label)
        return self._rows(source, rank)

    def weight(self, source: Source, rank: int) -> int | None:
        """How many rows the call that made it worked on there."""
        if self._is_here(source, rank):
            return self._own(source).weight
        return self._weight(source, rank)

    def slice(self, source: Source, rank: int, start: int, stop: int, taken: list[Taken] | None) -> Any:
        """Some of its rows."""
        if self._is_here(source, rank):
            value = batch.slice_rows(self._own(source).value, start, stop)
            if taken is not None:
                taken.append((source.key, rank, tensor_bytes(value), 0.0, 0.0, 0, ""))
            return value
        return self._slice(source, rank, start, stop, taken)

    def abort(self, reason: str) -> None:
        """Fail what is under way."""
        self._host.store.poke()

    def _own(self, source: Source) -> Entry:
        # An async method may be waited for that makes it: until nobody waits for the call that uses it any more.
        return self._host.store.wait(source.key, self._host.why_not)

    def _is_here(self, source: Source, rank: int) -> bool:
        boot, origin = self._host.boot, source.origin
        return origin.slots[rank] == boot.slot and origin.group == boot.group and origin.generation == boot.generation

    # -- the same of another worker

    @abc.abstractmethod
    def _part(self, source: Source, rank: int, taken: list[Taken] | None) -> Any: ...

    @abc.abstractmethod
    def _rows(self, source: Source, rank: int) -> int: ...

    @abc.abstractmethod
    def _weight(self, source: Source, rank: int) -> int | None: ...

    @abc.abstractmethod
    def _slice(self, source: Source, rank: int, start: int, stop: int, taken: list[Taken] | None) -> Any: ...


class LocalPeers(_HostPeers):
    """All workers are in this process: parts are handed over by reference, or between slots as the codec has it."""

    def __init__(self, host: WorkerHost, find: Find) -> None:
        """Args: host: This worker. find: The worker on a slot of a group."""
        super().__init__(host)
        self._find = find
        self._waiting: Store | None = None
        self._borrowed: dict[int, list[tuple[Store, int, Entry]]] = {}  # by the call that has the very value

    @property
    def address(self) -> None:
        """They need none."""
        return

    def given_back(self, seq: int, label: str) -> Sequence[Written]:
        """A call is over: what it wrote into of other workers' residents."""
        written: list[Written] = []
        for store, key, entry in self._borrowed.pop(seq, ()):
            written += store.written([key], label)
            entry.lent.remove(label)
        return written

    def abort(self, reason: str) -> None:
        """Fail what is under way."""
        super().abort(reason)
        if self._waiting is not None:
            self._waiting.poke()

    def close(self) -> None:
        """Nothing to end."""

    def _part(self, source: Source, rank: int, taken: list[Taken] | None) -> Any:
        entry = self._entry(source, rank)
        return self._handed_over(entry, entry.value, source, rank)

    def _rows(self, source: Source, rank: int) -> int:
        return self._entry(source, rank).rows(source.label)

    def _weight(self, source: Source, rank: int) -> int | None:
        return self._entry(source, rank).weight

    def _slice(self, source: Source, rank: int, start: int, stop: int, taken: list[Taken] | None) -> Any:
        entry = self._entry(source, rank)
        return self._handed_over(entry, batch.slice_rows(entry.value, start, stop), source, rank)

    def _handed_over(self, entry: Entry, value: Any, source: Source, rank: int) -> Any:
        codec, boot = self._host.codec, self._host.boot
        if codec.name == "reference":
            self._borrow(entry, source, rank)
            return self._host.hand_over(value)
        with self._find(source.group, source.slot(rank)).store.reading(entry):
            body = self._host.packed(value, source.label)
        return codec.unpack(body, boot.device)

    def _borrow(self, entry: Entry, source: Source, rank: int) -> None:
        call = running_call.get()
        if isinstance(call, Work):
            entry.lent.append(call.label)
            store = self._find(source.group, source.slot(rank)).store
            self._borrowed.setdefault(call.seq, []).append((store, source.key, entry))

    def _entry(self, source: Source, rank: int) -> Entry:
        found = self._find(source.group, source.slot(rank))
        if found.boot.generation != source.generation:
            raise Consequence(f"group {source.group!r} has been restarted")
        self._waiting = found.store
        try:
            return self._waiting.wait(source.key, self._host.why_not)
        finally:
            self._waiting = None


class ChannelPeers(_HostPeers):
    """Workers are processes: parts travel worker to worker on authenticated sockets.

    Between those of one machine what is on a device is copied from there, where the driver of the device has it so.
    """

    def __init__(self, host: WorkerHost, tls: wire.Tls | None = None) -> None:
        super().__init__(host)
        elsewhere = None if host.boot.host == wire.LOOPBACK else host.boot.host
        self._channel = wire.PeerChannel(host.boot.secret, self._answer, elsewhere, tls, host.boot.ports, host.broken)
        self._addresses: dict[tuple[str, int, int], str] = {}
        self._borrower = Borrower(host.boot.device)
        self._by_host: set[tuple[str, int, int]] = set()  # who can't lend to this worker

    @property
    def address(self) -> str:
        """Where other workers reach this one; it listens from now on."""
        return self._channel.address

    def abort(self, reason: str) -> None:
        """Fail what is under way."""
        super().abort(reason)
        self._channel.abort(reason)

    def close(self) -> None:
        """End its threads and sockets."""
        self._channel.close(0.5)

    def _part(self, source: Source, rank: int, taken: list[Taken] | None) -> Any:
        return self._fetch(source, rank, partial(parts.Part, source.key), taken)

    def _rows(self, source: Source, rank: int) -> int:
        count = self._number(source, rank, parts.Rows(source.key))
        assert count is not None
        return count

    def _weight(self, source: Source, rank: int) -> int | None:
        return self._number(source, rank, parts.Weight(source.key))

    def _slice(self, source: Source, rank: int, start: int, stop: int, taken: list[Taken] | None) -> Any:
        return self._fetch(source, rank, partial(parts.Slice, source.key, start, stop), taken)

    def _fetch(self, source: Source, rank: int, about: Callable[[str], Message], taken: list[Taken] | None) -> Any:
        """Args: about: The question, given where this worker computes if memory may be lent to it."""
        asked, where, device = time.time(), _where(source, rank), self._host.boot.device
        answer, body = self._value(source, rank, about("" if where in self._by_host else place(device)))
        made, refusal, value = asked + answer.waited, answer.refusal, None
        if answer.lent:
            try:
                with self._borrower.borrowing():
                    value = self._host.codec.unpack(body, device)
            except NotLentError as error:
                refusal = str(error)
                answer, body = self._value(source, rank, about(""))
        if refusal:
            self._by_host.add(where)
        if not answer.lent:
            value = self._host.codec.unpack(body, device)
        elif self._number(source, rank, parts.Still(source.key)) is None:
            raise Consequence(f"the resident of {source.label} was let go of while it was copied")
        if taken is not None:
            taken.append((source.key, rank, body.nbytes + answer.lent, made, time.time(), answer.lent, refusal))
        return value

    def _value(self, source: Source, rank: int, question: Message) -> tuple[parts.Value, wire.Packed]:
        answer, body = self._ask(source, rank, question)
        assert isinstance(answer, parts.Value)
        assert body is not None
        return answer, body

    def _number(self, source: Source, rank: int, question: Message) -> int | None:
        answer, _ = self._ask(source, rank, question)
        assert isinstance(answer, parts.Number)
        return answer.number

    def _ask(self, source: Source, rank: int, question: Message) -> tuple[Message, wire.Packed | None]:
        where = _where(source, rank)
        address = self._addresses.get(where)
        if address is None:
            address = self._addresses[where] = self._host.ask(WhereIs(*where))
        aborts = self._channel.aborts
        reason = self._host.why_not()
        if reason is not None:
            raise Consequence(reason)
        try:
            head, body = self._channel.request(address, question.head(), aborts)
        except ConnectionError as error:
            raise Consequence(
                f"the resident of {source.label} can't be had from worker {where[1]} of group {where[0]!r}: {error}"
            ) from error
        answer = read(head)
        if isinstance(answer, parts.Unsendable):
            raise SerializationError(answer.text, argument=answer.argument, path=answer.path)
        if isinstance(answer, parts.Poison):
            raise Poisoned(answer.why)
        return answer, body

    def _answer(self, head: Head) -> tuple[Head, wire.Packed | None]:
        try:
            answer, body = self._found(read(head))
        except Poisoned as error:
            answer, body = parts.Poison(error.message), None
        except SerializationError as error:
            answer, body = parts.Unsendable(error.message, error.argument, error.path), None
        return answer.head(), body

    def _found(self, question: Message) -> tuple[Message, wire.Packed | None]:
        host = self._host
        if isinstance(question, parts.Rows):
            return parts.Number(host.part_rows(question.key)), None
        if isinstance(question, parts.Weight):
            return parts.Number(host.part_weight(question.key)), None
        if isinstance(question, parts.Still):
            kept = host.store.local(question.key)
            if kept is not None and kept.error is not None:
                raise Poisoned(kept.error)
            return parts.Number(1 if kept is not None and kept.ready else None), None
        assert isinstance(question, parts.Part | parts.Slice)
        asked = time.monotonic()
        entry = host.store.wait(question.key)
        waited, value = time.monotonic() - asked, entry.value
        if isinstance(question, parts.Slice):
            # Where it is packed, too: the offsets of jagged rows are made anew.
            with host.device.aside():
                value = batch.slice_rows(value, question.start, question.stop)
        if not question.place or question.place != place(host.boot.device):
            with host.store.reading(entry):
                return parts.Value(waited), host.packed(value, entry.maker, wait=True)
        lender = Lender(host.boot.device, tensors(entry.value))
        with host.store.reading(entry), lender.lending():
            body = host.packed(value, entry.maker, wait=True)
        return parts.Value(waited, lender.lent, lender.refusal), body


def _where(source: Source, rank: int) -> tuple[str, int, int]:
    return source.group, source.slot(rank), source.generation
