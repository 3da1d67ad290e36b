"""Ranks at a breakpoint: the driver's terminal, `colocate debug` in another one, kills, and `colocate stacks`."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.cli.conftest import CommandLine

from colocate.features.debugging.attach import list_stopped_drivers
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until
from colocate_report.jobs import list_jobs
from colocate_run.cli.stacks import group_stacks

ROLES = """
    import colocate
    from colocate import First, Role, method


    class Actor(Role):
        @method(collect=First())
        def step(self, number: int) -> int:
            found = number * 2
            if self.ctx.rank == 1 and number < 2:
                breakpoint()
            if number == 3:
                raise ValueError("three")
            return found


    def job(run) -> None:
        actor = run.groups["policy"].role("actor", Actor)
        for number in range(4):
            run.log(number, value=actor.step(number))
"""
OF_JOB = "run.log(number, value=actor.step(number))"
ENDS = """found = actor.step(number)
            run.log(number, value=found, second=actor.step(1))
            if run.stopping:
                return"""
CONFIG = """
    name: stops
    executor: {use: local, with: {processes: true}}
    pools: {main: {slots: 2}}
    groups: {policy: {pool: main, roles: {actor: {use: "roles:Actor"}}}}
    job: {use: "roles:job"}
"""


class Screen:
    """A pseudo-terminal with a program that runs in it."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._screen, inside = pty.openpty()
        self.shown = ""

        def begin() -> None:
            os.setsid()
            fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, cwd=folder, env=environment, preexec_fn=begin
        )
        os.close(inside)

    def until(self, words: str) -> str:
        """Read until `words` are shown; return the text before them."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.shown:
            assert select.select([self._screen], [], [], end - time.monotonic())[0], self.shown
            with suppress(OSError):  # raised when the terminal's last program has ended
                if read := os.read(self._screen, 1 << 16):
                    self.shown += read.decode(errors="replace")
                    continue
            raise AssertionError(self.shown)
        found, _, self.shown = self.shown.partition(words)
        return found

    def write(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def screen(colocate: CommandLine) -> Iterator[Callable[..., Screen]]:
    colocate.write("roles.py", ROLES)
    colocate.write("stops.yaml", CONFIG)
    begun: list[Screen] = []

    def start(*args: str) -> Screen:
        command, environment = colocate.command(*args)
        begun.append(Screen(command, colocate.folder, environment | {"TERM": "xterm"}))
        return begun[-1]

    yield start
    for each in begun:
        each.close()


PROMPT = "(actor.step rank 1) "


def test_the_drivers_own_terminal(screen: Callable[..., Screen]) -> None:
    """The debugger's prompt has history and no progress bar over it; `--debug` also stops where an error is raised."""
    run = screen("run", "stops.yaml", "--debug")
    run.until(PROMPT)
    run.write("p found + 40\n")
    assert "40\r\n" in run.until(PROMPT)
    run.write("\x1b[A\n")  # arrow up: the previous line
    assert "40\r\n" in run.until(PROMPT)
    assert "stops" not in run.shown
    run.write("continue\n")
    assert "goes on" in run.until(PROMPT)
    run.write("p number\n")
    assert "1\r\n" in run.until(PROMPT)
    run.write("\x04")
    run.until("is stopped by ValueError: three")  # both ranks raise, and use the terminal one after the other
    run.until(") ")
    run.write("p number\n")
    assert "3\r\n" in run.until(") ")
    run.write("quit\n")
    run.until("actor.step raised ValueError")
    assert run.process.wait(PATIENCE_S) == 1


def without_terminal(colocate: CommandLine, **more: str) -> "subprocess.Popen[str]":
    command, environment = colocate.command("run", "stops.yaml")
    return subprocess.Popen(
        command,
        cwd=colocate.folder,
        env=environment | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def driver(colocate: CommandLine, screen: Callable[..., Screen]) -> Iterator["subprocess.Popen[str]"]:
    with without_terminal(colocate) as found:
        try:
            wait_until(lambda: found.pid in list_stopped_drivers(), "a rank is stopped")
            yield found
        finally:
            found.kill()
    wait_until(
        lambda: found.pid not in {each.pid for each in list_jobs()}, "its workers, which hold its socket, have ended"
    )


def test_another_terminal(
    colocate: CommandLine, screen: Callable[..., Screen], driver: "subprocess.Popen[str]"
) -> None:
    """`colocate debug` gets the prompt in another terminal; other commands show the stop; its end resumes the call."""
    pid = str(driver.pid)
    listed = colocate("debug", pid, "--rank", "7")
    assert listed.returncode == 1
    assert "--rank 7: none is called so; stopped: policy/actor/1" in listed.stderr
    stacks = colocate("stacks", pid)
    assert re.search(
        r"policy: 1 worker \(1\)\nrank 1 is stopped at .*roles\.py:\d+\nrunning actor.step\n", stacks.stdout
    )
    assert "policy: 1 worker (0)\nidle\n" in stacks.stdout
    assert set(re.findall(r'File "(?:.*/)?([^/]+)"', stacks.stdout)) == {"roles.py"}  # no frames of pdb or colocate
    told = json.loads(colocate("stacks", pid, "--json").stdout)
    assert [each["slot"] for each in told["stacks"]] == [0, 1]
    top = json.loads(colocate("top", pid, "--once", "--json").stdout)
    assert ["stopped" in slot for slot in top["groups"][0]["slots"]] == [False, True]
    shown = colocate("top", pid, "--once").stdout
    assert re.search(r"actor\.step: rank 1 is stopped at .*roles\.py:\d+", shown)
    assert re.search(r"the stop of rank 1 \d+%", shown)
    began = time.monotonic()
    debug = screen("debug", pid)
    debug.until(PROMPT)
    assert time.monotonic() - began < 5.0  # one second on an idle machine
    busy = colocate("debug", pid, "--rank", "1")
    assert "another terminal has it" in busy.stderr
    assert "colocate debug" in colocate("debug", pid).stdout
    debug.write("p found\n")
    assert "0\r\n" in debug.until(PROMPT)
    debug.process.kill()
    other = screen("debug", pid)  # for the next call: the first one continued
    other.until(PROMPT)
    other.write("p number\n")
    assert "1\r\n" in other.until(PROMPT)
    other.write("c\n")
    other.until("goes on")
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert "step 2  value 4" in output
    assert "actor.step raised ValueError" in output
    other.until("[colocate] group 'policy'")
    assert other.process.wait(PATIENCE_S) == 0


def test_a_killed_driver(colocate: CommandLine, screen: Callable[..., Screen], driver: "subprocess.Popen[str]") -> None:
    """A killed driver leaves no workers, no socket and no waiting `colocate debug`."""
    debug = screen("debug", str(driver.pid))
    debug.until(PROMPT)
    with Processes(each.pid for each in psutil.Process(driver.pid).children(recursive=True)) as below:
        os.kill(driver.pid, signal.SIGKILL)
        debug.until("the driver has ended")
        assert debug.process.wait(PATIENCE_S) == 0
        below.wait_all()
    wait_until(lambda: driver.pid not in list_stopped_drivers(), "its socket is gone")


@pytest.mark.in_make_test("15-terminal")
@pytest.mark.parametrize("hook", ["", "debugpy.breakpoint"], ids=["terminal", "editor"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_to_end(colocate: CommandLine, number: signal.Signals, hook: str) -> None:
    """A signal ends a stop that nobody attached to, in a terminal or an editor, and skips the step's next stop."""
    if hook:
        pytest.importorskip("debugpy")
    colocate.write("roles.py", ROLES.replace("number in range(4)", "number in range(2)").replace(OF_JOB, ENDS))
    colocate.write("stops.yaml", CONFIG)
    with without_terminal(colocate, PYTHONBREAKPOINT=hook) as driver:
        try:
            assert driver.stdout is not None
            shown = ""
            while "127.0.0.1:" not in shown and "its prompt" not in shown:
                line = driver.stdout.readline()
                assert line, shown
                shown += line
            assert "is stopped at" in shown
            driver.send_signal(number)
            shown, _ = driver.communicate(timeout=PATIENCE_S)
        finally:
            driver.kill()
    assert "stopping after a checkpoint" in shown
    assert "is stopped" not in shown  # the step has two breakpoints
    assert "step 0  value 0  second 2" in shown
    assert driver.returncode == 128 + number


def test_nothing_is_stopped(colocate: CommandLine) -> None:
    """`colocate debug` says that no job has the name, or that no rank of the process is stopped."""
    done = colocate("debug", "nobody-knows")
    assert done.returncode == 1
    assert "no job is called 'nobody-knows' on this machine" in done.stderr
    done = colocate("debug", str(os.getpid()))
    assert f"no rank of a run of process {os.getpid()} is stopped" in done.stderr


def test_folded() -> None:
    """Equal stacks of a group are shown once, with the slots of their workers."""
    stacks = [
        {"group": group, "slot": slot, "stack": "waits\n" if slot != 3 else "works\n"}
        for group in ("b", "a")
        for slot in range(6)
    ]
    assert list(group_stacks(stacks)) == [
        ("a: 5 workers (0-2, 4-5)", "waits\n"),
        ("a: 1 worker (3)", "works\n"),
        ("b: 5 workers (0-2, 4-5)", "waits\n"),
        ("b: 1 worker (3)", "works\n"),
    ]
