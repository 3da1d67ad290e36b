"""What a piece of code leaves behind in this process and below it, with the lines that made it."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from colocate._owned.owned import Owned
from colocate.testing import origins
from colocate.testing.inventory import Thing, everything, key_of, live_objects, without_engines
from colocate.testing.waiting import becomes_true

_PATIENCE_S = 10.0
_HELD_S = 1.0
_LAST_WORDS = "What can be closed has been closed; the rest is not counted against the tests that follow."
_FIRST = "left behind: "
_MORE = " " * len(_FIRST)
_watches: list[Watch] = []


class Watch:
    """What there was at one moment; `check` fails if there is more later.

    Attributes:
        shares_engines: Whether runtimes that outlive it may start what they need later: threads and connections of
            colocate's own, and processes below those that there were.
    """

    shares_engines = False

    def __init__(self) -> None:
        origins.begin()
        self._before = set(everything())
        self._told: list[str] = []
        _watches.append(self)

    def adopt(self, more: Iterable[str]) -> None:
        """Take what has been made since for a part of what there was."""
        self._before.update(more)

    def leaked(self) -> list[str]:
        """What there is more now, in words."""
        return [thing.words for thing in self._left().values()]

    def settle(self, spared: Owned | None = None) -> None:
        """Take note of colocate's own objects that are left, and close them; all but one that somebody else closes."""
        found = {key: thing for key, thing in live_objects().items() if key not in self._before}
        if spared is not None:
            found.pop(key_of(spared), None)
        found = {key: thing for key, thing in found.items() if thing.group not in found}
        if any(thing.made == "kept" for thing in found.values()):  # their handles may be in a cycle
            gc.collect()

            def freed() -> bool:  # or held a moment longer, by a thread that has yet to let go of what it has raised
                nonlocal found
                found = {key: thing for key, thing in live_objects().items() if key in found}
                return all(thing.made != "kept" for thing in found.values())

            becomes_true(freed, _HELD_S)
        for thing in found.values():
            self._told.append(thing.words)
        for thing in found.values():  # owners come first, and close what they own
            self._told += _closed(thing)

    def check(self) -> None:
        """Fail if something is left, after what is on its way out has had time to go. Close what can be closed.

        Raises:
            AssertionError: Says what is left, and which line made it.
        """
        told: list[str] | None = None
        try:
            self.settle()
            left = self._left()

            def gone() -> bool:  # what wasn't there all the time is somebody's at work: Dask's look at the machine, say
                nonlocal left
                now = self._left()
                left = {key: thing for key, thing in left.items() if key in now}
                return not left

            if left:
                gc.collect()
                becomes_true(gone, _PATIENCE_S)
            told = [*self._told, *(thing.words for thing in left.values())]
            for thing in left.values():
                told += _closed(thing)
        finally:
            self._end(clean=told == [])
        if told:
            raise AssertionError("\n".join([_FIRST + told[0], *(_MORE + words for words in told[1:]), _LAST_WORDS]))

    def dismiss(self) -> None:
        """Close what can be closed, and say nothing: the test has failed, and there is enough to read."""
        try:
            self.settle()
            for thing in self._left().values():
                _closed(thing)
        finally:
            self._end()

    def _left(self) -> dict[str, Thing]:
        now = everything()
        left = {key: thing for key, thing in now.items() if key not in self._before}
        return without_engines(left, now) if self.shares_engines else left

    def _end(self, clean: bool = False) -> None:
        _watches.remove(self)
        if _watches and not clean:  # what has been told isn't told again
            left = self._left()
            for outer in _watches:
                outer.adopt(left)
        origins.end()


def _closed(thing: Thing) -> list[str]:
    """Close it; what went wrong with that."""
    if thing.close is None:
        return []
    try:
        thing.close()
    except BaseExceptionGroup as group:
        return [_went_wrong(each) for each in group.exceptions]
    except Exception as error:
        return [_went_wrong(error)]
    return []


def _went_wrong(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"and then, closing it: {type(error).__name__}: {text}"


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """What is made inside is shared by several tests: whoever made it closes it, later."""
    before = everything()
    try:
        yield
    finally:
        made = [key for key in everything() if key not in before]
        for watch in _watches:
            watch.adopt(made)


@contextlib.contextmanager
def own_temporary_folder(folder: Path) -> Iterator[str]:
    """Have this process and its children make their temporary files in a folder of ours."""
    old, old_env = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield str(folder)
    finally:
        tempfile.tempdir = old
        del os.environ["TMPDIR"]
        if old_env is not None:
            os.environ["TMPDIR"] = old_env
