"""The far end of a `DriverProxy`: the process beside the driver in which an engine is used on its behalf."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from colocate import wire
from colocate._protocol.message import Message, read
from colocate._protocol.proxying import OPEN, PING, Failure, ProxyDid, ProxyDo, ProxySaid


class Proxied:
    """What a driver can ask for: the methods of a subclass, whose module is run by its `DriverProxy`.

    The module ends with `if __name__ == "__main__": MyProxied.serve()`. `open` comes first, and runs on the main
    thread, which stays: the kernel may tie the lives of processes to the thread that starts them. Each other method
    runs on a thread of its own. Arguments and results travel pickled; of an error of the engine's only its text does.
    """

    engine: ClassVar[str] = "the engine"  # what errors call it
    _lane: wire.SocketLane
    _to_open: queue.SimpleQueue[tuple[int, tuple[Any, ...]]]

    def open(self, *arguments: Any) -> Any:
        """Begin: what `DriverProxy` was given. Until it has ended nothing else is asked."""

    def leave(self) -> None:
        """The driver has let go, or is gone: end what is the driver's. The process ends afterwards."""

    def method(self, name: str) -> Callable[..., Any]:
        """What is asked for by a name; override it where others than this object have the methods."""
        found: Callable[..., Any] = getattr(self, name)
        return found

    def say(self, *what: Any) -> None:
        """Tell the driver something that it hasn't asked for (`heard`). From any thread; in order."""
        self._tell(ProxySaid(), what)

    @classmethod
    def serve(cls) -> None:
        """Be the process, until the driver lets go or is gone. It doesn't return."""
        for number in (signal.SIGINT, signal.SIGTERM):  # the driver decides when it ends
            signal.signal(number, lambda *_: None)  # by handlers, which children don't inherit
        made = cls()
        made._to_open = queue.SimpleQueue()
        made._lane = wire.Hub("driver").attach(socket.socket(fileno=int(sys.argv[1])), made._heard, made._left)
        token, arguments = made._to_open.get()
        made._do(token, OPEN, arguments)
        threading.Event().wait()

    def _heard(self, head: wire.Head, body: wire.Packed | None) -> None:
        asked = read(head)
        assert isinstance(asked, ProxyDo)
        assert body is not None
        arguments = wire.unpack(body)
        if asked.name == PING:
            self._tell(ProxyDid(asked.token), None)
        elif asked.name == OPEN:
            self._to_open.put((asked.token, arguments))
        else:
            job = asked.token, asked.name, arguments
            try:
                threading.Thread(target=self._do, args=job, name=asked.name, daemon=True).start()
            except RuntimeError as error:  # no thread is to be had
                self._tell(ProxyDid(asked.token), Failure.of(error, self.engine))

    def _do(self, token: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = self.open(*arguments) if name == OPEN else self.method(name)(*arguments)
        except BaseException as error:
            answer = Failure.of(error, self.engine)
        self._tell(ProxyDid(token), answer)

    def _tell(self, message: Message, value: Any) -> None:
        self._lane.send(message.head(), wire.pack(value))  # if nobody listens, `_left` is about to be called

    def _left(self, _reason: str) -> None:
        try:
            self.leave()
        finally:
            os._exit(0)
