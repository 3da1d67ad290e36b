"""Whose an error is that is raised while something is unpacked."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest

from colocate._signals.deferred import run_deferred
from colocate._system.tracebacks import NotRebuilt, rebuilding


class Ended(Exception):
    """A handler's."""


class Handler:
    def __call__(self, number: int, frame: object) -> None:
        raise Ended

    def method(self, number: int, frame: object) -> None:
        raise Ended


def function(number: int, frame: object) -> None:
    raise Ended


def of_a_class(error: BaseException) -> None:
    """What unpickling calls."""
    with rebuilding("it"):
        raise error


@pytest.mark.parametrize("handler", [function, partial(function), Handler(), Handler().method])
def test_of_a_handler(handler: Any) -> None:
    """It goes where a handler's errors go, out of whatever runs; the value's own is told as the reason."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Ended), rebuilding("it"):
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(NotRebuilt, match=r"it can't be rebuilt: .*Ended"):
            of_a_class(Ended())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_of_the_value() -> None:
    """Whichever thread unpacks, and whatever it is."""
    for error in (SystemExit("the value's"), ValueError("the value's")):
        for run in (lambda work: work(), run_deferred):
            with pytest.raises(NotRebuilt, match=r"it can't be rebuilt: .*the value's") as caught:
                run(partial(of_a_class, error))
            assert caught.value.cause is error
