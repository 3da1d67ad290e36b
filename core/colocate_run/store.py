"""`Store`: what runs have saved, in an object store. A checkpoint counts there when the list of its files is put, last.

For each run there is `RUN/step-000020/...`, and beside that `RUN/step-000020.json`, which is the list. Nothing there is
written over: another checkpoint of the same step is `RUN/step-000020-2`, and the first one is removed afterwards.
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
"""Files of a run's folder that go along: who goes on elsewhere has what was logged."""
_BESIDE = ".run"  # the folder of a checkpoint in which they are
_LIST = re.compile(r"(step-(\d+)(?:-(\d+))?)\.json")


class Store:
    """One folder of it.

    Args:
        url: Where that is: `s3://bucket/folder`, or what else fsspec knows.

    Raises:
        ConfigError: It isn't to be had.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            core = importlib.import_module("fsspec.core")  # an extra's
            found: tuple[Any, str] = core.url_to_fs(
                self.url, **({"auto_mkdir": True} if url.startswith("file:") else {})
            )
            self._files, self._root = found[0], found[1].rstrip("/")
            if bucket := self._root.partition("/")[0]:
                with contextlib.suppress(PermissionError):  # only what is in the folder may be looked at
                    self._files.ls(bucket)
            self._names("")
        except ImportError as error:
            raise ConfigError(
                f"checkpoints: {url}: {error}; the extra `stores` brings it for s3: {pip_line('stores')}"
            ) from error
        except Exception as error:  # of whatever library there is for it
            raise ConfigError(f"checkpoints: {url} isn't to be had: {error_text(error)}") from error

    def has(self, run: str) -> bool:
        """Return whether there is anything of a run."""
        return bool(self._names(run))

    def put(self, folder: RunFolder, name: str, step: int) -> None:
        """Bring a checkpoint of a run there; then remove what isn't in its folder any more.

        Args:
            folder: The run's.
            name: What the run's config is called.
            step: The checkpoint's.

        Raises:
            ColocateError: It can't be; those from before stay.
        """
        path, run = folder.of(step), folder.path.name
        there = f"{self._root}/{run}"
        try:
            listed = self._lists(run)
            halves = {each for each in self._names(run) if not each.endswith(".json")} - {*listed}  # of a killed run
            self._remove(run, halves)
            number = max((copy for saved, copy in listed.values() if saved == step), default=0) + 1
            target = f"{there}/{path.name}" + f"-{number}" * (number > 1)
            files = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if each.is_file()}
            sizes = {each: source.stat().st_size for each, source in files.items()}
            self._files.put([str(source) for source in files.values()], [f"{target}/{each}" for each in files])
            for each in OF_RUN:
                if (source := folder.path / each).exists():
                    data = source.read_bytes()  # to which the run may add meanwhile
                    self._files.pipe_file(f"{target}/{_BESIDE}/{each}", data)
                    sizes[f"{_BESIDE}/{each}"] = len(data)
            self._look(target, sizes)
            record = {"step": step, "name": name, "files": sizes}
            self._put_list(f"{target}.json", json.dumps(record).encode())
            newest = {saved: stem for stem, (saved, _) in self._lists(run).items()}
            self._remove(run, {*self._lists(run)} - {newest.get(saved) for saved, _ in folder.checkpoints()})
        except Exception as error:  # of whatever library there is for it
            raise ColocateError(
                f"the checkpoint of step {step} is in {path}, and couldn't be brought to {there}: {error_text(error)}"
            ) from error

    def bring(self, name: str, root: Path, say: Callable[[str], None] = lambda text: None) -> None:
        """Have the newest run of a name be on this machine, as far as it is saved, where that is farther than here.

        Raises:
            ConfigError: It can't be, or another driver writes into its folder here.
        """
        pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
        runs = [(int(match[1] or 1), run) for run in self._names("") if (match := pattern.fullmatch(run))]
        for _, run in sorted(runs, reverse=True):
            if not (lists := self._lists(run)):
                continue
            stem, (step, _) = [*lists.items()][-1]
            record = self._record(run, f"{stem}.json", step)
            if record["name"] != name:  # demo-2 may be the first of a config called so
                continue
            folder = RunFolder((root / run).absolute())
            if _is_behind(folder, record):
                folder.path.mkdir(parents=True, exist_ok=True)
                with locked(folder.path, say):
                    if _is_behind(folder, record):  # another driver may have brought it just now
                        self._bring(folder, stem, record)
            return

    def _record(self, run: str, name: str, step: int) -> Mapping[str, Any]:
        """Read the list of a checkpoint's files, which isn't trusted: it says what is written here, and where."""
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
        """See that files are there as they were put."""
        self._files.invalidate_cache()
        found = {path[len(prefix) + 1 :]: told["size"] for path, told in self._files.find(prefix, detail=True).items()}
        if wrong := [name for name, size in sizes.items() if found.get(name) != size]:
            raise ColocateError(f"{', '.join(wrong[:3])} isn't there as it was put")

    def _put_list(self, path: str, text: bytes) -> None:
        """Write a list in one step: local files by a rename, object stores write all objects in one step."""
        part = f"{path}.part" if getattr(self._files, "local_file", False) else path
        self._files.pipe_file(part, text)
        if part != path:
            self._files.mv(part, path)

    def _lists(self, run: str) -> dict[str, tuple[int, int]]:
        """Return step and number of each complete checkpoint of a run, by name; the newest comes last."""
        matches = [match for name in self._names(run) if (match := _LIST.fullmatch(name))]
        found = {match[1]: (int(match[2]), int(match[3] or 1)) for match in matches}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _names(self, run: str) -> list[str]:
        """Return what lies in the folder of a run, or in that of all, by name."""
        self._files.invalidate_cache()
        folder = f"{self._root}/{run}".rstrip("/")
        try:
            found = self._files.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found if str(path).rstrip("/") != folder}
        return sorted(names - {""})

    def _remove(self, run: str, names: set[str]) -> None:
        """Remove checkpoints: first the list by which each counts."""
        there = set(self._names(run)) if names else set()
        for name in sorted(names):
            for each in (f"{name}.json", name):
                if each in there:
                    self._files.rm(f"{self._root}/{run}/{each}", recursive=True)


def _is_list(record: Any, step: int) -> bool:
    """Whether that is what `put` writes: nothing of it is outside of the checkpoint, but for files of the run."""
    match record:
        case {"step": found, "name": str(), "files": dict(files)} if found == step:
            paths = [PurePosixPath(name) for name in files]
            return all(type(size) is int for size in files.values()) and all(
                path.parts
                and not path.is_absolute()
                and ".." not in path.parts
                and (path.parts[0] != _BESIDE or path.parts[1:] in [(each,) for each in OF_RUN])
                for path in paths
            )
    return False


def _is_behind(folder: RunFolder, record: Mapping[str, Any]) -> bool:
    """Whether a run has come farther there than here."""
    here = folder.checkpoints()
    return not here or here[-1][0] < int(record["step"])
