"""Whose an error is that is raised while something is unpacked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from colocate._signals.off_main import off_main
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


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def of_a_class(error: BaseException) -> None:
    """What unpickling calls."""
    raise error


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("handler", [function, partial(function), Handler(), Handler().method])
def test_of_a_handler(handler: Any) -> None:
    """It goes where a handler's errors go: out of whatever runs."""
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Ended), rebuilding("it"):
        os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(NotRebuilt, match=r"it can't be rebuilt: .*Ended"), rebuilding("it"):
        of_a_class(Ended())


@pytest.mark.parametrize("run", [lambda work: work(), off_main])
@pytest.mark.parametrize("error", [SystemExit("the value's"), ValueError("the value's")])
def test_of_the_value(error: BaseException, run: Callable[[Callable[[], None]], None]) -> None:
    """It is told as the reason, whichever thread unpacks, and whatever it is."""

    def unpack() -> None:
        with rebuilding("it"):
            of_a_class(error)

    with pytest.raises(NotRebuilt, match=r"it can't be rebuilt: .*the value's") as caught:
        run(unpack)
    assert caught.value.why is error
