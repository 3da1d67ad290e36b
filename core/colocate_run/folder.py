"""Manage the folder of a run, with the config, the metrics, and complete checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from colocate.driver import (
    GrowingFile,
    atomic_folder,
    list_complete_folders,
    remove_folder,
    tidy_folder,
    write_atomically,
)
from colocate.errors import ConfigError
from colocate_run.lock import LOCK

_STEP = re.compile(r"step-(\d+)")


@attrs.define(eq=False)
class RunFolder:
    """The folder of a run: runs/<name>, or runs/<name>-2 and so on if the name is taken."""

    path: Path  # absolute
    # Raises an error if another driver has taken the folder.
    check_lock: Callable[[], object] = attrs.field(default=lambda: None, kw_only=True)
    _metrics: GrowingFile | None = attrs.field(default=None, init=False)

    @classmethod
    def create(
        cls, name: str, root: Path, is_taken: Callable[[str], bool] = lambda name: False, *, shared: bool = False
    ) -> RunFolder:
        """Create a new folder for a run, with a name that is unused here and for which `is_taken` is false.

        If `shared`, return a folder that another driver has just made; later only one of these drivers gets the lock.
        """
        path = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = (root / (name if number == 1 else f"{name}-{number}")).absolute()
                with contextlib.suppress(FileExistsError):
                    if not is_taken(path.name):
                        path.mkdir()
                        break
                if shared and (_is_just_created(path) or cls(path).belongs_to(name)):
                    break
        except OSError as error:
            raise ConfigError(f"can't make the run's folder {path}: {error.strerror or error}") from error
        return cls(path)

    def free_name(self, stem: str, suffix: str) -> Path:
        """Return an unused path for a file, because a resumed run keeps the files of earlier attempts."""
        names = (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}" for number in itertools.count(1))
        return next(path for name in names if not (path := self.path / name).exists())

    @classmethod
    def find_all(cls, name: str, root: Path) -> list[RunFolder]:
        """Return the folders of runs with this name, newest first."""
        pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
        named = [(pattern.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ())]
        numbered = sorted(((int(match[1] or 1), path) for match, path in named if match), reverse=True)
        folders = [cls(path.absolute()) for _, path in numbered]
        # The folder demo-2 may also be the first run of a config called "demo-2".
        return [folder for folder in folders if folder.belongs_to(name)]

    @classmethod
    def find_latest(cls, name: str, root: Path) -> RunFolder:
        """Return the newest folder of this name with a complete checkpoint."""
        if match := next((folder for folder in cls.find_all(name, root) if folder.list_checkpoints()), None):
            return match
        raise ConfigError(
            f"nothing to resume: no complete checkpoint of {name!r} in {root.absolute()}; run it without --resume, or "
            "with --resume=auto, which begins where there is none"
        )

    def read_config(self) -> str:
        """Return the text of the run's last config; empty if there is no config."""
        path = self.path / "config.yaml"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def belongs_to(self, name: str) -> bool:
        """Return whether a config of this name has run in the folder."""
        from colocate_run.config.source import read_file  # Imported here, because this module imports YAML.

        with contextlib.suppress(ConfigError):  # The config may be missing or invalid.
            return read_file(self.path / "config.yaml").data.get("name") == name
        return False

    def write_file(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_atomically(self.path / name, text)

    def move_aside(self, stem: str, suffix: str) -> None:
        """Rename a file to an unused name, if the file exists."""
        path = self.path / f"{stem}{suffix}"
        if path.exists():
            path.rename(self.free_name(stem, suffix))

    def remove_file(self, name: str) -> None:
        """Remove a file, if there is one."""
        (self.path / name).unlink(missing_ok=True)

    # -- metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl. NaN and infinity become null, because JSON has neither."""
        if self._metrics is None:
            self._metrics = GrowingFile(self.path / "metrics.jsonl")
        self._metrics.append_text(json.dumps(replace_nonfinite(row), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close metrics.jsonl; the next `append_metrics` opens the file again."""
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()

    def rewind_metrics(self, step: int) -> list[dict[str, Any]]:
        """Remove the rows of metrics.jsonl after a step, and return the remaining rows."""
        self.close()
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        rows = [row for row in map(_parse_row, lines) if row is not None and row["step"] <= step]
        self.write_file("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    # -- checkpoints

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Return the complete checkpoints with their steps, oldest first."""
        folders = list_complete_folders(self.path / "checkpoints")
        return sorted((int(match[1]), path) for name, path in folders.items() if (match := _STEP.fullmatch(name)))

    def remove_unfinished(self) -> None:
        """Remove unfinished checkpoints of a killed driver. Only the driver with the folder's lock may call this."""
        if (folder := self.path / "checkpoints").is_dir():
            tidy_folder(folder, _STEP.pattern, is_alone=True)

    def find_checkpoint(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which may not exist."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    @contextlib.contextmanager
    def write_checkpoint(self, step: int, keep: int = 2) -> Iterator[Path]:
        """A context manager that yields a folder for a step's checkpoint.

        If the block raises no error, the checkpoint is complete, and all but the last `keep` checkpoints are removed.
        """
        with atomic_folder(self.find_checkpoint(step)) as part:
            yield part
            self.check_lock()
        for _, path in self.list_checkpoints()[:-keep]:
            remove_folder(path)


def _is_just_created(path: Path) -> bool:
    """Return whether a driver has just made this folder, but hasn't written the config yet."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {""}
    return not names or (LOCK in names and "config.yaml" not in names)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities in a value by None, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    return [replace_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


def _parse_row(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; return None for an invalid line, such as a killed run's incomplete last line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
