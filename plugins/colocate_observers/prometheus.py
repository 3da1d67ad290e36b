"""`observe: [prometheus]`: an endpoint for Prometheus while a run runs."""

from __future__ import annotations

import errno
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

import colocate

_LAST_PORT = 65535


class Prometheus:
    """Serves what was logged last, calls and their seconds, and bytes that were moved."""

    def __init__(self, port: int = 9464, address: str = "127.0.0.1") -> None:
        """Listen.

        Args:
            port: The port; 0 for any that is free.
            address: The address; who can reach it can read all numbers of the run.

        Raises:
            ConfigError: There is no such port.
        """
        if not 0 <= port <= _LAST_PORT:
            raise colocate.ConfigError(f"port: {port} is none: give one up to {_LAST_PORT}, or 0 for any that is free")
        self._at = port, address
        self._registry = registry = CollectorRegistry()
        method, role = ("group", "role", "method"), ("group", "role", "kind")
        self._step = Gauge("colocate_step", "the step that was logged last", registry=registry)
        self._logged = Gauge("colocate_logged", "what was logged last", ("name",), registry=registry)
        self._phase = Counter("colocate_phase_seconds", "seconds per phase of the job", ("phase",), registry=registry)
        self._calls = Counter("colocate_calls", "calls that have ended", (*method, "outcome"), registry=registry)
        self._busy = Counter("colocate_busy_seconds", "seconds that ranks have run", method, registry=registry)
        self._moved = Counter("colocate_moved_bytes", "bytes that roles slept or woke with", role, registry=registry)
        self._served: tuple[WSGIServer, threading.Thread] | None = None

    @property
    def port(self) -> int | None:
        """The port while it listens."""
        return None if self._served is None else self._served[0].server_port

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Listen.

        Raises:
            ConfigError: The port is taken or not for everybody, or there is no such address here.
        """
        port, address = self._at
        try:
            self._served = start_http_server(port, address, self._registry)
        except OSError as error:
            raise colocate.ConfigError(
                f"can't listen at {address}:{port} ({error.strerror or error}); {_cure(error)}"
            ) from error
        if not port:
            print(f"prometheus: http://{address}:{self.port}/metrics")

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Note what was logged."""
        self._step.set(record.step)
        for name, value in record.scalars.items():
            self._logged.labels(name).set(value)
        for phase, seconds in record.seconds.items():
            self._phase.labels(phase).inc(seconds)

    def colocate_call_finished(self, record: colocate.CallRecord) -> None:
        """Count a call."""
        method = (record.group, record.role, record.method)
        self._calls.labels(*method, "well" if record.error is None else "failed").inc()
        self._busy.labels(*method).inc(sum(end - start for _, start, end in record.ran))

    def colocate_memory_moved(self, record: colocate.MoveRecord) -> None:
        """Count what was moved."""
        self._moved.labels(record.group, record.role, record.kind).inc(record.nbytes)

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """Listen no longer."""
        served, self._served = self._served, None
        if served is not None:
            server, thread = served
            server.shutdown()
            server.server_close()
            thread.join()


def _cure(error: OSError) -> str:
    """What to do where it can't listen."""
    if error.errno == errno.EADDRINUSE:
        return "where another run has it, give this one a port of its own, `with: {port: ...}`"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give a port that your user may have, `with: {port: ...}`"
    return "give an address of this machine, such as `with: {address: 127.0.0.1}`, or 0.0.0.0 for all that it has"


@colocate.hookimpl
def colocate_observer() -> type[Prometheus]:
    """See `ObserverHooks`."""
    return Prometheus
