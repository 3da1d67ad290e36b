"""The end of a driver at a named moment, in each of the ways a process can end: nothing of it is left."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

import colocate
from colocate import ColocatedGroup
from colocate.executor import OwnProcess
from colocate.testing.executors._base import needs
from colocate.testing.executors.drivers import Scripted, Scripts
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes

CONNECTED = "runtime = CONNECT\n"
RESERVED = f"{CONNECTED}pool = runtime.reserve(2, cpus=0)\n"
SPAWNED = f"{RESERVED}group = pool.spawn(ROLES)\n"
HUNG = "group.role('faulty').wait.submit(GATE)\n"
# In slices: Python notices a signal that has come just before it began to wait for a lock only when that wait ends.
FOREVER = "while True:\n    threading.Event().wait(1)\n"

# What the driver does; at the last line it waits, or works on, until its end.
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
    """A driver that ends at whatever moment; another one on the same engine notices nothing."""

    @needs(OwnProcess)
    @pytest.mark.parametrize("stage", STAGES)
    def test_killed_while(self, scripts: Scripts, pair: ColocatedGroup, stage: str) -> None:
        """By SIGKILL, at each stage."""
        self._end(scripts, pair, stage, signal.SIGKILL)

    @needs(OwnProcess)
    @pytest.mark.long
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
    def test_ended_while(self, scripts: Scripts, pair: ColocatedGroup, number: signal.Signals, stage: str) -> None:
        """By SIGTERM, which ends a Python program on the spot, and by an exception that nobody catches."""
        self._end(scripts, pair, stage, number)

    @staticmethod
    def _end(scripts: Scripts, pair: ColocatedGroup, stage: str, number: signal.Signals) -> None:
        echo = pair.role("echo", Echo)
        with Gate() as gate:
            text = STAGES[stage].replace("GATE", repr(gate.address))
            driver = scripts.start(text + FOREVER)
            if stage in BY_GATE:
                gate.wait_for()
            if stage == "closing":  # what runs by now is what the close waits for
                driver.go_on()
            if stage not in ("spawning", "calling"):
                driver.hear()
            tenants: Any = [worker.pid for worker in pair._node.workforce.workers]
            left = Processes(child.pid for child in psutil.Process(driver.process.pid).children(recursive=True))
            driver.process.send_signal(number)
            assert echo.echo(1) == [1, 1]
            left.wait()
            left.close()
        with pair.owner.owner.reserve(2, cpus=0) as pool:
            assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo(2) == [2, 2]
        assert [worker.pid for worker in pair._node.workforce.workers] == tenants
