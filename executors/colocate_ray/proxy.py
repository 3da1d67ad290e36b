"""A process that is in a cluster on the driver's behalf: both ends of the connection. Imports no cluster."""

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
# seconds; a proxy that is silent for this long gets a ping, and is killed if no answer comes.
SILENCE_S = 2.0
_PONG_WITHIN_S = 3.0
_PARTY = "the proxy"  # the party that owes answers, for `Requests`
_LAST_WORDS_BYTES = 2000

Asked: TypeAlias = Request[str, Any]

PING = "ping"
"""The name of a ping, which is answered at once; the only request without a method in the module."""
OPEN = "open"
"""The name of the first request, which runs on the main thread."""


@message
class ProxyDo(Message):
    """A call of a method; the body has the arguments. Answered by `ProxyDid`."""

    token: int  # id of the request
    name: str  # name of the method


@message
class ProxyDid(Message):
    """The result of a call; the body has the result, or a `Failure`."""

    token: int  # id of the request


@message
class ProxySaid(Message):
    """A notification from the proxy; the body has the payload."""


@attrs.frozen
class Failure:
    """An error on the way to the driver."""

    kind: type[ColocateError]
    message: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException, engine: str) -> Failure:
        """Describe an error; a cluster's own error becomes text, since the driver may lack the cluster's library."""
        if not isinstance(error, ColocateError):
            error = ColocateError(f"{engine} failed: {type(error).__name__}: {error}")
        return cls(type(error), error.message, dict(error.__dict__))

    def error(self) -> ColocateError:
        """Return the error."""
        return self.kind(self.message, **self.facts)


class DriverProxy:
    """The driver's end of a process that is in a cluster on the driver's behalf.

    A cluster connection would mark the driver's process for good: with threads, signal handlers, settings, one
    connection per process. So a module with a subclass of `Proxied` runs in a process of its own; the driver calls that
    subclass's methods. The process ends when it is closed, and with the driver in whatever way that ends; the janitor,
    a small process, kills one that is stopped or stuck then.

    Args:
        module: The module to run as a program. Its output is kept for errors.
        engine: The cluster's name in errors ("Ray", "the cluster at …").
        heard: Called with the arguments of each `Proxied.say`, in order, on a thread of the proxy's: must not block.
        env: The process's environment; None for this process's. The import path for colocate and the module is added.
        mark: A variable set in the process's environment, and so in all descendants.
        folder: A folder of the descendants' files: after the process's end, the janitor kills all processes with the
            mark, and removes the folder, after `lost`. None if no such process belongs to the driver.
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
        """Start the process; call `open` next.

        Raises:
            OSError: The process can't be started; nothing is left behind.
        """
        self._engine = engine
        self._said = heard
        self._requests = Requests[str, Any]()
        self._closing = False
        self._log = tempfile.TemporaryFile(prefix="colocate-")  # noqa: SIM115  # open until `close`
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
                    start_new_session=True,  # keeps Ctrl-C for the driver
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
        """The id of the process."""
        return self._process.pid

    def open(self, *arguments: Any, within_s: float) -> bool:
        """Call `Proxied.open` and wait; return False on a timeout. An error closes the proxy, a timeout doesn't.

        Raises:
            ColocateError: The call failed, or the process is gone.
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
        """Call a method of the `Proxied` and wait for the result, while the proxy lives.

        Args:
            name: The method's name.
            arguments: The method's arguments.
            within_s: Seconds to wait.

        Raises:
            ColocateError: The method failed or took longer, or the proxy is gone.
        """
        question = self.post(name, *arguments)
        if not self.wait([question], within_s):
            raise ColocateError(f"{self._engine} hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = question.result()
        return answer

    def wait(self, posted: Sequence[Asked], within_s: float | None = None) -> bool:
        """Wait for posted requests; return whether all are done. A proxy that answers no ping meanwhile is killed."""
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            silent = time.monotonic() + min(SILENCE_S, left_s)
            if all(question.wait(max(0.0, silent - time.monotonic())) for question in posted):
                return True
            if left_s <= SILENCE_S:
                return False
            if not self.post(PING).wait(_PONG_WITHIN_S):
                # The proxy is stopped or stuck. Only the process's end frees resources; the reader's thread reports
                # the end.
                self._process.kill()

    def post(self, name: str, *arguments: Any) -> Asked:
        """Send a request to the proxy, without waiting."""
        body = wire.pack(arguments)
        question = self._requests.open([_PARTY])
        if not question.over:  # a dead proxy ends the request at once
            self._lane.send(ProxyDo(question.token, name).head(), body)
        return question

    def close(self) -> None:
        """Close the connection: the process calls `Proxied.leave`, and exits. Idempotent."""
        self._closing = True
        self._event_loop.close()
        self._end()
        self._log.close()

    def last_words(self) -> str:
        """Return the end of the process's output for an error; empty without output."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        text = tail.decode(errors="replace").strip()
        return f"Its last words:\n{text}" if text else ""

    def lost(self, why: str) -> ClusterError:
        """Return the error for all pending requests when the process ended by itself. `folder` still exists."""
        return ClusterError(why, logs={})

    def _end(self) -> None:
        self._end_process()
        assert self._janitor.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the janitor has ended, or was already told
            self._janitor.stdin.write(b".")  # closing stdin isn't enough: a fork of the driver may hold the pipe open
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
        message = read(head)
        assert body is not None
        value = wire.unpack(body)
        if isinstance(message, ProxySaid):
            self._said(*value)
            return
        assert isinstance(message, ProxyDid)
        if isinstance(value, Failure):
            self._requests.refused(message.token, value.error())
        else:
            self._requests.answered(message.token, _PARTY, value)

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
    """Return import paths for colocate and the module, however this process has found these."""
    folders = [given] if given else []
    for name in ("colocate", module.partition(".")[0]):
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        places = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
        folders.append(str(Path(places[0]).parent))
    return dict.fromkeys(folders)


class Proxied:
    """The proxy's end: the driver calls a subclass's methods, and `DriverProxy` runs the subclass's module.

    The module ends with `if __name__ == "__main__": MyProxied.serve()`. `open` comes first, and runs on the main
    thread, which stays: the kernel may tie the lives of processes to the thread that starts them. Each other method
    runs on a thread of its own. Arguments and results travel pickled; a cluster's own error travels as text.
    """

    engine: ClassVar[str] = "the cluster"  # the cluster's name in errors
    _lane: wire.SocketLane
    _to_open: queue.SimpleQueue[tuple[int, tuple[Any, ...]]]

    def open(self, *arguments: Any) -> Any:
        """Start the service, with the arguments of `DriverProxy.open`. No other method is called before the return."""

    def leave(self) -> None:
        """Release the driver's resources: the driver has closed, or is gone. The process exits afterwards."""

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method for a request; override this where another object has the methods."""
        function: Callable[..., Any] = getattr(self, name)
        return function

    def say(self, *what: Any) -> None:
        """Send a notification to the driver's `heard`. From any thread; in order."""
        self._tell(ProxySaid(), what)

    @classmethod
    def serve(cls) -> None:
        """Run the process until the driver closes or is gone. Doesn't return."""
        pass_over(LEFT)  # the driver decides when the process ends
        # an engine's processes, started here, are no target of a batch system's signals either
        for number in FOR_DRIVERS:
            signal.signal(number, signal.SIG_IGN)
        service = cls()
        service._to_open = queue.SimpleQueue()
        service._lane = wire.EventLoop("driver").attach(
            socket.socket(fileno=int(sys.argv[1])), service._heard, service._left
        )
        token, arguments = service._to_open.get()
        service._do(token, OPEN, arguments)
        threading.Event().wait()

    def _heard(self, head: wire.Head, body: wire.Packed | None) -> None:
        message = read(head)
        assert isinstance(message, ProxyDo)
        assert body is not None
        arguments = wire.unpack(body)
        if message.name == PING:
            self._tell(ProxyDid(message.token), None)
        elif message.name == OPEN:
            self._to_open.put((message.token, arguments))
        else:
            job = message.token, message.name, arguments
            try:
                Thread(target=self._do, args=job, name=message.name).start()
            except RuntimeError as error:  # no thread could be started
                self._tell(ProxyDid(message.token), Failure.of(error, self.engine))

    def _do(self, token: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = self.open(*arguments) if name == OPEN else self.method(name)(*arguments)
        except BaseException as error:
            answer = Failure.of(error, self.engine)
        self._tell(ProxyDid(token), answer)

    def _tell(self, message: Message, value: Any) -> None:
        self._lane.send(message.head(), wire.pack(value))  # without a reader, `_left` is about to be called

    def _left(self, _reason: str) -> None:
        try:
            self.leave()
        finally:
            os._exit(0)
