"""Bodies that a worker passes on: to others of its machine, and to one of the next machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from colocate import wire
from colocate._definitions.packed import Lost, Packed
from colocate._protocol import parts
from colocate._protocol.consequence import Consequence, Poisoned
from colocate._protocol.to_worker import Passed

_Part: TypeAlias = tuple[tuple[str, int, int, int], int]  # who has it, as `WhereIs` says it; its key


class Passing:
    """What is passed on here, from the moment when it begins to arrive until all have asked for it who take it.

    A message whose body is elsewhere is received when that has come, as one with its body is: all that the driver says
    later comes after it. Nobody waits in a circle, as all workers get the messages in one order, and whoever passes
    something on does so by threads of its own.
    """

    def __init__(self, secret: bytes, tls: wire.Tls | None) -> None:
        """Args: as of `wire.PeerChannel`. It has one of its own, for a failed call ends all that others wait for."""
        self._channel = wire.PeerChannel(secret, _answers_nothing, tls=tls)
        self._news = threading.Condition()
        self._there: dict[int, Packed | wire.Arriving] = {}
        self._left: dict[int, int] = {}  # how many are still to ask
        self._closed = False

    def arrives(self, passed: Passed, sizes: Sequence[int], length: int) -> wire.Arriving | None:
        """Say where a body is to arrive; None where nobody takes it from here."""
        key, takers, _ = passed
        if not takers:
            return None
        arriving = wire.Arriving(sizes, length)
        self._put(key, takers, arriving)
        return arriving

    def take(self, passed: Passed) -> Packed:
        """Take a body from who passes it on to this worker, and wait until it is there.

        Who unpacks it is told if it doesn't come, as the other worker is gone, say.
        """
        key, takers, address = passed
        begun: list[wire.Arriving | None] = []

        def arrives(_head: object, sizes: Sequence[int], length: int) -> wire.Arriving | None:
            begun.append(self.arrives(passed, sizes, length))
            return begun[-1]

        try:
            _, body = self._channel.request(address, parts.Passed(key).head(), arrives=arrives)
            assert body is not None
        except Exception as error:
            body = Lost.when_unpacked(_never_came, f"what was to be passed on to this worker has not come: {error}")
        if takers and not begun:  # by a file, or not at all
            self._put(key, takers, body if isinstance(body, Lost) else body.copy())
        return body

    def asked(self, key: int) -> Packed | wire.Arriving:
        """Return what somebody asks for, once it has begun to arrive."""
        with self._news:
            while (found := self._there.get(key)) is None:
                if self._closed:
                    raise Consequence("the worker that was to pass it on is ending")
                self._news.wait()
            self._left[key] -= 1
            if not self._left[key]:
                del self._there[key], self._left[key]
            return found

    def close(self) -> None:
        """Pass on nothing any more."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._channel.close(0.0)

    def _put(self, key: int, takers: int, body: Packed | wire.Arriving) -> None:
        with self._news:
            self._there[key], self._left[key] = body, takers
            self._news.notify_all()


class Sharing:
    """Parts of residents of other machines: others of this machine have them from here as long as a call has them."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._there: dict[_Part, tuple[int, wire.Arriving | None]] = {}  # with the call that has asked for it

    def expect(self, part: _Part, call: int) -> bool:
        """Note that a call is about to ask for a part; False where another one has it already."""
        with self._news:
            return self._there.setdefault(part, (call, None)) == (call, None)

    def arrives(self, part: _Part, call: int, sizes: Sequence[int], length: int) -> wire.Arriving:
        """Say where it is to arrive, from where it is passed on."""
        arriving = wire.Arriving(sizes, length)
        with self._news:
            self._there[part] = call, arriving
            self._news.notify_all()
        return arriving

    def find(self, part: _Part) -> wire.Arriving | None:
        """Return a part, once it has begun to arrive; None where it isn't here."""
        with self._news:
            while (found := self._there.get(part)) is not None and found[1] is None:
                self._news.wait()
            return None if found is None else found[1]

    def forget(self, call: int, part: _Part | None = None) -> None:
        """Pass on no longer what a call has asked for, or one part of that."""
        with self._news:
            for each in [each for each, (by, _) in self._there.items() if by == call and part in (None, each)]:
                del self._there[each]
            self._news.notify_all()

    def close(self) -> None:
        """Pass on nothing any more."""
        with self._news:
            self._there.clear()
            self._news.notify_all()


def _never_came(why: str) -> NoReturn:
    raise Poisoned(why)


def _answers_nothing(head: wire.Head) -> NoReturn:
    raise Consequence("nothing is asked for here")
