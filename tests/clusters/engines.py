"""Ray or Dask on machines: the head or scheduler on the first, which has no slots, and nodes on the others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
from tests.clusters.machines import Machine, Machines

from colocate.testing.waiting import wait_until

SPARSE = {  # the self-monitoring of Dask's workers keeps small machines busy
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms",
}
_JOINS_S = 180.0
_TOGETHER = 2  # the number of machines that start an engine's node at once
_COUNTS_RAYS = "import ray; ray.init(address='auto', logging_level='ERROR', log_to_driver=False); {}"
_COUNTS_RAYS = _COUNTS_RAYS.format("print(sum(node['Alive'] for node in ray.nodes()))")
_COUNTS_DASKS = """
from distributed import Client
with Client("{}") as client:
    print(len(client.scheduler_info(n_workers=-1)["workers"]))
"""


@attrs.define(eq=False)
class OnMachines:
    """An engine on machines.

    Attributes:
        engine: `ray` or `dask`.
        address: The address by which drivers on these machines connect.
        machines: The machines of the engine.
    """

    engine: str
    address: str
    machines: Machines
    _join: Callable[[Machine], object]
    _count: Callable[[], int]

    def join(self, machine: Machine) -> None:
        """Add a machine to the engine's nodes, also again after a reboot."""
        self._join(machine)

    def nodes(self) -> int:
        """Return the number of live nodes, or Dask workers, by the engine's own count."""
        return self._count()

    def wait_for(self, count: int) -> None:
        """Wait until the engine has `count` nodes, Ray's head included."""
        wait_until(lambda: self.nodes() == count, f"{self.engine} has {count} nodes")

    def driver(self, script: Path | str, *args: str, on: int = 0, **env: str) -> subprocess.Popen[str]:
        """Start a Python program on a machine; its arguments are the engine, the engine's address, and `args`."""
        command = ["python", str(script), self.engine, self.address, *args]
        return self.machines[on].start_driver(*command, env=env)


def ray_on(
    machines: Machines,
    *,
    cpus: int = 4,
    head_cpus: int = 0,
    later: int = 0,
    options: Sequence[str] = (),
    own: Callable[[Machine], Sequence[str]] = lambda machine: (),
    env: Mapping[str, str] = {},
) -> OnMachines:
    """Start Ray: the head on n0, and a node on each other machine except the last `later` ones."""
    head = machines[0]
    small = ["--object-store-memory=100000000", "--disable-usage-stats", *options]

    def join(machine: Machine) -> None:
        where = [f"--address={head.address}:6379", f"--node-ip-address={machine.address}", f"--num-cpus={cpus}"]
        machine.run("ray", "start", *where, *small, *own(machine), env=env, timeout=_JOINS_S)

    books = ["--head", "--port=6379", f"--node-ip-address={head.address}", f"--num-cpus={head_cpus}"]
    head.run("ray", "start", *books, "--include-dashboard=false", *small, env=env)
    _each([*machines][1 : len(machines) - later], join)

    def count() -> int:
        done = head.run("python", "-c", _COUNTS_RAYS, check=False)
        return int(done.stdout.split()[-1]) if done.stdout.split() else 0

    return OnMachines("ray", f"{head.address}:6379", machines, join, count)


def dask_on(
    machines: Machines,
    *,
    workers: int = 1,
    later: int = 0,
    options: Sequence[str] = (),
    own: Callable[[Machine], Sequence[str]] = lambda machine: (),
    scheduler: Sequence[str] = (),
    env: Mapping[str, str] = {},
) -> OnMachines:
    """Start Dask: the scheduler on n0, and workers on each other machine except the last `later` ones."""
    head = machines[0]
    address = f"tcp://{head.address}:8786"
    books = ["dask", "scheduler", "--host", head.address, "--port", "8786", "--no-dashboard", *scheduler]
    head.start_driver(*books, log=machines.state / "scheduler.log", env={**SPARSE, **env})

    def join(machine: Machine) -> None:
        command = ["dask", "worker", address, "--host", machine.address, "--nworkers", str(workers), "--nthreads", "2"]
        more = ["--no-dashboard", "--memory-limit", "2GB", "--local-directory", "/tmp", *options]
        machine.start_driver(
            *command, *more, *own(machine), log=machines.state / f"{machine.name}.log", env={**SPARSE, **env}
        )

    def count() -> int:
        done = head.run("python", "-c", _COUNTS_DASKS.format(address), check=False)
        return int(done.stdout.split()[-1]) if done.stdout.split() else 0

    _each([*machines][1 : len(machines) - later], join)
    found = OnMachines("dask", address, machines, join, count)
    found.wait_for(workers * (len(machines) - 1 - later))
    return found


def _each(nodes: Sequence[Machine], join: Callable[[Machine], object]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_TOGETHER) as threads:
        for _ in threads.map(join, nodes):
            pass
