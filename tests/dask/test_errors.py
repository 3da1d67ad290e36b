"""Errors that keep a driver from a Dask cluster: each names its cause, within a bounded time."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.dask.clusters import security
from tests.dask.conftest import running

import colocate
from colocate.errors import ClusterError, ConfigError, PlacementError
from colocate.testing.probes.plain import Echo
from colocate_dask.connection import check_versions
from colocate_dask.offers import Facts

WITHOUT_COLOCATE = "import sys; sys.modules['colocate'] = None\n"


def make_certificates(folder: Path) -> None:
    """Write certificates of the cluster, `good-…`, and of another authority, `bad-…`."""
    for whose in ("good", "bad"):
        authority = trustme.CA()
        one = authority.issue_cert("colocate.test")
        authority.cert_pem.write_to_path(str(folder / f"{whose}-ca.pem"))
        one.cert_chain_pems[0].write_to_path(str(folder / f"{whose}-cert.pem"))
        one.private_key_pem.write_to_path(str(folder / f"{whose}-key.pem"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


def own_address() -> str:
    """Return an address of this machine that others would use, or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


@pytest.fixture(scope="module")
def cluster(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a TLS cluster of two workers, one of them without colocate; yield its address."""
    without = tmp_path_factory.mktemp("preload") / "without_colocate.py"
    without.write_text(WITHOUT_COLOCATE)
    each: dict[str, Any] = {"host": own_address(), "nthreads": 1}
    with running([each, {**each, "preload": [str(without)]}], str(certificates)) as address:
        assert address.startswith("tls://")
        yield address


def test_tls(cluster: str, certificates: Path) -> None:
    """A driver with the cluster's certificates, as an object or as options, joins it, and its keepers use TLS."""
    joined = colocate.connect("dask", address=cluster, security=security(certificates))
    with joined as runtime, runtime.reserve(1, cpus=0) as pool:
        assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None]
        assert pool.slots[0].node == own_address()
        executor: Any = runtime._node.services.executor
        (held,) = executor._held.values()
        assert not [kept.address for kept in held.slots.values() if "tcp:" in kept.address]
    sides = ("ca_file", "client_cert", "client_key")
    options = {
        f"tls_{side}": str(certificates / f"good-{side.split('_')[0 if 'ca' in side else 1]}.pem") for side in sides
    }
    colocate.connect("dask", address=cluster, security=options).close()


def test_worker_without_colocate(cluster: str, certificates: Path) -> None:
    """A Dask worker that can't import colocate is no candidate for a slot, and the error says why."""
    joined = colocate.connect("dask", address=cluster, security=security(certificates))
    with joined as runtime, pytest.raises(PlacementError, match="1 where colocate doesn't work"):
        runtime.reserve(2, cpus=0)


@pytest.mark.parametrize("whose", ["bad", "none", "plain"])
def test_wrong_certificates(cluster: str, certificates: Path, whose: str) -> None:
    """Another authority's certificates, none, and no TLS each have an error of their own, within the timeout."""
    began = time.monotonic()
    address, own, words = {
        "bad": (cluster, security(certificates, "bad"), "shows no certificate of the authority"),
        "none": (cluster, None, "needs certificates"),
        "plain": (cluster.replace("tls://", "tcp://"), None, "does it use tls"),
    }[whose]
    with pytest.raises(ClusterError, match=words) as caught:
        colocate.connect("dask", address=address, security=own, timeout=30)
    assert address in str(caught.value)
    assert time.monotonic() - began < 30


def test_client_that_the_cluster_does_not_know(cluster: str, certificates: Path) -> None:
    """A client whose certificate the cluster's authority didn't sign is refused."""
    options = {
        "tls_ca_file": str(certificates / "good-ca.pem"),
        "tls_client_cert": str(certificates / "bad-cert.pem"),
        "tls_client_key": str(certificates / "bad-key.pem"),
    }
    with pytest.raises(ClusterError, match=r"doesn't accept the certificates|can be reached"):
        colocate.connect("dask", address=cluster, security=options)


def test_unreachable() -> None:
    """An address where nobody listens, or where a server never answers, raises ClusterError."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no Dask scheduler can be reached at {address}"):
            colocate.connect("dask", address=address, timeout=0.5)
    with pytest.raises(ClusterError, match="no Dask scheduler can be reached") as caught:
        colocate.connect("dask", address=address, timeout=0.5)
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "nonsense"}, "tcp://host:port"),
        ({"address": "tls://127.0.0.1:1", "security": {"certificate": "x"}}, "security"),
        (
            {"address": "tls://127.0.0.1:1", "security": {"tls_ca_file": "/nowhere", "tls_client_cert": "/no"}},
            "missing",
        ),
        (
            {"address": "tcp://127.0.0.1:1", "security": {"require_encryption": True}},
            "^connect.'dask', address='tcp://127.0.0.1:1'.: Dask is told to require encryption, .* tls:// address",
        ),
        ({"address": "tcp://127.0.0.1:1", "client": object()}, "not both"),
        ({"client": object()}, "distributed.Client"),
        ({"address": "tcp://127.0.0.1:1", "cpus": 2}, "private cluster"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    """Options that make no sense are refused before anything is started."""
    with pytest.raises(ConfigError, match=words):
        colocate.connect("dask", **options)


def test_versions() -> None:
    """A cluster with another version of Python or colocate than the driver's is refused."""
    check_versions(Facts("3.12", "1.0"), Facts("3.12", "1.0"), "it")
    cases = {("3.11", "1.0"): "Python 3.11, the driver 3.12", ("3.12", "2.0"): "colocate 2.0, the driver 1.0"}
    for there, what in cases.items():
        with pytest.raises(ClusterError, match=rf"^it has {what}: install the same in both") as caught:
            check_versions(Facts("3.12", "1.0"), Facts(*there), "it")
    assert "pip install ." in str(caught.value)


def test_not_installed() -> None:
    """Without distributed, the error says what to install, in one traceback."""
    source = "import sys; sys.modules['distributed'] = None\nimport colocate\ncolocate.connect('dask')"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "PluginError" in done.stderr
    assert done.stderr.count("pip install 'distributed>=") == 1
    assert done.stderr.count("Traceback") == 1
