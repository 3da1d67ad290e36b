"""Helpers of the scripts here: a runtime by mode, and verdicts."""

from __future__ import annotations

import sys
from typing import Any

import colocate

_bad: list[str] = []


def mode() -> str:
    return sys.argv[1] if len(sys.argv) > 1 else "threads"


def connect(which: str | None = None, **options: Any) -> colocate.Runtime:
    which = which or mode()
    if which == "threads":
        return colocate.connect(**options)
    if which == "strict":
        return colocate.connect("local", strict=True, **options)
    if which == "processes":
        return colocate.connect(processes=True, **options)
    return colocate.connect(which, cpus=4, **options)


def attempt(work: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the value of a call, or the error that it raised."""
    try:
        return work(*args, **kwargs)
    except Exception as error:
        return error


def verdict(what: str, good: object, got: object = "") -> None:
    print("ok  " if good else "BAD ", what, repr(got)[:400] if not good else "", flush=True)
    if not good:
        _bad.append(what)


def end() -> None:
    """End the script, with status 1 after a bad verdict."""
    sys.exit(1 if _bad else 0)
