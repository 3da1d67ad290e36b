"""Certificates for the tests of encrypted connections."""

from __future__ import annotations

import pytest
import trustme

from colocate.wire import Tls


def certificates() -> Tls:
    """Those of a new authority."""
    authority = trustme.CA()
    one = authority.issue_cert("colocate.test")
    return Tls(
        authority.cert_pem.bytes().decode(),
        "".join(blob.bytes().decode() for blob in one.cert_chain_pems),
        one.private_key_pem.bytes().decode(),
    )


@pytest.fixture(scope="session")
def cluster() -> Tls:
    """Those of a cluster."""
    return certificates()


@pytest.fixture(scope="session")
def stranger() -> Tls:
    """Those of another cluster."""
    return certificates()
