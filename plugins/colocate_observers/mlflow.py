"""The observer `mlflow`, which writes a run's logs to an MLflow store."""

from __future__ import annotations

import posixpath
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

import colocate

_FOREIGN = re.compile(r"[^/\w.\- :]")
ANSWERS_WITHIN_S = 10.0
_LONGEST = 250  # The longest key that MLflow accepts, in characters.


class MLflow:
    """An observer that writes scalars, seconds per phase, versions, the config and the report to MLflow.

    A separate thread sends logged values in batches, so that other observers don't wait for the store.
    """

    def __init__(self, experiment: str = "colocate", tracking_uri: str | None = None) -> None:
        """Connect to an MLflow store.

        Args:
            experiment: The experiment's name in the store; created if missing.
            tracking_uri: The store, as in "http://tracking:5000"; None for the environment's (`MLFLOW_TRACKING_URI`).

        Raises:
            ConfigError: The store isn't available.
        """
        try:
            # Use a client, because MLflow's active run belongs to one thread.
            self._client = MlflowClient(tracking_uri)
        except MlflowException as error:
            raise colocate.ConfigError(
                f"MLflow has no store at {tracking_uri or 'its default address'}: name a server (tracking_uri, or "
                "MLFLOW_TRACKING_URI), or install the full package mlflow for a store on this machine "
                f"({str(error).strip()})"
            ) from error
        self._experiment = experiment
        self._run: str | None = None
        self._sender = ThreadPoolExecutor(1, "colocate-mlflow")
        self._unsent: deque[Metric] = deque()
        self._failure: Exception | None = None
        self._raised = False

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Create an MLflow run, or continue the MLflow run of a resumed run.

        Raises:
            ConfigError: The server doesn't answer, or no longer has the MLflow run.
        """
        self._check_server()
        file = run.directory / "mlflow-run"
        if run.resumed is not None and file.exists():
            self._run = self._resume_run(file)
        else:
            experiment_there = self._client.get_experiment_by_name(self._experiment)
            experiment = (
                self._client.create_experiment(self._experiment)
                if experiment_there is None
                else experiment_there.experiment_id
            )
            self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
            file.write_text(f"{self._run}\n", encoding="utf-8")
            parameters = [Param(name, value) for name, value in run.environment.items()]
            self._client.log_batch(self._run, params=parameters)  # Only in a new run, because MLflow refuses changes.
        self._client.log_dict(self._run, dict(run.config), "config.json")

    def _resume_run(self, kept: Path) -> str:
        run = kept.read_text(encoding="utf-8").strip()
        try:
            self._client.update_run(run, status="RUNNING")
        except MlflowException as error:
            raise colocate.ConfigError(
                f"MLflow can't go on with run {run} ({str(error).strip()}); to begin another one there, remove {kept}"
            ) from error
        return run

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Queue logged values for the sending thread."""
        if self._run is not None:
            self._raise_failure()
            seconds = {f"seconds/{phase}": spent for phase, spent in record.seconds.items()}
            at, logged = int(record.time * 1000), {**record.scalars, **seconds}
            self._unsent.extend(Metric(_legal_name(name), value, at, record.step) for name, value in logged.items())
            self._sender.submit(self._send_metrics, self._run)

    def _send_metrics(self, run: str) -> None:
        rows = [self._unsent.popleft() for _ in range(len(self._unsent))]
        if rows and self._failure is None:
            try:
                self._client.log_batch(run, rows)
            except Exception as error:
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None and not self._raised:
            self._raised = True
            raise self._failure

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """Wait until all values are sent, then write the report and the run's status."""
        if self._run is not None:
            self._sender.shutdown()
            self._check_server()
            report = record.directory / "report.html"
            if report.exists():
                self._client.log_artifact(self._run, str(report))
            self._client.set_terminated(self._run, _run_status(record, error))
            self._raise_failure()

    def _check_server(self) -> None:
        # Check the server here, because MLflow's client would retry silently for four minutes.
        uri = urlsplit(self._client.tracking_uri)
        if uri.scheme not in ("http", "https"):
            return
        try:
            requests.head(uri.geturl(), timeout=ANSWERS_WITHIN_S)
        except requests.exceptions.SSLError:  # MLflow's client may trust certificates that `requests` doesn't.
            pass
        except (requests.ConnectionError, requests.Timeout) as error:
            where = uri.netloc.rpartition("@")[2]
            raise colocate.ConfigError(f"MLflow's server at {uri.scheme}://{where} doesn't answer") from error


def _run_status(record: colocate.RunRecord, error: BaseException | None) -> str:
    if record.stopped or isinstance(error, KeyboardInterrupt):
        return "KILLED"  # A run that the user has stopped isn't a failed run.
    return "FINISHED" if error is None else "FAILED"


def _legal_name(name: str) -> str:
    """Convert a metric's name to a name that MLflow accepts, also as a relative path."""
    name = _FOREIGN.sub("_", name)[:_LONGEST]
    normal = posixpath.normpath(name)
    return name if normal == name and not name.startswith((".", "/")) else f"_{name.replace('/', '_')}"[:_LONGEST]


@colocate.hookimpl
def colocate_observer() -> type[MLflow]:
    """Return the class of the MLflow observer."""
    return MLflow
