"""Services of a runtime: executor, threads and settings."""

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
    """The executor, threads and settings that all groups of a runtime share.

    Attributes:
        id: The runtime's id, globally unique.
        executor: The executor of the workers.
        seed: The seed of every `ctx.generator`.
        strict: Whether everything is checked.
        call_timeout: Seconds for calls without a timeout of their own.
        collective_timeout: Seconds for an operation of a process group.
        spill_dir: Folder for sleeping memory on the workers' machines; None for one of the usual folders.
        ports: The first and the last TCP port to listen on; None for any.
        cut_s: Seconds of silence after which another machine counts as cut off; None for the default.
        timers: The thread of deadlines; runs no users' code.
        dispatcher: The thread of users' callbacks.
        printer: The thread that prints workers' output and logs.
        observers: The observers of events.
        secret: The key with which workers and driver authenticate each other.
        debugging: Whether ranks stop where a role raises, and the driver's PYTHONBREAKPOINT; None for neither.
        is_ending: Whether the run was asked to end: then no rank of any group of this process stops in a debugger.
        output_handler: Callback for the output of workers' processes: the worker's boot, the role and rank, if known,
            and the line; returns whether to hide the line.
        resumed: Checkpoints of groups in a resumed run, by group name.
        run: The run (`Run`) that records calls; None for none.
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
    output_handler: Callable[[Boot, str | None, str], bool] | None = None
    secret: bytes = attrs.field(factory=lambda: secrets.token_bytes(32), repr=False)
    debugging: tuple[bool, str] | None = None
    is_ending: bool = False
    resumed: Mapping[str, Path] = attrs.field(factory=dict)
    run: Any = None
    _keys: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    @property
    def path(self) -> tuple[str, ...]:
        """The current module search path of this process."""
        return tuple(entry or os.getcwd() for entry in sys.path)

    def new_key(self) -> int:
        return next(self._keys)

    def flush_observers(self) -> bool:
        """Wait until observers have received all events; return False if an observer hangs."""
        flag = Flag()
        self.dispatcher.call_soon(flag.set)
        return flag.wait(TOLD_WITHIN_S)

    def notify_observers(self, hook: str, *args: Any) -> None:
        """Report an event to the observers, on the dispatcher's thread."""
        if self.observers:
            self.dispatcher.call_soon(partial(self.observers.notify, hook, *args))
