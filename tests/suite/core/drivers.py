"""Whole drivers as scripts in their own processes: start, interruption and exit without leftovers."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

import colocate
from colocate import ColocatedGroup
from colocate.executor import OwnProcess
from colocate.testing.executors import drivers
from colocate.testing.executors._base import needs
from colocate.testing.executors.drivers import Scripted, Scripts, _find_workers
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes, wait_until


class Drivers(drivers.Drivers):
    """A driver that ends, in whatever way, leaves nothing behind."""

    def test_main(self, scripts: Scripts) -> None:
        """A script without a main guard, and modules beside the script, may define roles."""
        (scripts.folder / "beside.py").write_text(
            textwrap.dedent("""
            import colocate

            OFFSET = 40

            class Beside(colocate.Role):
                @colocate.method
                def value(self, x):
                    return x + OFFSET + helper()

            def helper():
                return 2
            """)
        )
        driver = scripts.start_script("""
            from beside import Beside, helper

            SCALE = 10

            def scaled(x):
                return x * SCALE

            class InMain(colocate.Role):
                def __init__(self, start):
                    self.start = start

                @colocate.method
                def value(self, x):
                    return self.start + scaled(x) + helper()

            class Child(InMain):
                @colocate.method
                def value(self, x):
                    return -super().value(x)

            with CONNECT as runtime, runtime.reserve(2, cpus=0) as pool:
                roles = {name: colocate.role(cls, 1) for name, cls in (("main", InMain), ("child", Child))}
                group = pool.spawn({**roles, "beside": colocate.role(Beside)})
                say([group.role("main").value(3), group[Child].value(3), group[Beside].value(0)])
            """)
        assert driver.read_answer() == [[33, 33], [-33, -33], [42, 42]]
        assert driver.wait_exit() == (0, "")

    def test_interpreter_exit_closes_open_runtime(self, scripts: Scripts) -> None:
        """Interpreter exit closes an open runtime, and warns once with the line that made the runtime."""
        driver = scripts.start_script(
            """
            runtime = CONNECT  # the line to be named
            group = runtime.reserve(1, cpus=0).spawn(ROLES)
            say([group.role("echo").place()[0][0], os.getpid()])
            wait()
            """,
            "-W",
            "always::ResourceWarning",
        )
        pids = _find_workers(driver.read_answer())
        workers = Processes(pids)
        code, errors = driver.wait_exit()
        assert code == 0
        line = 1 + (scripts.folder / "script.py").read_text().splitlines().index(
            f"runtime = {scripts.connect}  # the line to be named"
        )
        assert f"script.py:{line} was never closed" in errors
        assert errors.count("never closed") == 1
        workers.wait_all()
        workers.release_all()

    @needs(OwnProcess)
    def test_shared_memory_of_roles(self, scripts: Scripts) -> None:
        """A role's shared memory is removed when its group closes, its worker dies or its driver is killed."""
        driver = scripts.start_script("""
            from multiprocessing import shared_memory

            class Sharing(colocate.Role):
                @colocate.method
                def share(self):
                    self.memory = shared_memory.SharedMemory(create=True, size=4096)
                    return self.memory.name

            runtime = CONNECT
            pool = runtime.reserve(2, cpus=0)

            def shared():
                group = pool.spawn({**ROLES, "sharing": colocate.role(Sharing)})
                say(group.role("sharing").share())
                return group

            shared().close()
            group = shared()
            group.role("faulty").kill.options(ranks=[0]).submit().exception()
            try:
                group.close()
            except ExceptionGroup:
                pass
            shared()
            threading.Event().wait()
            """)
        memory = [Path("/dev/shm", name) for _ in range(3) for name in driver.read_answer()]
        exist = [path.exists() for path in memory]
        driver.process.kill()
        assert exist == [False] * 4 + [True] * 2
        wait_until(lambda: not any(path.exists() for path in memory), "the last ones are removed")


CONNECTED = "runtime = CONNECT\n"
RESERVED = f"{CONNECTED}pool = runtime.reserve(2, cpus=0)\n"
SPAWNED = f"{RESERVED}group = pool.spawn(ROLES)\n"
HUNG = "group.role('faulty').wait.submit(GATE)\n"
# Waits in slices: Python handles a signal that arrives just before a lock wait only after that wait.
FOREVER = "while True:\n    threading.Event().wait(1)\n"

# The driver's program at each stage, which waits or works on until the driver ends.
STAGES = {
    "connected": f"{CONNECTED}say(0)\n",
    "reserved": f"{RESERVED}say(0)\n",
    "spawning": (
        f"{RESERVED}from colocate.testing.probes.faulty import HangsAtStart\n"
        "roles = {'slow': colocate.role(HangsAtStart, GATE)}\n"
        "threading.Thread(target=lambda: pool.spawn(roles), daemon=True).start()\n"
    ),
    "calling": f"{SPAWNED}{HUNG}",
    "transferring": (
        f"{SPAWNED}kept = group.role('echo').first.keep(bytes(64 << 20))\n"
        "def transfer():\n    while True:\n        group.role('echo').first(kept.ref)\n"
        "threading.Thread(target=transfer, daemon=True).start()\nsay(0)\n"
    ),
    "closing": f"{SPAWNED}{HUNG}wait()\nthreading.Thread(target=group.close, daemon=True).start()\nsay(0)\n",
}
BY_GATE = ("spawning", "calling", "closing")


class Endings(Scripted):
    """A driver's end at any stage leaves another driver on the same cluster undisturbed."""

    @needs(OwnProcess)
    @pytest.mark.parametrize("stage", STAGES)
    def test_killed_while(self, scripts: Scripts, pair: ColocatedGroup, stage: str) -> None:
        """A driver killed by SIGKILL at any stage leaves no process behind and disturbs no other driver."""
        self._end_driver(scripts, pair, stage, signal.SIGKILL)

    @needs(OwnProcess)
    @pytest.mark.long
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
    def test_ended_while(self, scripts: Scripts, pair: ColocatedGroup, number: signal.Signals, stage: str) -> None:
        """A driver ended by SIGTERM or Ctrl-C at any stage leaves no process behind and disturbs no other driver."""
        self._end_driver(scripts, pair, stage, number)

    @staticmethod
    def _end_driver(scripts: Scripts, pair: ColocatedGroup, stage: str, number: signal.Signals) -> None:
        echo = pair.role("echo", Echo)
        with Gate() as gate:
            text = STAGES[stage].replace("GATE", repr(gate.address))
            driver = scripts.start_script(text + FOREVER)
            if stage in BY_GATE:
                gate.wait_for()
            if stage == "closing":  # The close waits for the call that runs now.
                driver.resume()
            if stage not in ("spawning", "calling"):
                driver.read_answer()
            tenants: Any = [worker.pid for worker in pair._node.workforce.workers]
            children = Processes(child.pid for child in psutil.Process(driver.process.pid).children(recursive=True))
            driver.process.send_signal(number)
            assert echo.echo(1) == [1, 1]
            children.wait_all()
            children.release_all()
        with pair.owner.owner.reserve(2, cpus=0) as pool:
            assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo(2) == [2, 2]
        assert [worker.pid for worker in pair._node.workforce.workers] == tenants
