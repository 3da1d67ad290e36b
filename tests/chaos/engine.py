"""An engine that all drivers of a run share, in a process of its own: `python -m tests.chaos.engine ray|dask SLOTS`.

It says where it is. A line "free?" asks it whether another tenant could have all of it: it tries, gives it back, and
says how long that took. Any other line is the beginning of drivers' ids: it says what it has for those. It ends with
its input.
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
    executor: str  # its name
    options: dict[str, Any]  # what to connect with
    slots: int | None = None  # how many slots there are; None where each driver has its own
    _process: subprocess.Popen[str] | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def all_free(self) -> tuple[float | None, str]:
        """Reserve all of it at once: after how many seconds that was possible, or who has it."""
        if self._process is None:
            return 0.0, ""
        took, holders = self._ask(FREE)
        return took, holders

    def held_by(self, pid: int) -> list[str]:
        """What it has for a driver: reservations, actors."""
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
    """Start the engine of an executor: drivers share so many slots, or have so many of their own each."""
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
    """One node. Reserving all of it is a placement group, as a driver makes it."""
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
    """A scheduler, and a Dask worker per slot with a nanny. Reserving all of it goes as for a driver."""
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
