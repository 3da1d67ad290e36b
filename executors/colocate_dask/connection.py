"""The driver's connection to a Dask scheduler: bounded, and with errors that a user can act on."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed import Client, LocalCluster, Security, Worker

from colocate.errors import ColocateError, ConfigError
from colocate_dask import far, reservations
from colocate_dask.offers import Facts


class DaskConnectionError(ColocateError, ConnectionError):
    """A Dask scheduler can't be reached, or doesn't let us in."""


class Connection:
    """A Dask client of our own, so that nobody else closes it, and what it says to the scheduler.

    Args:
        address: The scheduler's, or a cluster object.
        security: Certificates, where the scheduler wants them.
        timeout: Seconds to connect in.
    """

    def __init__(self, address: Any, security: Security | None, timeout: float) -> None:
        self._timeout = timeout
        self._client = _client(address, security, timeout)
        try:
            self.version = far.describe()
            self._check_scheduler()
            self.ask(self._client.register_plugin, reservations.Reservations(), within_s=timeout)
        except BaseException:
            self._client.close(timeout=1)
            raise

    @property
    def id(self) -> str:
        """The client's id."""
        return str(self._client.id)

    @property
    def address(self) -> str:
        """The scheduler's address."""
        return str(self._client.scheduler.address)

    def ask(self, method: Callable[..., Any], *args: Any, within_s: float | None = None, **kwargs: Any) -> Any:
        """Call one of the client's methods, for a bounded time.

        Raises:
            DaskConnectionError: The scheduler doesn't answer in time, or is gone.
        """

        async def call() -> Any:
            return await method(*args, **kwargs)

        try:
            return self._client.sync(call, callback_timeout=within_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise DaskConnectionError(f"the Dask scheduler at {self.address} didn't answer in {within_s:g} s") from error
        except OSError as error:
            raise DaskConnectionError(f"the Dask scheduler at {self.address} is gone: {error}") from error

    def on_scheduler(self, function: Callable[..., Any], *args: Any, within_s: float | None = None) -> Any:
        """Run a function in the scheduler."""
        return self.ask(self._client.run_on_scheduler, function, *args, within_s=within_s)

    def on_workers(self, function: Callable[..., Any], *args: Any, workers: Sequence[str], **kwargs: Any) -> Any:
        """Run a function in workers; the answers by address, an exception where it failed."""
        return self.ask(self._client.run, function, *args, workers=list(workers), on_error="return", **kwargs)

    def subscribe(self, heard: Callable[[Any], None]) -> None:
        """Hear what the scheduler tells drivers. On the client's loop: don't wait there."""
        self._client.subscribe_topic(reservations.TOPIC, lambda event: heard(event[1]))

    def close(self) -> None:
        """Leave."""
        self._client.close(timeout=self._timeout)

    def _check_scheduler(self) -> None:
        try:
            there = self.on_scheduler(far.describe, within_s=self._timeout)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # whatever it raised when it looked for colocate
            raise DaskConnectionError(
                f"the Dask scheduler at {self.address} can't use colocate ({type(error).__name__}: {error}); "
                f"install colocate {self.version.colocate} where the scheduler and the workers run, "
                "and leave distributed.scheduler.pickle on"
            ) from error
        check_versions(self.version, there, f"the Dask scheduler at {self.address}")


def check_versions(here: Facts, there: Facts, who: str) -> None:
    """Compare versions.

    Raises:
        DaskConnectionError: They differ.
    """
    if not isinstance(there, Facts) or (here.python, here.colocate) != (there.python, there.colocate):
        theirs = f"Python {there.python} and colocate {there.colocate}" if isinstance(there, Facts) else "another colocate"
        raise DaskConnectionError(
            f"{who} has {theirs}, the driver Python {here.python} and colocate {here.colocate}; "
            "use the same versions on both sides"
        )


def security_of(value: Security | Mapping[str, Any] | None) -> Security | None:
    """A `Security`, also from the options of one, as a config gives them.

    Raises:
        ConfigError: It is neither.
    """
    if value is None or isinstance(value, Security):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"connect('dask', security=...) takes a distributed.Security or its options, not {value!r}")
    try:
        return Security(**value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"connect('dask', security=...): {error}") from error


def _client(address: Any, security: Security | None, timeout: float) -> Client:
    try:
        return Client(address, security=security, timeout=timeout, set_as_default=False, name="colocate")
    except TypeError as error:
        if "ssl_context" not in str(error):
            raise
        text = f"{address} needs TLS certificates: connect('dask', address=..., security=Security(tls_ca_file=..., ...))"
        raise DaskConnectionError(text) from error
    except (OSError, ImportError) as error:
        raise DaskConnectionError(f"{_why_not(error, address, timeout)}: {error}") from error


def _why_not(error: BaseException, address: Any, timeout: float) -> str:
    """What kept a client from connecting, in words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the Dask scheduler at {address} doesn't show a certificate of the authority in security="
        if isinstance(cause, ssl.SSLError):
            return f"the Dask scheduler at {address} doesn't accept the certificates in security="
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ImportError):
        return f"the Dask scheduler at {address} has other versions"
    hint = " with these certificates" if str(address).startswith("tls://") else " (does it use tls:// ?)"
    return f"no Dask scheduler at {address} answered within {timeout:g} s{hint}"


class PrivateCluster:
    """A scheduler and Dask workers in this very process: nothing listens, and nothing is left when it ends.

    Role code doesn't run in a Dask worker but in its keeper's process, so Dask's own processes would add nothing.
    """

    def __init__(self) -> None:
        self.cluster: Any = LocalCluster(
            n_workers=0,
            processes=False,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )
        self.cluster.shutdown_on_close = False  # at interpreter exit core closes it, after what uses it
        self._workers: dict[str, Worker] = {}

    def start(self, slots: int, cpus: float, gpus: int) -> list[str]:
        """Start workers; their addresses."""
        return list(self.cluster.sync(self._start, slots, cpus, gpus))

    def stop(self, workers: Sequence[str]) -> None:
        """End workers."""
        self.cluster.sync(self._stop, workers)

    def close(self) -> None:
        """End everything."""
        self.stop(list(self._workers))
        self.cluster.close()

    async def _start(self, slots: int, cpus: float, gpus: int) -> list[str]:
        scratch = tempfile.mkdtemp(prefix="colocate-dask-")
        try:
            started = [
                Worker(
                    self.cluster.scheduler_address,
                    nthreads=max(1, math.ceil(cpus)),
                    resources={"GPU": gpus} if gpus else None,
                    memory_limit=0,
                    dashboard=False,
                    local_directory=scratch,
                )
                for _ in range(slots)
            ]
            await asyncio.gather(*started)
        finally:
            # They have no tasks, so nothing to spill: the folder isn't there to be forgotten by a driver that is killed.
            shutil.rmtree(scratch, ignore_errors=True)
        self._workers.update({worker.address: worker for worker in started})
        return [worker.address for worker in started]

    async def _stop(self, workers: Sequence[str]) -> None:
        ending = [worker for address in workers if (worker := self._workers.pop(address, None)) is not None]
        await asyncio.gather(*(worker.close(nanny=False) for worker in ending))
