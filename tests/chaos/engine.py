"""An engine that all drivers of a run share, in a process of its own: `python -m tests.chaos.engine ray|dask SLOTS`.

The process prints the engine's address. At a line "free?" it reserves and releases all slots, and prints how long that
took. Any other line is a prefix of drivers' ids: the process prints what the engine holds for these drivers. The
process exits at the end of its stdin.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from tests.clusters import SPARING, started

FREE = "free?"
FREE_WITHIN_S = 20.0


@attrs.define(eq=False)
class Engine:
    executor: str  # the executor's name
    options: dict[str, Any]  # the options for `connect`
    slots: int | None = None  # the number of shared slots; None if each driver has own slots
    _process: subprocess.Popen[str] | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def all_free(self) -> tuple[float | None, str]:
        """Reserve all slots at once; return the seconds until that succeeded, or None and the holders."""
        if self._process is None:
            return 0.0, ""
        took, holders = self._ask(FREE)
        return took, holders

    def held_by(self, pid: int) -> list[str]:
        """Return the names of a driver's reservations and actors in the engine."""
        if self._process is None:
            return []
        held: list[str] = self._ask(f"{platform.node()}-{pid}-")
        return held

    def _ask(self, line: str) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@contextmanager
def running(executor: str, slots: int, own: int) -> Iterator[Engine]:
    """Start the engine of an executor: drivers share `slots`, or each driver has `own` slots (on `local`)."""
    if executor == "local":
        yield Engine(executor, {"processes": True, "cpus": own})
        return
    with started(
        executor,
        [sys.executable, "-m", "tests.chaos.engine", executor, str(slots)],
        SPARING,
        token=secrets.token_hex(32),
        own_temporary=True,  # where Dask has its scratch space
    ) as (process, options):
        yield Engine(executor, options, slots, process)


def ray(slots: int) -> None:
    """Run Ray with one node, and reserve all of it by a placement group, as a driver does."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from colocate_ray.listing import PREFIX

    def held_by(who: str) -> list[str]:
        groups = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
        actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        return [name for name in (*groups, *actors) if name.startswith(f"{PREFIX}{who}")]

    context: Any = ray.init(
        address="local", num_cpus=slots, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    free_now: Any = ray.available_resources
    tell({"address": context.address_info["gcs_address"]})
    for line in map(str.strip, sys.stdin):
        if line != FREE:
            tell(held_by(line))
            continue
        began = time.monotonic()
        everything = placement_group([{"CPU": 1}] * slots)
        free = everything.wait(FREE_WITHIN_S)
        took = time.monotonic() - began
        remove_placement_group(everything)
        tell((took, "") if free else (None, f"of {slots} CPUs are free: {free_now().get('CPU', 0)}"))
    ray.shutdown()


def dask(slots: int) -> None:
    """Run a scheduler, and a Dask worker with a nanny per slot; reserve all of it as a driver does."""
    from distributed import LocalCluster

    from colocate_dask import reservations
    from colocate_dask.connection import Connection
    from colocate_dask.loop import LoopThread
    from colocate_dask.offers import Refusal, SlotRequest

    options: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": "127.0.0.1:0"}
    cluster: Any = LocalCluster
    with cluster(n_workers=slots, processes=True, protocol="tcp", host="127.0.0.1", **options) as made:
        connection = Connection(LoopThread(), made.scheduler_address, None, 30.0)
        tell({"address": made.scheduler_address})
        for line in map(str.strip, sys.stdin):
            if line != FREE:
                held = connection.run_on_scheduler(reservations.list_reservations)
                tell([each.label for each in held if each.label.startswith(line)])
                continue
            began = time.monotonic()
            wanted = SlotRequest(secrets.token_hex(8), connection.id, "chaos", slots, 1, timeout=FREE_WITHIN_S)
            answer = connection.run_on_scheduler(reservations.reserve_slots, wanted, connection.version)
            took = time.monotonic() - began
            connection.run_on_scheduler(reservations.release_slots, wanted.reservation)
            tell((None, str(list(answer.rows))) if isinstance(answer, Refusal) else (took, ""))
        connection.close()


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    {"ray": ray, "dask": dask}[sys.argv[1]](int(sys.argv[2]))
