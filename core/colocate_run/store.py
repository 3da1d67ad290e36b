"""Copy a run's checkpoints to an object store (`Store`).

A checkpoint is complete when the list of its files is written, after all files.

A run has folders `RUN/step-000020/...`, and a list `RUN/step-000020.json` for each. Nothing is overwritten: a second
checkpoint of a step is `RUN/step-000020-2`, and the first checkpoint is removed afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from colocate.driver import atomic_folder
from colocate.errors import ColocateError, ConfigError
from colocate.plugins import pip_line
from colocate.texts import error_text
from colocate_run.folder import RunFolder
from colocate_run.lock import locked

OF_RUN = ("config.yaml", "metrics.jsonl")
"""Files of a run's folder that are copied, too: a run that resumes elsewhere needs the logged rows."""
_BESIDE = ".run"  # A checkpoint's copy has these files in this folder.
_LIST = re.compile(r"(step-(\d+)(?:-(\d+))?)\.json")


class Store:
    """A folder of an object store, with copies of checkpoints.

    Args:
        url: The folder: `s3://bucket/folder`, or another URL that fsspec knows.

    Raises:
        ConfigError: The store can't be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            core = importlib.import_module("fsspec.core")  # This package is installed by an extra.
            resolved: tuple[Any, str] = core.url_to_fs(
                self.url, **({"auto_mkdir": True} if url.startswith("file:") else {})
            )
            self._files, self._root = resolved[0], resolved[1].rstrip("/")
            if bucket := self._root.partition("/")[0]:
                with contextlib.suppress(PermissionError):  # Access may be limited to the folder.
                    self._files.ls(bucket)
            self._names("")
        except ImportError as error:
            raise ConfigError(
                f"checkpoints: {url}: {error}; the extra `stores` brings it for s3: {pip_line('stores')}"
            ) from error
        except Exception as error:  # The store's library may raise any error.
            raise ConfigError(f"checkpoints: {url} isn't to be had: {error_text(error)}") from error

    def has(self, run: str) -> bool:
        """Return whether the store has files of a run."""
        return bool(self._names(run))

    def put(self, folder: RunFolder, name: str, step: int) -> None:
        """Copy a checkpoint of a run to the store; then remove checkpoints that the run's folder no longer has.

        Args:
            folder: The run's folder.
            name: The name in the run's config.
            step: The checkpoint's step.

        Raises:
            ColocateError: The copy failed; earlier checkpoints stay.
        """
        path, run = folder.of(step), folder.path.name
        base = f"{self._root}/{run}"
        try:
            listed = self._lists(run)
            # Remove incomplete copies, which a killed run has left.
            halves = {entry for entry in self._names(run) if not entry.endswith(".json")} - {*listed}
            self._remove(run, halves)
            number = max((copy for saved, copy in listed.values() if saved == step), default=0) + 1
            target = f"{base}/{path.name}" + f"-{number}" * (number > 1)
            files = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*") if entry.is_file()}
            sizes = {entry: source.stat().st_size for entry, source in files.items()}
            self._files.put([str(source) for source in files.values()], [f"{target}/{entry}" for entry in files])
            for entry in OF_RUN:
                if (source := folder.path / entry).exists():
                    data = source.read_bytes()  # Read the whole file, because the run may append meanwhile.
                    self._files.pipe_file(f"{target}/{_BESIDE}/{entry}", data)
                    sizes[f"{_BESIDE}/{entry}"] = len(data)
            self._look(target, sizes)
            record = {"step": step, "name": name, "files": sizes}
            self._put_list(f"{target}.json", json.dumps(record).encode())
            newest = {saved: stem for stem, (saved, _) in self._lists(run).items()}
            self._remove(run, {*self._lists(run)} - {newest.get(saved) for saved, _ in folder.checkpoints()})
        except Exception as error:  # The store's library may raise any error.
            raise ColocateError(
                f"the checkpoint of step {step} is in {path}, and couldn't be brought to {base}: {error_text(error)}"
            ) from error

    def bring(self, name: str, root: Path, say: Callable[[str], None] = lambda text: None) -> None:
        """Download the newest checkpoint of a name, unless a local checkpoint is as new.

        Raises:
            ConfigError: The download failed, or another driver writes into the local folder.
        """
        pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
        runs = [(int(match[1] or 1), run) for run in self._names("") if (match := pattern.fullmatch(run))]
        for _, run in sorted(runs, reverse=True):
            if not (lists := self._lists(run)):
                continue
            stem, (step, _) = [*lists.items()][-1]
            record = self._record(run, f"{stem}.json", step)
            if record["name"] != name:  # The run demo-2 may be of a config called "demo-2".
                continue
            folder = RunFolder((root / run).absolute())
            if _is_behind(folder, record):
                folder.path.mkdir(parents=True, exist_ok=True)
                with locked(folder.path, say):
                    if _is_behind(folder, record):  # Another driver may have downloaded the files just now.
                        self._bring(folder, stem, record)
            return

    def _record(self, run: str, name: str, step: int) -> Mapping[str, Any]:
        """Read and validate the list of a checkpoint's files, because the list decides which files are written."""
        try:
            record: dict[str, Any] = json.loads(self._files.cat_file(f"{self._root}/{run}/{name}"))
            if not _is_list(record, step):
                raise ValueError("it is no list of a checkpoint's files")
        except Exception as error:
            raise ConfigError(f"can't go on from {self.url}/{run}: {name}: {error_text(error)}") from error
        return record

    def _bring(self, folder: RunFolder, stem: str, record: Mapping[str, Any]) -> None:
        try:
            self._get(folder, f"{self._root}/{folder.path.name}/{stem}", record)
        except Exception as error:
            raise ConfigError(f"can't go on from {self.url}/{folder.path.name}: {error_text(error)}") from error

    def _get(self, folder: RunFolder, source: str, record: Mapping[str, Any]) -> None:
        with atomic_folder(folder.of(record["step"])) as part:
            targets = {name: part / name for name in record["files"]}
            for target in targets.values():
                target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get([f"{source}/{name}" for name in targets], [str(target) for target in targets.values()])
            wrong = [name for name, target in targets.items() if target.stat().st_size != record["files"][name]]
            if wrong:
                raise ColocateError(f"{', '.join(wrong[:3])} isn't what was saved there")
            for path in (part / _BESIDE).glob("*"):
                path.replace(folder.path / path.name)
            (part / _BESIDE).rmdir()

    def _look(self, prefix: str, sizes: Mapping[str, int]) -> None:
        """Raise an error if an uploaded file has the wrong size."""
        self._files.invalidate_cache()
        stored = {path[len(prefix) + 1 :]: info["size"] for path, info in self._files.find(prefix, detail=True).items()}
        if wrong := [name for name, size in sizes.items() if stored.get(name) != size]:
            raise ColocateError(f"{', '.join(wrong[:3])} isn't there as it was put")

    def _put_list(self, path: str, text: bytes) -> None:
        """Write a list atomically. A local file needs a rename for this, but an object store doesn't."""
        part = f"{path}.part" if getattr(self._files, "local_file", False) else path
        self._files.pipe_file(part, text)
        if part != path:
            self._files.mv(part, path)

    def _lists(self, run: str) -> dict[str, tuple[int, int]]:
        """Return the step and copy number of each complete checkpoint of a run, by name; the newest comes last."""
        matches = [match for name in self._names(run) if (match := _LIST.fullmatch(name))]
        steps = {match[1]: (int(match[2]), int(match[3] or 1)) for match in matches}
        return dict(sorted(steps.items(), key=lambda item: item[1]))

    def _names(self, run: str) -> list[str]:
        self._files.invalidate_cache()
        folder = f"{self._root}/{run}".rstrip("/")
        try:
            paths = self._files.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in paths if str(path).rstrip("/") != folder}
        return sorted(names - {""})

    def _remove(self, run: str, names: set[str]) -> None:
        """Remove checkpoints. Each list is removed first, because a checkpoint without a list is incomplete."""
        existing = set(self._names(run)) if names else set()
        for name in sorted(names):
            for entry in (f"{name}.json", name):
                if entry in existing:
                    self._files.rm(f"{self._root}/{run}/{entry}", recursive=True)


def _is_list(record: Any, step: int) -> bool:
    """Return whether a list is valid, so that all paths are inside the checkpoint or name files of the run."""
    match record:
        case {"step": found, "name": str(), "files": dict(files)} if found == step:
            paths = [PurePosixPath(name) for name in files]
            return all(type(size) is int for size in files.values()) and all(
                path.parts
                and not path.is_absolute()
                and ".." not in path.parts
                and (path.parts[0] != _BESIDE or path.parts[1:] in [(run_file,) for run_file in OF_RUN])
                for path in paths
            )
    return False


def _is_behind(folder: RunFolder, record: Mapping[str, Any]) -> bool:
    checkpoints = folder.checkpoints()
    return not checkpoints or checkpoints[-1][0] < int(record["step"])
