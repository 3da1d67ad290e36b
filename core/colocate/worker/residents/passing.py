"""Forwards bodies of messages to other workers on this machine, and to one worker on the next machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from colocate import wire
from colocate._definitions.packed import LostPacked, Packed
from colocate._protocol import parts
from colocate._protocol.consequence import Consequence, PoisonedPart
from colocate._protocol.to_worker import Passed

# The part's owner (the fields of `GetPeerAddress`), and the part's key.
_Part: TypeAlias = tuple[tuple[str, int, int, int], int]


class BodyRelay:
    """Forwards message bodies to other workers.

    A body is available from its first byte until all takers have requested it.

    A message whose body comes from another worker counts as received when the body is here, so all later messages of
    the driver come after it. This can't deadlock, because all workers get the messages in one order, and separate
    threads forward the bodies.
    """

    def __init__(self, secret: bytes, tls: wire.Tls | None) -> None:
        """Open a separate `wire.PeerChannel`, because a failed call aborts all requests on the residents' channel."""
        self._channel = wire.PeerChannel(secret, _refuse_request, tls=tls)
        self._news = threading.Condition()
        self._bodies: dict[int, Packed | wire.IncomingBody] = {}
        self._remaining: dict[int, int] = {}  # Number of takers that haven't requested the body yet, by key.
        self._closed = False

    def open_buffer(self, passed: Passed, sizes: Sequence[int], length: int) -> wire.IncomingBody | None:
        """Return a buffer for an arriving body that other workers will request; None if no worker will."""
        key, takers, _ = passed
        if not takers:
            return None
        arriving = wire.IncomingBody(sizes, length)
        self._add_body(key, takers, arriving)
        return arriving

    def fetch_body(self, passed: Passed) -> Packed:
        """Request a body from the forwarding worker, and wait for the body.

        A failure, such as the forwarding worker's death, is raised when the body is unpacked.
        """
        key, takers, address = passed
        begun: list[wire.IncomingBody | None] = []

        def arrives(_head: object, sizes: Sequence[int], length: int) -> wire.IncomingBody | None:
            begun.append(self.open_buffer(passed, sizes, length))
            return begun[-1]

        try:
            _, body = self._channel.request(address, parts.PassedOn(key).head(), arrives=arrives)
            assert body is not None
        except Exception as error:
            body = LostPacked.from_raiser(
                _raise_poisoned, f"what was to be passed on to this worker has not come: {error}"
            )
        if takers and not begun:  # The body came in a file, or didn't come at all.
            self._add_body(key, takers, body if isinstance(body, LostPacked) else body.copy())
        return body

    def wait_for_body(self, key: int) -> Packed | wire.IncomingBody:
        """Wait for the first bytes of a body, and return the body."""
        with self._news:
            while (body := self._bodies.get(key)) is None:
                if self._closed:
                    raise Consequence("the worker that was to pass it on is ending")
                self._news.wait()
            self._remaining[key] -= 1
            if not self._remaining[key]:
                del self._bodies[key], self._remaining[key]
            return body

    def close(self) -> None:
        """Stop forwarding, and wake the waiting threads."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._channel.close(0.0)

    def _add_body(self, key: int, takers: int, body: Packed | wire.IncomingBody) -> None:
        with self._news:
            self._bodies[key], self._remaining[key] = body, takers
            self._news.notify_all()


class SharedParts:
    """Parts of remote residents that this worker shares with other workers on the machine, each during one call."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        # Each entry includes the number of the call that requested the part.
        self._parts: dict[_Part, tuple[int, wire.IncomingBody | None]] = {}

    def claim_part(self, part: _Part, call: int) -> bool:
        """Register a call's request for a part. Return False if another call has registered the part already."""
        with self._news:
            return self._parts.setdefault(part, (call, None)) == (call, None)

    def open_buffer(self, part: _Part, call: int, sizes: Sequence[int], length: int) -> wire.IncomingBody:
        """Return a buffer for a part, which other workers can request while the part arrives."""
        arriving = wire.IncomingBody(sizes, length)
        with self._news:
            self._parts[part] = call, arriving
            self._news.notify_all()
        return arriving

    def find_part(self, part: _Part) -> wire.IncomingBody | None:
        """Wait for the first bytes of a part, and return the part; None if no call here has requested the part."""
        with self._news:
            while (entry := self._parts.get(part)) is not None and entry[1] is None:
                self._news.wait()
            return None if entry is None else entry[1]

    def drop_parts(self, call: int, part: _Part | None = None) -> None:
        """Stop sharing one part, or all parts that a call has requested."""
        with self._news:
            for shared_part in [
                shared_part
                for shared_part, (by, _) in self._parts.items()
                if by == call and part in (None, shared_part)
            ]:
                del self._parts[shared_part]
            self._news.notify_all()

    def close(self) -> None:
        """Stop sharing parts, and wake the waiting threads."""
        with self._news:
            self._parts.clear()
            self._news.notify_all()


def _raise_poisoned(why: str) -> NoReturn:
    raise PoisonedPart(why)


def _refuse_request(head: wire.Head) -> NoReturn:
    raise Consequence("nothing is asked for here")
