"""Whole drivers, as scripts in processes of their own: how they start, are interrupted, and end; nothing is left."""

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

_FOLLOWS_WITHIN_S = 20.0  # a killed driver's output is closed: what it has started ends with it, or soon after

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
    """A script that runs."""

    process: subprocess.Popen[str]
    _heard: bytes = b""

    def hear(self) -> Any:
        """Return what it says next; a failure when it says nothing within a test's patience."""
        assert self.process.stdout is not None
        stdout = self.process.stdout.fileno()
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._heard:
            left_s = max(0.0, deadline - time.monotonic())
            assert readable(stdout, left_s), f"the script has said nothing for {PATIENCE_S:g} s"
            more = os.read(stdout, 2**16)
            assert more, "the script has ended, or closed its output, and had more to say"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def go_on(self) -> None:
        """Let it go on where it waits."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Let it go on where it waits, until its end: exit code and what it wrote to stderr."""
        _, errors = self.process.communicate("\n", timeout=PATIENCE_S)
        return self.process.returncode, errors


@attrs.define(eq=False)
class Scripts:
    """Starts scripts that connect as the suite does."""

    folder: Path
    connect: str
    started: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def start(self, text: str, *flags: str) -> Driver:
        """Start a script; `CONNECT` in its text becomes a call of connect."""
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

    def close(self) -> None:
        """End what still runs; a failure when something that a script has started outlives it."""
        holders: set[int] = set()
        for process in self.started:
            process.kill()
            try:
                process.communicate(timeout=_FOLLOWS_WITHIN_S)
            except subprocess.TimeoutExpired:  # its output has no end as long as somebody has it open
                for pipe in filter(None, (process.stdout, process.stderr)):
                    holders |= _having_open(pipe.fileno())
                    pipe.close()
                process.wait()  # it has been killed
        outlive = ", ".join(f"{pid} ({_command_of(pid)})" for pid in sorted(holders))
        assert not outlive, f"after a driver's end these still have its output open, which it has started: {outlive}"


def _having_open(pipe: int) -> set[int]:
    """The other processes that have a pipe of this one open, as far as they can be seen."""
    pipe_stat = os.fstat(pipe)
    pids: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has gone, or is somebody else's
            folder = f"/proc/{pid}/fd"
            if any(os.path.samestat(os.stat(f"{folder}/{name}"), pipe_stat) for name in os.listdir(folder)):
                pids.add(pid)
    return pids - {os.getpid()}


def _command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:  # gone meanwhile
        return "gone"


class Scripted(ExecutorCase):
    """Base of the areas that need other drivers."""

    def connect_source(self, **more: Any) -> str:
        """The Python expression that connects in a script; override it where `connect` is overridden."""
        options = {**self.options, **more}
        return f"colocate.connect({self.executor!r}, **{options!r})"

    @pytest.fixture
    def scripts(self, no_leaks: None, tmp_path: Path) -> Iterator[Scripts]:
        """For scripts in a folder of their own."""
        scripts = Scripts(tmp_path, self.connect_source())
        yield scripts
        scripts.close()


class Drivers(Scripted):
    """A driver that ends, in whatever way, leaves nothing behind."""

    @needs(OwnProcess)
    def test_many_open_files(self, scripts: Scripts) -> None:
        """A driver with more than a thousand of them gets workers, and ends them: `select` couldn't take their numbers.

        Forks of a template, and those that aren't, for a variable that Python reads at its start.
        """
        driver = scripts.start("""
            import resource

            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
            held = [open(os.devnull) for _ in range(1100)]
            with CONNECT as runtime:
                for env in (None, {"PYTHONHASHSEED": "7"}):
                    with runtime.reserve(2, cpus=0, env=env) as pool:
                        say(pool.spawn(ROLES).role("echo").noop())
            """)
        assert (driver.hear(), driver.hear()) == ([None, None], [None, None])
        assert driver.end() == (0, "")

    def test_interrupted(self, scripts: Scripts) -> None:
        """Ctrl-C in a blocking call raises KeyboardInterrupt there; the way out closes everything."""
        with Gate() as gate:
            driver = scripts.start(f"""
                try:
                    with CONNECT as runtime, runtime.reserve(1, cpus=0) as pool:
                        group = pool.spawn(ROLES)
                        say([group.role("echo").place()[0][0], os.getpid()])
                        group.role("faulty").wait({gate.address!r})
                except BaseException as error:
                    say([type(error).__name__, [type(e).__name__ for e in getattr(error, "exceptions", ())]])
                """)
            workers = Processes(_others(driver.hear()))
            gate.wait_for()
            driver.process.send_signal(signal.SIGINT)
            assert driver.hear() == ["KeyboardInterrupt", []]
        assert driver.end()[0] == 0
        workers.wait()
        workers.close()

    @needs(OwnProcess)
    @smoke
    def test_killed(self, scripts: Scripts) -> None:
        """A driver killed by SIGKILL takes its workers along: idle, hung, and holding the interpreter's lock.

        With them goes what their roles have started, whatever session that is in.
        """
        with Gate() as hung, Gate() as holding:
            driver = scripts.start(f"""
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
            workers = Processes(driver.hear())
            hung.wait_for()
            holding.wait_for()
            holding.open()
            driver.process.kill()
            workers.wait()
            workers.close()

    @needs(OwnProcess)
    def test_killed_with_a_fork_alive(self, scripts: Scripts) -> None:
        """So it does when a forked child of the driver, such as a data loader's, lives on."""
        driver = scripts.start("""
            import multiprocessing
            runtime = CONNECT
            group = runtime.reserve(1, cpus=0).spawn(ROLES)
            workers = [pid for pid, _, _ in group.role("echo").place()]
            loader = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
            loader.start()
            say([workers, loader.pid])
            threading.Event().wait()
            """)
        pids, child = driver.hear()
        workers, forked = Processes(pids), Processes([child])
        driver.process.kill()
        workers.wait()
        os.kill(child, signal.SIGKILL)  # it is still there
        forked.wait()
        workers.close()
        forked.close()


def _others(pids: Sequence[int]) -> list[int]:
    """The workers among (worker, driver): none where they are one process."""
    worker, driver = pids
    return [worker] if worker != driver else []


class Signals(Scripted):
    """Signals, which Python handles on the main thread, between any two lines of whatever runs there."""

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_interrupted_spawn(self, scripts: Scripts) -> None:
        """Ctrl-C in a start gives it up: nothing of it is left, and its slots are as good as before."""
        with Gate() as gate:
            driver = scripts.start(f"""
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
            assert driver.hear() == "interrupted"
            assert driver.hear() == [[], "clean: nothing is leaked, nothing is missing"]
            assert driver.hear() == "works"
            code, errors = driver.end()
        assert (code, errors) == (0, "")

    @needs_feature("looking")
    @needs_feature("pipelines")
    @needs_feature("functions")
    def test_executor_is_called_off_the_main_thread(self, scripts: Scripts) -> None:
        """What may take long doesn't keep the main thread, which makes and sends messages only."""
        driver = scripts.start("""
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
        assert driver.hear() == ["called", "kept", [0, 1], "clean: nothing is leaked, nothing is missing"]
        assert driver.hear() == []
        assert driver.hear() == []
        code, errors = driver.end()
        assert (code, errors) == (0, "")
