"""The driver's connection to a Dask scheduler, with timeouts and with errors that a user can act on."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, Security

from colocate.errors import ClusterError, ConfigError
from colocate.wire import Tls, track
from colocate_dask import far, reservations, undocumented
from colocate_dask.loop import LoopThread
from colocate_dask.offers import Facts

_CLOSE_S = 3.0
# A request without an answer for this long triggers a ping, because the scheduler may only be slow.
_SILENCE_S = 1.0
_QUIET_S = 0.5
_CONNECTS_WITHIN_S = 1.0
_PONG_WITHIN_S = 4.0
_FILES = (
    "tls_ca_file",
    *(f"tls_{side}_{what}" for side in ("client", "worker", "scheduler") for what in ("cert", "key")),
)


class Connection:
    """The driver's own Dask client, for all requests to the scheduler. No other code closes this client."""

    def __init__(self, loop: LoopThread, address: Any, security: Security | None, timeout: float) -> None:
        self._loop = loop
        self._timeout = timeout
        self._security = security
        self._on_event: Callable[[Any], None] | None = None
        self._closed = False
        self._renewing = threading.Lock()
        self.version = far.describe()
        self._client: Any = _connect_client(loop, address, security, timeout)
        self.address = str(self._client.scheduler.address)
        self._introduced = undocumented.find_stream(self._client)
        track(self)
        try:
            self._check_scheduler()
            self.call_client("register_plugin", reservations.Reservations(), within_s=timeout)
        except BaseException:
            self.close()
            raise

    @property
    def id(self) -> str:
        """The id of the Dask client."""
        return str(self._client.id)

    @property
    def host(self) -> str | None:
        """This machine's address on the connection to the scheduler; None if the scheduler is on this machine."""

        async def find() -> str | None:
            sockets = undocumented.find_sockets(self._client)
            addresses = [sock.getsockname()[0] for sock in sockets if sock.family != socket.AF_UNIX]
            return next((host for host in addresses if not ipaddress.ip_address(host).is_loopback), None)

        return self._loop.run_coroutine(find())

    @property
    def tls(self) -> Tls | None:
        """The client's TLS certificates, if Dask encrypts the connection; else None."""
        return far.make_tls(self._client.security, "client") if self.address.startswith("tls://") else None

    def call_client(self, method: str, *args: Any, within_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the Dask client, and wait for the result at most `within_s` seconds.

        Raises:
            ClusterError: The scheduler doesn't answer in time, or is gone.
        """
        return self._await_answer(partial(getattr(self._client, method), *args, **kwargs), within_s)

    def _await_answer(self, question: Callable[[], Awaitable[Any]], within_s: float | None) -> Any:
        async def ask() -> Any:
            await self._register_plugin()
            try:
                return await question()
            finally:
                undocumented.close_surplus(self._client)

        if (lost := self._describe_loss()) is not None:
            raise ClusterError(lost)
        try:
            return self._loop.run_coroutine(ask(), within_s)
        # A TimeoutError also follows a lost connection, after Dask has tried to reconnect.
        except TimeoutError as error:
            raise ClusterError(
                self._describe_loss() or f"the Dask scheduler at {self.address} didn't answer in time"
            ) from error
        except OSError as error:
            raise ClusterError(f"the Dask scheduler at {self.address} is gone: {error}") from error

    def _describe_loss(self) -> str | None:
        """Return an error text if the connection is lost; None while Dask's client considers the connection alive."""
        status = self._client.status
        if status == "running":
            return None
        if status == "connecting":  # Dask's client is trying to reconnect.
            return f"the connection to the Dask scheduler at {self.address} is lost: is it still there?"
        again = "" if self._closed else ". The next reservation connects again, if it is there"
        return f"the connection to the Dask scheduler at {self.address} is {status}{again}"

    def reconnect(self) -> None:
        """Reconnect to the scheduler, if Dask's client has given up after a lost connection.

        Raises:
            ClusterError: The scheduler is still unreachable.
        """
        with self._renewing:
            if self._client.status == "closed" and not self._closed:
                if not self._loop.run_coroutine(undocumented.accepts_connections(self.address, _CONNECTS_WITHIN_S)):
                    raise ClusterError(f"no Dask scheduler takes connections at {self.address}: is it still there?")
                self._client = _connect_client(self._loop, self.address, self._security, self._timeout)

    async def _register_plugin(self) -> None:
        """Register the plugin and subscribe again after a reconnect, because the scheduler may be a new process."""
        stream = undocumented.find_stream(self._client)
        if stream is self._introduced:
            return
        facts = await self._client.run_on_scheduler(far.describe)
        check_versions(self.version, facts, f"the Dask scheduler at {self.address}")
        await self._client.register_plugin(reservations.Reservations())
        if self._on_event is not None:
            self._subscribe(self._on_event)
        self._introduced = stream

    def run_on_scheduler(
        self,
        function: Callable[..., Any],
        *args: Any,
        within_s: float | None = None,
        pong_s: float = _PONG_WITHIN_S,
    ) -> Any:
        """Run a function in the scheduler, and wait while the scheduler answers pings within `pong_s` seconds.

        Raises:
            ClusterError: No answer came in time, or the scheduler is stopped, stuck or gone. If the address refuses
                connections, the error comes at once.
        """
        return self._await_answer(partial(self._await_pongs, pong_s, function, *args), within_s)

    async def _await_pongs(self, pong_s: float, function: Callable[..., Any], *args: Any) -> Any:
        answer = asyncio.ensure_future(undocumented.run_on_scheduler(self._client, function, *args))
        try:
            while not (await asyncio.wait([answer], timeout=_SILENCE_S))[0]:
                pong = asyncio.ensure_future(undocumented.ping_scheduler(self._client))
                try:
                    quiet = not (await asyncio.wait([pong], timeout=_QUIET_S))[0]
                    if quiet and not await undocumented.accepts_connections(self.address, _CONNECTS_WITHIN_S):
                        raise TimeoutError
                    await asyncio.wait_for(pong, pong_s)
                finally:
                    pong.cancel()
            return answer.result()
        finally:
            answer.cancel()

    def run_on_workers(self, function: Callable[..., Any], *args: Any, workers: Sequence[str], **kwargs: Any) -> Any:
        """Run a function in Dask workers. Return the answers by address, with an exception for each failure."""
        return self.call_client("run", function, *args, workers=list(workers), on_error="return", **kwargs)

    def subscribe(self, heard: Callable[[Any], None]) -> None:
        """Call `heard`, which must not block, on Dask's event loop with each colocate event from the scheduler."""

        async def subscribe() -> None:
            self._subscribe(heard)

        self._on_event = heard
        self._loop.run_coroutine(subscribe())

    def _subscribe(self, heard: Callable[[Any], None]) -> None:
        self._client.subscribe_topic(far.TOPIC, lambda event: heard(event[1]))

    def close_after_fork(self) -> None:
        """Close the client's sockets in a forked child.

        Open copies in the child would keep this driver's slots held after the driver's end.
        """
        for sock in undocumented.find_sockets(self._client):
            descriptor = sock.detach()
            if descriptor >= 0:
                os.close(descriptor)

    def close(self) -> None:
        """Close the Dask client."""
        with self._renewing:
            self._closed = True
        _close_client(self._loop, self._client)

    def _check_scheduler(self) -> None:
        try:
            facts = self.call_client("run_on_scheduler", far.describe, within_s=self._timeout)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # An import of colocate in the scheduler may raise any error.
            raise ClusterError(
                f"the Dask scheduler at {self.address} can't use colocate ({type(error).__name__}: {error}); "
                f"install colocate {self.version.colocate} where the scheduler and the workers run, "
                "and leave distributed.scheduler.pickle on"
            ) from error
        check_versions(self.version, facts, f"the Dask scheduler at {self.address}")


def make_security(value: Any) -> Security | None:
    """Return a `Security` unchanged, or create one from the options in a config.

    Raises:
        ConfigError: `value` is neither of the two, or the options are invalid.
    """
    if value is None or isinstance(value, Security):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"connect('dask', security=...) takes a distributed.Security or its options, not {value!r}")
    try:
        return Security(**value)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"connect('dask', security=...): {error}") from error


def check_versions(here: Facts, there: Facts, who: str) -> None:
    """Check that another process has the same versions of Python and colocate.

    Raises:
        ClusterError: The versions differ.
    """
    if (words := there.version_difference(here)) is not None:
        raise ClusterError(f"{who} {words}")


def _connect_client(loop: LoopThread, address: Any, security: Security | None, timeout: float) -> Any:
    clients: list[Any] = []

    async def connect() -> Any:
        options: dict[str, Any] = {
            "security": security,
            "timeout": timeout,
            "set_as_default": False,
            "name": "colocate",
        }
        clients.append(Client(address, asynchronous=True, **options))  # type: ignore[no-untyped-call]
        client = await clients[0]
        undocumented.stop_polling(client)
        return client

    try:
        try:
            return loop.run_coroutine(connect(), timeout + 1)
        except BaseException:
            if clients:
                _close_client(loop, clients[0])
            raise
    except TypeError as error:
        if "abstract class" in str(error):  # The library for this protocol isn't installed.
            raise ConfigError(
                f"connect('dask', address={address!r}): this protocol isn't available: {error}"
            ) from error
        if "ssl_context" not in str(error):
            raise
        text = f"{address} needs certificates: connect('dask', address=..., security=Security(tls_ca_file=..., ...))"
        raise ClusterError(text) from error
    except RuntimeError as error:
        if "encryption required" not in str(error):
            raise
        text = f"connect('dask', address={address!r}): Dask is told to require encryption, which this address hasn't; "
        raise ConfigError(text + "give the scheduler's tls:// address, and security= with its certificates") from error
    except ValueError as error:
        raise ConfigError(f"connect('dask', address={address!r}): {error}; it should be tcp://host:port") from error
    except FileNotFoundError as error:
        raise ConfigError(f"connect('dask', security=...): {_find_missing_files(security)}") from error
    except (OSError, ImportError) as error:  # TimeoutError is a subclass of OSError.
        words = str(error) or f"no answer within {timeout:g} s"
        raise ClusterError(f"{_describe_failure(error, address)}: {words}") from error


def _find_missing_files(security: Security | None) -> str:
    """Return an error text that names the missing certificate files, because Python's own error names none."""
    values = {name: getattr(security, name, None) for name in _FILES}
    paths = {name: path for name, path in values.items() if isinstance(path, str) and "\n" not in path}
    missing = [f"{name}={path!r}" for name, path in paths.items() if not Path(path).exists()]
    return f"a certificate or key is missing: {', '.join(missing) or 'a file'}"


def _close_client(loop: LoopThread, client: Any) -> None:
    async def close() -> None:
        await client.close(timeout=_CLOSE_S)

    # The scheduler may be slow or absent. The end of the event loop ends the client in any case.
    with contextlib.suppress(OSError):
        loop.run_coroutine(close(), 2 * _CLOSE_S)


def _describe_failure(error: BaseException, address: Any) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the Dask scheduler at {address} shows no certificate of the authority in security="
        if isinstance(cause, ssl.SSLError):
            return f"the Dask scheduler at {address} doesn't accept the certificates in security="
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ImportError):
        return f"the Dask scheduler at {address} has other versions"
    hint = "" if str(address).startswith("tls://") else " (is it there, and does it use tls://?)"
    return f"no Dask scheduler can be reached at {address}{hint}"
