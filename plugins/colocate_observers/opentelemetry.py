"""The observer `opentelemetry`, which sends a run's calls and logs as OpenTelemetry spans and gauges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode

import colocate

_FOREIGN = re.compile(r"[^-_./a-zA-Z0-9]")
_LONGEST = 255  # The longest name of an instrument, in characters.


class OpenTelemetry:
    """An observer that sends a span for the run and for each call on each rank, and a gauge for each logged number."""

    def __init__(self, endpoint: str | None = None, service: str = "colocate") -> None:
        """Set up exporters to a collector, by OTLP over HTTP.

        Args:
            endpoint: The collector's address, as in "http://127.0.0.1:4318"; None for the environment's
                (`OTEL_EXPORTER_OTLP_ENDPOINT`).
            service: The service's name in the collector.

        Raises:
            ConfigError: The endpoint is no URL. The exporters would report this only at the end of the run.
        """
        if endpoint is not None:
            uri = urlsplit(endpoint)
            if uri.scheme not in ("http", "https") or not uri.netloc:
                raise colocate.ConfigError(f"endpoint {endpoint!r}: must be like 'http://127.0.0.1:4318'")
            endpoint = endpoint.rstrip("/")
        resource = Resource.create({"service.name": service})
        spans, metrics = (None if endpoint is None else f"{endpoint}/v1/{kind}" for kind in ("traces", "metrics"))
        self._spans = TracerProvider(resource=resource)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(spans)))
        self._metrics = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter(metrics))], resource=resource)
        self._tracer, self._meter = self._spans.get_tracer("colocate"), self._metrics.get_meter("colocate")
        self._gauges: dict[str, Callable[[float], None]] = {}
        self._run: Span | None = None

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Start the run's span. A resumed run gets a new span, with the same folder as an attribute."""
        attributes: dict[str, str | int] = {**run.environment, "colocate.directory": str(run.directory)}
        if run.resumed is not None:
            attributes["colocate.resumed"] = run.resumed
        self._run = self._tracer.start_span(run.name, attributes=attributes)

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Set the gauges of all logged numbers that are finite."""
        seconds = {f"seconds.{phase}": spent for phase, spent in record.seconds.items()}
        for name, value in {"step": record.step, **record.scalars, **seconds}.items():
            if name not in self._gauges:
                legal = _FOREIGN.sub("_", f"colocate.{name}")[:_LONGEST]
                self._gauges[name] = self._meter.create_gauge(legal).set
            if math.isfinite(value):
                # Converted to a float, because OpenTelemetry has no integers of more than 64 bits.
                self._gauges[name](float(value))

    def colocate_call_finished(self, record: colocate.CallRecord) -> None:
        """Send a span for each rank that ran a call, and a span without a rank if the call failed on no rank."""
        inside = None if self._run is None else trace.set_span_in_context(self._run)
        name = f"{record.role}.{record.method}" if record.role else record.method
        shared: dict[str, str | float] = {"colocate.group": record.group, "colocate.submitted": record.submitted}
        failed = {*record.raised, *(rank for rank, _ in record.unfinished)}
        whole = [(-1, record.submitted, record.finished)] if record.error is not None and not failed else []
        for rank, start, end in [*record.ran, *whole]:
            attributes = {**shared, **({} if rank < 0 else {"colocate.rank": rank})}
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=_to_nanoseconds(start))
            if record.error is not None and (rank < 0 or rank in failed):
                span.set_status(StatusCode.ERROR, record.error)
            span.end(_to_nanoseconds(end))

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """End the run's span, and send all queued data."""
        if self._run is not None:
            if error is not None:
                self._run.record_exception(error)
                self._run.set_status(StatusCode.ERROR, str(error).partition("\n")[0])
            self._run.end()
        self._spans.shutdown()
        self._metrics.shutdown()


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


@colocate.hookimpl
def colocate_observer() -> type[OpenTelemetry]:
    """Return the class of the OpenTelemetry observer."""
    return OpenTelemetry
