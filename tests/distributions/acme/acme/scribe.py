from pathlib import Path

import colocate


class Scribe:
    """Writes a line for each notification."""

    def __init__(self, file: str) -> None:
        """Write.

        Args:
            file: Its name, in the run's folder.
        """
        self.file = file
        self.path: Path | None = None

    def colocate_run_started(self, run: colocate.RunInfo) -> None:
        self.path = run.directory / self.file
        self._write(f"{run.name} starts with {len(run.config['groups'])} group, after step {run.resumed}")

    def colocate_run_logged(self, record: colocate.LogRecord) -> None:
        self._write(f"step {record.step}")

    def colocate_run_finished(self, record: colocate.RunRecord, error: BaseException | None) -> None:
        self._write(f"over: {len(record.metrics)} steps, {error!r}")

    def _write(self, line: str) -> None:
        assert self.path is not None
        with self.path.open("a") as file:
            file.write(f"{line}\n")


@colocate.hookimpl
def colocate_observer() -> type[Scribe]:
    return Scribe
