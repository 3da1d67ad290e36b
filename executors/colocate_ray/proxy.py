"""A process beside the driver that is in a cluster on its behalf: the driver's end, and its own. Imports no cluster."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import attrs
import psutil

from colocate import wire
from colocate.errors import ClusterError, ColocateError
from colocate.keeper import Message, Request, Requests, Thread, hear_of_ends, message, read
from colocate.worker.birth.signals import FOR_DRIVERS, LEFT, pass_over
from colocate_ray import janitor

_ENDS_WITHIN_S = 10.0
# A proxy that has been silent for so long is asked whether it is there, and ended when it isn't.
SILENCE_S = 2.0
_PONG_WITHIN_S = 3.0
_PARTY = "the proxy"  # who owes answers
_LAST_WORDS_BYTES = 2000

Asked: TypeAlias = Request[str, Any]

PING = "ping"
"""Answered at once, whatever else goes on; of all requests the only one that a module has no method for."""
OPEN = "open"
"""Comes first, and is done on the main thread."""


@message
class ProxyDo(Message):
    """Do something; the body has the arguments. Answered by `ProxyDid`."""

    token: int  # the request's
    name: str  # the method


@message
class ProxyDid(Message):
    """Tell what was done; the body has the result, or a `Failure`."""

    token: int  # the request's


@message
class ProxySaid(Message):
    """Tell something that nobody has asked for; the body has it."""


@attrs.frozen
class Failure:
    """An error on its way to the driver."""

    kind: type[ColocateError]
    message: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException, engine: str) -> Failure:
        """Describe an error; one of a cluster's own as text, as the driver may have nothing to unpickle it with."""
        if not isinstance(error, ColocateError):
            error = ColocateError(f"{engine} failed: {type(error).__name__}: {error}")
        return cls(type(error), error.message, dict(error.__dict__))

    def error(self) -> ColocateError:
        """Return the error."""
        return self.kind(self.message, **self.facts)


class DriverProxy:
    """A module beside the driver that is called, heard, and ends with it: it is in a cluster on the driver's behalf.

    For a cluster that would mark the driver's process for good: by threads, signal handlers, settings, one connection
    per process. The module has a `Proxied`, whose methods are what can be asked for. It ends when it is closed, and
    with the driver in whatever way that ends; its janitor, a small process, sees to one that is stopped or stuck then.

    Args:
        module: The module, which is run as a program. What it prints is kept for errors.
        engine: What errors call the cluster ("Ray", "the cluster at …").
        heard: Called with what `Proxied.say` was given, in order, on a thread of the proxy's: it mustn't wait.
        env: The process's environment; None for this one's. What it needs to import colocate and the module is added.
        mark: A variable that is set in its environment, and so in that of all that it starts.
        folder: A folder of what it starts: when the process has ended, its janitor ends all that has the mark, and
            removes the folder, after `lost`. None where nothing of that is the driver's to end.
    """

    def __init__(
        self,
        module: str,
        *,
        engine: str,
        heard: Callable[..., object] = lambda *what: None,
        env: Mapping[str, str] | None = None,
        mark: str = "COLOCATE_PROXY",
        folder: str | None = None,
    ) -> None:
        """Start the process; `open` is to be called next.

        Raises:
            OSError: It can't be started; nothing is left.
        """
        self._engine = engine
        self._said = heard
        self._requests = Requests[str, Any]()
        self._closing = False
        self._log = tempfile.TemporaryFile(prefix="colocate-")  # noqa: SIM115  # until `close`
        value = secrets.token_hex(8)
        whole = {**(os.environ if env is None else env), mark: value}
        whole["PYTHONPATH"] = os.pathsep.join(_import_path(whole.get("PYTHONPATH"), module))
        hear_of_ends()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-W", "ignore", "-m", module, str(theirs.fileno()), str(os.getpid())],
                    env=whole,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is the driver's
                )
            self._janitor = _watched(self._process, f"{mark}={value}", folder)
        except BaseException:
            ours.close()
            self._log.close()
            raise
        self._event_loop = wire.EventLoop("proxy")
        self._lane = self._event_loop.attach(ours, self._heard, self._gone)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def open(self, *arguments: Any, within_s: float) -> bool:
        """Have it begin (`Proxied.open`), and wait; False when that takes longer. It is closed when it isn't open.

        Raises:
            ColocateError: It failed, or the process is gone.
        """
        try:
            opened = self.post(OPEN, *arguments)
            if opened.wait(within_s):
                opened.result()
                return True
        except BaseException:
            self.close()
            raise
        return False

    def call(self, name: str, *arguments: Any, within_s: float) -> Any:
        """Have it do something, and wait for the result: while the proxy lives, and at most so many seconds.

        Args:
            name: The method of its `Proxied`.
            arguments: Its arguments.
            within_s: How long.

        Raises:
            ColocateError: It failed, or took longer, or the proxy is gone.
        """
        asked = self.post(name, *arguments)
        if not self.wait([asked], within_s):
            raise ColocateError(f"{self._engine} hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = asked.result()
        return answer

    def wait(self, posted: Sequence[Asked], within_s: float | None = None) -> bool:
        """Wait for what was posted; whether all of it is done. A proxy that shows no life meanwhile is ended."""
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            silent = time.monotonic() + min(SILENCE_S, left)
            if all(each.wait(max(0.0, silent - time.monotonic())) for each in posted):
                return True
            if left <= SILENCE_S:
                return False
            if not self.post(PING).wait(_PONG_WITHIN_S):
                # Stopped, or stuck. What it holds can be freed by its end alone, of which the reader will tell.
                self._process.kill()

    def post(self, name: str, *arguments: Any) -> Asked:
        """Have it do something; doesn't wait."""
        body = wire.pack(arguments)
        asked = self._requests.open([_PARTY])
        if not asked.over:  # if it is gone, whatever is asked for is about to fail
            self._lane.send(ProxyDo(asked.token, name).head(), body)
        return asked

    def close(self) -> None:
        """End it: `Proxied.leave` is called there, and the process ends. Idempotent."""
        self._closing = True
        self._event_loop.close()
        self._end()
        self._log.close()

    def last_words(self) -> str:
        """Return the end of what it has printed, for an error; empty when that is nothing."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        text = tail.decode(errors="replace").strip()
        return f"Its last words:\n{text}" if text else ""

    def lost(self, why: str) -> ClusterError:
        """Return the error of all that is asked for when the process has ended by itself. `folder` is still there."""
        return ClusterError(why, logs={})

    def _end(self) -> None:
        self._end_process()
        assert self._janitor.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was told before
            self._janitor.stdin.write(b".")  # its end wouldn't do: a fork of the driver's may hold that open
        self._janitor.stdin.close()
        if not _has_ended(self._janitor, _ENDS_WITHIN_S):
            self._janitor.kill()
            self._janitor.wait()

    def _end_process(self) -> None:
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while not _has_ended(self._process, 1.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
                if stopped or time.monotonic() > deadline:
                    self._process.kill()

    def _heard(self, head: wire.Head, body: wire.Packed | None) -> None:
        told = read(head)
        assert body is not None
        said = wire.unpack(body)
        if isinstance(told, ProxySaid):
            self._said(*said)
            return
        assert isinstance(told, ProxyDid)
        if isinstance(said, Failure):
            self._requests.refused(told.token, said.error())
        else:
            self._requests.answered(told.token, _PARTY, said)

    def _gone(self, _reason: str) -> None:
        ended = f"the connection to {self._engine} has ended"
        if self._closing:
            self._requests.fail_all(ClusterError(f"{ended}: it was closed"))
            return
        self._end_process()
        why = f"{ended}: the process that was in it ended with code {self._process.returncode}"
        error = self.lost(f"{why}. Close the runtime, and connect again. {self.last_words()}".strip())
        self._end()
        self._requests.fail_all(error)


def _watched(proxy: subprocess.Popen[bytes], mark: str, folder: str | None) -> subprocess.Popen[bytes]:
    """Start its janitor."""
    try:
        pidfds = [os.pidfd_open(pid) for pid in (os.getpid(), proxy.pid)]
        try:
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", janitor.__file__),
                    *(*map(str, pidfds), str(proxy.pid), mark, folder or ""),
                ],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=pidfds,
                start_new_session=True,
            )
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
    except BaseException:
        proxy.kill()
        proxy.wait()
        raise


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _import_path(given: str | None, module: str) -> Iterable[str]:
    """Return a path on which colocate and the module are found, however this process has come to find them."""
    found = [given] if given else []
    for name in ("colocate", module.partition(".")[0]):
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        places = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
        found.append(str(Path(places[0]).parent))
    return dict.fromkeys(found)


class Proxied:
    """What a driver can ask for: the methods of a subclass, whose module is run by its `DriverProxy`.

    The module ends with `if __name__ == "__main__": MyProxied.serve()`. `open` comes first, and runs on the main
    thread, which stays: the kernel may tie the lives of processes to the thread that starts them. Each other method
    runs on a thread of its own. Arguments and results travel pickled; of an error of the cluster's only its text does.
    """

    engine: ClassVar[str] = "the cluster"  # what errors call it
    _lane: wire.SocketLane
    _to_open: queue.SimpleQueue[tuple[int, tuple[Any, ...]]]

    def open(self, *arguments: Any) -> Any:
        """Begin: what `DriverProxy` was given. Until it has ended nothing else is asked."""

    def leave(self) -> None:
        """The driver has let go, or is gone: end what is the driver's. The process ends afterwards."""

    def method(self, name: str) -> Callable[..., Any]:
        """Return what is asked for by a name; override it where others than this object have the methods."""
        found: Callable[..., Any] = getattr(self, name)
        return found

    def say(self, *what: Any) -> None:
        """Tell the driver something that it hasn't asked for (`heard`). From any thread; in order."""
        self._tell(ProxySaid(), what)

    @classmethod
    def serve(cls) -> None:
        """Be the process, until the driver lets go or is gone. It doesn't return."""
        pass_over(LEFT)  # the driver decides when it ends
        for number in FOR_DRIVERS:  # an engine that it starts is none of a batch system's programs either
            signal.signal(number, signal.SIG_IGN)
        made = cls()
        made._to_open = queue.SimpleQueue()
        made._lane = wire.EventLoop("driver").attach(socket.socket(fileno=int(sys.argv[1])), made._heard, made._left)
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
                Thread(target=self._do, args=job, name=asked.name).start()
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
