"""Where Ray encrypts, colocate's own connections are encrypted with the same certificates."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from colocate.errors import ConfigError
from colocate_ray.certificates import tls_of_environment


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert tls_of_environment() is None
    monkeypatch.setenv("RAY_USE_TLS", "0")
    assert tls_of_environment() is None


def test_those_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    one = authority.issue_cert("ray.test")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    one.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    one.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "cert.pem"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "key.pem"))
    tls = tls_of_environment()
    assert tls is not None
    tls.context(server=True)  # they are accepted as what they are
    tls.context(server=False)


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on in clear text where it was to be encrypted."""
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/nowhere/ca.pem")
    monkeypatch.delenv("RAY_TLS_SERVER_CERT", raising=False)
    monkeypatch.delenv("RAY_TLS_SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"RAY_TLS_CA_CERT='/nowhere/ca\.pem', RAY_TLS_SERVER_CERT=''"):
        tls_of_environment()
