"""Trackers, read back by their own tools: the values that a run logged, its calls, and its end."""

from __future__ import annotations

import http.server
import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

import colocate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import wait_until

STEPS = 3
ODD = {
    "tokens per step": 2**70,
    "größe %": 4,
    "": 5,
    "../up//there": 6,
    "x" * 300: 7,
    "gone": math.nan,
    "far": math.inf,
    "flag": True,
}


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect files of a tracker's library to the test's folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")


def run_some(folder: Path, *observe: object, fails: bool = False, interrupted: bool = False) -> Path:
    """Run three steps, each with a call and logged values; return the run's folder."""
    with colocate.connect("local") as runtime:
        group = runtime.reserve(2).spawn({"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}, "policy")
        with colocate.record(runtime, folder / "runs" / "sums", observe=observe) as run:
            for step in range(STEPS):
                with run.timed("echo"):
                    group.role("echo", Echo).noop()
                run.log(step, loss=1.0 / (step + 1), accuracy=step, **ODD)
            if fails:
                group.role("faulty", Faulty).fail()
            if interrupted:
                raise KeyboardInterrupt
        return run.directory


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    found = EventAccumulator(str(run_some(tmp_path, "tensorboard") / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("accuracy")] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [each.value for each in found.Scalars("loss")] == pytest.approx([1, 1 / 2, 1 / 3])
    assert len(found.Scalars("seconds/echo")) == STEPS


def log_records(data: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, after a header of seven bytes."""
    at, parts = 7, b""
    while at < len(data):
        if block - at % block < 7:  # no header fits into the block's rest
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def run_for_wandb(folder: Path) -> None:
    """Make a run, and print the content of its store: rows, axes and exit codes."""
    directory = run_some(folder, {"use": "wandb", "with": {"mode": "offline"}})
    _print_wandb(directory)


def go_on_for_wandb(folder: Path) -> None:
    """Make a run of three steps, resume it after the second one, and once more; print the store's content."""
    from colocate_observers.wandb import WeightsAndBiases

    for resumed, steps in ((None, (1, 2, 3)), (2, (3, 4)), (4, (5,))):
        observer = WeightsAndBiases(mode="offline")
        tell_of(observer, folder, resumed, steps)
    _print_wandb(folder)


def tell_of(observer: Any, folder: Path, resumed: int | None, steps: Sequence[int]) -> None:
    """Notify an observer of a run, or of a part of a run."""
    observer.colocate_run_started(colocate.RunInfo("sums", folder, {}, resumed, {"python": f"3 after {resumed}"}))
    for step in steps:
        observer.colocate_run_logged(colocate.LogRecord(step, {"n": step}, {}, 100.0 + step))
    with colocate.connect() as runtime, colocate.record(runtime, folder / "other") as run:
        pass
    assert run.record is not None
    observer.colocate_run_finished(run.record, None)


def _print_wandb(directory: Path) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # the library's process has written everything
    files = sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    names = {file.stem.rpartition("-")[2] for file in files}
    rows: list[dict[str, str]] = []
    axes: list[tuple[str, str]] = []
    exits: list[int] = []
    for data in (data for file in files for data in log_records(file.read_bytes())):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
        elif record.WhichOneof("record_type") == "metric":
            axes.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
        elif record.WhichOneof("record_type") == "exit":
            exits.append(record.exit.exit_code)
    print(json.dumps([rows, axes, exits, len(names)]))


def by_wandb(folder: Path, function: str) -> Any:
    """Return the content of wandb's store; a process of its own ends the library's threads."""
    script = f"from pathlib import Path; from {__name__} import {function}; {function}(Path.cwd())"
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=here, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_run_that_goes_on_in_wandb(tmp_path: Path) -> None:
    """A resumed run is one run in wandb, and its rows count on, so that later rows replace no others."""
    rows, _, exits, runs = by_wandb(tmp_path, "go_on_for_wandb")
    assert runs == 1
    assert [(row["_step"], row["n"]) for row in rows] == [(str(i), n) for i, n in enumerate("123345")]
    assert exits == [0, 0, 0]


@pytest.mark.long
def test_a_run_that_goes_on_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run is one run in MLflow; the error of a removed run says what to do."""
    from mlflow import MlflowClient

    from colocate_observers.mlflow import MLflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's warnings
        for resumed, steps in ((None, (1, 2, 3)), (2, (3, 4)), (4, (5,))):
            tell_of(MLflow("sums", store), tmp_path, resumed, steps)
        client = MlflowClient(store)
        experiment = client.get_experiment_by_name("sums")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "n")
        assert [each.step for each in history] == [1, 2, 3, 3, 4, 5]
        assert (run.info.status, run.data.params) == ("FINISHED", {"python": "3 after None"})
        client.delete_run(run.info.run_id)
        with pytest.raises(colocate.ConfigError, match=r"MLflow can't go on with run .*remove .*mlflow-run"):
            tell_of(MLflow("sums", store), tmp_path, 5, ())


def test_a_run_that_goes_on_in_tensorboard(tmp_path: Path) -> None:
    """A resumed run hides in TensorBoard the points after the step at which it resumes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from colocate_observers.tensorboard import TensorBoard

    for resumed, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        tell_of(TensorBoard(), tmp_path, resumed, steps)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [each.step for each in found.Scalars("n")] == [1, 2, 3, 4]


@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    """An offline run in wandb has the logged rows, the axis and the exit code."""
    rows, axes, exits, _ = by_wandb(tmp_path, "run_for_wandb")
    assert [row["accuracy"] for row in rows] == ["0", "1", "2"]
    assert all("seconds/echo" in row for row in rows)
    assert axes == [["*", "step"]]
    assert exits == [0]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow has the logged values, under valid names, and the status of each run."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # stores in databases need more libraries
    store = (tmp_path / "store").as_uri()
    observe = {"use": "mlflow", "with": {"tracking_uri": store, "experiment": "sums"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's warnings
        run_some(tmp_path, observe)
        with pytest.raises(colocate.RoleError):
            run_some(tmp_path, observe, fails=True)
        with pytest.raises(KeyboardInterrupt):
            run_some(tmp_path, observe, interrupted=True)
        client = MlflowClient(store)
        experiment = client.get_experiment_by_name("sums")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        assert sorted(run.info.status for run in runs) == ["FAILED", "FINISHED", "KILLED"]
        for run in runs:
            history = client.get_metric_history(run.info.run_id, "accuracy")
            assert sorted((each.step, each.value) for each in history) == [(0, 0.0), (1, 1.0), (2, 2.0)]
            names = ("größe _", "_", "_.._up__there", "x" * 250)
            assert {run.data.metrics[name] for name in names} == {4, 5, 6, 7}
            assert (run.data.metrics["tokens per step"], run.data.metrics["flag"]) == (2**70, 1)
            assert run.data.params["colocate"] == colocate.__version__
            assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"config.json", "report.html"}


def test_an_mlflow_store_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the MLflow observer's thread is in log.txt once, and the run in the store is finished."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_batch = MlflowClient.log_batch

    def gone(client: MlflowClient, run: str, metrics: Sequence[Any] = (), **rest: Any) -> None:
        if metrics:
            raise ConnectionError("the store is gone")
        log_batch(client, run, metrics, **rest)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's warnings
        monkeypatch.setattr(MlflowClient, "log_batch", gone)
        store = (tmp_path / "store").as_uri()
        folder = run_some(tmp_path, {"use": "mlflow", "with": {"tracking_uri": store}})
        client = MlflowClient(store)
        experiment = client.get_experiment_by_name("colocate")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    log = (folder / "log.txt").read_text()
    assert log.count("the observer 'mlflow' raised in colocate_run_") == 1
    assert "ConnectionError: the store is gone" in log


def test_an_mlflow_server_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run doesn't start if MLflow's server doesn't answer: the library would retry for minutes, silently."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        observe = {"use": "mlflow", "with": {"tracking_uri": f"http://me:hush@{where}"}}
        with pytest.raises(colocate.PluginError, match=f"MLflow's server at http://{where} doesn't answer") as error:
            run_some(tmp_path, observe)
    assert "hush" not in str(error.value)


def test_prometheus(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from colocate_observers.prometheus import Prometheus

    observer = Prometheus(port=0)
    told: dict[tuple[str, frozenset[str]], float] = {}
    ports: list[int | None] = []
    health: list[tuple[int, bytes]] = []

    class EndpointReader:
        """Reads the endpoint during the run, after the other observer has the last step."""

        def colocate_run_logged(self, record: colocate.LogRecord) -> None:
            ports.append(observer.port)
            if record.step == STEPS - 1:
                with urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/metrics", timeout=60) as answer:
                    text = answer.read().decode()
                with urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/healthz", timeout=60) as answer:
                    health.append((answer.status, answer.read()))
                for family in text_string_to_metric_families(text):
                    for sample in family.samples:
                        told[sample.name, frozenset(sample.labels.values())] = sample.value

    folder = run_some(tmp_path, observer, EndpointReader())
    assert f"prometheus: http://127.0.0.1:{ports[0]}/metrics\n" in (folder / "log.txt").read_text()
    assert told["colocate_step", frozenset({"sums"})] == STEPS - 1
    assert told["colocate_logged", frozenset({"sums", "accuracy"})] == 2.0
    assert told["colocate_calls_total", frozenset({"sums", "policy", "echo", "noop", "ok"})] == STEPS
    assert told["colocate_phase_seconds_total", frozenset({"sums", "echo"})] > 0
    assert told["colocate_group_state", frozenset({"sums", "policy", "ready"})] == 1.0
    assert told["colocate_group_restarts_total", frozenset({"sums", "policy"})] == 0.0
    assert told["colocate_worker_deaths_total", frozenset({"sums", "policy"})] == 0.0
    assert all("sums" in labels for _, labels in told)
    assert health == [(200, b"policy ready\n")]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=60)
    assert observer.port is None


def test_prometheus_of_gpus() -> None:
    """The last sample of each GPU is served, without unknown values, and its Xid errors are counted."""
    from prometheus_client import generate_latest

    from colocate_observers.prometheus import Prometheus

    observer = Prometheus()
    observer.run = "sums"
    for use, xids in ((0.2, [79]), (0.87, [])):
        observer.colocate_devices_sampled(
            [colocate.DeviceSample(1.0, "n", [("policy", 0), ("eval", 0)], "GPU-1", "G", use, 41, 80, None, 61.0, xids)]
        )
    text = generate_latest(observer._registry).decode()
    labels = 'gpu="GPU-1",node="n",run="sums",slots="policy/0,eval/0"'
    assert f"colocate_gpu_use{{{labels}}} 0.87\n" in text
    assert f"colocate_gpu_memory_bytes{{{labels}}} 41.0\n" in text
    assert f"colocate_gpu_temperature_celsius{{{labels}}} 61.0\n" in text
    assert "colocate_gpu_power_watts{" not in text
    assert f'colocate_gpu_xid_errors_total{{{labels},xid="79"}} 1.0\n' in text


class Holder(colocate.Role):
    """Holds an array of a MiB."""

    def __init__(self) -> None:
        self.weights = numpy.zeros(1 << 17)

    @colocate.method
    def noop(self) -> None:
        """Do nothing."""


def test_prometheus_of_groups(tmp_path: Path) -> None:
    """States, restarts, deaths and held bytes of groups are served; a failed group makes the run unhealthy."""
    from prometheus_client.parser import text_string_to_metric_families

    from colocate_observers.prometheus import Prometheus

    observer = Prometheus(port=0)

    def told(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/{path}", timeout=60) as answer:
                return f"{answer.status} {answer.read().decode()}"
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    def value(name: str, *labels: str) -> float | None:
        for family in text_string_to_metric_families(told("metrics").partition(" ")[2]):
            for sample in family.samples:
                if sample.name == name and {*labels} <= {*sample.labels.values()}:
                    return sample.value
        return None

    with colocate.connect("local", processes=True) as runtime:
        pool = runtime.reserve(2)
        again = pool[0:1].spawn({"holder": colocate.role(Holder)}, "again", on_failure="restart")
        once = pool[1:2].spawn({"holder": colocate.role(Holder)}, "once")
        with colocate.record(runtime, tmp_path / "runs" / "held", observe=[observer]):
            wait_until(lambda: value("colocate_group_state", "again", "ready") == 1.0, "there is a group")
            assert value("colocate_role_bytes", "held", "again", "holder", "0", "host") is not None
            assert told("healthz") == "200 again ready\nonce ready\n"
            for group in (again, once):
                with pytest.raises(colocate.WorkerDied):
                    group.run(lambda ctx: os._exit(3))
            again.wait_ready(60)
            wait_until(lambda: told("healthz") == "503 again ready\nonce failed\n", "one is lost")
            for name, restarts in (("again", 1.0), ("once", 0.0)):
                assert value("colocate_worker_deaths_total", name) == 1.0
                assert value("colocate_group_restarts_total", name) == restarts
            once.close(force=True)
            wait_until(lambda: told("healthz") == "200 again ready\nonce closed\n", "it is closed")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """A run doesn't start if a port is taken, and the error names the observer."""
    taken = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    with taken, pytest.raises(colocate.PluginError, match=r"prometheus' raised when .*in use.* a port of its own"):
        run_some(tmp_path, {"use": "prometheus", "with": {"port": taken.server_port}})


class Collector(http.server.BaseHTTPRequestHandler):
    """Collects data that is sent by OTLP over HTTP."""

    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    bodies: list[tuple[str, bytes]] = []
    handler = type("Handler", (Collector,), {"bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def test_opentelemetry(
    tmp_path: Path, collector: tuple[str, list[tuple[str, bytes]]], caplog: pytest.LogCaptureFixture
) -> None:
    import gzip

    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    endpoint, bodies = collector
    with pytest.raises(colocate.RoleError):
        run_some(tmp_path, {"use": "opentelemetry", "with": {"endpoint": f"{endpoint}/"}}, fails=True)
    spans: list[Any] = []
    gauges: dict[str, float] = {}
    for path, body in bodies:
        data = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(data)
            spans += [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
        else:
            assert path == "/v1/metrics"
            metrics = ExportMetricsServiceRequest.FromString(data)
            for each in metrics.resource_metrics:
                for scope in each.scope_metrics:
                    gauges |= {metric.name: metric.gauge.data_points[0].as_double for metric in scope.metrics}
    (whole,) = [span for span in spans if span.name == "sums"]
    calls = [span for span in spans if span.name == "echo.noop"]
    failed, *others = [span for span in spans if span.name == "faulty.fail"]  # one for each rank that had reported
    assert len(calls) == 2 * STEPS  # on two ranks
    assert all(span.parent_span_id == whole.span_id for span in [*calls, failed, *others])
    assert "ValueError" in failed.status.message
    assert whole.status.code == 2  # an error, by OTLP
    assert all(
        span.status.code == 2 and {each.key for each in span.attributes} >= {"colocate.rank"}
        for span in (failed, *others)
    )
    assert gauges["colocate.loss"] == pytest.approx(1 / 3)
    assert (gauges["colocate.tokens_per_step"], gauges["colocate.gr__e__"], gauges["colocate."]) == (2**70, 4, 5)
    assert not {"colocate.gone", "colocate.far"} & gauges.keys()
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "/v1"])
def test_an_endpoint_that_is_none(tmp_path: Path, endpoint: str) -> None:
    """A run doesn't start with an invalid endpoint."""
    with pytest.raises(colocate.PluginError, match=f"endpoint '{endpoint}': must be like 'http://"):
        run_some(tmp_path, {"use": "opentelemetry", "with": {"endpoint": endpoint}})


def test_config_names_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config names trackers with options, and mistakes are reported before anything starts."""
    monkeypatch.chdir(tmp_path)
    config: Mapping[str, Any] = {
        "name": "demo",
        "pools": {"main": {"slots": 1}},
        "groups": {"policy": {"pool": "main", "roles": {"echo": "colocate.testing.probes.plain:Echo"}}},
        "job": f"{__name__}:job",
    }
    observe = ["tensorboard", {"use": "prometheus", "with": {"port": 0}}]
    with colocate.launch(colocate.load_config({**config, "observe": observe})) as launched:
        record = launched.run(quiet=True)
    assert list((record.directory / "tensorboard").iterdir())
    with pytest.raises(colocate.ConfigError, match="did you mean 'tensorboard'"):
        colocate.load_config({**config, "observe": ["tensorbord"]})
    with pytest.raises(colocate.ConfigError, match=r"observe\[0\].with.port: must be an integer"):
        colocate.load_config({**config, "observe": [{"use": "prometheus", "with": {"port": "eighty"}}]})
    with pytest.raises(colocate.ConfigError, match=r"observe: .*list"):
        colocate.load_config({**config, "observe": 7})


def job(run: colocate.Run) -> None:
    run.log(0, loss=1.0)
