"""A job's window for others of its cluster: they find it by its name, and prove that the cluster has told them the key.

Who connects is told what the groups do just then, in one message, and nothing is read.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colocate import wire
from colocate.driver import Deadline, JobThread, Requests, Seen, off_main, read, report_exception
from colocate.errors import ClosedError, EngineError
from colocate.executor import Watchable, Window

PATIENCE_S = 5.0


class ClusterWindow:
    """It is announced when this has been made."""

    def __init__(
        self,
        executor: Watchable,
        name: str,
        id: str,
        seen: Callable[[], Mapping[str, Any]],
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._executor = executor
        self._seen = seen
        self._process = os.getpid()
        self._closed = False
        reach, key = executor.reach(), wire.new_key()
        listeners = wire.listen_widely(reach.host, reach.tls, ports=ports, what=f"others to look at job {name!r}")
        self._hub = wire.Hub(f"window-{name}")
        self._thread = JobThread(f"colocate-glances-{name}", lambda error: report_exception())
        try:
            for listener in listeners:
                self._hub.listen(listener, key, lambda sock: self._thread.soon(partial(self._tell, sock)))
            self._window = Window(name, id, ",".join(listener.address for listener in listeners), key)
            executor.announce(self._window)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Nobody looks any more."""
        if os.getpid() == self._process:  # a child's is its parent's
            off_main(self._close)

    def _close(self) -> None:
        self._executor.retract(self._window)
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._hub.close()
        self._thread.close(PATIENCE_S)

    def _tell(self, sock: socket.socket) -> None:
        if self._closed:
            sock.close()
            return
        told = Seen(dict(self._seen())).head()
        with contextlib.suppress(ClosedError):  # just now: then the socket is closed with it
            lane = self._hub.attach(sock, lambda head, body: None, lambda reason: None)
            lane.send(told)
            self._hub.later(PATIENCE_S, lane.close)  # who looked closes it, once that has come


def look_at(window: Window, executor: Watchable) -> Mapping[str, Any]:
    """What a job's groups do just now."""
    looks: Requests[None, Mapping[str, Any]] = Requests()
    asked = looks.open([None])

    def told(head: wire.Head, body: Any) -> None:
        seen = read(head)
        assert isinstance(seen, Seen)
        assert seen.facts is not None
        looks.answered(asked.token, None, seen.facts)

    def closed(reason: str) -> None:
        looks.fail_all(EngineError(f"it has just ended ({reason})"))

    deadline = Deadline(PATIENCE_S)
    try:
        sock = wire.connect(window.address, window.key, PATIENCE_S, executor.reach().tls)
    except TimeoutError as error:
        raise TimeoutError(f"job {window.name!r} ({window.id}) doesn't answer: {error}") from None
    except OSError as error:
        raise EngineError(f"job {window.name!r} ({window.id}) can't be reached from here: {error}") from error
    hub = wire.Hub("look")
    try:
        hub.attach(sock, told, closed)
        (facts,) = asked.result(deadline)
    except TimeoutError:
        raise TimeoutError(f"job {window.name!r} ({window.id}) doesn't answer: it is stopped, or hangs") from None
    finally:
        hub.close()
    return facts
