"""`Runtime`: a connection to one executor, the root of the ownership graph."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from colocate import features
from colocate._api.connection import Connection, live_connections
from colocate._api.group import ColocatedGroup
from colocate._api.held import NodeHandle
from colocate._api.pool import Pool
from colocate._api.slots import Slots
from colocate._calls.records import check_observer
from colocate._owned.owned import NodeBuilder
from colocate._plugins.needs import require
from colocate._role.budget import NO_BUDGET, Budget
from colocate._signals.deferred import run_deferred
from colocate._signals.in_framework import check_may_wait
from colocate._signatures import options_of, path_text
from colocate._system.limits import DEBUGGED_S, REGROWN_WITHIN_S
from colocate._system.lines import find_caller, format_line
from colocate._system.numbers import (
    find_amount_problem,
    find_duration_problem,
    find_gpus_problem,
    find_labels_problem,
    find_name_problem,
    find_resources_problem,
    find_together_problem,
    find_variable_problem,
    format_value,
    parse_limit,
    parse_ports,
    parse_seconds,
)
from colocate._system.printer import report_when_slow
from colocate._system.room import find_spill_problem
from colocate.errors import ConfigError, Mistake, PlacementTimeout
from colocate.executor import Detachable, Executor, Growing, Labelled, OwnProcess, Request, SharedSlots

if TYPE_CHECKING:
    from colocate.features.looking.audit import Audit
    from colocate.features.looking.graph import Graph
    from colocate.features.recordings.driver import Recorder
    from colocate_report.trace import Trace

_log = logging.getLogger("colocate")


def open_runtime(
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
    """Check the arguments of `colocate.connect`, connect to an executor, and return the runtime."""
    if strict:
        options["strict"] = True
    call_timeout = parse_limit(call_timeout, "connect(call_timeout)", positive=True)
    collective_timeout = parse_seconds(collective_timeout, "connect(collective_timeout)", positive=True)
    spill = os.fspath(spill_dir) if isinstance(spill_dir, os.PathLike) else spill_dir
    if spill is not None and (problem := find_spill_problem(spill)) is not None:
        raise ConfigError(f"connect(spill_dir) {problem}")
    if spill is not None:
        features.get_feature("memory")
        require(cls.variant(options), OwnProcess, "have roles sleep (spill_dir=)")
    if debug:
        features.get_feature("debugging")
        require(cls.variant(options), OwnProcess, "stop where a role raises (debug=True)")
        # While a debugger stops one rank, the other ranks may wait in a collective.
        collective_timeout = max(collective_timeout, DEBUGGED_S)
    span = parse_ports(ports, "connect(ports)")
    cut_s = parse_limit(cut_s, "connect(cut_s)", positive=True)
    making: NodeBuilder[Connection] = NodeBuilder(f"connect({executor!r})")

    def start() -> Connection:
        if replace:
            _close_earlier(executor)
        with report_when_slow(f"connect({executor!r})"):
            accepted = options_of(cls)
            if "strict" not in accepted.parameters:
                # An executor without this option has processes as workers, which always receive serialized values.
                options.pop("strict", None)
            if problems := list(accepted.problems(options)):
                mistakes = tuple(Mistake(path_text(p.place), None, p.message, p.nearest) for p in problems)
                raise ConfigError(f"connect({executor!r}, ...): the options don't fit", mistakes=mistakes)
            connected = cls.connect(**accepted.convert(options))
            if cut_s is not None:
                connected.set_cut_timeout(cut_s)
        settings = seed, strict, call_timeout, collective_timeout, spill, span, cut_s
        connection = making.set_node(Connection(executor, connected, *settings))
        hook = os.environ.get("PYTHONBREAKPOINT", "")
        if hook.startswith("ray."):  # An earlier connection to Ray has set this variable.
            hook = ""
        if (debug or hook) and not connected.in_process:
            connection.services.debugging = debug, hook
        return connection

    return making.build(start, Runtime._wrap)


def _close_earlier(executor: str) -> None:
    where = format_line(find_caller())
    for connection in reversed(list(live_connections.values())):
        if connection.name == executor and not connection.is_forked:
            try:
                connection.close_for(f"connect({executor!r}, replace=True) at {where}", 2.0, True)
            except BaseExceptionGroup as errors:  # Errors of an earlier runtime don't prevent the new one.
                details = "".join(f"\n  {type(error).__name__}: {error}" for error in errors.exceptions)
                line = format_line(connection.line)
                _log.warning("%s (connected at %s; replaced at %s)%s", errors.message, line, where, details)


class Runtime(NodeHandle[Connection], node=Connection, by="colocate.connect"):
    """A connection to one executor, made by `connect`. A `with` block closes the runtime and everything in it."""

    @property
    def seed(self) -> int:
        """The seed of every `ctx.generator`."""
        return self._node.services.seed

    @property
    def groups(self) -> dict[str, ColocatedGroup]:
        """The open groups, by name."""
        return {
            name: ColocatedGroup._wrap(worker_group) for name, worker_group in list(self._node.worker_groups.items())
        }

    @property
    def graph(self) -> Graph:
        """The tree of all pools, groups and workers, which `runtime.graph.render("tree")` returns as text."""
        return cast("Graph", features.import_module_of("looking.graph").Graph(self._node))

    def observe(self, plugin: Any) -> None:
        """Register an observer: an object with hooks for events, called on the runtime's dispatcher thread.

        Hooks are `colocate_group_spawned(group)`, `colocate_call_finished(record)` (a `CallRecord`),
        `colocate_worker_died(error)`, `colocate_group_changed(name, state, cause)` (the new state, and the error
        behind a failure), `colocate_group_closed(name)`, `colocate_memory_moved(record)` (a `MoveRecord`: a role
        sleeps, or was woken), `colocate_group_checkpointed(record)` (a `CheckpointRecord`: it is complete) and
        `colocate_result_fetched(record)` (a `FetchRecord`). Calls are reported a moment after their end, those of
        the same moment one after the other, and before any later event.

        Raises:
            ConfigError: The object has no hook, or an unknown one.
        """
        check_observer(plugin, "runtime.observe")
        self._node.services.observers.append(plugin)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Write a trace of calls and events from now on, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        Each group is a process there and each of its slots a thread, with the calls of its roles, the waits before
        them and their reasons; with transfers from other workers, sleeps and wakes, and their bytes. The driver's
        calls have the bytes of their arguments and results.

        Args:
            path: The file; an existing one is replaced.

        Returns:
            The trace, a context manager that ends it. The file is up to date at any time.

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
        self._node.check_usable()
        # Import this here, because only traces need colocate_report.
        trace: Trace = import_module("colocate_report.trace").Trace(self, path, ahead or {}, zero, without)
        self.observe(trace)
        return trace

    def record(
        self, views: Any, folder: str | os.PathLike[str], *, limit: str | int | None = None, inputs: Any = ()
    ) -> Recorder:
        """Record the results of roles' calls in a folder from now on, to inspect, replay or compare the results.

        Each rank writes its own part, beside its calls: values at the end of each call, rows with their order,
        errors, and digests of arguments. Driver and workers share the folder. `colocate.load_recording` reads the
        recording, also while it grows.

        Args:
            views: A view, as `group.role(name)` returns it, or several.
            folder: A new folder, or one with recordings of other roles.
            limit: Limit on the written bytes, as "20GiB": the recording ends there with a warning.
            inputs: The view, or views, among `views` whose calls' arguments are recorded, too: as each rank receives
                them.

        Returns:
            The recorder; a context manager that ends the recording.

        Raises:
            ConfigError: An argument is no view of this runtime, or the role is recorded already, also in the folder.
        """
        module = features.import_module_of("recordings.driver")
        recorder: Recorder = module.record(views, folder, limit, inputs, self._node.services)
        return recorder

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
            slots: Number of slots. Two numbers are the least and the most, as in `(6, 8)`: the most are reserved. A
                restart that can't have as many within `regrow_timeout` continues with the available slots, and a
                later restart, or `group.resize()`, with all of them again.
            gpus: GPUs of each slot.
            cpus: CPUs of each slot.
            host_memory: Host memory of each slot ("8GiB" or bytes): reserved, if the executor counts memory; and the
                budget of the roles there, sleeping memory included.
            device_memory: The budget of the roles' memory on each slot's device: a group that exceeds it fails with
                `MemoryBudgetError` at the next check.
            strategy: "pack" on as few nodes as possible, or "spread" over as many; "strict_pack" all on one node, or
                "strict_spread" each on a node of its own.
            timeout: Seconds to wait for slots that could fit but don't now; `math.inf` waits for ever.
            env: Environment variables, set in the workers before torch or a role is imported. With a variable that
                is read earlier (`LD_*`, `PYTHON*`, `OMP_*`, `CUDA_*` ...) a worker isn't a fork but gets an
                interpreter of its own.
            detachable: Whether the pool may be given to the cluster later.
            name: Name of the pool: letters, digits, '-', '_' and '.'.
            groups: Number of groups that may share each slot at a time: each has a worker there, on the same
                devices.
            regrow_timeout: Seconds that a restart (`on_failure="restart"`) waits for replacements of lost slots,
                also for ones that need a new machine; `math.inf` waits for ever.
            spares: Number of additional slots: a restart takes one to replace a slot that is lost, or whose node has
                seen workers die twice; another spare is reserved meanwhile.
            labels: Labels of each slot's node, as `{"ray.io/accelerator-type": "H100"}`. A value may be several,
                "in(A100,H100)", or any but some, "!H100" and "!in(A100,H100)".
            resources: Amounts of the node's other resources for each slot, by name, as `{"tpu_host": 1}`.
            together: A label with one value on all nodes of the slots, as "ray.io/gpu-domain".
            grow: Whether to wait, up to `timeout`, for slots for which the cluster must grow: its autoscaler is
                told. By default, if the cluster reports an autoscaler.

        Raises:
            PlacementError: The request can never fit; has a table of the nodes.
            PlacementTimeout: The request doesn't fit now.
            CapabilityError: The executor lacks a requested capability.
        """
        connection = self._node
        connection.check_usable()
        least, slots = _parse_slot_range(slots, groups, detachable)
        labels, resources = labels or {}, resources or {}
        where = labels, resources, together
        _check_request(slots, gpus, cpus, timeout, strategy, env or {}, detachable, name, groups, *where, grow)
        timeout = parse_seconds(timeout, "reserve(timeout)")
        regrow_timeout = parse_seconds(regrow_timeout, "reserve(regrow_timeout)")
        if (problem := find_amount_problem(spares, whole=True)) is not None:
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
        budget = Budget.from_sizes(device_memory, host_memory)
        if groups > 1:
            connection.require(SharedSlots, f"let groups share slots (groups={groups})")
            if budget != NO_BUDGET:
                connection.require(
                    OwnProcess, "keep a budget (device_memory=, host_memory=) of slots that groups share"
                )
        chosen, id = connection.choose_pool_name(name)
        variables = {key: str(value) for key, value in (env or {}).items()}
        ports, cut_s = connection.services.ports, connection.services.cut_s
        amounts = slots, gpus, cpus, budget.host, strategy, timeout
        where = dict(labels), dict(resources), together or ""
        request = Request(*amounts, chosen, variables, id, detachable, ports, groups, *where, grow, cut_s)
        making: NodeBuilder[Slots] = NodeBuilder(f"reserve(name={chosen!r})")

        def reserve() -> Slots:
            slots = making.set_node(Slots(connection, chosen, request, budget, regrow_timeout, spares, least))
            try:
                connection.check_usable()  # Check again, because a close before `set_node` has missed the pool.
                with report_when_slow(f"reserve(name={chosen!r}, slots={request.slots})"):
                    reservation = connection.services.executor.reserve(slots.full_request)
            except BaseException as error:
                if isinstance(error, PlacementTimeout):
                    _name_holders(error, slots)
                slots.close_for("its failed reservation", 0.0, True)
                raise
            slots.accept_reservation(reservation)
            return slots

        return making.build(reserve, Pool._wrap)

    def attach(self, name: str, own: bool = False) -> Pool:
        """Attach a detached pool; `pool.groups` has the running groups.

        The pool is borrowed: closing it, or the end of this driver for any reason, leaves the pool alive for the
        next driver.

        Args:
            name: The name given to `detach`.
            own: Whether to take the pool from its present driver, whose uses end with `ClosedError`. The pool then
                ends with this driver, unless it is detached again.

        Raises:
            ConfigError: There is no such pool.
            BorrowedError: Another driver has the pool (without `own`).
            CapabilityError: The executor can't detach pools.
        """
        self._node.check_usable()
        self._node.require(Detachable, "attach a pool")
        making: NodeBuilder[Slots] = NodeBuilder(f"attach({name!r})")

        def attach() -> Slots:
            from colocate._api import detached

            return making.set_node(detached.attach(self._node, name, own))

        return making.build(attach, Pool._wrap)

    def detached(self) -> list[dict[str, Any]]:
        """Return the cluster's detached pools, with name, groups, slots, nodes, driver, seconds left and epoch.

        A pool that doesn't answer, within seconds, is listed too, with `answers` False and its state when detached.

        Raises:
            CapabilityError: The executor can't detach pools.
        """
        self._node.check_usable()
        self._node.require(Detachable, "list detached pools")
        check_may_wait("detached()")
        return run_deferred(
            lambda: [dict(pool_facts) for pool_facts in cast("Detachable", self._node.services.executor).list_pools()]
        )

    def audit(self) -> Audit:
        """Compare the ownership graph with the objects in the cluster. The result is false if both agree.

        Returns:
            The cluster's objects under colocate's name that no graph owns (`.leaked`), and the graph's objects that
                the cluster lacks (`.missing`). Starting and closing objects are in neither.
        """
        self._node.check_usable()
        check_may_wait("audit()")
        return cast("Audit", run_deferred(lambda: features.import_module_of("looking.audit").audit(self._node)))

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close the runtime's pools, the newest first, and disconnect.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for ever.
            force: Close the runtime despite borrows.

        Raises:
            ExceptionGroup: The errors, after everything has been freed.
        """
        self._node.close_by_caller(grace, force)


def _parse_slot_range(slots: Any, groups: Any, detachable: Any) -> tuple[int | None, int]:
    """Return the minimum and the maximum number of slots. The minimum is None if `slots` is one number."""
    if not isinstance(slots, tuple | list):
        return None, slots
    if (
        len(slots) != 2
        or any(find_amount_problem(number, whole=True, least=1) for number in slots)
        or slots[0] > slots[1]
    ):
        raise ConfigError(f"reserve(slots={slots!r}): give a number, or the least and the most, as in (6, 8)")
    if groups != 1 or detachable:
        option = "groups" if groups != 1 else "detachable"
        raise ConfigError(f"reserve(slots={slots!r}, {option}={groups if groups != 1 else True}): one or the other")
    return slots[0], slots[1]


def _name_holders(error: PlacementTimeout, waited: Slots) -> None:
    """Add the runtime's other pools to an error, because an earlier run of a notebook cell may hold the slots."""
    children = list(waited.connection.children.values())
    pools = [child for child in children if isinstance(child, Slots) and child is not waited]
    held = [
        f"pool {pool.name!r} has {len(pool.places)} (reserved at {format_line(pool.line)})"
        for pool in pools
        if pool.places
    ]
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
    problems = {
        "slots": find_amount_problem(slots, whole=True, least=1),
        "gpus": find_gpus_problem(gpus),
        "cpus": find_amount_problem(cpus),
        "timeout": find_duration_problem(timeout),
        "env": None
        if isinstance(env, Mapping)
        else f"must be a mapping from variables to values, not {format_value(env)}",
        "detachable": None
        if isinstance(detachable, bool)
        else f"must be True or False, not {format_value(detachable)}",
        "name": find_name_problem(name),
        "groups": find_amount_problem(groups, whole=True, least=1),
        "labels": find_labels_problem(labels),
        "resources": find_resources_problem(resources),
        "together": find_together_problem(together),
        "grow": None
        if grow is None or isinstance(grow, bool)
        else f"must be True, False or None, not {format_value(grow)}",
    }
    mistakes = [Mistake(name, None, problem) for name, problem in problems.items() if problem is not None]
    if strategy not in _STRATEGIES:
        mistakes.append(Mistake("strategy", None, f"is {strategy!r}; {', '.join(map(repr, _STRATEGIES))}"))
    for key, value in env.items() if isinstance(env, Mapping) else ():
        if (problem := find_variable_problem(key, value)) is not None:
            mistakes.append(Mistake(f"env.{key!r}", None, problem))
    if mistakes:
        raise ConfigError("reserve(...) has invalid arguments", mistakes=tuple(mistakes))
