"""Tests of complete drivers, which run as scripts in separate processes: start, interruption and end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from colocate._system.readable import readable
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, needs_feature, smoke
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S, Processes

_FOLLOWS_WITHIN_S = 20.0  # Within this time, all processes that a killed driver has started must end.

PREAMBLE = """
import json, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
import colocate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo

ROLES = {"faulty": colocate.role(Faulty), "echo": colocate.role(Echo)}

def say(what):
    print(json.dumps(what), flush=True)

def wait():
    sys.stdin.readline()
"""


@attrs.define(eq=False)
class Driver:
    """A running driver script."""

    process: subprocess.Popen[str]
    _buffer: bytes = b""

    def read_answer(self) -> Any:
        """Return the script's next message, and fail the test if none arrives in time."""
        assert self.process.stdout is not None
        stdout = self.process.stdout.fileno()
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            assert readable(stdout, left_s), f"the script has said nothing for {PATIENCE_S:g} s"
            more = os.read(stdout, 2**16)
            assert more, "the script has ended, or closed its output, and had more to say"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def resume(self) -> None:
        """Continue the script where it waits for input."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_exit(self) -> tuple[int, str]:
        """Continue the script to its end, and return the exit code and the text of stderr."""
        _, errors = self.process.communicate("\n", timeout=PATIENCE_S)
        return self.process.returncode, errors


@attrs.define(eq=False)
class Scripts:
    """A factory of driver scripts that connect to the tested executor."""

    folder: Path
    connect: str
    started: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def start_script(self, text: str, *flags: str) -> Driver:
        """Start a script, in whose text `CONNECT` is replaced by a call of `colocate.connect`."""
        path = self.folder / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(text).replace("CONNECT", self.connect))
        process = subprocess.Popen(
            [sys.executable, *flags, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        self.started.append(process)
        return Driver(process)

    def end_all(self) -> None:
        """Kill all scripts, and fail the test if a process that a script has started outlives the script."""
        holders: set[int] = set()
        for process in self.started:
            process.kill()
            try:
                process.communicate(timeout=_FOLLOWS_WITHIN_S)
            except subprocess.TimeoutExpired:  # Another process still has the script's output open.
                for pipe in filter(None, (process.stdout, process.stderr)):
                    holders |= _find_holders(pipe.fileno())
                    pipe.close()
                process.wait()  # This returns soon, because the script was killed.
        outlive = ", ".join(f"{pid} ({_read_command(pid)})" for pid in sorted(holders))
        assert not outlive, f"after a driver's end these still have its output open, which it has started: {outlive}"


def _find_holders(pipe: int) -> set[int]:
    pipe_stat = os.fstat(pipe)
    pids: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # The process has ended, or belongs to another user.
            folder = f"/proc/{pid}/fd"
            if any(os.path.samestat(os.stat(f"{folder}/{name}"), pipe_stat) for name in os.listdir(folder)):
                pids.add(pid)
    return pids - {os.getpid()}


def _read_command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:  # The process has ended meanwhile.
        return "gone"


class Scripted(ExecutorCase):
    """The base class of the areas that need other drivers."""

    def connect_source(self, **more: Any) -> str:
        """Return the Python expression that connects in a script. Override it together with `connect`."""
        options = {**self.options, **more}
        return f"colocate.connect({self.executor!r}, **{options!r})"

    @pytest.fixture
    def scripts(self, no_leaks: None, tmp_path: Path) -> Iterator[Scripts]:
        """A factory of driver scripts in a temporary folder."""
        scripts = Scripts(tmp_path, self.connect_source())
        yield scripts
        scripts.end_all()


class Drivers(Scripted):
    """A driver leaves nothing behind, in whichever way it ends."""

    @needs(OwnProcess)
    def test_many_open_files(self, scripts: Scripts) -> None:
        """A driver with more than a thousand open files can start and end workers, although `select` can't be used.

        The second pool's workers aren't forks, because Python reads their environment variable at its start.
        """
        driver = scripts.start_script("""
            import resource

            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
            held = [open(os.devnull) for _ in range(1100)]
            with CONNECT as runtime:
                for env in (None, {"PYTHONHASHSEED": "7"}):
                    with runtime.reserve(2, cpus=0, env=env) as pool:
                        say(pool.spawn(ROLES).role("echo").noop())
            """)
        assert (driver.read_answer(), driver.read_answer()) == ([None, None], [None, None])
        assert driver.wait_exit() == (0, "")

    def test_interrupted(self, scripts: Scripts) -> None:
        """Ctrl-C in a blocking call raises KeyboardInterrupt, and leaving the `with` block closes everything."""
        with Gate() as gate:
            driver = scripts.start_script(f"""
                try:
                    with CONNECT as runtime, runtime.reserve(1, cpus=0) as pool:
                        group = pool.spawn(ROLES)
                        say([group.role("echo").place()[0][0], os.getpid()])
                        group.role("faulty").wait({gate.address!r})
                except BaseException as error:
                    say([type(error).__name__, [type(e).__name__ for e in getattr(error, "exceptions", ())]])
                """)
            workers = Processes(_find_workers(driver.read_answer()))
            gate.wait_for()
            driver.process.send_signal(signal.SIGINT)
            assert driver.read_answer() == ["KeyboardInterrupt", []]
        assert driver.wait_exit()[0] == 0
        workers.wait_all()
        workers.release_all()

    @needs(OwnProcess)
    @smoke
    def test_killed(self, scripts: Scripts) -> None:
        """If a driver is killed by SIGKILL, all its workers end: idle, hung, and holding the interpreter's lock.

        The processes that the roles have started end, too, in whichever session they are.
        """
        with Gate() as hung, Gate() as holding:
            driver = scripts.start_script(f"""
                from colocate.testing.probes.faulty import Parent
                runtime = CONNECT
                group = runtime.reserve(3, cpus=0).spawn({{**ROLES, "parent": colocate.role(Parent)}})
                faulty = group.role("faulty")
                children = sum(map(list, group.role("parent").start_children()), [])
                say([pid for pid, _, _ in group.role("echo").place()] + children)
                hung = faulty.wait.options(ranks=[1]).submit({hung.address!r})
                holding = faulty.hold_the_gil.options(ranks=[2]).submit({holding.address!r})
                threading.Event().wait()
                """)
            workers = Processes(driver.read_answer())
            hung.wait_for()
            holding.wait_for()
            holding.open()
            driver.process.kill()
            workers.wait_all()
            workers.release_all()

    @needs(OwnProcess)
    def test_killed_with_a_fork_alive(self, scripts: Scripts) -> None:
        """The workers of a killed driver end even if a forked child of the driver, such as a data loader, lives on."""
        driver = scripts.start_script("""
            import multiprocessing
            runtime = CONNECT
            group = runtime.reserve(1, cpus=0).spawn(ROLES)
            workers = [pid for pid, _, _ in group.role("echo").place()]
            loader = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
            loader.start()
            say([workers, loader.pid])
            threading.Event().wait()
            """)
        pids, child = driver.read_answer()
        workers, forked = Processes(pids), Processes([child])
        driver.process.kill()
        workers.wait_all()
        os.kill(child, signal.SIGKILL)  # The forked child is still running.
        forked.wait_all()
        workers.release_all()
        forked.release_all()


def _find_workers(pids: Sequence[int]) -> list[int]:
    worker, driver = pids
    return [worker] if worker != driver else []


class Signals(Scripted):
    """Tests of signals, which Python handles on the main thread, between any two lines of code."""

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_interrupted_spawn(self, scripts: Scripts) -> None:
        """Ctrl-C during the start of workers cancels the start, leaves nothing behind and frees the slots."""
        with Gate() as gate:
            driver = scripts.start_script(f"""
                from colocate.testing.probes.faulty import HangsAtStart

                with CONNECT as runtime:
                    pool = runtime.reserve(2, cpus=0)
                    try:
                        pool.spawn({{"hangs": colocate.role(HangsAtStart, {gate.address!r})}})
                    except KeyboardInterrupt:
                        say("interrupted")
                    say([[group.name for group in runtime.groups.values()], str(runtime.audit())])
                    group = pool.spawn(ROLES)
                    say(group.role("echo", Echo).first("works"))
                """)
            gate.wait_for()
            driver.process.send_signal(signal.SIGINT)
            assert driver.read_answer() == "interrupted"
            assert driver.read_answer() == [[], "clean: nothing is leaked, nothing is missing"]
            assert driver.read_answer() == "works"
            code, errors = driver.wait_exit()
        assert (code, errors) == (0, "")

    @needs_feature("looking")
    @needs_feature("pipelines")
    @needs_feature("functions")
    def test_executor_is_called_off_the_main_thread(self, scripts: Scripts) -> None:
        """Slow methods of the executor aren't called on the main thread."""
        driver = scripts.start_script("""
            from colocate.executor import Executor
            called = []

            def watched(name, method):
                def call(self, *args, **options):
                    called.append((name, threading.current_thread() is threading.main_thread()))
                    return method(self, *args, **options)
                return call

            with CONNECT as runtime:
                kind = type(runtime._node.services.executor)
                for name, method in vars(Executor).items():
                    if not name.startswith("_") and callable(method):  # not the class's own methods
                        setattr(kind, name, watched(name, getattr(kind, name)))
                pool = runtime.reserve(2, cpus=0)
                group = pool.spawn(ROLES)
                echo = group.role("echo", Echo)
                with group.scope(), group.pipeline():
                    kept = echo.first.keep("kept")
                    sent = echo.first.submit(kept.ref)
                say([echo.first("called"), sent.result(), group.run(lambda ctx: ctx.rank), str(runtime.audit())])
                group.close()
                pool.close()
            say(sorted({name for name, on_main in called if on_main} - {"numbered", "frame", "discard"}))
            say(sorted({"reserve", "launch", "frame", "running", "release", "close"} - {name for name, _ in called}))
            """)
        assert driver.read_answer() == ["called", "kept", [0, 1], "clean: nothing is leaked, nothing is missing"]
        assert driver.read_answer() == []
        assert driver.read_answer() == []
        code, errors = driver.wait_exit()
        assert (code, errors) == (0, "")
