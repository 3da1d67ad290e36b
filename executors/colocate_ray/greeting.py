"""Whether the head of a cluster talks as this driver does, by TLS or without: Ray itself would try for a minute."""

from __future__ import annotations

import os
import socket
import ssl

from colocate.errors import EngineError

# What any gRPC client says first; a server answers with its settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_SETTINGS = "RAY_USE_TLS=1, RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY"


def greet(sock: socket.socket, address: str) -> None:
    """Exchange the first words with the head of a cluster.

    Args:
        sock: A connection to it, with a timeout.
        address: Its address, for messages.

    Raises:
        EngineError: One side wants TLS and the other doesn't, or doesn't know the certificate that it is shown.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        _greet_by_tls(sock, address)
    elif not _answers(sock):
        raise EngineError(
            f"the Ray cluster at {address} doesn't talk to this driver: does it use TLS? Then set {_SETTINGS} for the "
            "driver too"
        )


def _greet_by_tls(sock: socket.socket, address: str) -> None:
    try:
        with _context().wrap_socket(sock) as encrypted:
            answered = _answers(encrypted)
    except ssl.SSLCertVerificationError as error:
        raise EngineError(
            f"the Ray cluster at {address} shows no certificate of the authority in RAY_TLS_CA_CERT "
            f"({os.environ.get('RAY_TLS_CA_CERT')}): {error.verify_message}. Give the certificates of this cluster"
        ) from None
    except TimeoutError:
        return  # whatever it is, Ray's own words will say more
    except ssl.SSLError as error:
        raise EngineError(
            f"the Ray cluster at {address} doesn't talk TLS with this driver ({error.reason}): unset RAY_USE_TLS if it "
            "uses none, or give the certificates of this cluster"
        ) from None
    if not answered:
        raise EngineError(
            f"the Ray cluster at {address} doesn't accept the certificate of this driver, RAY_TLS_SERVER_CERT "
            f"({os.environ.get('RAY_TLS_SERVER_CERT')}). Give the certificates of this cluster"
        )


def _context() -> ssl.SSLContext:
    """What Ray takes from the environment. Names are left to Ray: it has rules of its own for them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
        context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    except (KeyError, OSError) as error:
        raise EngineError(
            f"RAY_USE_TLS is set, but the certificates can't be loaded ({error}): set {_SETTINGS}"
        ) from None
    return context


def _answers(sock: socket.socket) -> bool:
    """Whether the other side answers; one that only takes its time is given the benefit of the doubt."""
    try:
        sock.sendall(_HELLO)
        return bool(sock.recv(1))
    except TimeoutError:
        return True
    except (ConnectionError, ssl.SSLError):  # an alert
        return False
