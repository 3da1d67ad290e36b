"""List the listening sockets while two slots work, for docs/reference/trust.md and the test of that page.

`python -m tests.trust` prints the table.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import psutil
from tests.conformance.shared import cluster
from tests.dask.clusters import security
from tests.dask.conftest import running
from tests.dask.test_errors import make_certificates, own_address

import colocate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.plain import Echo

LOOPBACK, MACHINE, EVERYWHERE = "loopback", "the node's address", "all addresses"
_COMMANDS = (
    ("colocate_ray.service", "the envoy"),
    ("colocate.worker", "a worker"),
    ("gcs_server", "Ray's control store"),
    ("raylet/raylet", "Ray's raylet"),
    ("ray::DashboardAgent", "Ray's agents"),
    ("ray::RuntimeEnvAgent", "Ray's agents"),
    ("dashboard/agent.py", "Ray's agents"),
    ("runtime_env/agent/main.py", "Ray's agents"),
    ("dashboard/dashboard.py", "Ray's API server"),
    ("monitor.py", "Ray's monitors"),
    ("ray::", "a Ray actor, with a keeper"),
    ("default_worker.py", "a Ray actor, with a keeper"),
    ("dask/clusters.py", "the Dask scheduler, its nannies"),
    ("multiprocessing", "a Dask worker, with a keeper"),
)


@attrs.frozen(order=True)
class Listening:
    """A kind of listening socket: the process, the protocol, and the addresses."""

    who: str
    what: str
    where: str


Found = set[tuple[int, Listening]]
"""Listening sockets by process id, since another test may have sockets of the same kind."""


def listening(root: psutil.Process) -> Found:
    """Return all sockets that a process and its descendants listen on."""
    found: Found = set()
    names = _unix_names()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            who = "the driver" if process.pid == os.getpid() else _who(process)
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((process.pid, Listening(who, "TCP", _where(each.laddr.ip))))
            found |= {(process.pid, Listening(who, what, "this machine")) for what in _unix(process, names)}
    return found


def _who(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((name for part, name in _COMMANDS if part in command), command[:60])


def _where(address: str) -> str:
    if address in ("127.0.0.1", "::1"):
        return LOOPBACK
    return EVERYWHERE if address in ("0.0.0.0", "::") else MACHINE


def _unix_names() -> dict[str, str]:
    """Return the names of listening Unix sockets by inode."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[6]: row[7] for row in rows if len(row) == 8 and row[3] == "00010000"}


def _unix(process: psutil.Process, names: dict[str, str]) -> Iterator[str]:
    for entry in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{process.pid}/fd/{entry}"))
            name = names.get(found[1]) if found is not None else None
            if name is not None:
                yield "Unix, abstract" if name.startswith("@colocate-") else "Unix, in its folder"


def work(runtime: colocate.Runtime) -> None:
    """Pass a value from one slot to another, and call a collective on both."""
    pool = runtime.reserve(2)
    group = pool.spawn({"echo": colocate.role(Echo), "all": colocate.role(Collective)})
    left = pool.owner.groups[group.name].role("echo", Echo)
    kept = left.echo.keep(b"x" * (1 << 20))
    left.first(kept.ref)
    group.role("all", Collective).sum(1.0)


def measure(executor: str, before: Found, **options: Any) -> set[Listening]:
    """Return the sockets that listen while an executor's slots work, and not before."""
    with colocate.connect(executor, **options) as runtime:
        if executor == "local" and not options:
            runtime.reserve(2).spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop()
        else:
            work(runtime)
        return {each for _, each in listening(psutil.Process()) - before}


def _private(executor: str, **options: Any) -> set[Listening]:
    return measure(executor, listening(psutil.Process()), **options)


def _joined_ray() -> set[Listening]:
    before = listening(psutil.Process())
    with cluster("ray") as options:
        return measure("ray", before, **options)


def _joined_dask(encrypted: bool) -> set[Listening]:
    before = listening(psutil.Process())
    host = own_address() if encrypted else "127.0.0.1"
    workers = [{"host": host, "nthreads": 1}] * 2
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(
            os.environ, DASK_TEMPORARY_DIRECTORY=folder, DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD="spawn"
        ),
    ):  # Dask's default is spawn: a fork server would listen, too
        if encrypted:
            make_certificates(Path(folder))
        with running(workers, *([folder] if encrypted else [])) as address:
            more = {"security": security(Path(folder))} if encrypted else {}
            return measure("dask", before, address=address, **more)


MEASURED: dict[str, Callable[[], set[Listening]]] = {
    "`local`": partial(_private, "local"),
    "`local`, `processes=True`": partial(_private, "local", processes=True),
    "`ray`, private": partial(_private, "ray", cpus=2),
    "`ray`, joined": _joined_ray,
    "`dask`, private": partial(_private, "dask", cpus=2),
    "`dask`, joined, `tcp://`": partial(_joined_dask, False),
    "`dask`, joined, `tls://`": partial(_joined_dask, True),
}


if __name__ == "__main__":
    for name, ask in MEASURED.items():
        for each in sorted(ask()):
            print(f"| {name} | {each.who} | {each.what} | {each.where} |", flush=True)
