"""Open windows, through which other processes can look at a running job without changing the job.

For the same user on the same machine a window is an abstract socket, with process and job in the name. Other machines
of the cluster find the window by name, and authenticate with a key that they get from the cluster. A peer gets the
present state of the groups; only a short question is read from the peer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from colocate import wire
from colocate.driver import (
    Deadline,
    Driver,
    JobThread,
    PoolStatus,
    Requests,
    Thread,
    decode_head,
    report_exception,
    run_deferred,
    user_of,
)
from colocate.errors import ClosedError, ClusterError, ColocateError
from colocate.executor import Watchable, Window
from colocate_report.jobs import Job, job_address, shorten_name

if TYPE_CHECKING:
    from colocate.connecting import Runtime

PATIENCE_S = 5.0
LOOK, STACKS = b"look", b"stacks"
_QUESTION_BYTES = 16


class ClusterWindow:
    """A window into a job for other machines of the cluster."""

    def __init__(
        self,
        executor: Watchable,
        name: str,
        id: str,
        seen: Callable[[], Mapping[str, Any]],
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._executor = executor
        self._read_scene = seen
        self._process = os.getpid()
        self._closed = False
        reach, key = executor.reach(), wire.new_key()
        listeners = wire.listen_everywhere(reach.host, reach.tls, ports=ports, what=f"others to look at job {name!r}")
        self._event_loop = wire.EventLoop(f"window-{name}")
        self._thread = JobThread(f"colocate-glances-{name}", lambda error: report_exception())
        try:
            for listener in listeners:
                self._event_loop.listen(listener, key, lambda sock: self._thread.call_soon(partial(self._answer, sock)))
            self._window = Window(name, id, ",".join(listener.address for listener in listeners), key)
            executor.announce(self._window)
        except BaseException:
            self._close_sockets()
            raise

    def close(self) -> None:
        """Close the window: retract the announcement, and stop the threads."""
        if os.getpid() == self._process:  # A forked child must not close the parent's window.
            run_deferred(self._shut_down)

    def _shut_down(self) -> None:
        self._executor.retract(self._window)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._closed = True
        self._event_loop.close()
        self._thread.close(PATIENCE_S)

    def _answer(self, sock: socket.socket) -> None:
        if self._closed:
            sock.close()
            return
        reply = PoolStatus(dict(self._read_scene())).head()
        with contextlib.suppress(ClosedError):  # The closing event loop may have closed the socket.
            lane = self._event_loop.attach(sock, lambda head, body: None, lambda reason: None)
            lane.send(reply)
            self._event_loop.call_later(PATIENCE_S, lane.close)  # Normally the peer closes the connection earlier.


def inspect_cluster_job(window: Window, executor: Watchable) -> Mapping[str, Any]:
    """Ask a job of the cluster for the present state of the job's groups."""
    looks: Requests[None, Mapping[str, Any]] = Requests()
    question = looks.open([None])

    def told(head: wire.Head, body: Any) -> None:
        reply = decode_head(head)
        assert isinstance(reply, PoolStatus)
        assert reply.facts is not None
        looks.add_answer(question.token, None, reply.facts)

    def closed(reason: str) -> None:
        looks.fail_all(ClusterError(f"it has just ended ({reason})"))

    deadline = Deadline(PATIENCE_S)
    try:
        sock = wire.connect(window.address, window.key, PATIENCE_S, executor.reach().tls)
    except TimeoutError as error:
        raise TimeoutError(f"job {window.name!r} ({window.id}) doesn't answer: {error}") from None
    except OSError as error:
        raise ClusterError(f"job {window.name!r} ({window.id}) can't be reached from here: {error}") from error
    event_loop = wire.EventLoop("look")
    try:
        event_loop.attach(sock, told, closed)
        (facts,) = question.result(deadline)
    except TimeoutError:
        raise TimeoutError(f"job {window.name!r} ({window.id}) doesn't answer: it is stopped, or hangs") from None
    finally:
        event_loop.close()
    return facts


_STEP_S = 0.1
_log = logging.getLogger("colocate")

_numbers = itertools.count(1)


@contextlib.contextmanager
def open_window(runtime: Runtime, name: str) -> Iterator[None]:
    """A context manager that opens a job's windows. A window that fails to open is skipped."""
    job, scene = Job(name, os.getpid(), next(_numbers)), Scene(runtime, name)
    driver = Driver(runtime)
    executor = driver.executor
    with contextlib.ExitStack() as windows:
        runtime.observe(scene.recent)
        windows.callback(driver.remove_observer, scene.recent)
        # This fails if no descriptor is free, or if a job in another container of this network has the address.
        with contextlib.suppress(OSError):
            windows.callback(_LocalWindow(job, scene).close)
        if isinstance(executor, Watchable):
            new = partial(
                ClusterWindow, executor, name, f"{platform.node()}/{job.id}", scene.describe_groups, driver.ports
            )
            try:
                windows.callback(run_deferred(new).close)
            except (OSError, ColocateError) as error:
                _log.warning("others of the cluster can't look at job %s: %s", name, error)
        yield


class Scene:
    """The state of a job that the job's windows show."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._since = time.time()
        # Imported here, because a program that only views jobs may lack this feature.
        from colocate.driver import RecentCalls

        self.recent = RecentCalls(Driver(runtime).slot_of)

    def describe_groups(self) -> dict[str, Any]:
        """Return the present state of all groups of the job."""
        groups = Driver(self._runtime).glance(self.recent) if self._runtime.alive else []
        seconds = round(time.time() - self._since, 3)
        return {"job": self._name, "node": platform.node(), "pid": os.getpid(), "seconds": seconds, "groups": groups}

    def describe_stacks(self) -> dict[str, Any]:
        """Return the stacks of all workers of the job."""
        return {"job": self._name, "stacks": Driver(self._runtime).stacks() if self._runtime.alive else []}


class _LocalWindow:
    def __init__(self, job: Job, scene: Scene) -> None:
        self._scene = scene
        self._process = os.getpid()
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(job_address(job._replace(name=shorten_name(job.name))))
            self._socket.listen(8)
        except OSError:
            self._socket.close()
            raise
        self._thread = Thread(target=self._serve_requests, name=f"colocate-window-{job.name}")
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        mine = os.getpid() == self._process  # Not in a forked child, which shares the socket.
        if mine:
            self._socket.shutdown(socket.SHUT_RDWR)  # Wake up the thread in `accept`.
        self._socket.close()
        if mine:
            self._thread.join(_STEP_S)  # The socket stays listed while the thread is in `accept`.

    def _serve_requests(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # The socket was closed, or no descriptor is free.
                if not self._closing:
                    time.sleep(_STEP_S)
                continue
            with peer:
                try:
                    peer.settimeout(PATIENCE_S)
                    if user_of(peer) in (os.getuid(), 0):
                        get_answer = (
                            self._scene.describe_stacks
                            if peer.recv(_QUESTION_BYTES) == STACKS
                            else self._scene.describe_groups
                        )
                        peer.sendall(json.dumps(get_answer()).encode() + b"\n")
                except Exception as error:  # No error of a viewer may harm the job.
                    if not isinstance(error, OSError):
                        report_exception()


def inspect_job(job: Job, what: bytes = LOOK) -> dict[str, Any] | None:
    """Ask a job on this machine for the present state of the job's groups.

    Args:
        job: The job.
        what: `STACKS` for the stacks of all workers instead.

    Returns:
        The state; None if the job has ended, or belongs to another user.

    Raises:
        TimeoutError: The job doesn't answer.
    """
    deadline, received = Deadline(PATIENCE_S), b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.settimeout(PATIENCE_S)
            peer.connect(job_address(job))
            peer.sendall(what)
            while chunk := peer.recv(1 << 16):
                received += chunk
                peer.settimeout(max(0.01, deadline.seconds_left or 0.01))
        except TimeoutError:
            raise TimeoutError(
                f"job {job.name!r} (process {job.pid}) doesn't answer: it is stopped, or hangs"
            ) from None
        except OSError:
            return None
    try:
        reply: dict[str, Any] = json.loads(received)
    except ValueError:  # The job ended during the answer, or refused to answer.
        return None
    return reply
