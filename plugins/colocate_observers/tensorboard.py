"""The observer `tensorboard`, which writes a run's logs for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

import colocate


class TensorBoard:
    """An observer that writes scalars, seconds per phase, and the config for `tensorboard --logdir runs`."""

    def __init__(self, directory: str | None = None) -> None:
        """Set the folder for TensorBoard's files.

        Args:
            directory: The parent of a folder for each run; None for `tensorboard` in the run's own folder.
        """
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        """Open the writer. In a resumed run, TensorBoard hides old values of steps after the resumed step."""
        directory = Path(self._directory) / run.directory.name if self._directory else run.directory / "tensorboard"
        purge = None if run.resumed is None else run.resumed + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        """Write scalars and seconds per phase."""
        if self._writer is not None:
            for name, value in record.scalars.items():
                self._writer.add_scalar(name, value, record.step, record.time)
            for phase, seconds in record.seconds.items():
                self._writer.add_scalar(f"seconds/{phase}", seconds, record.step, record.time)

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        """Flush and close the writer."""
        if self._writer is not None:
            self._writer.close()


@colocate.hookimpl
def colocate_observer() -> type[TensorBoard]:
    """Return the class of the TensorBoard observer."""
    return TensorBoard
