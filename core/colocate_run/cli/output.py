"""What the commands share: reading the config, printing, and errors as their message."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

import attrs
from rich.text import Text

from colocate.errors import ColocateError, ConfigError
from colocate.texts import frames_of_users, told
from colocate_run.config import Config
from colocate_run.config.load import read_config
from colocate_run.folder import finite
from colocate_run.screen import console

P = ParamSpec("P")


def load(file: Path, executor: str | None, changes: Iterable[str], *, allow_import: bool = True) -> Config:
    """The config of a command.

    The modules beside it, and those in the current folder, can be imported from now on; not those of a config that may
    import nothing, for they could stand in for others.
    """
    for folder in (os.getcwd(), str(file.absolute().parent)) if allow_import else ():
        if folder not in sys.path:
            sys.path.insert(0, folder)
    config, warned = read_config(file, executor=executor, set=changes, allow_import=allow_import)
    for each in warned:
        console(error=True).print(Text("warning: ", "bold yellow").append(Text(f"{file}: {each}", "")), soft_wrap=True)
    return config


def guarded(command: Callable[P, int]) -> Callable[P, int]:
    """Have a command tell what goes wrong, which is exit status 1; as JSON, where it is called with json=True.

    An error of colocate is its message, with the frames of the code that called, if it was a job's. Any other of a job
    is its traceback, without the framework's frames. One without a frame of a job is a bug, and is raised.
    """

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> int:
        try:
            return command(*args, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            found = _told_as(error)
            if not all(map(_is_told, found)):
                raise
        print_errors(found, as_json=bool(options.get("json")))
        return 1

    return run


def _told_as(error: BaseException) -> list[BaseException]:
    """Return what is told for an error: those in a group, or the group where one of them doesn't say whose it is."""
    if isinstance(error, BaseExceptionGroup):
        parts = [part for each in error.exceptions for part in _told_as(each)]
        if all(map(_is_told, parts)):
            return parts
    return [error]


def _is_told(error: BaseException) -> bool:
    return isinstance(error, ColocateError) or bool(frames_of_users(error))


def leaves(group: BaseExceptionGroup[Any]) -> list[Any]:
    """The exceptions of a group, those of groups inside it included."""
    return [
        leaf for each in group.exceptions for leaf in (leaves(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]


def print_errors(errors: Iterable[BaseException], *, as_json: bool) -> None:
    """Errors as people or as scripts read them."""
    if as_json:
        print_json({"errors": [error_data(error) for error in errors]})
        return
    to = console(error=True)
    for error in errors:
        if not isinstance(error, ColocateError):
            to.print(Text(told(error).rstrip()), soft_wrap=True)
            continue
        if frames := frames_of_users(error):
            to.print(Text(f"Traceback (most recent call last):\n{frames.rstrip()}"), soft_wrap=True)
        # Notes tell what else went wrong, mostly while closing.
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        to.print(Text("error: ", "bold red").append(Text(text, "")), soft_wrap=True)


def error_data(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
    message = error.message if isinstance(error, ColocateError) else str(error)
    data: dict[str, Any] = {"type": type(error).__name__, "message": message}
    if frames_of_users(error):
        data["traceback"] = told(error)
    if isinstance(error, ConfigError):
        data["mistakes"] = [attrs.asdict(mistake) for mistake in error.mistakes]
    return data


def print_json(data: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(finite(data), indent=2, default=str, allow_nan=False) + "\n")
    sys.stdout.flush()
