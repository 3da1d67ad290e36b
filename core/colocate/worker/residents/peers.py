"""Reads residents from the worker's own store, from a worker in the same process, or through a peer channel."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from colocate import wire
from colocate._devices.lending import Borrower, Lender, NotLentError, place
from colocate._protocol import parts
from colocate._protocol.consequence import Consequence, Poisoned
from colocate._protocol.message import Head, Message, read
from colocate._protocol.questions import WhereIs
from colocate._protocol.taken import Taken
from colocate._protocol.to_worker import PASSED_BYTES, Passed
from colocate._protocol.uses import Source, Taking, Written
from colocate._role.context import running_call
from colocate._values import batch
from colocate._values.leaving import tensor_bytes, tensors
from colocate.errors import SerializationError
from colocate.wire.arriving import Arrives
from colocate.worker.lane import Work
from colocate.worker.residents.passing import Passing, Sharing
from colocate.worker.residents.store import Entry, Store

if TYPE_CHECKING:
    from colocate.worker.serving.host import WorkerHost

Find = Callable[[str, int], "WorkerHost"]
_Rows = tuple[int, int]  # The first row, and one past the last row.
_Body = wire.Packed | None


class Peers(abc.ABC):
    """A worker's access to parts of local and remote residents. Every method waits until the part exists.

    A part of this worker itself comes from its store, on whichever device the part is. Complete arguments are moved to
    the slot's device later.
    """

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def part(self, source: Source, rank: int, taken: list[Taken] | None, taking: Taking | None = None) -> Any:
        """Return a rank's complete part of a resident.

        The read is recorded in `taken`, unless that is None or the other worker is a thread of this process. `taking`
        is this worker's state while it takes several offered parts one after the other.
        """
        return self._read(source, rank, None, taken, taking)

    def slice(self, source: Source, rank: int, start: int, stop: int, taken: list[Taken] | None) -> Any:
        """Return rows `start` to `stop` of a rank's part, and record the read in `taken`."""
        return self._read(source, rank, (start, stop), taken)

    def _read(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Taken] | None, taking: Taking | None = None
    ) -> Any:
        if (entry := self._own(source, rank)) is None:
            return self._fetch(source, rank, rows, taken, taking)
        value, nbytes = entry.value, entry.nbytes
        if rows is not None:
            value = batch.slice_rows(value, *rows)
            nbytes = 0 if taken is None else tensor_bytes(value)
        if taken is not None:
            taken.append((source.key, rank, nbytes, 0.0, 0.0, 0, ""))
        return value

    def rows(self, source: Source, rank: int) -> int:
        """Return the number of rows of a part."""
        if (entry := self._own(source, rank)) is not None:
            return entry.rows(source.label)
        count = self._number(source, rank, parts.Rows(source.key))
        assert count is not None
        return count

    def weight(self, source: Source, rank: int) -> int | None:
        """Return how many rows the producing call worked on at a rank; None if nothing was scattered."""
        entry = self._own(source, rank)
        return self._number(source, rank, parts.Weight(source.key)) if entry is None else entry.weight

    def took(self, source: Source, rank: int, keeps: bool) -> None:
        """Notify the offering rank that this worker has received an offered part.

        `keeps` says whether the value is retained.
        """
        self._number(source, rank, parts.Took(source.key, keeps))

    def abort(self, reason: str) -> None:
        """Fail the requests that are under way. Later requests work again."""
        self._host.store.poke()

    def passed(self, passed: Passed) -> Any:
        """Return the body of a driver's message that another worker forwards. Not used within one process."""
        raise NotImplementedError

    def arrives(self, passed: Passed, sizes: Sequence[int], length: int) -> wire.Arriving | None:
        """Return a buffer for a body that is forwarded to other workers; None for all other bodies."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - workers on threads have nothing to close
        """End the threads and sockets."""

    @property
    @abc.abstractmethod
    def address(self) -> str | None:
        """Address for other workers; None if all workers share one process."""

    @abc.abstractmethod
    def given_back(self, seq: int, label: str) -> Sequence[Written]:
        """End a call's borrowing, and return the borrowed residents that the call has changed in place.

        The result is empty if values of other workers are copies.
        """

    def _own(self, source: Source, rank: int) -> Entry | None:
        boot, origin = self._host.boot, source.origin
        if origin.slots[rank] != boot.slot or origin.group != boot.group or origin.generation != boot.generation:
            return None
        # The producer may be an async method, so this waits as long as the calling call itself is needed.
        return self._host.store.wait(source.key, self._host.why_not)

    # -- reads from other workers

    @abc.abstractmethod
    def _fetch(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Taken] | None, taking: Taking | None
    ) -> Any: ...

    @abc.abstractmethod
    def _number(self, source: Source, rank: int, question: Message) -> int | None: ...


class LocalPeers(Peers):
    """Access to residents within one process.

    Parts are passed by reference, or packed and unpacked if the codec says so.
    """

    def __init__(self, host: WorkerHost, find: Find) -> None:
        """Args: host: This worker. find: Returns the worker on a slot of a group."""
        super().__init__(host)
        self._find = find
        self._waiting: list[Store] = []  # Stores on which lanes of this worker wait, with one entry for each wait.
        # Borrowed entries of other workers' stores, by the number of the borrowing call.
        self._borrowed: dict[int, list[tuple[Store, int, Entry]]] = {}

    @property
    def address(self) -> None:
        """Return None, because workers of one process read each other's stores directly."""
        return

    def given_back(self, seq: int, label: str) -> Sequence[Written]:
        """Return the residents of other workers that a finished call has changed in place."""
        written: list[Written] = []
        for store, key, entry in self._borrowed.pop(seq, ()):
            written += store.written([key], label)
            entry.lent.remove(label)
        return written

    def abort(self, reason: str) -> None:
        """Fail the requests that are under way."""
        super().abort(reason)
        for store in list(self._waiting):
            store.poke()

    def _fetch(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Taken] | None, taking: Taking | None
    ) -> Any:
        if taking is not None and taking.over is not None:
            self._find(source.group, source.slot(rank)).store.took(*taking.over)
        store, entry = self._entry(source, rank)
        value = entry.value if rows is None else batch.slice_rows(entry.value, *rows)
        codec, boot = self._host.codec, self._host.boot
        if codec.name == "reference":
            call = running_call.get()
            # An offered value isn't lent, because the taker becomes the owner.
            if isinstance(call, Work) and not entry.takers:
                entry.lent.append(call.label)
                self._borrowed.setdefault(call.seq, []).append((store, source.key, entry))
            return value
        with store.reading(entry):
            body = self._host.packed(value, source.label)
        return codec.unpack(body, boot.device)

    def _number(self, source: Source, rank: int, question: Message) -> int | None:
        store, entry = self._entry(source, rank)
        if isinstance(question, parts.Took):
            store.took(question.key, question.keeps)
            return None
        return entry.weight if isinstance(question, parts.Weight) else entry.rows(source.label)

    def _entry(self, source: Source, rank: int) -> tuple[Store, Entry]:
        peer = self._find(source.group, source.slot(rank))
        if peer.boot.generation != source.generation:
            raise Consequence(f"group {source.group!r} has been restarted")
        self._waiting.append(peer.store)
        try:
            return peer.store, peer.store.wait(source.key, self._host.why_not)
        finally:
            self._waiting.remove(peer.store)


class ChannelPeers(Peers):
    """Access to residents of other processes. Parts travel directly between workers on authenticated sockets.

    Device memory of workers on one machine is copied directly, if the device's driver allows that.
    """

    def __init__(self, host: WorkerHost, tls: wire.Tls | None = None) -> None:
        super().__init__(host)
        elsewhere = None if host.boot.host == wire.LOOPBACK else host.boot.host
        self._channel = wire.PeerChannel(host.boot.secret, self._answer, elsewhere, tls, host.boot.ports, host.broken)
        self._passing = Passing(host.boot.secret, tls)
        self._sharing = Sharing()
        self._addresses: dict[tuple[str, int, int, int], str] = {}
        self._borrower = Borrower(host.boot.device)
        # Workers that can't lend device memory to this worker, so that their parts come through the host.
        self._by_host: set[tuple[str, int, int, int]] = set()

    @property
    def address(self) -> str:
        """Address for other workers. The first read makes this worker listen there."""
        return self._channel.address

    def passed(self, passed: Passed) -> Any:
        """Return the body of a message that another worker forwards to this worker."""
        return self._passing.take(passed)

    def arrives(self, passed: Passed, sizes: Sequence[int], length: int) -> wire.Arriving | None:
        """Return a buffer for a body that is forwarded to other workers; None for all other bodies."""
        return self._passing.arrives(passed, sizes, length)

    def given_back(self, seq: int, label: str) -> Sequence[Written]:
        """Stop sharing parts that the call has requested."""
        self._sharing.forget(seq)
        return ()

    def abort(self, reason: str) -> None:
        """Fail the requests that are under way."""
        super().abort(reason)
        self._channel.abort(reason)

    def close(self) -> None:
        """End the threads and sockets."""
        self._passing.close()
        self._sharing.close()
        self._channel.close(0.5)

    def _fetch(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Taken] | None, taking: Taking | None
    ) -> Any:
        key, where, device = source.key, _where(source, rank), self._host.boot.device
        over = None if taking is None else taking.over

        def asked(place: str) -> tuple[parts.Value, wire.Packed]:
            """Request the value.

            `place` names this worker's device if device memory may be lent; otherwise it is empty.
            """
            if rows is not None:
                answer, body = self._ask(source, rank, parts.Slice(key, *rows, place))
            elif taking is not None:
                answer, body = self._ask(source, rank, parts.Part(key, place, over))
            else:
                answer, body = self._whole(source, rank, place)
            assert isinstance(answer, parts.Value)
            assert body is not None
            if taking is not None and isinstance(body, wire.InArea):
                taking.areas.append(body)
            return answer, body

        began = time.time()
        answer, body = asked("" if where in self._by_host else place(device))
        ready_time, refusal, value = began + answer.waited, answer.refusal, None
        if answer.lent:
            try:
                with self._borrower.borrowing():
                    value = self._host.codec.unpack(body, device)
            except NotLentError as error:
                refusal = str(error)
                answer, body = asked("")
        if refusal:
            self._by_host.add(where)
        if not answer.lent:
            value = self._host.codec.unpack(body, device)
        elif self._number(source, rank, parts.Still(key)) is None:
            raise Consequence(f"the resident of {source.label} was let go of while it was copied")
        if taken is not None:
            taken.append((key, rank, body.nbytes + answer.lent, ready_time, time.time(), answer.lent, refusal))
        return value

    def _whole(self, source: Source, rank: int, place: str, lacking: int = 0) -> tuple[Message, _Body]:
        """Request a complete part.

        Workers on one machine share a large remote part: the first requests it, the others copy it.

        A worker that can't copy the part from the first worker reports that, and becomes the first worker itself.
        """
        part, boot, call = (_where(source, rank), source.key), self._host.boot, running_call.get()
        is_far = boot.host != wire.LOOPBACK and f":{boot.host}:" not in self._address_of(part[0])
        if not is_far or not isinstance(call, Work) or not self._sharing.expect(part, call.seq):
            return self._ask(source, rank, parts.Part(source.key, place))
        seq, begun = call.seq, False

        def arrives(head: Head, sizes: Sequence[int], length: int) -> wire.Arriving | None:
            nonlocal begun
            answer = read(head)
            begun = isinstance(answer, parts.Value) and answer.shared
            return self._sharing.arrives(part, seq, sizes, length) if begun else None

        try:
            location = boot.node, self.address
            answer, body = self._ask(source, rank, parts.Part(source.key, place, None, location, lacking), arrives)
        except BaseException:
            begun = False
            raise
        finally:
            if not begun:
                self._sharing.forget(seq, part)
        if not isinstance(answer, parts.Elsewhere):
            return answer, body
        with contextlib.suppress(ConnectionError):
            head, body = self._channel.request(answer.address, parts.Shared(*part).head())
            if body is not None:
                return read(head), body
        return self._whole(source, rank, place, answer.times)

    def _number(self, source: Source, rank: int, question: Message) -> int | None:
        answer, _ = self._ask(source, rank, question)
        assert isinstance(answer, parts.Number)
        return answer.number

    def _address_of(self, where: tuple[str, int, int, int]) -> str:
        address = self._addresses.get(where)
        if address is None:
            address = self._addresses[where] = self._host.ask(WhereIs(*where))
        return address

    def _ask(
        self, source: Source, rank: int, question: Message, arrives: Arrives | None = None
    ) -> tuple[Message, _Body]:
        where = _where(source, rank)
        address = self._address_of(where)
        while True:
            aborts = self._channel.aborts
            reason = self._host.why_not()
            if reason is not None:
                raise Consequence(reason)
            try:
                head, body = self._channel.request(address, question.head(), aborts, arrives)
                break
            except ConnectionError as error:
                # The abort was meant for a request of another lane.
                if aborts != self._channel.aborts and self._host.why_not() is None:
                    continue
                raise Consequence(
                    f"the resident of {source.label} can't be had from worker {where[1]} of group {where[0]!r}: {error}"
                ) from error
        answer = read(head)
        if isinstance(answer, parts.Unsendable):
            raise SerializationError(answer.text, argument=answer.argument, path=answer.path)
        if isinstance(answer, parts.Poison):
            raise Poisoned(answer.why)
        return answer, body

    def _answer(self, head: Head) -> tuple[Head, wire.Packed | wire.InFile | wire.Arriving | None]:
        body: wire.Packed | wire.InFile | wire.Arriving | None
        try:
            answer, body = self._found(read(head))
        except Poisoned as error:
            answer, body = parts.Poison(error.message), None
        except SerializationError as error:
            answer, body = parts.Unsendable(error.message, error.argument, error.path), None
        return answer.head(), body

    def _found(self, question: Message) -> tuple[Message, wire.Packed | wire.InFile | wire.Arriving | None]:
        host = self._host
        if isinstance(question, parts.Passed):
            return parts.Value(0.0), self._passing.asked(question.key)
        if isinstance(question, parts.Shared):
            shared_body = self._sharing.find((question.who, question.key))
            return (parts.Number(None) if shared_body is None else parts.Value(0.0)), shared_body
        if isinstance(question, parts.Rows):
            return parts.Number(host.store.wait(question.key).rows(f"resident {question.key}")), None
        if isinstance(question, parts.Weight):
            return parts.Number(host.store.wait(question.key).weight), None
        if isinstance(question, parts.Took):
            host.store.took(question.key, question.keeps)
            return parts.Number(None), None
        if isinstance(question, parts.Still):
            local_entry = host.store.local(question.key)
            if local_entry is not None and local_entry.error is not None:
                raise Poisoned(local_entry.error)
            return parts.Number(1 if local_entry is not None and local_entry.ready else None), None
        assert isinstance(question, parts.Part | parts.Slice)
        if isinstance(question, parts.Part) and question.over is not None:
            host.store.took(*question.over)
        start = time.monotonic()
        entry = host.store.wait(question.key)
        waited, value = time.monotonic() - start, entry.value
        if entry.takers and isinstance(value, wire.Packed | wire.InFile):
            return parts.Value(waited), value
        shared = False
        if isinstance(question, parts.Part) and question.here and entry.nbytes >= PASSED_BYTES:
            sharer = host.store.sharer(entry, question.here, question.lacking)
            if not (shared := sharer[0] == question.here[1]):
                return parts.Elsewhere(*sharer), None
        if isinstance(question, parts.Slice):
            # Slicing runs on the side stream, like packing, because jagged rows get new offsets on the device.
            with host.device.aside():
                value = batch.slice_rows(value, question.start, question.stop)
        if not question.place or question.place != place(host.boot.device):
            with host.store.reading(entry):
                return parts.Value(waited, shared=shared), host.packed(value, entry.maker, wait=True)
        lender = Lender(host.boot.device, tensors(entry.value))
        with host.store.reading(entry), lender.lending():
            body = host.packed(value, entry.maker, wait=True)
        return parts.Value(waited, lender.lent, lender.refusal), body


def _where(source: Source, rank: int) -> tuple[str, int, int, int]:
    return source.group, source.slot(rank), source.generation, source.origin.number
