"""Inject a fault at its moment, on a thread of its own, while the program runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import psutil
from tests.chaos import sockets
from tests.chaos.programs import Fault
from tests.chaos.records import Applied, PlayedGroup

from colocate import Pool, Runtime

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_STEP_S = 0.001
_LOOKS_FOR_S = 3.0


class Injector:
    """Injects the fault of an episode."""

    _broken: BaseException | None = None

    def __init__(self, fault: Fault, runtime: Runtime, pool: Pool, played: Sequence[PlayedGroup]) -> None:
        self.fault = fault
        # the injected fault; None without a target, or after the end of the time
        self.applied: Applied | None = None
        self.over = threading.Event()  # set when the injection is over
        self._runtime = runtime
        self._pool = pool
        self._played = played
        self._thread = threading.Thread(target=self._run, name="chaos-fault", daemon=True)
        self._given_up = threading.Event()
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    def note(self, kind: str, pid: int, began: float) -> None:
        """Record the fault as injected, by role code."""
        now = time.monotonic()
        fault, name = self.fault, self._played[self.fault.group].name
        self.applied = Applied(kind, fault.group, fault.rank, pid, began, now, fault.moment, name=name)
        self.over.set()

    def give_up(self) -> None:
        """End the injection, wait for its thread, and raise an error of the injection itself."""
        self._given_up.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.over.set()
        if self._broken is not None:
            raise self._broken

    def go_on(self) -> None:
        assert self.applied is not None
        os.kill(self.applied.pid, signal.SIGCONT)
        self.applied.went_on = time.monotonic()

    def _run(self) -> None:
        try:
            time.sleep(self.fault.delay_s)
            deadline = self._began + _LOOKS_FOR_S
            while not self._given_up.is_set() and time.monotonic() < deadline:
                if self._done():
                    return
                time.sleep(_STEP_S)
        except BaseException as error:
            self._broken = error
        finally:
            self.over.set()

    def _done(self) -> bool:
        """Inject the fault if there is a target; return whether the fault was injected."""
        fault = self.fault
        name = self._played[fault.group].name
        group = self._pool.groups.get(name)
        if group is None:
            return False
        pid = group._node.workforce.workers[fault.rank].pid or 0
        if fault.kind == "stop":
            pid = _worker(pid)
        below = _worker(pid)
        began = time.monotonic()
        act: Callable[[], object]
        if fault.kind == "drop":
            act = lambda: sockets.drop(fault.target, self._runtime, group, fault.rank)  # noqa: E731
        elif not pid:
            return False
        else:
            act = lambda: _signal(pid, _SIGNALS[fault.kind])  # noqa: E731
        try:
            act()
            if fault.kind == "stop" and _worker(pid) != pid:  # a supervisor by now, whose stop delays no call
                os.kill(pid, signal.SIGCONT)
                return False
        except (sockets.NoSuchSocket, ProcessLookupError, FileNotFoundError):  # the target has ended by itself
            return False
        kind = fault.target or fault.kind
        now = time.monotonic()
        self.applied = Applied(kind, fault.group, fault.rank, pid, began, now, fault.moment, below=below, name=name)
        return True


def _worker(pid: int) -> int:
    """Return a worker's own pid: before the hello, the driver may only know the upper supervisor's pid."""
    try:
        below = psutil.Process(pid).children() if pid else []
        while len(below) == 1 and "colocate.worker" in below[0].cmdline():
            pid, below = below[0].pid, below[0].children()
    except psutil.Error:  # the process has ended by itself
        pass
    return pid


def _signal(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        # One thread begins the stop when it is scheduled: until then other threads may still answer a call.
        while not all(state in "TZX" for state in _states(pid)):  # or the process has ended
            time.sleep(_STEP_S)


def _states(pid: int) -> list[str]:
    """Return the states of a process's threads, as the kernel's letters."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                found.append(file.read().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
            continue
    return found
