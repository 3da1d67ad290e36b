"""Making calls, each with its record, and waiting for what has a bound."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.chaos.model import value_of
from tests.chaos.records import Played, Sent

import colocate

LONG_S = float(os.environ.get("COLOCATE_CHAOS_LONG_S", "30"))
"""The timeout of calls that nothing should delay but the import of torch, on a machine that is busy with faults."""
SHORT_S = 0.3
STACKS_S = 0.5
"""How long a timed out call asks its late ranks for their stacks."""
HANG_S = 5.0
"""What outlives its bound by so much hangs."""

Say = Callable[[str, float], None]
Submit = Callable[[Any, int], Any]


class Caller:
    def __init__(self, idents: Iterator[int], say: Say) -> None:
        self.hangs: list[str] = []  # what has outlived its bound, in words
        self._idents = idents
        self._say = say

    @contextmanager
    def bound(self, what: str, seconds: float) -> Iterator[None]:
        """What must end within a time. Who watches from outside is told."""
        self._say(what, seconds)
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self._say("", 0.0)
            if took > seconds + HANG_S:
                self.hangs.append(f"{what} took {took:.2f} s, and has a bound of {seconds:.2f} s")

    def settle(self, calls: Iterable[Sent]) -> None:
        for sent in calls:
            self.wait(sent)

    def wait(self, sent: Sent) -> None:
        if sent.settled is not None or sent.call is None:
            return
        at_most = (LONG_S if sent.timeout is None else sent.timeout) + STACKS_S
        self._say(str(sent), at_most)
        try:
            sent.value = sent.call.result(at_most + HANG_S)
        except TimeoutError as error:
            if not sent.call.done():
                self.hangs.append(f"{sent} is not done {HANG_S:g} s after its timeout of {sent.timeout} s")
                return
            sent.error = error
        except Exception as error:
            sent.error = error
        finally:
            self._say("", 0.0)
        sent.settled = time.monotonic()

    def submit(self, played: Played, sent: Sent, call: Submit, role: str = "a") -> Any:
        assert played.group is not None
        played.sent.append(sent)
        sent.generation, sent.role = played.generation, role
        sent.submitted = time.monotonic()
        try:
            made = call(played.group.role(role), sent.ident)
        except Exception as error:
            sent.error, sent.settled = error, time.monotonic()
            return None
        sent.call = made if isinstance(made, colocate.Call) else colocate.Call(made._kept.call)
        return made

    def new(self, what: str, ranks: Sequence[int], timeout: float | None, **more: Any) -> Sent:
        return Sent(next(self._idents), what, tuple(ranks), timeout, value_of(None), **more)
