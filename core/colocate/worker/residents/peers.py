"""Reads residents from the worker's own store, from a worker in the same process, or through a peer channel."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from colocate import wire
from colocate._devices.lending import Borrower, Lender, NotLentError, get_place
from colocate._protocol import parts
from colocate._protocol.consequence import Consequence, PoisonedPart
from colocate._protocol.message import Head, Message, decode_head
from colocate._protocol.questions import GetPeerAddress
from colocate._protocol.taken import Receipt
from colocate._protocol.to_worker import PASSED_BYTES, Passed
from colocate._protocol.uses import ResidentWrite, Source, Taking
from colocate._role.context import running_call
from colocate._values import batch
from colocate._values.leaving import count_tensor_bytes, list_tensors
from colocate.errors import SerializationError
from colocate.wire.arriving import OpenBuffer
from colocate.worker.lane import Work
from colocate.worker.residents.passing import BodyRelay, SharedParts
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

    def fetch_part(self, source: Source, rank: int, taken: list[Receipt] | None, taking: Taking | None = None) -> Any:
        """Return a rank's complete part of a resident.

        The read is recorded in `taken`, unless that is None or the other worker is a thread of this process. `taking`
        is this worker's state while it takes several offered parts one after the other.
        """
        return self._read(source, rank, None, taken, taking)

    def fetch_rows(self, source: Source, rank: int, start: int, stop: int, taken: list[Receipt] | None) -> Any:
        """Return rows `start` to `stop` of a rank's part, and record the read in `taken`."""
        return self._read(source, rank, (start, stop), taken)

    def _read(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Receipt] | None, taking: Taking | None = None
    ) -> Any:
        if (entry := self._own(source, rank)) is None:
            return self._fetch_part(source, rank, rows, taken, taking)
        value, nbytes = entry.value, entry.nbytes
        if rows is not None:
            value = batch.slice_rows(value, *rows)
            nbytes = 0 if taken is None else count_tensor_bytes(value)
        if taken is not None:
            taken.append((source.key, rank, nbytes, 0.0, 0.0, 0, ""))
        return value

    def count_rows(self, source: Source, rank: int) -> int:
        """Return the number of rows of a part."""
        if (entry := self._own(source, rank)) is not None:
            return entry.count_rows(source.label)
        count = self._ask_number(source, rank, parts.Rows(source.key))
        assert count is not None
        return count

    def weight(self, source: Source, rank: int) -> int | None:
        """Return how many rows the producing call worked on at a rank; None if nothing was scattered."""
        entry = self._own(source, rank)
        return self._ask_number(source, rank, parts.Weight(source.key)) if entry is None else entry.weight

    def report_taken(self, source: Source, rank: int, keeps: bool) -> None:
        """Notify the offering rank that this worker has received an offered part.

        `keeps` says whether the value is retained.
        """
        self._ask_number(source, rank, parts.PartReceived(source.key, keeps))

    def abort(self, reason: str) -> None:
        """Fail the requests that are under way. Later requests work again."""
        self._host.store.wake_waiters()

    def fetch_passed(self, passed: Passed) -> Any:
        """Return the body of a driver's message that another worker forwards. Not used within one process."""
        raise NotImplementedError

    def arrival_buffer(self, passed: Passed, sizes: Sequence[int], length: int) -> wire.IncomingBody | None:
        """Return a buffer for a body that is forwarded to other workers; None for all other bodies."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - workers on threads have nothing to close
        """End the threads and sockets."""

    @property
    @abc.abstractmethod
    def address(self) -> str | None:
        """Address for other workers; None if all workers share one process."""

    @abc.abstractmethod
    def collect_written(self, seq: int, label: str) -> Sequence[ResidentWrite]:
        """End a call's borrowing, and return the borrowed residents that the call has changed in place.

        The result is empty if values of other workers are copies.
        """

    def _own(self, source: Source, rank: int) -> Entry | None:
        boot, origin = self._host.boot, source.origin
        if origin.slots[rank] != boot.slot or origin.group != boot.group or origin.generation != boot.generation:
            return None
        # An async producer may still run. The wait ends early if the current call mustn't wait any longer.
        return self._host.store.wait_for_entry(source.key, self._host.get_wait_refusal)

    # -- reads from other workers

    @abc.abstractmethod
    def _fetch_part(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Receipt] | None, taking: Taking | None
    ) -> Any: ...

    @abc.abstractmethod
    def _ask_number(self, source: Source, rank: int, question: Message) -> int | None: ...


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

    def collect_written(self, seq: int, label: str) -> Sequence[ResidentWrite]:
        """Return the residents of other workers that a finished call has changed in place."""
        written: list[ResidentWrite] = []
        for store, key, entry in self._borrowed.pop(seq, ()):
            written += store.pop_written([key], label)
            entry.borrowers.remove(label)
        return written

    def abort(self, reason: str) -> None:
        """Fail the requests that are under way."""
        super().abort(reason)
        for store in list(self._waiting):
            store.wake_waiters()

    def _fetch_part(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Receipt] | None, taking: Taking | None
    ) -> Any:
        if taking is not None and taking.over is not None:
            self._find(source.group, source.slot(rank)).store.mark_taken(*taking.over)
        store, entry = self._wait_for_entry(source, rank)
        value = entry.value if rows is None else batch.slice_rows(entry.value, *rows)
        codec, boot = self._host.codec, self._host.boot
        if codec.name == "reference":
            call = running_call.get()
            # An offered value isn't lent, because the taker becomes the owner.
            if isinstance(call, Work) and not entry.remaining_takers:
                entry.borrowers.append(call.label)
                self._borrowed.setdefault(call.seq, []).append((store, source.key, entry))
            return value
        with store.reading_entry(entry):
            body = self._host.pack_result(value, source.label)
        return codec.unpack(body, boot.device)

    def _ask_number(self, source: Source, rank: int, question: Message) -> int | None:
        store, entry = self._wait_for_entry(source, rank)
        if isinstance(question, parts.PartReceived):
            store.mark_taken(question.key, question.keeps)
            return None
        return entry.weight if isinstance(question, parts.Weight) else entry.count_rows(source.label)

    def _wait_for_entry(self, source: Source, rank: int) -> tuple[Store, Entry]:
        peer = self._find(source.group, source.slot(rank))
        if peer.boot.generation != source.generation:
            raise Consequence(f"group {source.group!r} has been restarted")
        self._waiting.append(peer.store)
        try:
            return peer.store, peer.store.wait_for_entry(source.key, self._host.get_wait_refusal)
        finally:
            self._waiting.remove(peer.store)


class ChannelPeers(Peers):
    """Access to residents of other processes. Parts travel directly between workers on authenticated sockets.

    Device memory of workers on one machine is copied directly, if the device's driver allows that.
    """

    def __init__(self, host: WorkerHost, tls: wire.Tls | None = None) -> None:
        super().__init__(host)
        elsewhere = None if host.boot.host == wire.LOOPBACK else host.boot.host
        self._channel = wire.PeerChannel(
            host.boot.secret, self._answer_peer, elsewhere, tls, host.boot.ports, host.report_broken
        )
        self._passing = BodyRelay(host.boot.secret, tls)
        self._sharing = SharedParts()
        self._addresses: dict[tuple[str, int, int, int], str] = {}
        self._borrower = Borrower(host.boot.device)
        # Workers that can't lend device memory to this worker, so that their parts come through host memory.
        self._without_lending: set[tuple[str, int, int, int]] = set()

    @property
    def address(self) -> str:
        """Address for other workers. The first read makes this worker listen there."""
        return self._channel.address

    def fetch_passed(self, passed: Passed) -> Any:
        """Return the body of a message that another worker forwards to this worker."""
        return self._passing.fetch_body(passed)

    def arrival_buffer(self, passed: Passed, sizes: Sequence[int], length: int) -> wire.IncomingBody | None:
        """Return a buffer for a body that is forwarded to other workers; None for all other bodies."""
        return self._passing.open_buffer(passed, sizes, length)

    def collect_written(self, seq: int, label: str) -> Sequence[ResidentWrite]:
        """Stop sharing the parts that the call has requested. Return nothing, because these parts are copies."""
        self._sharing.drop_parts(seq)
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

    def _fetch_part(
        self, source: Source, rank: int, rows: _Rows | None, taken: list[Receipt] | None, taking: Taking | None
    ) -> Any:
        key, where, device = source.key, _locate(source, rank), self._host.boot.device
        over = None if taking is None else taking.over

        def asked(place: str) -> tuple[parts.Value, wire.Packed]:
            """Request the value from the worker that owns the part.

            `place` names this worker's device if device memory may be lent; otherwise it is empty.
            """
            if rows is not None:
                answer, body = self._ask_peer(source, rank, parts.Slice(key, *rows, place))
            elif taking is not None:
                answer, body = self._ask_peer(source, rank, parts.Part(key, place, over))
            else:
                answer, body = self._fetch_shared(source, rank, place)
            assert isinstance(answer, parts.Value)
            assert body is not None
            if taking is not None and isinstance(body, wire.PackedInArea):
                taking.areas.append(body)
            return answer, body

        began = time.time()
        answer, body = asked("" if where in self._without_lending else get_place(device))
        ready_time, refusal, value = began + answer.waited, answer.refusal, None
        if answer.lent:
            try:
                with self._borrower.borrow_block():
                    value = self._host.codec.unpack(body, device)
            except NotLentError as error:
                refusal = str(error)
                answer, body = asked("")
        if refusal:
            self._without_lending.add(where)
        if not answer.lent:
            value = self._host.codec.unpack(body, device)
        elif self._ask_number(source, rank, parts.CheckUnchanged(key)) is None:
            raise Consequence(f"the resident of {source.label} was let go of while it was copied")
        if taken is not None:
            taken.append((key, rank, body.nbytes + answer.lent, ready_time, time.time(), answer.lent, refusal))
        return value

    def _fetch_shared(self, source: Source, rank: int, place: str, lacking: int = 0) -> tuple[Message, _Body]:
        """Request a complete part, which workers on this machine may share.

        Workers on one machine share a large remote part: the first requests it, the others copy it.

        A worker that can't copy the part from the first worker reports that, and becomes the first worker itself.
        """
        part, boot, call = (_locate(source, rank), source.key), self._host.boot, running_call.get()
        is_far = boot.host != wire.LOOPBACK and f":{boot.host}:" not in self._get_address(part[0])
        if not is_far or not isinstance(call, Work) or not self._sharing.claim_part(part, call.seq):
            return self._ask_peer(source, rank, parts.Part(source.key, place))
        seq, begun = call.seq, False

        def arrives(head: Head, sizes: Sequence[int], length: int) -> wire.IncomingBody | None:
            nonlocal begun
            answer = decode_head(head)
            begun = isinstance(answer, parts.Value) and answer.shared
            return self._sharing.open_buffer(part, seq, sizes, length) if begun else None

        try:
            location = boot.node, self.address
            answer, body = self._ask_peer(source, rank, parts.Part(source.key, place, None, location, lacking), arrives)
        except BaseException:
            begun = False
            raise
        finally:
            if not begun:
                self._sharing.drop_parts(seq, part)
        if not isinstance(answer, parts.Redirect):
            return answer, body
        with contextlib.suppress(ConnectionError):
            head, body = self._channel.request(answer.address, parts.FetchShared(*part).head())
            if body is not None:
                return decode_head(head), body
        return self._fetch_shared(source, rank, place, answer.times)

    def _ask_number(self, source: Source, rank: int, question: Message) -> int | None:
        answer, _ = self._ask_peer(source, rank, question)
        assert isinstance(answer, parts.Number)
        return answer.number

    def _get_address(self, where: tuple[str, int, int, int]) -> str:
        address = self._addresses.get(where)
        if address is None:
            address = self._addresses[where] = self._host.ask_driver(GetPeerAddress(*where))
        return address

    def _ask_peer(
        self, source: Source, rank: int, question: Message, arrives: OpenBuffer | None = None
    ) -> tuple[Message, _Body]:
        where = _locate(source, rank)
        address = self._get_address(where)
        while True:
            aborts = self._channel.aborts
            reason = self._host.get_wait_refusal()
            if reason is not None:
                raise Consequence(reason)
            try:
                head, body = self._channel.request(address, question.head(), aborts, arrives)
                break
            except ConnectionError as error:
                # The abort was meant for another lane's request, so this request is repeated.
                if aborts != self._channel.aborts and self._host.get_wait_refusal() is None:
                    continue
                raise Consequence(
                    f"the resident of {source.label} can't be had from worker {where[1]} of group {where[0]!r}: {error}"
                ) from error
        answer = decode_head(head)
        if isinstance(answer, parts.Unsendable):
            raise SerializationError(answer.text, argument=answer.argument, path=answer.path)
        if isinstance(answer, parts.Poison):
            raise PoisonedPart(answer.why)
        return answer, body

    def _answer_peer(self, head: Head) -> tuple[Head, wire.Packed | wire.FileBody | wire.IncomingBody | None]:
        body: wire.Packed | wire.FileBody | wire.IncomingBody | None
        try:
            answer, body = self._find_answer(decode_head(head))
        except PoisonedPart as error:
            answer, body = parts.Poison(error.message), None
        except SerializationError as error:
            answer, body = parts.Unsendable(error.message, error.argument, error.path), None
        return answer.head(), body

    def _find_answer(self, question: Message) -> tuple[Message, wire.Packed | wire.FileBody | wire.IncomingBody | None]:
        host = self._host
        if isinstance(question, parts.PassedOn):
            return parts.Value(0.0), self._passing.wait_for_body(question.key)
        if isinstance(question, parts.FetchShared):
            shared_body = self._sharing.find_part((question.holder, question.key))
            return (parts.Number(None) if shared_body is None else parts.Value(0.0)), shared_body
        if isinstance(question, parts.Rows):
            return parts.Number(host.store.wait_for_entry(question.key).count_rows(f"resident {question.key}")), None
        if isinstance(question, parts.Weight):
            return parts.Number(host.store.wait_for_entry(question.key).weight), None
        if isinstance(question, parts.PartReceived):
            host.store.mark_taken(question.key, question.keeps)
            return parts.Number(None), None
        if isinstance(question, parts.CheckUnchanged):
            local_entry = host.store.find_entry(question.key)
            if local_entry is not None and local_entry.error is not None:
                raise PoisonedPart(local_entry.error)
            return parts.Number(1 if local_entry is not None and local_entry.ready else None), None
        assert isinstance(question, parts.Part | parts.Slice)
        if isinstance(question, parts.Part) and question.over is not None:
            host.store.mark_taken(*question.over)
        start = time.monotonic()
        entry = host.store.wait_for_entry(question.key)
        waited, value = time.monotonic() - start, entry.value
        if entry.remaining_takers and isinstance(value, wire.Packed | wire.FileBody):
            return parts.Value(waited), value
        shared = False
        if isinstance(question, parts.Part) and question.requester and entry.nbytes >= PASSED_BYTES:
            sharer = host.store.choose_sharer(entry, question.requester, question.lacking)
            if not (shared := sharer[0] == question.requester[1]):
                return parts.Redirect(*sharer), None
        if isinstance(question, parts.Slice):
            # Slicing runs on the side stream, like packing, because jagged rows get new offsets on the device.
            with host.device.use_side_stream():
                value = batch.slice_rows(value, question.start, question.stop)
        if not question.place or question.place != get_place(host.boot.device):
            with host.store.reading_entry(entry):
                return parts.Value(waited, shared=shared), host.pack_result(value, entry.maker, wait=True)
        lender = Lender(host.boot.device, list_tensors(entry.value))
        with host.store.reading_entry(entry), lender.lend_block():
            body = host.pack_result(value, entry.maker, wait=True)
        return parts.Value(waited, lender.lent, lender.refusal), body


def _locate(source: Source, rank: int) -> tuple[str, int, int, int]:
    return source.group, source.slot(rank), source.generation, source.origin.number
