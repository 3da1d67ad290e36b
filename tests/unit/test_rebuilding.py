"""Errors during unpickling: from a signal handler, or from the value."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest

from colocate._signals.deferred import run_deferred
from colocate._system.tracebacks import NotRebuilt, rebuilding


class Ended(Exception):
    """Raised by the handlers."""


class Handler:
    def __call__(self, number: int, frame: object) -> None:
        raise Ended

    def method(self, number: int, frame: object) -> None:
        raise Ended


def function(number: int, frame: object) -> None:
    raise Ended


def of_a_class(error: BaseException) -> None:
    """Raise an error during a rebuild."""
    with rebuilding("it"):
        raise error


@pytest.mark.parametrize("handler", [function, partial(function), Handler(), Handler().method])
def test_of_a_handler(handler: Any) -> None:
    """A signal handler's error during a rebuild propagates unchanged; the same error of a value becomes NotRebuilt."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Ended), rebuilding("it"):
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(NotRebuilt, match=r"it can't be rebuilt: .*Ended"):
            of_a_class(Ended())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_of_the_value() -> None:
    """A value's error becomes NotRebuilt, on whichever thread."""
    for error in (SystemExit("the value's"), ValueError("the value's")):
        for run in (lambda work: work(), run_deferred):
            with pytest.raises(NotRebuilt, match=r"it can't be rebuilt: .*the value's") as caught:
                run(partial(of_a_class, error))
            assert caught.value.cause is error
