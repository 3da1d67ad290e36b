"""Puts two small supervisor processes above a worker. They end all processes that roles have started.

    starter → supervisor → supervisor → worker → whatever roles start

Before any import, a process that will be a worker forks twice, and its grandchild is the worker. Each supervisor is a
subreaper (`PR_SET_CHILD_SUBREAPER`): the kernel gives it all descendants whose parent has ended, in any session or
process group. So no process that the worker has started is out of reach when the worker ends, in whichever way. A
supervisor kills until nothing is left, and then ends as the worker did, by the same exit code or signal: a waiting
starter sees the worker's end when all of it is over.

A supervisor does the same when its parent ends or sends `ENDS`. There are two because one may be killed (Ray, for one,
kills the children of a process that it ends): the other then does its work. If both are killed at once, the processes
left behind are recognized by `MARK` in their environment, or by a limit if they have cleared that (`find_starter`).

A child that a role starts by `ctx.start` has two supervisors of its own, also in a worker on a thread of the driver:
this file, run as a script, puts them above the child's program.

Only parts of the standard library are imported here: every page that is written to is a supervisor's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

ENDS = signal.SIGRTMIN
"""Tells a supervisor to end everything below, and itself. No batch system or terminal sends this signal."""

CLOSES_OTHERS = "os.close and os.closerange do that, in a role that closes what it hasn't opened"
"""How a worker loses its connection to the driver, for the error texts of the worker and its keeper."""

MARK = "COLOCATE_WORKER_OF"
"""Environment variable of a worker and its descendants: the pid of the worker's starter, and the worker's label."""

SUPERVISORS = 2
"""Number of supervisors above a worker."""

TRACKERS_S = 5.0
"""Seconds that Python's resource trackers may go on after everything else was killed."""

# Descendants inherit this resource limit, whatever happens to their environment, session and descriptors.
# The value is ten thousand years in microseconds, thus no limit, with the starter's pid in the lower bits.
_LIMIT = 0xC010 << 46
_LIMIT_PIDS = 1 << 22

_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores these signals, and raises an error instead.
_LEFT_S = 5.0  # Seconds to wait for processes that SIGKILL doesn't end, such as other users' processes.
_LOWER_S = 1.0  # Seconds in which the lower supervisor may end by itself before being killed.
_LOOK_S, _LONGEST_S = 0.01, 0.5
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER = 1, 4, 36, 0x59616D61
_TRACKER = b"resource_tracker import main"  # Text in the command lines of the trackers of multiprocessing and loky.


def supervise(starter: int, begin: Callable[[], object] = lambda: None) -> None:
    """Put supervisors above this process, and return in the grandchild, which has one thread and no child yet.

    In the grandchild, no signal is ignored or blocked, however the starter was started (by `nohup`, a daemon, a shell's
    `&`). A process that ignores SIGCHLD can't learn how a child ends, and SIGTERM doesn't end a process that ignores
    it.

    Args:
        starter: The process that has started this one. The supervisors and the grandchild end with it.
        begin: Called in the grandchild before signals are unblocked.
    """
    import resource

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for number in signal.valid_signals() - _PYTHONS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    # This limit is only set if no other program has set the limit.
    if hard == resource.RLIM_INFINITY and (soft == hard or find_starter(soft)):
        resource.setrlimit(resource.RLIMIT_RTTIME, (_LIMIT + starter, hard))
    above = starter
    for lower in range(SUPERVISORS, 0, -1):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        this = os.getpid()
        child = os.fork()
        if child:
            _supervise(above, child, lower > 1)
        above = this
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != above:  # The parent exited before the death signal was requested.
        os._exit(0)
    # A new session protects the supervisors from a role that signals the process group.
    # A session of its own also helps scheduling: the kernel divides time among sessions (sched(7), autogroup).
    # Among workers of one session, a thread woken for a collective waits for the running worker's time slice.
    # In one session, two ranks on two cores took twice as long for collectives, and 8 % longer for a step.
    os.setsid()
    # Otherwise, the kernel's Yama module prevents the starter's other children from reading this process's memory.
    _prctl(_PR_SET_PTRACER, starter)
    begin()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def find_starter(limit: int) -> int | None:
    """Decode the pid of a worker's starter from a descendant's real-time limit; return None for any other limit."""
    return limit - _LIMIT if _LIMIT < limit < _LIMIT + _LIMIT_PIDS else None


def is_tracker(pid: int) -> bool:
    """Return whether a process is Python's resource tracker (which removes leaked shared memory), or may become one.

    The command line of a process is empty while the kernel still executes the program.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return not line or _TRACKER in line


def _supervise(above: int, child: int, supervises: bool) -> NoReturn:
    try:
        # The worker's descriptors are closed here, so that peers notice when the worker closes descriptors.
        # Output stays open for the supervisor's own errors.
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2:
                try:
                    os.close(int(entry))
                except OSError:  # This is the descriptor of the listing itself.
                    pass
        _prctl(_PR_SET_PDEATHSIG, ENDS)
        _Supervisor(above, child, supervises).run_until_end()
    except BaseException:
        import traceback  # Imported only on errors, because supervisors should stay small.

        traceback.print_exc()  # The traceback goes to the worker's output.
    finally:
        os._exit(70)  # After this exit, the other supervisor ends the descendants.


class _Supervisor:
    """Waits until the child (a supervisor or the worker) or the parent exits. All signals are blocked."""

    def __init__(self, above: int, child: int, supervises: bool) -> None:
        self._above = above
        self._child = child
        self._supervises = supervises
        self._status: int | None = None

    def run_until_end(self) -> NoReturn:
        while self._reap() and self._status is None:
            if os.getppid() != self._above or signal.sigwaitinfo({signal.SIGCHLD, ENDS}).si_signo == ENDS:
                # A lower supervisor gets `ENDS`, so that it ends the processes even if this supervisor is killed.
                _kill(self._child, ENDS if self._supervises else signal.SIGKILL)
                break
        self._end_all()
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:  # The child was killed by a signal.
            _prctl(_PR_SET_DUMPABLE, 0)  # The child has already dumped a core, so this process must not dump another.
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)

    def _reap(self) -> bool:
        """Reap all ended children, and return whether a child is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._status = ended[1]
        except ChildProcessError:
            return False
        return True

    def _end_all(self) -> None:
        """Kill all descendants until none is left.

        Python's resource trackers end by themselves, after removing memory.
        """
        began = time.monotonic()
        pause = _LOOK_S
        over: float | None = None  # Time at which the supervised child was found to have ended.
        while self._reap():
            now = time.monotonic()
            if self._status is not None:
                over = over or now
                if now - over > _LEFT_S + TRACKERS_S:
                    return
            for pid in list_descendants(os.getpid()):
                if pid == self._child and self._supervises and now - began < _LOWER_S:
                    continue
                if now - began > TRACKERS_S or not is_tracker(pid):
                    _kill(pid)
            signal.sigtimedwait({signal.SIGCHLD}, pause)
            pause = min(2 * pause, _LONGEST_S)


def list_descendants(top: int) -> list[int]:
    """Return all running descendants of a process, the nearest first.

    No call scans all processes of the machine, because many supervisors may call this at once.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _list_descendants_by_parent(top)  # This kernel lacks the `children` files.
    pids = [top]
    for pid in pids:  # The list grows during the loop.
        pids += [child for child in _list_children(pid) if _find_parent(child) is not None]
    return pids[1:]


def _list_children(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # The process has exited.
        return pids
    for task in tasks:  # Each thread has a list of the children that it has forked.
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                pids += map(int, file.read().split())
        except OSError:
            continue
    return pids


def _list_descendants_by_parent(top: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _find_parent(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    pids = children.get(top, [])
    for pid in pids:  # The list grows during the loop.
        pids += children.get(pid, ())
    return pids


def _find_parent(pid: int) -> int | None:
    """Return the parent of a running process; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]  # A program's name may contain parentheses.
    except (OSError, ValueError):  # The process has exited.
        return None
    return None if state in (b"Z", b"X") else int(parent)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # The process has exited, or belongs to another user.
        pass


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def exec_program(starter: int, told: int, command: list[str]) -> NoReturn:
    """Execute a program below new supervisors, in place of this process.

    Args:
        starter: The process that has started this one.
        told: A descriptor for this process's id, followed by the error if the program can't be executed.
        command: The program and its arguments.
    """
    supervise(starter)
    os.write(told, str(os.getpid()).encode())
    os.set_inheritable(told, False)
    for number in _PYTHONS:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(told, f" {error.strerror}".encode())
    os._exit(127)


if __name__ == "__main__":
    exec_program(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
