"""Ray clusters with TLS: a driver with wrong certificates gets an error that says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.conformance.shared import cluster as running
from tests.ray.conftest import tls

import colocate
from colocate.errors import ClusterError, ConfigError
from colocate.testing.probes.plain import Echo
from colocate_report.window import inspect_cluster_job


@pytest.fixture(scope="module")
def cluster(certificates: Path) -> Iterator[dict[str, Any]]:
    """Start a TLS cluster; yield the options to connect with."""
    with pytest.MonkeyPatch.context() as patch:
        tls(patch, certificates)
        with running("ray") as options:
            patch.undo()
            yield options


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(ClusterError) as caught:
        colocate.connect("ray", **options)
    assert options["address"] in str(caught.value)
    return str(caught.value)


@pytest.mark.long
def test_right_certificates(
    cluster: dict[str, Any], certificates: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver with the right certificates joins a TLS cluster, and its job can be inspected over TLS."""
    tls(monkeypatch, certificates)
    with colocate.connect("ray", **cluster) as runtime, colocate.record(runtime, tmp_path / "demo"):
        with runtime.reserve(1, cpus=0) as pool:
            assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None]
        executor: Any = runtime._node.services.executor
        (window,) = executor.windows()
        here, there = window.address.split(",")
        assert (here.partition(":")[0], there.partition(":")[0]) == ("unix", "tls")
        assert inspect_cluster_job(attrs.evolve(window, address=there), executor)["job"] == "demo"


@pytest.mark.long
def test_none(cluster: dict[str, Any]) -> None:
    assert re.search(r"does it use TLS\? Then set RAY_USE_TLS=1", refused(cluster))


@pytest.mark.long
def test_of_another_authority(cluster: dict[str, Any], certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls(monkeypatch, certificates, "bad", "bad")
    assert re.search(r"no certificate of the authority in RAY_TLS_CA_CERT \(.*bad-ca\.pem\)", refused(cluster))


@pytest.mark.long
def test_that_the_cluster_does_not_know(
    cluster: dict[str, Any], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls(monkeypatch, certificates, "good", "bad")
    assert re.search(r"doesn't accept the certificate .*bad-cert\.pem", refused(cluster))


@pytest.mark.long
def test_that_are_not_there(cluster: dict[str, Any], certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls(monkeypatch, certificates, "good", "missing")
    with pytest.raises(ConfigError, match=r"name no file: RAY_TLS_SERVER_CERT=.*missing-cert\.pem"):
        colocate.connect("ray", **cluster)


def test_that_are_none(cluster: dict[str, Any], certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("cert", "key"):
        (certificates / f"garbled-{part}.pem").write_text("garbled")
    tls(monkeypatch, certificates, "good", "garbled")
    with pytest.raises(ClusterError, match="the certificates can't be loaded"):
        colocate.connect("ray", **cluster)
