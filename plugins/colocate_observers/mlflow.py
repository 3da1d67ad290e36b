"""`observe: [mlflow]`: what a run logs, in an MLflow store."""

from __future__ import annotations

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

import colocate


class MLflow:
    """Writes scalars, seconds per phase, versions, the config and the report."""

    def __init__(self, experiment: str = "colocate", tracking_uri: str | None = None) -> None:
        """Write to a store.

        Args:
            experiment: Its name there; made if there is none.
            tracking_uri: The store, as in "http://tracking:5000"; None for what the environment says
                (`MLFLOW_TRACKING_URI`).
        """
        self._client = MlflowClient(tracking_uri)  # no active run of MLflow's, which belongs to a thread
        self._experiment = experiment
        self._run: str | None = None

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Begin a run there."""
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(name, value) for name, value in run.environment.items()]
        self._client.log_batch(self._run, params=parameters)
        self._client.log_dict(self._run, dict(run.config), "config.json")

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Write what was logged."""
        if self._run is not None:
            seconds = {f"seconds/{phase}": spent for phase, spent in record.seconds.items()}
            at = int(record.time * 1000)
            rows = [Metric(name, value, at, record.step) for name, value in {**record.scalars, **seconds}.items()]
            self._client.log_batch(self._run, rows)

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """Write the report, and whether it went well."""
        if self._run is not None:
            report = record.directory / "report.html"
            if report.exists():
                self._client.log_artifact(self._run, str(report))
            self._client.set_terminated(self._run, "FINISHED" if error is None else "FAILED")


@colocate.hookimpl
def colocate_observer() -> type[MLflow]:
    """See `ObserverHooks`."""
    return MLflow
