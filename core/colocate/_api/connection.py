"""`Connection`: a connection to an executor, and the root of an ownership graph."""

from __future__ import annotations

import atexit
import itertools
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator

from colocate._api.slow import SlowCalls
from colocate._calls.failures import thread_error
from colocate._calls.services import Services
from colocate._owned.dispatcher import Dispatcher
from colocate._owned.owned import Owned, raise_together
from colocate._plugins.needs import require
from colocate._signals import deferred, guard
from colocate._signals.in_framework import DISPATCHER
from colocate._system.jobs import JobThread, format_error, report_exception
from colocate._system.limits import SETTLES_AT_EXIT_S
from colocate._system.lines import format_line
from colocate._system.numbers import FOREVER_S
from colocate._system.printer import Printer
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ColocateError, ConfigError
from colocate.executor import Executor

_numbers = itertools.count(1)
live_connections: dict[int, Connection] = {}
"""The open connections of this process."""


class Connection(Owned):
    """A connection to an executor, with the services that all groups share, and the groups' names.

    Attributes:
        services: The services of all groups.
        worker_groups: The living groups, by name.
        naming: Lock for looking up and taking a name.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        seed: int,
        strict: bool,
        call_timeout: float | None,
        collective_timeout: float,
        spill_dir: str | None,
        ports: tuple[int, int] | None,
        cut_s: float | None,
    ) -> None:
        super().__init__("runtime", name, None)
        runtime_id = f"{platform.node()}-{os.getpid()}-{next(_numbers)}"
        self.services = Services(
            runtime_id,
            executor,
            seed,
            strict,
            FOREVER_S if call_timeout is None else call_timeout,
            collective_timeout,
            spill_dir,
            ports,
            cut_s,
            timers=JobThread(f"colocate-timers-{runtime_id}", self._on_timers_failed),
            dispatcher=Dispatcher(f"{DISPATCHER}{runtime_id}"),
            printer=Printer(f"colocate-output-{runtime_id}"),
        )
        self.services.timers.start()  # Start the thread now, so that `connect` can report a lack of threads.
        self.worker_groups: dict[str, WorkerGroup] = {}
        self._closed_groups: dict[
            str, WorkerGroup
        ] = {}  # Observers may not have received all events of these closed groups.
        self.naming = threading.Lock()
        self._pool_numbers = itertools.count(1)
        self._pools_named: dict[str, Iterator[int]] = {}
        self._group_numbers = itertools.count(1)
        self._slow_calls = SlowCalls(self.services, self.worker_groups)
        live_connections[id(self)] = self
        guard.connected_runtimes.add(id(self))

    def _on_timers_failed(self, error: BaseException) -> None:
        """Fail all groups after an error in a timer job, because the job's group is unknown and might wait forever."""
        report_exception()
        for worker_group in list(self.worker_groups.values()):
            worker_group.fail_group(
                thread_error(worker_group.name, f"the thread that keeps its deadlines met {format_error(error)}")
            )

    def choose_pool_name(self, wanted: str | None) -> tuple[str, str]:
        """Return the wanted name for a pool, or an unused name, with a unique id for the reservation."""
        used_names = {child.name for child in list(self.children.values())}
        pool_name = wanted or next(
            name for number in self._pool_numbers if (name := f"pool-{number}") not in used_names
        )
        # Pools may share a name, so the reservation's id has a number.
        number = next(self._pools_named.setdefault(pool_name, itertools.count(1)))
        id = f"{self.services.id}/{pool_name}"
        return pool_name, id if number == 1 else f"{id}~{number}"

    def choose_group_name(self, wanted: str | None) -> str:
        """Return a name for a group, unique among living groups."""
        if wanted is None:
            return next(name for number in self._group_numbers if (name := f"group-{number}") not in self.worker_groups)
        if wanted in self.worker_groups:
            raise ConfigError(
                f"there is a group {wanted!r} already, made at {format_line(self.worker_groups[wanted].line)}; "
                "names are unique"
            )
        return wanted

    def release_name(self, worker_group: WorkerGroup) -> None:
        """Release the name of a closed group."""
        if self.worker_groups.get(worker_group.name) is worker_group:
            self._closed_groups[worker_group.name] = worker_group
            self.worker_groups.pop(worker_group.name, None)

            def nobody_is_told() -> None:
                if self._closed_groups.get(worker_group.name) is worker_group:
                    self._closed_groups.pop(worker_group.name)

            self.services.dispatcher.call_soon(nobody_is_told)

    def find_worker_group(self, group: str) -> WorkerGroup | None:
        """Return the worker group with this name; None for a group that was closed long ago."""
        return self.worker_groups.get(group) or self._closed_groups.get(group)

    def find_slot(self, group: str, role: str, rank: int) -> int:
        """Return the slot of a role's rank; if the group was closed long ago, return the rank itself."""
        worker_group = self.find_worker_group(group)
        info = None if worker_group is None else worker_group.roles.get(role)
        return rank if info is None else info.slots[rank]

    def require(self, capability: type, what: str) -> None:
        """Raise `CapabilityError` if the executor lacks a capability. The error names executors that have it."""
        require(type(self.services.executor), capability, what)

    def abandon(self, by: str) -> None:
        """Close the connection at once, after an interruption of `connect` or `spawn`."""
        for child in list(self.children.values()):
            child.abandon(by)  # This also stops a pool's wait for slots.
        super().abandon(by)

    def close_for(self, by: str, grace: float, force: bool) -> None:
        if self.is_forked:
            self.check_usable()
        if not self.life.mark_closing(by):
            # The dispatcher must not wait, because the closing thread waits for the dispatcher.
            if not self.services.dispatcher.is_current:
                self.life.wait_closed()
            return
        errors: list[BaseException] = []
        try:
            errors += self.close_children(grace)
        finally:
            try:
                self._slow_calls.close()
                self.services.executor.close()
            except Exception as error:
                errors.append(error)
            finally:
                dispatcher = self.services.dispatcher
                given_up = dispatcher.is_given_up()
                if not dispatcher.close(0 if given_up else None) and not given_up:
                    text = f"a callback or an observer of this runtime goes on:\n{dispatcher.stack}"
                    errors.append(ColocateError(text))
                self.services.timers.close()
                self.services.printer.close()
                live_connections.pop(id(self), None)
                guard.connected_runtimes.discard(id(self))
                self.life.set_closed()
        raise_together(f"runtime {self.name!r} was closed with errors", errors)


@atexit.register
def _close_leftovers() -> None:
    for connection in list(live_connections.values()):
        if connection.is_forked:
            continue
        # Only the connection is reported, because the connection closes all pools and groups.
        text = f"runtime {connection.name!r} made at {format_line(connection.line)} was never closed"
        try:
            try:
                if connection.closed_by is None:  # Don't warn if an interrupted close still runs.
                    warnings.warn(text, ResourceWarning, stacklevel=1)
            finally:  # Close even if the warning raises an exception.
                connection.close_here("interpreter exit", 2.0, True)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    deferred.wait_until_done(SETTLES_AT_EXIT_S)
