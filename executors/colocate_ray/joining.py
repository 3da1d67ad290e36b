"""The start of a private Ray, and the entry into an existing Ray cluster. Runs in the envoy."""

from __future__ import annotations

import os
import re
import socket
import ssl
from typing import Any

import ray
from ray.exceptions import RuntimeEnvSetupError
from ray.runtime_env import RuntimeEnv

from colocate.errors import ClusterError, ConfigError
from colocate_ray.private import PrivateFolder, make_cluster_error
from colocate_ray.silence import HELLO
from colocate_ray.terms import Cluster

_DIAL_S = 5.0
_SETTINGS = "RAY_USE_TLS=1, RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY"
_QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
# Ray raises these types for errors in a runtime environment, and other types for all other failures.
_OF_ENVIRONMENTS = (TypeError, ValueError, RuntimeEnvSetupError)


def start_private(cluster: Cluster, folder: PrivateFolder) -> None:
    """Start a private Ray with all files in a folder.

    Raises:
        ConfigError: Ray rejects the runtime environment.
        ClusterError: Ray doesn't start. The error has the last log lines of Ray's processes.
    """
    environment = _make_runtime_env(cluster)
    try:
        ray.init(**folder.init_options(cluster), **environment, **_QUIET)
    except _OF_ENVIRONMENTS as error:
        raise ConfigError(f"connect('ray', runtime_env=...): {ray_message(error)}") from None
    except Exception as error:
        raise make_cluster_error(folder.path, f"a private Ray could not be started: {ray_message(error)}") from None


def join_cluster(cluster: Cluster) -> None:
    """Join an existing Ray cluster.

    Raises:
        ConfigError: Ray rejects the runtime environment.
        ClusterError: The cluster can't be reached, or refuses this driver.
    """
    environment = _make_runtime_env(cluster)
    address = _resolve_address(str(cluster.address))
    _check_listening(address)
    try:
        # "auto" isn't resolved here, so that Ray finds this user's token by itself.
        ray.init(address="auto" if cluster.address == "auto" else address, **environment, **_QUIET)
    except _OF_ENVIRONMENTS as error:
        raise ConfigError(f"connect('ray', runtime_env=...): {ray_message(error)}") from None
    except Exception as error:
        raise ClusterError(_refusal_error(address, error)) from None


def _make_runtime_env(cluster: Cluster) -> dict[str, Any]:
    """Return the runtime environment as an option for `ray.init`.

    Ray delivers local folders only with the environment of a whole job.

    Raises:
        ConfigError: Ray doesn't know some of the keys, and would ignore these keys.
    """
    fields = RuntimeEnv.known_fields
    unknown = sorted({*(cluster.runtime_env or {})} - fields)
    if unknown and "RAY_RUNTIME_ENV_PLUGINS" not in os.environ:  # A plugin may define further keys.
        raise ConfigError(
            f"connect('ray', runtime_env=...): Ray knows no {', '.join(map(repr, unknown))}; it knows "
            f"{', '.join(sorted(name for name in fields if not name.startswith('_')))}"
        )
    return {"runtime_env": dict(cluster.runtime_env)} if cluster.runtime_env else {}


def _resolve_address(address: str) -> str:
    from ray._private import services

    try:
        return str(services.canonicalize_bootstrap_address_or_die(address))
    except ConnectionError as error:
        raise ClusterError(
            f"connect('ray', address='auto') finds no Ray on this machine: {ray_message(error)} Start one "
            "(`ray start --head`), give its address ('host:port'), or leave address out for a private one"
        ) from None
    except ValueError:
        raise ClusterError(f"{address!r} is no address of a Ray cluster: write 'host:port', or 'auto'") from None


def _check_listening(address: str) -> None:
    """Check that some process listens at an address, because Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), _DIAL_S)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster can be reached at {address} ({error}). Is it running, and is this the address of its "
            "head (port 6379 unless `ray start` was told another)? With 'auto', RAY_ADDRESS or the file of a cluster "
            "that is gone may have named it: `ray stop` clears that"
        ) from None
    with sock:
        _greet_head(sock, address)


def _greet_head(sock: socket.socket, address: str) -> None:
    """Check that the cluster's head answers a greeting with the right encryption, because Ray would retry for a minute.

    Raises:
        ClusterError: Only one side uses TLS, or a side rejects the other's certificate.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        _greet_by_tls(sock, address)
    elif not _is_answering(sock):
        raise ClusterError(
            f"the Ray cluster at {address} doesn't talk to this driver: does it use TLS? Then set {_SETTINGS} for the "
            "driver too"
        )


def _greet_by_tls(sock: socket.socket, address: str) -> None:
    try:
        with _make_tls_context().wrap_socket(sock) as encrypted:
            answered = _is_answering(encrypted)
    except ssl.SSLCertVerificationError as error:
        raise ClusterError(
            f"the Ray cluster at {address} shows no certificate of the authority in RAY_TLS_CA_CERT "
            f"({os.environ.get('RAY_TLS_CA_CERT')}): {error.verify_message}. Give the certificates of this cluster"
        ) from None
    except TimeoutError:
        return  # The cause is unknown, and Ray's own error will say more.
    except ssl.SSLError as error:
        raise ClusterError(
            f"the Ray cluster at {address} doesn't talk TLS with this driver ({error.reason}): unset RAY_USE_TLS if it "
            "uses none, or give the certificates of this cluster"
        ) from None
    if not answered:
        raise ClusterError(
            f"the Ray cluster at {address} doesn't accept the certificate of this driver, RAY_TLS_SERVER_CERT "
            f"({os.environ.get('RAY_TLS_SERVER_CERT')}). Give the certificates of this cluster"
        )


def _make_tls_context() -> ssl.SSLContext:
    """Create a TLS context from Ray's environment variables. Ray itself checks host names, by its own rules."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
        context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    except (KeyError, OSError) as error:
        raise ClusterError(
            f"RAY_USE_TLS is set, but the certificates can't be loaded ({error}): set {_SETTINGS}"
        ) from None
    return context


def _is_answering(sock: socket.socket) -> bool:
    """Return whether the other side answers a greeting. A timeout counts as an answer, because the side may be slow."""
    try:
        sock.sendall(HELLO)
        return bool(sock.recv(1))
    except TimeoutError:
        return True
    except (ConnectionError, ssl.SSLError):  # A TLS alert means a refusal.
        return False


def _refusal_error(address: str, error: Exception) -> str:
    words = ray_message(error)
    if "Authentication" in words or "token" in words.lower():
        return (
            f"the Ray cluster at {address} refuses this driver's token: {words} Give the file with the cluster's token "
            "(connect('ray', address=..., token_file=...)), or set RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH"
        )
    if "ersion mismatch" in words:
        return f"the Ray cluster at {address} runs other versions than this driver: {words}"
    return (
        f"the Ray cluster at {address} can't be joined: {words} A driver has to run on a machine of the cluster; from "
        "elsewhere, submit it as a job (`ray job submit -- python driver.py`). That command needs pip install "
        "'ray[default]', there and in the cluster"
    )


def ray_message(error: BaseException) -> str:
    """Return the text of the innermost error, without the tracebacks that Ray adds to error texts."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    if "Traceback" in text:
        text = re.split(r"\n(?=\w[\w.]*(?:Error|Exception): )", text)[-1].strip()
    text = " ".join(text.split())
    return text if text.endswith(".") else f"{text}."
