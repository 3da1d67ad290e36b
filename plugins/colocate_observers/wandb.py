"""The observer `wandb`, which sends a run's logs to Weights & Biases."""

from __future__ import annotations

from typing import Any, Literal

import wandb
from wandb.errors import UsageError

import colocate


class WeightsAndBiases:
    """An observer that sends scalars, seconds per phase, the config and the report to W&B."""

    def __init__(
        self,
        project: str = "colocate",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        tags: list[str] | None = None,
    ) -> None:
        """Store the options for `wandb.init`.

        Args:
            project: The project's name.
            entity: The project's owner; None for the environment's (`WANDB_ENTITY`), or your own.
            mode: Whether to send, to write only, or neither; None for the environment's (`WANDB_MODE`).
            tags: Labels of the run.
        """
        self._options: dict[str, Any] = {"project": project, "entity": entity, "mode": mode, "tags": tags}
        self._run: wandb.Run | None = None
        self._next: int | None = None  # The next row's number in a resumed offline run, else None.

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Create a W&B run in the run's folder, or continue the W&B run of a resumed run.

        Raises:
            ConfigError: There is no API key.
        """
        options = {**self._options, "config": dict(run.config), "dir": str(run.directory)}
        file = run.directory / "wandb-run"  # This file has the W&B run's id, and a dot for each row.
        name, rows = "", ""
        if run.resumed is not None and file.exists():
            name, _, rows = file.read_text(encoding="utf-8").partition("\n")
            options |= {"id": name, "resume": "allow"}
        try:
            self._run = wandb.init(name=run.name, reinit="create_new", **options)
        except UsageError as error:
            if "API key" not in str(error):
                raise
            words = str(error).rstrip(".")
            raise colocate.ConfigError(
                f"{words}, or give this observer `with: {{mode: offline}}`, which needs none"
            ) from error
        self._file = file.open("ab", buffering=0)
        if self._run.id != name:
            self._file.truncate(0)
            self._file.write(f"{self._run.id}\n".encode())
        # After a resume, an offline run would number rows from 0, and a later upload would replace earlier rows.
        self._next = len(rows) if rows and self._run.offline else None
        self._run.define_metric("*", step_metric="step")  # Use the step as the x axis of charts.

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Send scalars and seconds per phase."""
        if self._run is not None:
            seconds = {f"seconds/{phase}": spent for phase, spent in record.seconds.items()}
            self._run.log({**record.scalars, **seconds, "step": record.step}, step=self._next)
            self._file.write(b".")
            self._next = None if self._next is None else self._next + 1

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """Send the report and the exit status, and wait until all data is sent."""
        if self._run is not None:
            report = record.directory / "report.html"
            if report.exists():
                self._run.save(str(report), base_path=str(record.directory), policy="now")
            self._run.finish(exit_code=0 if error is None else 1)
            self._file.close()


@colocate.hookimpl
def colocate_observer() -> type[WeightsAndBiases]:
    """Return the class of the W&B observer."""
    return WeightsAndBiases
