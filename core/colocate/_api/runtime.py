"""`Runtime`: a connection to one executor, the root of the ownership graph."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from colocate import features
from colocate._api.connection import Connection, live
from colocate._api.group import ColocatedGroup
from colocate._api.held import Held
from colocate._api.pool import Pool
from colocate._api.slots import Slots
from colocate._calls.records import check_observer
from colocate._owned.owned import Making
from colocate._plugins.needs import require
from colocate._role.budget import NO_BUDGET, Budget
from colocate._signals.deferred import run_deferred
from colocate._signals.in_framework import refuse_to_wait
from colocate._signatures import options_of, path_text
from colocate._system.limits import DEBUGGED_S, REGROWN_WITHIN_S
from colocate._system.lines import at, caller
from colocate._system.numbers import (
    amount_problem,
    duration_problem,
    gpus_problem,
    labels_problem,
    limit,
    name_problem,
    port_range,
    resources_problem,
    seconds,
    shown,
    together_problem,
    variable_problem,
)
from colocate._system.printer import told_when_slow
from colocate._system.room import spill_problem
from colocate.errors import ConfigError, Mistake, PlacementTimeout
from colocate.executor import Detachable, Executor, Growing, Labelled, OwnProcess, Request, SharedSlots

if TYPE_CHECKING:
    from colocate.features.looking.audit import Audit
    from colocate.features.looking.graph import Graph
    from colocate.features.recordings.driver import Recorder
    from colocate_report.trace import Trace

_log = logging.getLogger("colocate")


def begin(
    executor: str,
    cls: type[Executor],
    options: dict[str, Any],
    seed: int,
    strict: bool,
    call_timeout: float | None,
    collective_timeout: float,
    spill_dir: str | os.PathLike[str] | None,
    ports: str | None,
    cut_s: float | None,
    debug: bool,
    replace: bool,
) -> Runtime:
    """As `connect`, whose executor has been found."""
    if strict:
        options["strict"] = True
    call_timeout = limit(call_timeout, "connect(call_timeout)", positive=True)
    collective_timeout = seconds(collective_timeout, "connect(collective_timeout)", positive=True)
    spill = os.fspath(spill_dir) if isinstance(spill_dir, os.PathLike) else spill_dir
    if spill is not None and (problem := spill_problem(spill)) is not None:
        raise ConfigError(f"connect(spill_dir) {problem}")
    if spill is not None:
        features.needed("memory")
        require(cls.variant(options), OwnProcess, "have roles sleep (spill_dir=)")
    if debug:
        features.needed("debugging")
        require(cls.variant(options), OwnProcess, "stop where a role raises (debug=True)")
        collective_timeout = max(collective_timeout, DEBUGGED_S)  # others wait there for who is stopped
    span = port_range(ports, "connect(ports)")
    cut_s = limit(cut_s, "connect(cut_s)", positive=True)
    making: Making[Connection] = Making(f"connect({executor!r})")

    def start() -> Connection:
        if replace:
            _close_earlier(executor)
        with told_when_slow(f"connect({executor!r})"):
            accepted = options_of(cls)
            if "strict" not in accepted.parameters:
                options.pop("strict", None)  # its workers are processes: everything goes through the wire format anyway
            if problems := list(accepted.problems(options)):
                mistakes = tuple(Mistake(path_text(p.place), None, p.message, p.nearest) for p in problems)
                raise ConfigError(f"connect({executor!r}, ...): the options don't fit", mistakes=mistakes)
            connected = cls.connect(**accepted.built(options))
            if cut_s is not None:
                connected.bear(cut_s)
        told = seed, strict, call_timeout, collective_timeout, spill, span, cut_s
        connection = making.made(Connection(executor, connected, *told))
        hook = os.environ.get("PYTHONBREAKPOINT", "")
        if hook.startswith("ray."):  # Ray has set it, by an earlier connection
            hook = ""
        if (debug or hook) and not connected.in_process:
            connection.services.debugging = debug, hook
        return connection

    return making.run(start, Runtime._of)


def _close_earlier(executor: str) -> None:
    where = at(caller())
    for connection in reversed(list(live.values())):
        if connection.name == executor and not connection.forked:
            try:
                connection.close_for(f"connect({executor!r}, replace=True) at {where}", 2.0, True)
            except BaseExceptionGroup as errors:  # they were the earlier cell's: this one gets its runtime
                told = "".join(f"\n  {type(each).__name__}: {each}" for each in errors.exceptions)
                line = at(connection.line)
                _log.warning("%s (connected at %s; replaced at %s)%s", errors.message, line, where, told)


class Runtime(Held[Connection], node=Connection, by="colocate.connect"):
    """A connection to one executor. Made by `connect`; a context manager that closes everything in it."""

    @property
    def seed(self) -> int:
        """Return what every `ctx.generator` is derived from."""
        return self._node.services.seed

    @property
    def groups(self) -> dict[str, ColocatedGroup]:
        """The groups that live, by name."""
        return {name: ColocatedGroup._of(worker_group) for name, worker_group in list(self._node.worker_groups.items())}

    @property
    def graph(self) -> Graph:
        """Everything that it owns: `runtime.graph.render("tree")`."""
        return cast("Graph", features.module("looking.graph").Graph(self._node))

    def observe(self, plugin: Any) -> None:
        """Tell an object what happens, by the hooks that it has, on the runtime's dispatcher thread.

        Hooks are `colocate_group_spawned(group)`, `colocate_call_finished(record)` (a `CallRecord`),
        `colocate_worker_died(error)`, `colocate_group_changed(name, state, cause)` (its new state, and the error that
        made it fail), `colocate_group_closed(name)`, `colocate_memory_moved(record)` (a `MoveRecord`: a role sleeps, or
        was woken), `colocate_group_checkpointed(record)` (a `CheckpointRecord`: it is complete) and
        `colocate_result_fetched(record)` (a `FetchRecord`). Calls are told of a moment after their end, those of the
        same moment one after the other, and before whatever happens later.

        Raises:
            ConfigError: It has none of them, or one that doesn't exist.
        """
        check_observer(plugin, "runtime.observe")
        self._node.services.observers.append(plugin)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Write calls from now on, and what else happens, into a file, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        Each group is a process there and each of its slots a thread, with what its roles ran and for how long a call
        had waited, and for whom; with what came to it from other workers, sleeps and wakes, and their bytes. The
        driver's calls have the bytes of their arguments and results.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            The trace, a context manager that ends it. What has been told is in the file at any time.

        Raises:
            OSError: The file can't be written, or another trace is being written there.
        """
        return self._trace(Path(path))

    def _trace(
        self,
        path: Path,
        ahead: Mapping[tuple[str, int], float] | None = None,
        zero: float = 0.0,
        without: Collection[str] = (),
    ) -> Trace:
        """Write a trace in a time of its own, see `Trace`."""
        self._node.check()
        # A package beside core: only traces need colocate_report.
        trace: Trace = import_module("colocate_report.trace").Trace(self, path, ahead or {}, zero, without)
        self.observe(trace)
        return trace

    def record(
        self, views: Any, folder: str | os.PathLike[str], *, limit: str | int | None = None, inputs: Any = ()
    ) -> Recorder:
        """Write what the calls of roles give into a folder, from now on: to look at, to replay, to compare with.

        Each rank writes its own part, beside its calls: values as they are when a call ends, rows with their order,
        errors, and what tells arguments from others. The folder is one that driver and workers share.
        `colocate.load_recording` reads it, also while it grows.

        Args:
            views: A view, as `group.role(name)` gives it, or several.
            folder: Where to; none that is there, or one with recordings of other roles.
            limit: How much is written at most, as "20GiB": the recording ends there with a warning.
            inputs: Of `views` the one, or those, whose calls' arguments are written, too: as each rank gets them.

        Returns:
            What records them; a context manager that ends it.

        Raises:
            ConfigError: What is given is no view of this runtime, or the role is recorded already, also there.
        """
        module = features.module("recordings.driver")
        found: Recorder = module.record(views, folder, limit, inputs, self._node.services)
        return found

    def reserve(
        self,
        slots: int | tuple[int, int] = 1,
        gpus: int = 0,
        cpus: float = 1,
        host_memory: str | int | None = None,
        device_memory: str | int | None = None,
        strategy: str = "pack",
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        detachable: bool = False,
        name: str | None = None,
        groups: int = 1,
        regrow_timeout: float = REGROWN_WITHIN_S,
        spares: int = 0,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        together: str | None = None,
        grow: bool | None = None,
    ) -> Pool:
        """Reserve slots together, all or none.

        Args:
            slots: How many. Two numbers are the least and the most, as in `(6, 8)`: the most are reserved. A restart
                that can't have as many within `regrow_timeout` goes on with what there is, and a later one, or
                `group.resize()`, with all of them again.
            gpus: GPUs of each.
            cpus: CPUs of each.
            host_memory: The host's memory of each ("8GiB" or bytes): where the executor counts it, it is reserved; and
                it is the budget of what roles hold there, with what sleeps.
            device_memory: The budget of what roles hold of each one's device: a group in which they hold more fails
                with `MemoryBudgetError` where that shows.
            strategy: "pack" on as few nodes as possible, or "spread" over as many; "strict_pack" all on one node, or
                "strict_spread" each on a node of its own.
            timeout: Seconds to wait while they could fit but don't now; `math.inf` waits for ever.
            env: Environment variables, set in the workers before torch or a role is imported. With one that is read
                before that (`LD_*`, `PYTHON*`, `OMP_*`, `CUDA_*` ...) a worker is no fork but gets an interpreter of
                its own.
            detachable: Whether the pool may be given to the cluster later.
            name: Name of the pool: letters, digits, '-', '_' and '.'.
            groups: How many groups may share each slot at a time: each has a worker there, on the same devices.
            regrow_timeout: Seconds that a restart (`on_failure="restart"`) waits for slots in the place of lost ones,
                also for what can't fit before a machine has come; `math.inf` waits for ever.
            spares: Slots held besides: a restart takes one where a slot is lost, or lies on a node on which workers
                have died twice, and another spare is reserved meanwhile.
            labels: Labels that each one's node has, as `{"ray.io/accelerator-type": "H100"}`. A value may be several,
                "in(A100,H100)", or any but some, "!H100" and "!in(A100,H100)".
            resources: How much each has of what its node offers besides, by name, as `{"tpu_host": 1}`.
            together: A label of which all their nodes have one value, as "ray.io/gpu-domain".
            grow: Whether slots are waited for, up to `timeout`, for which the cluster has to grow: its autoscaler is
                told. By default where the cluster says that it has one.

        Raises:
            PlacementError: It can never fit; has a table of the nodes.
            PlacementTimeout: It doesn't fit now.
            CapabilityError: The executor lacks what was asked.
        """
        connection = self._node
        connection.check()
        least, slots = _least_and_most(slots, groups, detachable)
        labels, resources = labels or {}, resources or {}
        where = labels, resources, together
        _check_request(slots, gpus, cpus, timeout, strategy, env or {}, detachable, name, groups, *where, grow)
        timeout = seconds(timeout, "reserve(timeout)")
        regrow_timeout = seconds(regrow_timeout, "reserve(regrow_timeout)")
        if (problem := amount_problem(spares, whole=True)) is not None:
            raise ConfigError(f"reserve(spares) {problem}")
        if spares and detachable:
            raise ConfigError("reserve(spares=...): a pool that may be detached has none; it isn't reserved anew")
        if env:
            connection.require(OwnProcess, "set the environment of a worker (env=)")
        if any(where):
            connection.require(Labelled, "place slots by what nodes say of themselves (labels=, resources=, together=)")
        if grow:
            connection.require(Growing, "wait for nodes that are to come (grow=)")
        if detachable:
            connection.require(Detachable, "give a pool to its cluster (detachable=)")
        budget = Budget.of(device_memory, host_memory)
        if groups > 1:
            connection.require(SharedSlots, f"let groups share slots (groups={groups})")
            if budget != NO_BUDGET:
                connection.require(
                    OwnProcess, "keep a budget (device_memory=, host_memory=) of slots that groups share"
                )
        chosen, id = connection.pool_name(name)
        variables = {key: str(value) for key, value in (env or {}).items()}
        ports, cut_s = connection.services.ports, connection.services.cut_s
        what = slots, gpus, cpus, budget.host, strategy, timeout
        where = dict(labels), dict(resources), together or ""
        request = Request(*what, chosen, variables, id, detachable, ports, groups, *where, grow, cut_s)
        making: Making[Slots] = Making(f"reserve(name={chosen!r})")

        def reserve() -> Slots:
            slots = making.made(Slots(connection, chosen, request, budget, regrow_timeout, spares, least))
            try:
                connection.check()  # again: who has closed it meanwhile didn't see the pool
                with told_when_slow(f"reserve(name={chosen!r}, slots={request.slots})"):
                    reservation = connection.services.executor.reserve(slots.wanted)
            except BaseException as error:
                if isinstance(error, PlacementTimeout):
                    _name_holders(error, slots)
                slots.close_for("its failed reservation", 0.0, True)
                raise
            slots.hold(reservation)
            return slots

        return making.run(reserve, Pool._of)

    def attach(self, name: str, own: bool = False) -> Pool:
        """Go on with a pool that was detached; its groups are in `pool.groups`.

        It is borrowed: closing it, or the end of this driver in whatever manner, leaves it as it is for the next one.

        Args:
            name: What it was detached as.
            own: Take it from whoever has it, whose uses of it end with `ClosedError`. It is this driver's then: it ends
                with it, unless it is detached again.

        Raises:
            ConfigError: There is no such pool.
            BorrowedError: Another driver has it (without `own`).
            CapabilityError: The executor can't detach pools.
        """
        self._node.check()
        self._node.require(Detachable, "attach a pool")
        making: Making[Slots] = Making(f"attach({name!r})")

        def attach() -> Slots:
            from colocate._api import detached  # which nothing else of core needs

            return making.made(detached.attach(self._node, name, own))

        return making.run(attach, Pool._of)

    def detached(self) -> list[dict[str, Any]]:
        """The detached pools of the cluster: name, groups, slots, nodes, driver, seconds left, epoch.

        One that doesn't answer, within seconds, is listed too, with `answers` False and as it was when detached.

        Raises:
            CapabilityError: The executor can't detach pools.
        """
        self._node.check()
        self._node.require(Detachable, "list detached pools")
        refuse_to_wait("detached()")
        return run_deferred(
            lambda: [dict(each) for each in cast("Detachable", self._node.services.executor).published()]
        )

    def audit(self) -> Audit:
        """Compare the graph with what the cluster really runs and holds; false when they agree.

        Returns:
            What the cluster has under our name and no graph owns (`.leaked`), and what the graph claims and the cluster
            lacks (`.missing`). What is just starting or closing is in neither.
        """
        self._node.check()
        refuse_to_wait("audit()")
        return cast("Audit", run_deferred(lambda: features.module("looking.audit").audit(self._node)))

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close its pools, the newest first, and disconnect.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although somebody else borrows from it.

        Raises:
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)


def _least_and_most(slots: Any, groups: Any, detachable: Any) -> tuple[int | None, int]:
    """Return both numbers of slots; None for a least one that nobody gave."""
    if not isinstance(slots, tuple | list):
        return None, slots
    if len(slots) != 2 or any(amount_problem(each, whole=True, least=1) for each in slots) or slots[0] > slots[1]:
        raise ConfigError(f"reserve(slots={slots!r}): give a number, or the least and the most, as in (6, 8)")
    if groups != 1 or detachable:
        what = "groups" if groups != 1 else "detachable"
        raise ConfigError(f"reserve(slots={slots!r}, {what}={groups if groups != 1 else True}): one or the other")
    return slots[0], slots[1]


def _name_holders(error: PlacementTimeout, waited: Slots) -> None:
    """Say which pools of this runtime have slots: in a notebook, the one of a cell that is run again."""
    children = list(waited.connection.children.values())
    pools = [child for child in children if isinstance(child, Slots) and child is not waited]
    held = [f"pool {pool.name!r} has {len(pool.places)} (reserved at {at(pool.line)})" for pool in pools if pool.places]
    if held:
        text = f"{error.message.removesuffix(':')}; of this runtime's own, {', '.join(held)}: close what isn't needed"
        error.args = (f"{text}:",)


_STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")


def _check_request(
    slots: Any,
    gpus: Any,
    cpus: Any,
    timeout: Any,
    strategy: str,
    env: Any,
    detachable: Any,
    name: Any,
    groups: Any,
    labels: Any,
    resources: Any,
    together: Any,
    grow: Any,
) -> None:
    found = {
        "slots": amount_problem(slots, whole=True, least=1),
        "gpus": gpus_problem(gpus),
        "cpus": amount_problem(cpus),
        "timeout": duration_problem(timeout),
        "env": None if isinstance(env, Mapping) else f"must be a mapping from variables to values, not {shown(env)}",
        "detachable": None if isinstance(detachable, bool) else f"must be True or False, not {shown(detachable)}",
        "name": name_problem(name),
        "groups": amount_problem(groups, whole=True, least=1),
        "labels": labels_problem(labels),
        "resources": resources_problem(resources),
        "together": together_problem(together),
        "grow": None if grow is None or isinstance(grow, bool) else f"must be True, False or None, not {shown(grow)}",
    }
    mistakes = [Mistake(name, None, problem) for name, problem in found.items() if problem is not None]
    if strategy not in _STRATEGIES:
        mistakes.append(Mistake("strategy", None, f"is {strategy!r}; {', '.join(map(repr, _STRATEGIES))}"))
    for key, value in env.items() if isinstance(env, Mapping) else ():
        if (problem := variable_problem(key, value)) is not None:
            mistakes.append(Mistake(f"env.{key!r}", None, problem))
    if mistakes:
        raise ConfigError("reserve(...) was asked for what can't be", mistakes=tuple(mistakes))
