from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trustme
from tests.clusters import NONE_IDLE, SPARING, started

import colocate
from colocate import Runtime
from colocate.testing.leaks import LeakWatch
from colocate.testing.probes.plain import Echo

pytest.importorskip("ray", reason="Ray is not installed")


@attrs.define(eq=False)
class RunningCluster:
    """A Ray cluster in its own process."""

    process: subprocess.Popen[str]
    options: dict[str, Any]
    """The options to connect with."""

    def tell(self, word: str) -> None:
        """Send a command to the cluster, and wait for its completion."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    @property
    def address(self) -> str:
        return str(self.options["address"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Start a cluster of two nodes: 2 CPUs and 1 GPU, 1 CPU and 2 GPUs. It requires a token."""
    command = [sys.executable, str(Path(__file__).with_name("clusters.py"))]
    with started("ray", command, {**SPARING, **NONE_IDLE}) as (process, options):
        yield RunningCluster(process, options)


@pytest.fixture(scope="module")
def runtime(cluster: RunningCluster) -> Iterator[Runtime]:
    with colocate.connect("ray", **cluster.options) as runtime:
        with runtime.reserve(1, cpus=0) as pool:  # the first group makes objects that last
            pool.spawn({"echo": colocate.role(Echo)})
        yield runtime


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write certificates of the cluster, `good-…`, and of another authority, `bad-…`."""
    import ray

    folder = tmp_path_factory.mktemp("certificates")
    for whose in ("good", "bad"):
        authority = trustme.CA()
        one = authority.issue_cert(ray.util.get_node_ip_address(), "127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(str(folder / f"{whose}-ca.pem"))
        one.cert_chain_pems[0].write_to_path(str(folder / f"{whose}-cert.pem"))
        one.private_key_pem.write_to_path(str(folder / f"{whose}-key.pem"))
    return folder


def tls(patch: pytest.MonkeyPatch, folder: Path, authority: str = "good", own: str = "good") -> None:
    """Set the certificates that Ray uses, by environment variables."""
    patch.setenv("RAY_USE_TLS", "1")
    patch.setenv("RAY_TLS_CA_CERT", str(folder / f"{authority}-ca.pem"))
    patch.setenv("RAY_TLS_SERVER_CERT", str(folder / f"{own}-cert.pem"))
    patch.setenv("RAY_TLS_SERVER_KEY", str(folder / f"{own}-key.pem"))


@pytest.fixture(autouse=True)
def may_start_what_it_needs_later(_colocate_watch: LeakWatch) -> None:
    """Exempt keeper actors from the leak check: a shared runtime starts them when needed, on each machine."""
    _colocate_watch.shares_engines = True
