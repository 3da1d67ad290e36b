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
from colocate.plugins import get_pip_line
from colocate.texts import format_error
from colocate_run.folder import RunFolder
from colocate_run.lock import lock_folder

OF_RUN = ("config.yaml", "metrics.jsonl")
"""Files of a run's folder that are copied, too: a run that resumes elsewhere needs the logged rows."""
_RUN_FOLDER = ".run"  # Each copy of a checkpoint has the files `OF_RUN` in this folder.
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
            core = importlib.import_module("fsspec.core")  # The extra `stores` installs fsspec.
            resolved: tuple[Any, str] = core.url_to_fs(
                self.url, **({"auto_mkdir": True} if url.startswith("file:") else {})
            )
            self._files, self._root = resolved[0], resolved[1].rstrip("/")
            if bucket := self._root.partition("/")[0]:
                with contextlib.suppress(PermissionError):  # Access may be limited to the folder.
                    self._files.ls(bucket)
            self._list_names("")
        except ImportError as error:
            raise ConfigError(
                f"checkpoints: {url}: {error}; the extra `stores` brings it for s3: {get_pip_line('stores')}"
            ) from error
        except Exception as error:  # The store's library may raise any error.
            raise ConfigError(f"checkpoints: {url} isn't to be had: {format_error(error)}") from error

    def has_run(self, run: str) -> bool:
        """Return whether the store has files of a run."""
        return bool(self._list_names(run))

    def upload_checkpoint(self, folder: RunFolder, name: str, step: int) -> None:
        """Copy a checkpoint of a run to the store; then remove checkpoints that the run's folder no longer has.

        Args:
            folder: The run's folder.
            name: The name in the run's config.
            step: The checkpoint's step.

        Raises:
            ColocateError: The copy failed; earlier checkpoints stay.
        """
        path, run = folder.find_checkpoint(step), folder.path.name
        base = f"{self._root}/{run}"
        try:
            listed = self._find_checkpoints(run)
            # Remove incomplete copies, which a killed run has left.
            halves = {entry for entry in self._list_names(run) if not entry.endswith(".json")} - {*listed}
            self._remove_checkpoints(run, halves)
            number = max((copy for saved, copy in listed.values() if saved == step), default=0) + 1
            target = f"{base}/{path.name}" + f"-{number}" * (number > 1)
            files = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*") if entry.is_file()}
            sizes = {entry: source.stat().st_size for entry, source in files.items()}
            self._files.put([str(source) for source in files.values()], [f"{target}/{entry}" for entry in files])
            for entry in OF_RUN:
                if (source := folder.path / entry).exists():
                    data = source.read_bytes()  # Read the whole file, because the run may append meanwhile.
                    self._files.pipe_file(f"{target}/{_RUN_FOLDER}/{entry}", data)
                    sizes[f"{_RUN_FOLDER}/{entry}"] = len(data)
            self._check_files(target, sizes)
            record = {"step": step, "name": name, "files": sizes}
            self._write_list(f"{target}.json", json.dumps(record).encode())
            newest = {saved: stem for stem, (saved, _) in self._find_checkpoints(run).items()}
            self._remove_checkpoints(
                run, {*self._find_checkpoints(run)} - {newest.get(saved) for saved, _ in folder.list_checkpoints()}
            )
        except Exception as error:  # The store's library may raise any error.
            raise ColocateError(
                f"the checkpoint of step {step} is in {path}, and couldn't be brought to {base}: {format_error(error)}"
            ) from error

    def download_run(self, name: str, root: Path, say: Callable[[str], None] = lambda text: None) -> None:
        """Download the newest checkpoint of a name, unless a local checkpoint is as new.

        Raises:
            ConfigError: The download failed, or another driver writes into the local folder.
        """
        pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
        runs = [(int(match[1] or 1), run) for run in self._list_names("") if (match := pattern.fullmatch(run))]
        for _, run in sorted(runs, reverse=True):
            if not (lists := self._find_checkpoints(run)):
                continue
            stem, (step, _) = [*lists.items()][-1]
            record = self._read_record(run, f"{stem}.json", step)
            if record["name"] != name:  # The run demo-2 may be of a config called "demo-2".
                continue
            folder = RunFolder((root / run).absolute())
            if _is_older(folder, record):
                folder.path.mkdir(parents=True, exist_ok=True)
                with lock_folder(folder.path, say):
                    if _is_older(folder, record):  # Another driver may have downloaded the files just now.
                        self._download(folder, stem, record)
            return

    def _read_record(self, run: str, name: str, step: int) -> Mapping[str, Any]:
        """Read and validate the list of a checkpoint's files, because the list decides which files are written."""
        try:
            record: dict[str, Any] = json.loads(self._files.cat_file(f"{self._root}/{run}/{name}"))
            if not _is_record(record, step):
                raise ValueError("it is no list of a checkpoint's files")
        except Exception as error:
            raise ConfigError(f"can't go on from {self.url}/{run}: {name}: {format_error(error)}") from error
        return record

    def _download(self, folder: RunFolder, stem: str, record: Mapping[str, Any]) -> None:
        try:
            self._download_file(folder, f"{self._root}/{folder.path.name}/{stem}", record)
        except Exception as error:
            raise ConfigError(f"can't go on from {self.url}/{folder.path.name}: {format_error(error)}") from error

    def _download_file(self, folder: RunFolder, source: str, record: Mapping[str, Any]) -> None:
        with atomic_folder(folder.find_checkpoint(record["step"])) as part:
            targets = {name: part / name for name in record["files"]}
            for target in targets.values():
                target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get([f"{source}/{name}" for name in targets], [str(target) for target in targets.values()])
            wrong = [name for name, target in targets.items() if target.stat().st_size != record["files"][name]]
            if wrong:
                raise ColocateError(f"{', '.join(wrong[:3])} isn't what was saved there")
            for path in (part / _RUN_FOLDER).glob("*"):
                path.replace(folder.path / path.name)
            (part / _RUN_FOLDER).rmdir()

    def _check_files(self, prefix: str, sizes: Mapping[str, int]) -> None:
        """Raise an error if an uploaded file has the wrong size."""
        self._files.invalidate_cache()
        stored = {path[len(prefix) + 1 :]: info["size"] for path, info in self._files.find(prefix, detail=True).items()}
        if wrong := [name for name, size in sizes.items() if stored.get(name) != size]:
            raise ColocateError(f"{', '.join(wrong[:3])} isn't there as it was put")

    def _write_list(self, path: str, text: bytes) -> None:
        """Write a list atomically. A local file needs a rename for this, but an object store doesn't."""
        part = f"{path}.part" if getattr(self._files, "local_file", False) else path
        self._files.pipe_file(part, text)
        if part != path:
            self._files.mv(part, path)

    def _find_checkpoints(self, run: str) -> dict[str, tuple[int, int]]:
        """Return the step and copy number of each complete checkpoint of a run, by name; the newest comes last."""
        matches = [match for name in self._list_names(run) if (match := _LIST.fullmatch(name))]
        steps = {match[1]: (int(match[2]), int(match[3] or 1)) for match in matches}
        return dict(sorted(steps.items(), key=lambda item: item[1]))

    def _list_names(self, run: str) -> list[str]:
        self._files.invalidate_cache()
        folder = f"{self._root}/{run}".rstrip("/")
        try:
            paths = self._files.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in paths if str(path).rstrip("/") != folder}
        return sorted(names - {""})

    def _remove_checkpoints(self, run: str, names: set[str]) -> None:
        """Remove checkpoints. Each list is removed first, because a checkpoint without a list is incomplete."""
        existing = set(self._list_names(run)) if names else set()
        for name in sorted(names):
            for entry in (f"{name}.json", name):
                if entry in existing:
                    self._files.rm(f"{self._root}/{run}/{entry}", recursive=True)


def _is_record(record: Any, step: int) -> bool:
    """Return whether a checkpoint's file list is valid: each path is inside the checkpoint, or is a file of the run."""
    match record:
        case {"step": found, "name": str(), "files": dict(files)} if found == step:
            paths = [PurePosixPath(name) for name in files]
            return all(type(size) is int for size in files.values()) and all(
                path.parts
                and not path.is_absolute()
                and ".." not in path.parts
                and (path.parts[0] != _RUN_FOLDER or path.parts[1:] in [(run_file,) for run_file in OF_RUN])
                for path in paths
            )
    return False


def _is_older(folder: RunFolder, record: Mapping[str, Any]) -> bool:
    checkpoints = folder.list_checkpoints()
    return not checkpoints or checkpoints[-1][0] < int(record["step"])
