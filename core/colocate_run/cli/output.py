"""Helpers of all commands, which read the config, print results, and print errors as messages."""

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
from colocate.texts import format_exception, format_user_frames
from colocate_run.config import Config
from colocate_run.config.load import read_config
from colocate_run.folder import replace_nonfinite
from colocate_run.screen import console

P = ParamSpec("P")


def load_command_config(
    file: Path, executor: str | None, changes: Iterable[str], *, allow_import: bool = True
) -> Config:
    """Read the config of a command, and print warnings.

    Modules in the config's folder and in the current folder become importable, unless the config may import nothing,
    because these modules could shadow other modules.
    """
    for folder in (os.getcwd(), str(file.absolute().parent)) if allow_import else ():
        if folder not in sys.path:
            sys.path.insert(0, folder)
    config, warned = read_config(file, executor=executor, set=changes, allow_import=allow_import)
    for warning in warned:
        console(error=True).print(
            Text("warning: ", "bold yellow").append(Text(f"{file}: {warning}", "")), soft_wrap=True
        )
    return config


def report_errors(command: Callable[P, int]) -> Callable[P, int]:
    """Wrap a command to print errors (as JSON if called with `json=True`) and to return exit status 1.

    An error of colocate is printed as its message, after the frames of the job's code if a job raised. Any other error
    of a job is printed as a traceback without the framework's frames. An error without a frame of a job is a bug, and
    is raised.
    """

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> int:
        try:
            return command(*args, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            errors = _errors_to_print(error)
            if not all(map(_is_printable, errors)):
                raise
        print_errors(errors, as_json=bool(options.get("json")))
        return 1

    return run


def _errors_to_print(error: BaseException) -> list[BaseException]:
    """Return the errors to print: an exception group's errors, or the whole group if one is a bug of colocate."""
    if isinstance(error, BaseExceptionGroup):
        parts = [part for inner in error.exceptions for part in _errors_to_print(inner)]
        if all(map(_is_printable, parts)):
            return parts
    return [error]


def _is_printable(error: BaseException) -> bool:
    return isinstance(error, ColocateError) or bool(format_user_frames(error))


def leaf_errors(group: BaseExceptionGroup[Any]) -> list[Any]:
    """Return the exceptions in an exception group, including the exceptions in nested groups."""
    return [
        leaf
        for inner in group.exceptions
        for leaf in (leaf_errors(inner) if isinstance(inner, BaseExceptionGroup) else [inner])
    ]


def print_errors(errors: Iterable[BaseException], *, as_json: bool) -> None:
    """Print errors as text for users, or as JSON for scripts."""
    if as_json:
        print_json({"errors": [error_to_json(error) for error in errors]})
        return
    to = console(error=True)
    for error in errors:
        if not isinstance(error, ColocateError):
            to.print(Text(format_exception(error).rstrip()), soft_wrap=True)
            continue
        if frames := format_user_frames(error):
            to.print(Text(f"Traceback (most recent call last):\n{frames.rstrip()}"), soft_wrap=True)
        # An error's notes describe further errors, mostly while closing.
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        to.print(Text("error: ", "bold red").append(Text(text, "")), soft_wrap=True)


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON data."""
    message = error.message if isinstance(error, ColocateError) else str(error)
    data: dict[str, Any] = {"type": type(error).__name__, "message": message}
    if format_user_frames(error):
        data["traceback"] = format_exception(error)
    if isinstance(error, ConfigError):
        data["mistakes"] = [attrs.asdict(mistake) for mistake in error.mistakes]
    return data


def print_json(data: Any) -> None:
    """Print one JSON value on standard output."""
    sys.stdout.write(json.dumps(replace_nonfinite(data), indent=2, default=str, allow_nan=False) + "\n")
    sys.stdout.flush()
