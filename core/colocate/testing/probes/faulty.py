"""Roles that fail in every way in which a role can fail."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import Any, NoReturn

from colocate import First, Gather, PerRank, Role, method
from colocate.testing.gate import Address, pass_gate


class TwoArguments(Exception):
    """An exception that pickle can't rebuild, because its constructor needs two arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")
        self.subject = what
        self.why = why


class Unpicklable(Exception):
    """An exception that contains a lock, which can't be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Stubborn:
    """A class whose objects can't be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Mute(Exception):
    """An exception whose `__str__` raises an error."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class MuteValue(Mute, ValueError):
    """A `ValueError` whose `__str__` raises; colocate adds hints to some errors of this kind."""


class MuteRuntime(Mute, RuntimeError):
    """A `RuntimeError` whose `__str__` raises; torch reports a lack of memory by this kind of error."""


@dataclasses.dataclass(frozen=True)
class Frozen(MemoryError):
    """An exception whose attributes can't be set."""

    remaining: int = 0


def make_chained(length: int) -> ValueError:
    """Return an exception with a chain of `length` causes."""
    error = ValueError("the first")
    for _ in range(length):
        later = ValueError("the last")
        later.__cause__ = error
        error = later
    return error


class Unreadable:
    """A class whose objects can be pickled but not unpickled."""

    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it can't be read")


class Leaving(Exception):
    """An exception that raises `SystemExit` in any other process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _exit_unless, (os.getpid(),)


def _exit_unless(pid: int) -> Leaving:
    if os.getpid() != pid:
        raise SystemExit("it leaves")
    return Leaving("it has left")


_RAISE: dict[str, Any] = {
    "value": lambda: ValueError("a plain one", 42),
    "two": lambda: TwoArguments("it broke", "it was old"),
    "unpicklable": lambda: Unpicklable("it holds a lock"),
    "mute": Mute,
    "mute value": MuteValue,
    "mute runtime": MuteRuntime,
    "frozen": Frozen,
    "chained": lambda: make_chained(sys.getrecursionlimit() + 100),
    "leaving": lambda: Leaving("it has left"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "stop": lambda: StopIteration("no more"),
}


def raise_deep_inside(kind: str) -> NoReturn:
    """Raise an error; tracebacks should end in this function."""
    raise _RAISE[kind]()


def make_nested(kind: str, levels: int) -> Any:
    """Return a list, tuple or dict with `levels` levels, or one that contains itself if `levels` is 0."""
    if levels == 0:
        endless: Any = {} if kind == "dict" else []
        if kind == "dict":
            endless["a"] = endless
        else:
            endless.append(endless)
        return endless
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if kind == "dict" else (value,) if kind == "tuple" else [value]
    return value


class Faulty(Role):
    """A role that raises errors, returns values that can't be sent, hangs, or ends its process."""

    @method(collect=First())
    def nest(self, kind: str, levels: int) -> Any:
        return make_nested(kind, levels)

    @method(collect=Gather())
    def fail(self, kind: str = "value", ranks: tuple[int, ...] | None = None) -> int:
        if ranks is None or self.ctx.rank in ranks:
            raise_deep_inside(kind)
        return self.ctx.rank

    @method(dispatch=PerRank("gate"))
    def fail_after(self, gate: Address | None, failing: int) -> int:
        """Wait at the rank's gate, if any, and then raise on rank `failing`."""
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} was told to raise")
        return self.ctx.rank

    @method
    def return_lock(self, nested: bool = False) -> Any:
        return {"fine": 1, "bad": [0, Stubborn()]} if nested else threading.Lock()

    @method
    def return_unreadable(self) -> Any:
        return {"bad": Unreadable()}

    @method
    def fine(self) -> int:
        return self.ctx.rank

    @method
    def kill(self, number: int = signal.SIGKILL, ranks: tuple[int, ...] = (0,)) -> int:
        if self.ctx.rank in ranks:
            os.kill(os.getpid(), number)
            threading.Event().wait()
        return self.ctx.rank

    @method
    def exit(self, code: int, last_words: str, ranks: tuple[int, ...] = (0,)) -> int:
        """Print a line to stderr, and end the process without Python's cleanup."""
        if self.ctx.rank in ranks:
            print(last_words, file=sys.stderr, flush=True)
            os._exit(code)
        return self.ctx.rank

    @method
    def wait(self, gate: Address) -> int:
        pass_gate(gate)
        return self.ctx.rank

    @method
    def hold_the_gil(self, gate: Address) -> None:
        """Pass a gate, and then hold the interpreter's lock (GIL) forever."""
        pass_gate(gate)
        ctypes.PyDLL(None).pause()


class FailsToStart(Role):
    """A role whose constructor raises on some ranks."""

    def __init__(self, ranks: tuple[int, ...], kind: str = "value") -> None:
        if self.ctx.rank in ranks:
            raise_deep_inside(kind)

    @method
    def noop(self) -> None:
        """Do nothing."""


class HangsAtStart(Role):
    """A role whose constructor waits at a gate, on some ranks."""

    def __init__(self, gate: Address, ranks: tuple[int, ...] = (0,)) -> None:
        if self.ctx.rank in ranks:
            pass_gate(gate)

    @method
    def noop(self) -> None:
        """Do nothing."""


class DiesAtStart(Role):
    """A role whose constructor ends the process, on some ranks."""

    def __init__(self, code: int, ranks: tuple[int, ...] = (0,)) -> None:
        if self.ctx.rank in ranks:
            os._exit(code)

    @method
    def noop(self) -> None:
        """Do nothing."""


def _start_daemon() -> int:
    """Start a daemon (in its own session, with a parent that has ended), and return the pid."""
    code = "import subprocess as s; print(s.Popen(['sleep', '1000'], start_new_session=True, stdout=s.DEVNULL).pid)"
    return int(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout)


class Parent(Role):
    """A role that starts its own processes, as a data loader does."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None

    @method
    def start_children(self) -> tuple[int, int, int, int]:
        """Start four endless processes (program, fork, new session without environment, daemon); return the pids."""
        forever = "import threading; threading.Event().wait()"
        self.child = subprocess.Popen([sys.executable, "-c", forever])
        forked = os.fork()
        if forked == 0:
            threading.Event().wait()
        apart = subprocess.Popen([sys.executable, "-c", forever], start_new_session=True, env={})
        return self.child.pid, forked, apart.pid, _start_daemon()

    @method
    def compute(self, how: str) -> int:
        """Compute a result in a process of `multiprocessing`."""
        with multiprocessing.get_context(how).Pool(1) as pool:
            return pool.apply(len, ("abc",))

    @method
    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
