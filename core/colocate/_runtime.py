"""`connect` and `Runtime`: a connection to one executor, the root of the ownership graph."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import platform
import secrets
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from colocate import _off_main
from colocate._audit import Audit, audit
from colocate._bytes import parse_bytes
from colocate._dispatcher import Dispatcher
from colocate._failures import thread_error
from colocate._graph import Graph
from colocate._group import ColocatedGroup
from colocate._jobs import JobThread, error_text, report_exception
from colocate._numbers import FOREVER_S, amount_problem, duration_problem, limit, seconds
from colocate._off_main import off_main
from colocate._owned import Making, Owned, at, caller, raise_together
from colocate._plugins import find_executor, plugins
from colocate._pool import Pool, close_children
from colocate._printer import Printer
from colocate._records import Observers
from colocate._slow import SlowCalls
from colocate.config.arguments import options_of
from colocate.config.values import path_text
from colocate.errors import CapabilityError, ColocateError, ConfigError, Mistake, PlacementTimeout
from colocate.executor import Detachable, Executor, OwnProcess, Request
from colocate.worker.imports import refuse_while_importing

_log = logging.getLogger("colocate")
_SETTLES_S = 5.0  # at interpreter exit, for a checkpoint, say, for which nobody has waited to its end
_live: dict[int, Runtime] = {}
_numbers = itertools.count(1)


def connect(
    executor: str = "local",
    *,
    seed: int = 0,
    strict: bool = False,
    call_timeout: float | None = None,
    replace: bool = False,
    **options: Any,
) -> Runtime:
    """Connect to an executor.

    Args:
        executor: Its name: "local", or that of another installed executor plugin.
        seed: What every `ctx.generator` is derived from.
        strict: Check what is otherwise trusted: values go through the wire format even between threads, and residents
            are checked for writes by their contents.
        call_timeout: Seconds after which a call is given up that names no `options(timeout=...)` of its own; None for
            never.
        replace: Close this process's earlier runtimes on this executor first, with all that they own: for a notebook's
            cell that is run again. What had gone wrong in them is logged.
        **options: The executor's own options.

    Returns:
        The runtime; a context manager that closes everything in it.

    Raises:
        PluginError: There is no such executor, or it can't be imported.
        ConfigError: It has no such option.
    """
    refuse_while_importing(f"connect({executor!r})")
    cls = find_executor(executor)
    if strict:
        options["strict"] = True
    call_timeout = limit(call_timeout, "connect(call_timeout)", positive=True)
    making: Making[Runtime] = Making(f"connect({executor!r})")

    def start() -> Runtime:
        if replace:
            _close_earlier(executor)
        return making.made(Runtime(executor, _connected(executor, cls, options), seed, strict, call_timeout))

    return making.run(start)


def _close_earlier(executor: str) -> None:
    where = at(caller())
    for runtime in reversed(list(_live.values())):
        if runtime.name == executor and not runtime.forked:
            try:
                runtime.close_for(f"connect({executor!r}, replace=True) at {where}", 2.0, True)
            except BaseExceptionGroup as errors:  # they were the earlier cell's: this one gets its runtime
                told = "".join(f"\n  {type(each).__name__}: {each}" for each in errors.exceptions)
                _log.warning("%s (connected at %s; replaced at %s)%s", errors.message, at(runtime.line), where, told)


def _connected(name: str, cls: type[Executor], options: dict[str, Any]) -> Executor:
    accepted = options_of(cls)
    if "strict" not in accepted.parameters:
        options.pop("strict", None)  # its workers are processes, where everything goes through the wire format anyway
    problems = list(accepted.problems(options))
    if problems:
        mistakes = tuple(Mistake(path_text(p.place), None, p.message, p.nearest) for p in problems)
        raise ConfigError(f"connect({name!r}, ...): the options don't fit", mistakes=mistakes)
    return cls.connect(**options)


class Runtime(Owned):
    """A connection to one executor. Made by `connect`; a context manager that closes everything in it."""

    def __init__(
        self, name: str, executor: Executor, seed: int, strict: bool, call_timeout: float | None = None
    ) -> None:
        """Use `connect`."""
        super().__init__("runtime", name, None)
        self.executor = executor
        self.seed = seed
        self.strict = strict
        self.call_timeout = FOREVER_S if call_timeout is None else call_timeout
        self.id = f"{platform.node()}-{os.getpid()}-{next(_numbers)}"
        self.secret = secrets.token_bytes(32)
        self.dispatcher = Dispatcher(f"colocate-dispatcher-{self.id}")
        self.timers = JobThread(f"colocate-timers-{self.id}", self._timers_failed)
        self.printer = Printer(f"colocate-output-{self.id}")
        self.observers = Observers()
        self.groups: dict[str, ColocatedGroup] = {}
        self.naming = threading.Lock()  # a name is looked up and taken in one
        self._keys = itertools.count(1)
        self._pool_numbers = itertools.count(1)
        self._pools_named: dict[str, Iterator[int]] = {}
        self._group_numbers = itertools.count(1)
        self._slow = SlowCalls(self)
        _live[id(self)] = self

    @property
    def path(self) -> tuple[str, ...]:
        """Where this process looks for modules, as it is now."""
        return tuple(entry or os.getcwd() for entry in sys.path)

    @property
    def graph(self) -> Graph:
        """Everything that it owns: `runtime.graph.render("tree")`."""
        return Graph(self)

    def observe(self, plugin: Any) -> None:
        """Tell an object what happens, by the hooks that it has, on the runtime's dispatcher thread.

        Hooks are `colocate_group_spawned(group)`, `colocate_call_finished(record)` (a `CallRecord`),
        `colocate_worker_died(error)`, `colocate_group_changed(name, state, cause)` (its new state, and the error that
        made it fail) and `colocate_group_closed(name)`.
        """
        self.observers.add(plugin)

    def reserve(
        self,
        slots: int = 1,
        gpus: int = 0,
        cpus: float = 1,
        host_memory: str | int | None = None,
        strategy: str = "pack",
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        detachable: bool = False,
        name: str | None = None,
    ) -> Pool:
        """Reserve slots together, all or none.

        Args:
            slots: How many.
            gpus: GPUs of each.
            cpus: CPUs of each.
            host_memory: Memory of each ("8GiB" or bytes), where the executor counts it.
            strategy: "pack" on as few nodes as possible, or "spread" over as many.
            timeout: Seconds to wait while they could fit but don't now; `math.inf` waits for ever.
            env: Environment variables, set in the workers before torch or a role is imported.
            detachable: Whether the pool may be given to the cluster later.
            name: Name of the pool.

        Raises:
            PlacementError: It can never fit; has a table of the nodes.
            PlacementTimeout: It doesn't fit now.
            CapabilityError: The executor lacks what was asked.
        """
        self.check()
        _check_request(slots, gpus, cpus, timeout, strategy, env or {})
        timeout = seconds(timeout, "reserve(timeout)")
        if env:
            self.require(OwnProcess, "set the environment of a worker (env=)")
        if detachable:
            self.require(Detachable, "give a pool to its cluster (detachable=)")
        memory = None if host_memory is None else parse_bytes(host_memory, "host_memory")
        chosen = name or self._pool_name()
        variables = {key: str(value) for key, value in (env or {}).items()}
        id = self._pool_id(chosen)
        request = Request(slots, gpus, cpus, memory, strategy, timeout, chosen, variables, id, detachable)
        making: Making[Pool] = Making(f"reserve(name={chosen!r})")

        def reserve() -> Pool:
            pool = making.made(Pool(self, chosen, request))
            try:
                self.check()  # again: who has closed it meanwhile didn't see the pool
                reservation = self.executor.reserve(request)
            except BaseException as error:
                if isinstance(error, PlacementTimeout):
                    self._name_holders(error, pool)
                pool.close_for("its failed reservation", 0.0, True)
                raise
            pool.hold(reservation)
            return pool

        return making.run(reserve)

    def _timers_failed(self, error: BaseException) -> None:
        """A job that a group needs has failed: which one's isn't known, and none is to wait for what never comes."""
        report_exception()
        for group in list(self.groups.values()):
            group.fail(thread_error(group.name, f"the thread that keeps its deadlines met {error_text(error)}"))

    def _pool_name(self) -> str:
        """A name for a pool that no living one has."""
        taken = {child.name for child in list(self.children.values())}
        return next(name for number in self._pool_numbers if (name := f"pool-{number}") not in taken)

    def _name_holders(self, error: PlacementTimeout, waited: Pool) -> None:
        """Say which pools of this runtime have slots: in a notebook, the one of a cell that is run again."""
        pools = [child for child in list(self.children.values()) if isinstance(child, Pool) and child is not waited]
        held = [f"pool {pool.name!r} has {len(pool)} (reserved at {at(pool.line)})" for pool in pools if len(pool)]
        if held:
            text = (
                f"{error.message.removesuffix(':')}; of this runtime's own, {', '.join(held)}: close what isn't needed"
            )
            error.args = (f"{text}:",)

    def _pool_id(self, name: str) -> str:
        """An id for a pool's reservation: several pools may have one name."""
        number = next(self._pools_named.setdefault(name, itertools.count(1)))
        return f"{self.id}/{name}" if number == 1 else f"{self.id}/{name}~{number}"

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
        from colocate._detached import attach

        self.check()
        self.require(Detachable, "attach a pool")
        making: Making[Pool] = Making(f"attach({name!r})")
        return making.run(lambda: making.made(attach(self, name, own)))

    def detached(self) -> list[dict[str, Any]]:
        """The detached pools of the cluster: name, groups, slots, nodes, driver, seconds left, epoch.

        One that doesn't answer, within seconds, is listed too, with `answers` False and as it was when detached.

        Raises:
            CapabilityError: The executor can't detach pools.
        """
        self.check()
        self.require(Detachable, "list detached pools")
        return off_main(lambda: [dict(each) for each in cast("Detachable", self.executor).published()])

    def require(self, capability: type, what: str) -> None:
        """Raise `CapabilityError` if the executor can't do something: who can is named."""
        if not isinstance(self.executor, capability):
            having = having_capability(capability)
            raise CapabilityError(
                f"executor {self.name!r} can't {what}: it lacks {capability.__name__}; "
                f"these have it: {', '.join(having) or 'no installed one'}",
                capability=capability.__name__,
                executors=having,
            )

    def new_key(self) -> int:
        """An id for a resident."""
        return next(self._keys)

    def group_name(self, wanted: str | None) -> str:
        """A name for a group, unique among the living ones."""
        if wanted is None:
            return next(name for number in self._group_numbers if (name := f"group-{number}") not in self.groups)
        if wanted in self.groups:
            raise ConfigError(
                f"there is a group {wanted!r} already, made at {_at(self.groups[wanted])}; names are unique"
            )
        return wanted

    def forget(self, group: ColocatedGroup) -> None:
        """A group has gone: its name is free."""
        if self.groups.get(group.name) is group:
            self.groups.pop(group.name, None)

    def audit(self) -> Audit:
        """Compare the graph with what the engine really runs and holds; false when they agree.

        Returns:
            What the engine has under our name and no graph owns (`.leaked`), and what the graph claims and the engine
            lacks (`.missing`). What is just starting or closing is in neither.
        """
        self.check()
        return off_main(lambda: audit(self))

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close its pools, the newest first, and disconnect.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although somebody else borrows from it.

        Raises:
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self.close_here(self.by_caller(), seconds(grace, "close(grace)"), force)

    def close_for(self, by: str | None, grace: float, force: bool) -> None:
        """Close it on behalf of `by` (None: of its caller)."""
        if self.forked:
            self.check()
        if not self.mark_closed(by):
            if not self.dispatcher.is_current:  # whoever closes it waits for that thread
                self.wait_closed()
            return
        self.state = "closing"
        errors: list[BaseException] = []
        try:
            errors += close_children(self, grace)
        finally:
            try:
                self._slow.close()
                self.executor.close()
            except Exception as error:
                errors.append(error)
            finally:
                if not self.dispatcher.close():
                    errors.append(
                        ColocateError(f"a callback or an observer of this runtime goes on:\n{self.dispatcher.stack}")
                    )
                self.timers.close()
                self.printer.close()
                self.state = "closed"
                _live.pop(id(self), None)
                self._finished.set()
        raise_together(f"runtime {self.name!r} was closed, and this had gone wrong", errors)


def _at(node: Owned) -> str:
    return at(node.line)


def having_capability(capability: type) -> tuple[str, ...]:
    """Names of the installed executors that have a capability."""
    found = []
    for info in plugins():
        if info.kind != "executor":
            continue
        try:
            cls = find_executor(info.name)
        except ImportError:  # one that can't be imported here can't be recommended
            continue
        if issubclass(cls, capability) or capability.__name__ in getattr(cls, "variants", {}):
            found.append(getattr(cls, "variants", {}).get(capability.__name__, info.name))
    return tuple(found)


def _check_request(slots: Any, gpus: Any, cpus: Any, timeout: Any, strategy: str, env: Mapping[str, object]) -> None:
    fraction = isinstance(gpus, float) and 0 < gpus < math.inf
    why = "a slot has whole GPUs, and its group alone uses them; several roles share one by being in one group"
    found = {
        "slots": amount_problem(slots, whole=True, least=1),
        "gpus": f"is {gpus}; {why}" if fraction else amount_problem(gpus, whole=True),
        "cpus": amount_problem(cpus),
        "timeout": duration_problem(timeout),
    }
    mistakes = [Mistake(name, None, problem) for name, problem in found.items() if problem is not None]
    if strategy not in ("pack", "spread"):
        mistakes.append(Mistake("strategy", None, f"is {strategy!r}; 'pack' or 'spread'"))
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + str(value):
            mistakes.append(Mistake(f"env.{key!r}", None, f"is {value!r}; no environment can have such a variable"))
    if mistakes:
        raise ConfigError("reserve(...) was asked for what can't be", mistakes=tuple(mistakes))


@atexit.register
def _close_what_is_left() -> None:
    """At interpreter exit: report what nobody has closed, and close it."""
    for runtime in list(_live.values()):
        if runtime.forked:
            continue
        # What it owns is closed by it, and needs no report of its own.
        text = f"runtime {runtime.name!r} made at {_at(runtime)} was never closed"
        try:
            try:
                if runtime.closed_by is None:  # a close that was interrupted twice may still go on
                    warnings.warn(text, ResourceWarning, stacklevel=1)
            finally:  # it is raised where warnings are errors
                runtime.close_here("interpreter exit", 2.0, True)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    _off_main.settle(_SETTLES_S)
