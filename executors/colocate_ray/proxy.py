"""A process that joins a cluster for the driver, with both ends of the connection. Imports no cluster library."""

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
from colocate.keeper import Message, Request, Requests, Thread, decode_head, keep_exit_codes, message
from colocate.worker.birth.signals import FOR_DRIVERS, IGNORED, ignore_signals
from colocate_ray import janitor

_ENDS_WITHIN_S = 10.0
# A proxy that is silent for this long gets a ping, and is killed if no answer comes.
SILENCE_S = 2.0
_PONG_WITHIN_S = 3.0
_PARTY = "the proxy"  # `Requests` needs a name for the party that answers.
_LAST_WORDS_BYTES = 2000

Question: TypeAlias = Request[str, Any]

PING = "ping"
"""The name of a ping request, which the proxy answers at once. All other requests call a method of the module."""
OPEN = "open"
"""The name of the first request, which runs on the proxy's main thread."""


@message
class ProxyCall(Message):
    """A request to call a method of the proxy. The body has the arguments. Answered by `ProxyResult`."""

    token: int  # Id of the request.
    name: str


@message
class ProxyResult(Message):
    """The answer to a `ProxyCall`. The body has the method's result, or a `Failure`."""

    token: int  # Id of the request.


@message
class ProxyNotice(Message):
    """A notification from the proxy to the driver. The body has the payload."""


@attrs.frozen
class Failure:
    """An error in a form that the driver can unpickle without the cluster's library."""

    kind: type[ColocateError]
    message: str
    facts: Mapping[str, Any]

    @classmethod
    def from_values(cls, error: BaseException, engine: str) -> Failure:
        """Describe an error. Errors of the cluster's library become text, because the driver may lack the library."""
        if not isinstance(error, ColocateError):
            error = ColocateError(f"{engine} failed: {type(error).__name__}: {error}")
        return cls(type(error), error.message, dict(error.__dict__))

    def to_error(self) -> ColocateError:
        """Rebuild the error."""
        return self.kind(self.message, **self.facts)


class DriverProxy:
    """The driver's end of a process that joins a cluster on the driver's behalf.

    A cluster connection would change the driver's process for good: it adds threads, signal handlers and settings, and
    allows one connection per process. So a module with a subclass of `ProxyProcess` runs in a separate process, and the
    driver calls the methods of that subclass. The process ends when it is closed, or when the driver ends for any
    reason. A small process, the janitor, then kills a process that is stopped or stuck.

    Args:
        module: The module to run as a program. The output is stored for error texts.
        engine: The cluster's name in errors ("Ray", "the cluster at …").
        heard: Called in order with the arguments of each `ProxyProcess.notify_driver`, on the proxy's own thread. Must
            not block.
        env: The environment of the process; None for the driver's own. Import paths for colocate and the module are
            added.
        mark: Name of a variable that is set in the environment of the process and of all descendants.
        folder: A folder for files of the descendants. After the end of the process, the janitor kills all processes
            with the mark. After `make_lost_error` the janitor removes the folder. None if no descendants must be
            killed.
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
        """Start the process. The caller then calls `open`.

        Raises:
            OSError: The process can't be started. No process or descriptor is left behind.
        """
        self._engine = engine
        self._on_notice = heard
        self._requests = Requests[str, Any]()
        self._closing = False
        self._log = tempfile.TemporaryFile(prefix="colocate-")  # noqa: SIM115  # open until `close`
        value = secrets.token_hex(8)
        whole = {**(os.environ if env is None else env), mark: value}
        whole["PYTHONPATH"] = os.pathsep.join(_make_import_path(whole.get("PYTHONPATH"), module))
        keep_exit_codes()
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
                    # A new session keeps Ctrl-C in the driver's terminal away from this process.
                    start_new_session=True,
                )
            self._janitor = _start_janitor(self._process, f"{mark}={value}", folder)
        except BaseException:
            ours.close()
            self._log.close()
            raise
        self._event_loop = wire.EventLoop("proxy")
        self._lane = self._event_loop.attach(ours, self._on_message, self._on_lane_closed)

    @property
    def pid(self) -> int:
        """The process id of the proxy."""
        return self._process.pid

    def open(self, *arguments: Any, within_s: float) -> bool:
        """Call `ProxyProcess.open` and wait for the end of the call; return False on a timeout.

        An error closes the proxy; a timeout doesn't.

        Raises:
            ColocateError: The call failed, or the process is gone.
        """
        try:
            opened = self.call_soon(OPEN, *arguments)
            if opened.wait_over(within_s):
                opened.result()
                return True
        except BaseException:
            self.close()
            raise
        return False

    def call(self, name: str, *arguments: Any, within_s: float) -> Any:
        """Call a method of the `ProxyProcess` object, and wait for the result while the proxy is alive.

        Args:
            name: The method's name.
            arguments: The method's arguments.
            within_s: Seconds to wait.

        Raises:
            ColocateError: The method failed or took longer, or the proxy is gone.
        """
        question = self.call_soon(name, *arguments)
        if not self.wait_for([question], within_s):
            raise ColocateError(f"{self._engine} hasn't done within {within_s:g} s what it was asked for ({name})")
        [answer] = question.result()
        return answer

    def wait_for(self, posted: Sequence[Question], within_s: float | None = None) -> bool:
        """Wait for the given requests, and return whether all have ended. Kills a proxy that answers no ping."""
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            silent = time.monotonic() + min(SILENCE_S, left_s)
            if all(question.wait_over(max(0.0, silent - time.monotonic())) for question in posted):
                return True
            if left_s <= SILENCE_S:
                return False
            if not self.call_soon(PING).wait_over(_PONG_WITHIN_S):
                # The proxy is stopped or stuck. Only the end of the process frees the cluster's resources.
                # After this kill, the thread that reads from the proxy reports the end.
                self._process.kill()

    def call_soon(self, name: str, *arguments: Any) -> Question:
        """Send a request to the proxy, without waiting for the answer."""
        body = wire.pack(arguments)
        question = self._requests.open([_PARTY])
        if not question.is_over:  # With a dead proxy the request has failed already.
            self._lane.send(ProxyCall(question.token, name).head(), body)
        return question

    def close(self) -> None:
        """Close the connection, so that the process calls `ProxyProcess.leave` and exits. Further calls do nothing."""
        self._closing = True
        self._event_loop.close()
        self._end_proxy()
        self._log.close()

    def read_last_output(self) -> str:
        """Return the last lines of the process's output for an error text; empty without output."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        text = tail.decode(errors="replace").strip()
        return f"Its last words:\n{text}" if text else ""

    def make_lost_error(self, why: str) -> ClusterError:
        """Return the error for all pending requests of a process that ended by itself, before the folder is removed."""
        return ClusterError(why, logs={})

    def _end_proxy(self) -> None:
        self._end_process()
        assert self._janitor.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # The janitor may have ended, or may have been notified before.
            # Closing stdin isn't enough, because a fork of the driver may hold the pipe open.
            self._janitor.stdin.write(b".")
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

    def _on_message(self, head: wire.Head, body: wire.Packed | None) -> None:
        message = decode_head(head)
        assert body is not None
        value = wire.unpack(body)
        if isinstance(message, ProxyNotice):
            self._on_notice(*value)
            return
        assert isinstance(message, ProxyResult)
        if isinstance(value, Failure):
            self._requests.add_refusal(message.token, value.to_error())
        else:
            self._requests.add_answer(message.token, _PARTY, value)

    def _on_lane_closed(self, _reason: str) -> None:
        ended = f"the connection to {self._engine} has ended"
        if self._closing:
            self._requests.fail_all(ClusterError(f"{ended}: it was closed"))
            return
        self._end_process()
        why = f"{ended}: the process that was in it ended with code {self._process.returncode}"
        error = self.make_lost_error(f"{why}. Close the runtime, and connect again. {self.read_last_output()}".strip())
        self._end_proxy()
        self._requests.fail_all(error)


def _start_janitor(proxy: subprocess.Popen[bytes], mark: str, folder: str | None) -> subprocess.Popen[bytes]:
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


def _make_import_path(given: str | None, module: str) -> Iterable[str]:
    """Return the import paths by which the new process finds colocate and the module."""
    folders = [given] if given else []
    for name in ("colocate", module.partition(".")[0]):
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        places = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
        folders.append(str(Path(places[0]).parent))
    return dict.fromkeys(folders)


class ProxyProcess:
    """The proxy's side of the connection. The driver calls the methods of a subclass.

    The subclass's module ends with `if __name__ == "__main__": MyProxied.serve()`. `open` is called first, on the main
    thread, which never ends: the kernel may end processes with the thread that started them. Each other method runs on
    a thread of its own. Arguments and results are pickled. An error of the cluster's library is sent as text.
    """

    engine: ClassVar[str] = "the cluster"  # The cluster's name in error texts.
    _lane: wire.SocketLane
    _to_open: queue.SimpleQueue[tuple[int, tuple[Any, ...]]]

    def open(self, *arguments: Any) -> Any:
        """Start the service with the arguments of `DriverProxy.open`.

        No other method is called before this method returns.
        """

    def leave(self) -> None:
        """Release the driver's resources, because the driver has closed or is gone. The process exits afterwards."""

    def find_method(self, name: str) -> Callable[..., Any]:
        """Return the method for a request. Override this if another object has the methods."""
        function: Callable[..., Any] = getattr(self, name)
        return function

    def notify_driver(self, *what: Any) -> None:
        """Send a notification to the driver, which calls the `heard` callback of `DriverProxy` with these arguments.

        Any thread may call this. Notifications arrive in order.
        """
        self._send(ProxyNotice(), what)

    @classmethod
    def serve(cls) -> None:
        """Run the process until the driver closes the connection or is gone. Doesn't return."""
        ignore_signals(IGNORED)  # The process ignores signals, because the driver decides when the process ends.
        # The cluster's processes that this process starts must ignore a batch system's signals too.
        for number in FOR_DRIVERS:
            signal.signal(number, signal.SIG_IGN)
        service = cls()
        service._to_open = queue.SimpleQueue()
        service._lane = wire.EventLoop("driver").attach(
            socket.socket(fileno=int(sys.argv[1])), service._on_message, service._on_driver_gone
        )
        token, arguments = service._to_open.get()
        service._run_method(token, OPEN, arguments)
        threading.Event().wait()

    def _on_message(self, head: wire.Head, body: wire.Packed | None) -> None:
        message = decode_head(head)
        assert isinstance(message, ProxyCall)
        assert body is not None
        arguments = wire.unpack(body)
        if message.name == PING:
            self._send(ProxyResult(message.token), None)
        elif message.name == OPEN:
            self._to_open.put((message.token, arguments))
        else:
            job = message.token, message.name, arguments
            try:
                Thread(target=self._run_method, args=job, name=message.name).start()
            except RuntimeError as error:  # No thread could be started.
                self._send(ProxyResult(message.token), Failure.from_values(error, self.engine))

    def _run_method(self, token: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = self.open(*arguments) if name == OPEN else self.find_method(name)(*arguments)
        except BaseException as error:
            answer = Failure.from_values(error, self.engine)
        self._send(ProxyResult(token), answer)

    def _send(self, message: Message, value: Any) -> None:
        self._lane.send(message.head(), wire.pack(value))  # If the driver is gone, `_on_driver_gone` will be called.

    def _on_driver_gone(self, _reason: str) -> None:
        try:
            self.leave()
        finally:
            os._exit(0)
