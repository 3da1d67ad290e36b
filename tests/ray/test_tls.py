"""A cluster that talks by TLS, and one that doesn't: who comes with the wrong certificates is told, soon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.conformance.shared import cluster as running

import colocate
from colocate.errors import ConfigError, EngineError
from colocate.testing.probes.plain import Echo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of the cluster, `good-…`, and those of another authority, `bad-…`."""
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
    """Say to Ray, by the environment, which certificates to use."""
    patch.setenv("RAY_USE_TLS", "1")
    patch.setenv("RAY_TLS_CA_CERT", str(folder / f"{authority}-ca.pem"))
    patch.setenv("RAY_TLS_SERVER_CERT", str(folder / f"{own}-cert.pem"))
    patch.setenv("RAY_TLS_SERVER_KEY", str(folder / f"{own}-key.pem"))


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[dict[str, Any]]:
    """How to connect to a cluster that talks by TLS."""
    with pytest.MonkeyPatch.context() as patch:
        tls(patch, folder)
        with running("ray") as options:
            patch.undo()
            yield options


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(EngineError) as caught:
        colocate.connect("ray", **options)
    assert options["address"] in str(caught.value)
    return str(caught.value)


def test_right_certificates(cluster: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls(monkeypatch, folder)
    with colocate.connect("ray", **cluster) as runtime, runtime.reserve(1, cpus=0) as pool:
        assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None]


def test_none(cluster: dict[str, Any]) -> None:
    assert re.search(r"does it use TLS\? Then set RAY_USE_TLS=1", refused(cluster))


def test_of_another_authority(cluster: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls(monkeypatch, folder, "bad", "bad")
    assert re.search(r"no certificate of the authority in RAY_TLS_CA_CERT \(.*bad-ca\.pem\)", refused(cluster))


def test_that_the_cluster_does_not_know(cluster: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls(monkeypatch, folder, "good", "bad")
    assert re.search(r"doesn't accept the certificate .*bad-cert\.pem", refused(cluster))


def test_that_are_not_there(cluster: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls(monkeypatch, folder, "good", "missing")
    with pytest.raises(ConfigError, match=r"name no file: RAY_TLS_SERVER_CERT=.*missing-cert\.pem"):
        colocate.connect("ray", **cluster)


def test_that_are_none(cluster: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("cert", "key"):
        (folder / f"garbled-{part}.pem").write_text("garbled")
    tls(monkeypatch, folder, "good", "garbled")
    with pytest.raises(EngineError, match="the certificates can't be loaded"):
        colocate.connect("ray", **cluster)


@pytest.mark.long
def test_a_cluster_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("ray") as options:
        tls(monkeypatch, folder)
        assert re.search("doesn't talk TLS with this driver .*unset RAY_USE_TLS", refused(options))
