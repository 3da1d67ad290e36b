"""The observer `prometheus`, which serves metrics to Prometheus during a run."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_wsgi_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

import colocate

_LAST_PORT = 65535
_LOOKS_FOR_S = 2.0


class RoleBytes(Collector):
    """A collector that asks the workers for the roles' memory at each scrape. Groups that don't answer are left out."""

    def __init__(self, observer: Prometheus) -> None:
        self._observer = observer

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return no metrics, because no group exists at registration."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the bytes of memory of all roles in groups that are ready for calls."""
        labels = ["run", "group", "role", "slot", "where"]
        family = GaugeMetricFamily("colocate_role_bytes", "bytes that roles hold", labels=labels)
        for name, group in list(self._observer.groups.items()):
            try:
                memory = group.memory(_LOOKS_FOR_S) if group.state == "ready" else None
            except (colocate.ColocateError, TimeoutError):
                continue
            for slot in () if memory is None else memory.slots:
                for role in slot.roles:
                    sizes = {"device": role.device, "host": role.host, "asleep": {"": role.asleep}}
                    for where, parts in sizes.items():
                        at = [self._observer.run, name, role.role, str(slot.slot), where]
                        family.add_metric(at, float(sum(parts.values())))
        yield family


class Prometheus:
    """An observer that serves the latest logs, calls and their seconds, states of groups, and memory of roles.

    `/metrics` is for Prometheus; `/healthz` answers 200, or 503 once a group has failed for good.

    Attributes:
        run: The name of the run's folder, a label of all metrics.
        groups: The live groups, by name.
    """

    def __init__(self, port: int = 9464, address: str = "127.0.0.1") -> None:
        """Create the metrics; `colocate_run_started` opens the port.

        Args:
            port: The port; 0 for any free port.
            address: The address to listen on; everyone who can reach this address can read all numbers of the run.

        Raises:
            ConfigError: The port's number is out of range.
        """
        if not 0 <= port <= _LAST_PORT:
            raise colocate.ConfigError(f"port: {port} is none: give one up to {_LAST_PORT}, or 0 for any that is free")
        self._at = port, address
        self._registry = registry = CollectorRegistry()
        self.run = ""
        self.groups: dict[str, colocate.ColocatedGroup] = {}
        self._states: dict[str, str] = {}

        def made(kind: Callable[..., Any], name: str, what: str, *labels: str) -> Any:
            return kind(f"colocate_{name}", what, ("run", *labels), registry=registry)

        method = "group", "role", "method"
        self._step = made(Gauge, "step", "the step that was logged last")
        self._logged = made(Gauge, "logged", "what was logged last", "name")
        self._phase = made(Counter, "phase_seconds", "seconds per phase of the job", "phase")
        self._calls = made(Counter, "calls", "calls that have ended", *method, "outcome")
        self._busy = made(Counter, "busy_seconds", "seconds that ranks have run", *method)
        self._moved = made(Counter, "moved_bytes", "bytes that roles slept or woke with", "group", "role", "kind")
        self._state = made(Gauge, "group_state", "1 for the state that a group is in", "group", "state")
        self._restarts = made(Counter, "group_restarts", "how often a group was made anew", "group")
        self._deaths = made(Counter, "worker_deaths", "workers that have died", "group")
        gpu = "node", "gpu", "slots"
        self._gpu = {
            "use": made(Gauge, "gpu_use", "part of the last moment in which a GPU computed, of 1", *gpu),
            "memory": made(Gauge, "gpu_memory_bytes", "bytes of a GPU in use, by anybody", *gpu),
            "watts": made(Gauge, "gpu_power_watts", "power that a GPU draws", *gpu),
            "celsius": made(Gauge, "gpu_temperature_celsius", "temperature of a GPU", *gpu),
        }
        self._xids = made(Counter, "gpu_xid_errors", "XID errors of a GPU", *gpu, "xid")
        registry.register(RoleBytes(self))
        self._served: tuple[WSGIServer, threading.Thread] | None = None

    @property
    def port(self) -> int | None:
        """The port on which this observer listens; None before and after the run."""
        return None if self._served is None else self._served[0].server_port

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Open the port and start serving metrics.

        Raises:
            ConfigError: The port is taken or forbidden, or this machine lacks the address.
        """
        self.run = run.directory.name
        port, address = self._at
        try:
            self._served = _start_server(port, address, make_wsgi_app(self._registry), self._describe_health)
        except OSError as error:
            raise colocate.ConfigError(
                f"can't listen at {address}:{port} ({error.strerror or error}); {_describe_remedy(error)}"
            ) from error
        if not port:
            print(f"prometheus: http://{address}:{self.port}/metrics")

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Set the gauges of logged values, and count the seconds of phases."""
        self._step.labels(self.run).set(record.step)
        for name, value in record.scalars.items():
            self._logged.labels(self.run, name).set(value)
        for phase, seconds in record.seconds.items():
            self._phase.labels(self.run, phase).inc(seconds)

    def colocate_group_spawned(self, group: colocate.ColocatedGroup) -> None:
        """Register a new group and create the group's counters."""
        self.groups[group.name] = group
        self._has_state(group.name, group.state)
        for counter in (self._restarts, self._deaths):
            counter.labels(self.run, group.name)  # Creates the counter at 0, which Prometheus needs to compute rates.

    def colocate_group_changed(self, name: str, state: str, cause: colocate.ColocateError | None) -> None:
        """Set a group's state, and count a restart."""
        self._has_state(name, state)
        if state == "restarting":
            self._restarts.labels(self.run, name).inc()

    def colocate_worker_died(self, error: colocate.WorkerDied) -> None:
        """Count a worker's death."""
        self._deaths.labels(self.run, error.group or "").inc()

    def colocate_group_closed(self, name: str) -> None:
        """Remove a closed group."""
        self.groups.pop(name, None)
        self._has_state(name, "closed")

    def _has_state(self, group: str, state: str) -> None:
        before, self._states[group] = self._states.get(group, state), state
        self._state.labels(self.run, group, before).set(0)
        self._state.labels(self.run, group, state).set(1)

    def _describe_health(self) -> tuple[bool, str]:
        """Return whether no group has failed for good, and a text with the states of all groups."""
        lost = "failed" in self._states.values()
        return not lost, "".join(f"{group} {state}\n" for group, state in sorted(self._states.items()))

    def colocate_call_finished(self, record: colocate.CallRecord) -> None:
        """Count a finished call, and add the seconds that ranks ran."""
        method = (self.run, record.group, record.role, record.method.removeprefix("the "))
        self._calls.labels(*method, "ok" if record.error is None else "error").inc()
        self._busy.labels(*method).inc(sum(end - start for _, start, end in record.ran))

    def colocate_memory_moved(self, record: colocate.MoveRecord) -> None:
        """Add the bytes that a role moved to sleep or to wake up."""
        self._moved.labels(self.run, record.group, record.role, record.kind).inc(record.nbytes)

    def colocate_devices_sampled(self, samples: Sequence[colocate.DeviceSample]) -> None:
        """Set the gauges of GPUs, and count the GPUs' XID errors."""
        for sample in samples:
            gpu = self.run, sample.node, sample.uuid, ",".join(f"{group}/{slot}" for group, slot in sample.slots)
            for name, gauge in self._gpu.items():
                if (value := getattr(sample, name)) is not None:
                    gauge.labels(*gpu).set(value)
            for xid in sample.xids:
                self._xids.labels(*gpu, str(xid)).inc()

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """Stop serving metrics and close the port."""
        served, self._served = self._served, None
        if served is not None:
            server, thread = served
            server.shutdown()
            server.server_close()
            thread.join()


def _start_server(
    port: int, address: str, metrics: Callable[..., Any], health: Callable[[], tuple[bool, str]]
) -> tuple[WSGIServer, threading.Thread]:

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/healthz":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        well, text = health()
        start_response("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [text.encode()]

    server, thread = start_wsgi_server(port, address)
    server.set_app(answer)
    return server, thread


def _describe_remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "where another run has it, give this one a port of its own, `with: {port: ...}`"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give a port that your user may have, `with: {port: ...}`"
    return "give an address of this machine, such as `with: {address: 127.0.0.1}`, or 0.0.0.0 for all that it has"


@colocate.hookimpl
def colocate_observer() -> type[Prometheus]:
    """Return the class of the Prometheus observer."""
    return Prometheus
