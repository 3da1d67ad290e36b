"""Tests of closing groups, pools and runtimes, also after failures and with hung ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate.errors import ColocateError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until

ROLES: dict[str, RoleSpec[Any]] = {
    "echo": colocate.role(Echo),
    "log": colocate.role(Log),
    "faulty": colocate.role(Faulty),
}


class Closing(ExecutorCase):
    """Tests of closing groups and pools."""

    @needs(OwnProcess)
    @smoke
    def test_hung_process(self, runtime: Runtime) -> None:
        """When `close` returns, a hung worker process has ended, even if it was holding the interpreter's lock."""
        with runtime.reserve(1, cpus=0) as pool:
            for hang in (Faulty.wait, Faulty.hold_the_gil):
                group = pool.spawn(ROLES)
                processes = Processes(pid for pid, _, _ in group.role("echo", Echo).place())
                with Gate() as gate:
                    getattr(group.role("faulty", Faulty), hang.__name__).submit(gate.address)
                    gate.wait_for()
                    if hang is Faulty.hold_the_gil:
                        gate.open()
                    with pytest.raises(ExceptionGroup, match="closed with errors"):
                        group.close(grace=0.05)
                    processes.wait_all()
                    processes.release_all()

    def test_every_error(self, runtime: Runtime) -> None:
        """Closing a pool frees everything, and then raises all errors together."""
        pool = runtime.reserve(2, cpus=0)
        for part in (pool[0], pool[1]):
            group = part.spawn(ROLES)
            group.role("faulty", Faulty).fail.keep()
            group.role("faulty", Faulty).fine()
        with pytest.raises(ExceptionGroup) as caught:
            pool.close()
        assert [type(error) for error in caught.value.exceptions] == [RoleError, RoleError]
        assert pool.state == "closed"


def last_rank(group: ColocatedGroup) -> int:
    """Return the number of a group's last rank."""
    return len(group._node.workforce.workers) - 1


def hang_rank(group: ColocatedGroup, gate: Gate) -> None:
    """Make a group's last rank wait at a gate."""
    group.role("faulty", Faulty).wait.options(ranks=[last_rank(group)]).submit(gate.address)
    gate.wait_for()


class Converging(ExecutorCase):
    """A close always ends and frees everything, and only then raises errors."""

    def test_close_fails_waiting_reservation(self) -> None:
        """Closing the runtime fails a reservation that is still waiting for slots."""
        runtime = self.connect_privately(cpus=1)
        pool = runtime.reserve(1)
        errors: list[BaseException] = []

        def reserve() -> None:
            try:
                runtime.reserve(1, timeout=PATIENCE_S, name="late")
            except BaseException as error:
                errors.append(error)

        waiter = threading.Thread(target=reserve)
        waiter.start()
        wait_until(lambda: "late" in [child.name for child in list(runtime._node.children.values())], "it waits")
        runtime.close()
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
        assert isinstance(errors[0], ColocateError)
        assert (pool.state, runtime.state) == ("closed", "closed")
