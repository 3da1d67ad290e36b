"""What all that a runtime owns shares: its executor, its threads, and what it was connected with."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from colocate._calls.records import Observers
from colocate._owned.dispatcher import Dispatcher
from colocate._signals.deferred import Flag
from colocate._system.jobs import JobThread
from colocate._system.limits import TOLD_WITHIN_S
from colocate._system.printer import Printer
from colocate.executor import Boot, Executor


@attrs.define(eq=False)
class Services:
    """What every group of a runtime uses.

    Attributes:
        id: The runtime's, unique among all that there are.
        executor: What runs the workers.
        seed: What every `ctx.generator` is derived from.
        strict: Whether everything is checked.
        call_timeout: Seconds that a call may take which names no timeout of its own.
        collective_timeout: Seconds that an operation of a process group may take.
        spill_dir: Where memory that sleeps lies on the workers' machines; None for one of the usual folders.
        ports: The first and the last TCP port that may be listened on; None for any.
        cut_s: Seconds in which nothing may be heard of another machine; None for what is usual.
        timers: Keeps deadlines; nothing of the user's runs there.
        dispatcher: Runs users' callbacks.
        printer: Prints what workers print, and logs.
        observers: Who is told what happens.
        secret: What workers and driver know each other by.
        debugging: Whether ranks stop where a role raises, and the driver's PYTHONBREAKPOINT; None where neither is.
        is_ending: Whether its run was asked to end: no rank of any group of this process stops in a debugger any more.
        hears: Is told what workers' processes print: whose boot, the role and rank where that is known, and the line;
            returns whether the line isn't to be shown.
        resumed: Where a run that goes on has checkpoints of groups, by their names.
        run: The run (`Run`) that leaves what remains of its calls; None for none.
    """

    id: str
    executor: Executor
    seed: int
    strict: bool
    call_timeout: float
    collective_timeout: float
    spill_dir: str | None
    ports: tuple[int, int] | None
    cut_s: float | None
    timers: JobThread
    dispatcher: Dispatcher
    printer: Printer
    observers: Observers = attrs.field(factory=Observers)
    hears: Callable[[Boot, str | None, str], bool] | None = None
    secret: bytes = attrs.field(factory=lambda: secrets.token_bytes(32), repr=False)
    debugging: tuple[bool, str] | None = None
    is_ending: bool = False
    resumed: Mapping[str, Path] = attrs.field(factory=dict)
    run: Any = None
    _keys: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    @property
    def path(self) -> tuple[str, ...]:
        """Where this process looks for modules, as it is now."""
        return tuple(entry or os.getcwd() for entry in sys.path)

    def new_key(self) -> int:
        """An id for a resident."""
        return next(self._keys)

    def settle(self) -> bool:
        """Wait until observers have been told of all that has happened; False when one of them doesn't return."""
        told = Flag()
        self.dispatcher.soon(told.set)
        return told.wait(TOLD_WITHIN_S)

    def tell(self, hook: str, *args: Any) -> None:
        """Tell the observers what has happened, on the dispatcher's thread."""
        if self.observers:
            self.dispatcher.soon(partial(self.observers.tell, hook, *args))
