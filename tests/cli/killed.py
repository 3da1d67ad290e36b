"""A program whose child is killed at each file operation: `python -m tests.cli.killed FOLDER SCENARIO`.

The output is one line of JSON per kill: the checkpoints that a reader finds, the names in the folder, and the
checkpoints that the next driver finds.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from colocate._system import files
from colocate.config import load_config
from colocate_run.folder import RunFolder
from colocate_run.lock import lock_folder
from colocate_run.store import Store

STEPS = {"open", "ctypes.dlsym", "shutil.rmtree", "os.listdir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Audit events that Python raises before an operation."""


def save(folder: RunFolder, step: int, text: str) -> None:
    with folder.write_checkpoint(step) as directory:
        (directory / "policy").mkdir()
        for name in ("policy/one", "policy/two", "step"):
            (directory / name).write_text(text)


def contents(path: Path) -> str:
    """Return the text of a checkpoint, or `torn: …` if its files differ or are missing."""
    texts = [each.read_text() for each in sorted(path.rglob("*")) if each.is_file()]
    return texts[0] if len(texts) == 3 and len({*texts}) == 1 else f"torn: {texts}"


def found(folder: RunFolder) -> dict[int, str]:
    """Return the text of each listed checkpoint by its step."""
    return {step: contents(path) for step, path in folder.list_checkpoints()}


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def look(folder: RunFolder) -> dict[str, Any]:
    """Report the checkpoints that a reader finds, and those that the next driver finds after its cleanup."""
    told: dict[str, Any] = {"reader": found(folder), "names": names(folder)}
    with lock_folder(folder.path, lambda text: None):
        folder.remove_unfinished()
        told["next"], told["tidy"] = found(folder), names(folder)
    return told


def brought(url: str, root: Path) -> dict[str, Any]:
    """Report the checkpoints that another machine downloads."""
    shutil.rmtree(root, ignore_errors=True)
    Store(url).download_run("demo", root)
    return {"brought": found(RunFolder.find_latest("demo", root))}


def killed(number: int, work: Callable[[], object]) -> bool:
    """Run a function in a child that is killed before step `number`; return whether the child was killed."""
    child = os.fork()
    if child == 0:
        count = itertools.count()

        def hook(event: str, args: Any) -> None:
            if event in STEPS and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


def main(path: Path, scenario: str) -> None:
    first = RunFolder.create("demo", path / "first")
    first.write_file("config.yaml", load_config({"name": "demo"}).dump())
    for step in (1, 5):
        save(first, step, "old")
    if scenario == "renames":  # simulates a file system that can't exchange two names
        files._exchange = lambda path, other: False
    is_stored = scenario == "stored"
    store = f"file://{path}/store/deep"
    for number in itertools.count():
        shutil.rmtree(path / "run", ignore_errors=True)
        shutil.copytree(path / "first", path / "run")
        folder = RunFolder(path / "run" / "demo")
        if is_stored:
            shutil.rmtree(path / "store", ignore_errors=True)
            Store(store).upload_checkpoint(folder, "demo", 5)
            save(folder, 5, "new")
            goes_on = killed(number, partial(Store(store).upload_checkpoint, folder, "demo", 5))
            told = brought(store, path / "there")
            Store(store).upload_checkpoint(folder, "demo", 5)
            told |= {"again": brought(store, path / "there")["brought"], "names": Store(store)._list_names("demo")}
        else:
            step = 6 if scenario == "next" else 5
            goes_on = killed(number, partial(save, folder, step, "new"))
            told = look(folder)
        print(json.dumps({**told, "whole": not goes_on}), flush=True)
        if not goes_on:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
