"""`connect` and `spawn`. Both let the executor begin slow preparations while this process imports slow modules."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import attrs

from colocate._definitions import ids
from colocate._plugins.plugins import find_executor
from colocate._signals.in_framework import act_for_user
from colocate._system.nearest import find_nearest
from colocate._system.own_modules import preload_modules
from colocate._system.tracebacks import drop_own_traceback, fold_uncaught
from colocate.errors import ColocateError, ConfigError
from colocate.worker.birth.imports import is_importing

if TYPE_CHECKING:
    from colocate._api.connection import Connection
    from colocate._api.group import ColocatedGroup
    from colocate._api.runtime import Runtime as Runtime
    from colocate._role.role import RoleSpec
    from colocate.executor import Executor


def connect(
    executor: str = "local",
    *,
    seed: int = 0,
    strict: bool = False,
    call_timeout: float | None = None,
    collective_timeout: float = 1800.0,
    spill_dir: str | os.PathLike[str] | None = None,
    ports: str | None = None,
    cut_s: float | None = None,
    debug: bool = False,
    replace: bool = False,
    **options: Any,
) -> Runtime:
    """Connect to an executor.

    Args:
        executor: The executor's name: "local", or that of another installed executor plugin.
        seed: The seed of every `ctx.generator`.
        strict: Check more: values go through the wire format even between threads, and contents of residents and
            arguments are checked for writes.
        call_timeout: Seconds after which a call without `options(timeout=...)` is given up; None for never.
        collective_timeout: Seconds after which torch gives up an operation of a process group that colocate makes.
        spill_dir: A folder on a disk of the workers' machines, for memory of sleeping roles (`group.sleep`); None
            for the folder of temporary files, or `/var/tmp`. Refused on threads, where no role sleeps.
        ports: The first and the last of colocate's TCP ports, as "20000-20100", on every machine; None for any free
            ones. Ray, Dask, gloo and NCCL have ports of their own.
        cut_s: Seconds of silence after which everything on another machine is given up; None for 15, or the
            executor's own value. Shorter cuts of a network are waited out.
        debug: Stop at an error of a role before the error is reported: in a debugger in this process's terminal, if
            there is one, else in that of `colocate debug`. `collective_timeout` is then at least a day. Refused on
            threads.
        replace: First close this process's earlier runtimes on this executor, with everything in them: for a
            notebook's cell that is run again. Errors of these runtimes are logged.
        **options: The executor's own options.

    Returns:
        The runtime; a context manager that closes everything in it.

    Raises:
        PluginError: There is no such executor, or its import fails.
        ConfigError: The executor has no such option, or the option's value is wrong.
        CapabilityError: The executor lacks a requested capability.
    """
    _refuse_while_importing(f"connect({executor!r})")
    fold_uncaught()
    cls = find_executor(executor)
    cls.foresee(options)
    from colocate._api.runtime import open_runtime

    preload_modules()
    with _suggest_options(connect, cls):
        return open_runtime(
            executor,
            cls,
            options,
            seed,
            strict,
            call_timeout,
            collective_timeout,
            spill_dir,
            ports,
            cut_s,
            debug,
            replace,
        )


def spawn(
    roles: Mapping[str, RoleSpec[Any]],
    *,
    slots: int = 1,
    executor: str = "local",
    gpus: int = 0,
    cpus: float = 1,
    host_memory: str | int | None = None,
    device_memory: str | int | None = None,
    strategy: str = "pack",
    env: Mapping[str, str] | None = None,
    reserve_timeout: float = 60.0,
    name: str | None = None,
    mesh: Mapping[str, Any] | None = None,
    on_failure: str = "fail",
    timeout: float | None = None,
    restarts: int = 3,
    restore: str | os.PathLike[str] | None = None,
    residency: Literal["swap"] | None = None,
    step: Sequence[str] | None = None,
    **options: Any,
) -> ColocatedGroup:
    """Connect, reserve slots and start a group on them, for a script with one group.

    The runtime exists for the group alone: closing the group, or leaving its `with` block, closes the pool and the
    runtime too. The pool is `group.owner`, and the runtime `group.owner.owner`. For several groups or pools, use
    `connect`, `Runtime.reserve` and `Pool.spawn`.

    Args:
        roles: The roles by name, as `colocate.role(...)` declares them; constructed in this order.
        slots: Number of workers, each with every role.
        executor: The executor's name, as in `connect`.
        gpus: GPUs of each slot.
        cpus: CPUs of each slot.
        host_memory: The host memory of each slot, as in `Runtime.reserve`.
        device_memory: The budget of the roles' memory on each slot's device.
        strategy: "pack" on as few nodes as possible, or "spread" over as many; "strict_pack" all on one node, or
            "strict_spread" each on a node of its own.
        env: Environment variables, set in the workers before torch or a role is imported.
        reserve_timeout: Seconds to wait for slots that could fit but don't now.
        name: Name of the group.
        mesh: Mesh of the roles on all slots without a mesh of their own.
        on_failure: "fail", or "restart": see `Pool.spawn`.
        timeout: Seconds for the start, and for each restart; None for no limit.
        restarts: Number of restarts without a new checkpoint in between.
        restore: Folder of a checkpoint to start from.
        residency: "swap": roles take turns within `device_memory`.
        step: The roles in the order of calls in one step.
        **options: Other arguments of `connect`: `seed`, `strict`, `replace` ..., and the executor's own options,
            such as `processes` of "local". The executor's `cpus`, `gpus` and `timeout` have another meaning here;
            for these, use `connect`.

    Returns:
        The group; a context manager that closes everything.

    Raises:
        PluginError: There is no such executor, or its import fails.
        ConfigError: The declaration or an option is wrong.
        PlacementError: The slots can never fit; has a table of the nodes.
        PlacementTimeout: The slots don't fit now.
        CapabilityError: The executor lacks a requested capability.
        RoleStartError: A role could not be constructed. After any error, nothing is left running.
    """
    _refuse_while_importing("spawn(...)")
    from colocate._owned.owned import NodeBuilder

    making: NodeBuilder[Connection] = NodeBuilder(f"colocate.spawn(name={name!r})")

    def begin() -> Connection:
        with act_for_user(), _suggest_options(spawn, find_executor(executor)):
            return making.set_node(connect(executor, **options)._node)

    def fill(connection: Connection) -> ColocatedGroup:
        from colocate._api.runtime import Runtime as Runtime

        try:
            with act_for_user():
                pool = Runtime._wrap(connection).reserve(
                    slots, gpus, cpus, host_memory, device_memory, strategy, reserve_timeout, env
                )
                group = pool.spawn(
                    roles, name, mesh, on_failure, timeout, restarts, restore, residency=residency, step=step
                )
        except BaseException as error:
            connection.close_after(error, "its failed spawn", 0.0)
            raise
        group._node.closed_as = connection
        return group

    try:
        return making.build(begin, fill)
    except ColocateError as error:  # Drop the traceback if all frames are colocate's own.
        raise drop_own_traceback(error)  # noqa: B904 - it is the same one


@contextmanager
def _suggest_options(function: Callable[..., Any], cls: type[Executor]) -> Iterator[None]:
    """A context manager that adds similar parameter names to errors about unknown executor options."""
    try:
        yield
    except ConfigError as error:
        from colocate._signatures import options_of

        own_parameters, executor_parameters = inspect.signature(function).parameters, options_of(cls).parameters
        error.mistakes = [
            mistake
            if mistake.nearest or mistake.path in executor_parameters
            else attrs.evolve(mistake, nearest=find_nearest(mistake.path, own_parameters))
            for mistake in error.mistakes
        ]
        raise


def _refuse_while_importing(what: str) -> None:
    """Refuse to connect from a module that a worker is importing, because workers would start workers without end.

    Raises:
        ColocateError: A module under import in this worker connects.
    """
    frame = sys._getframe() if ids.find_missing is not None else None  # `find_missing` is None except in a worker.
    while frame is not None:
        if is_importing(frame):
            raise ColocateError(
                f"module {frame.f_globals['__name__']!r} calls {what} when it is imported "
                f"({frame.f_code.co_filename}:{frame.f_lineno}), and a worker imports it, for a class or function that "
                'it defines. Put the call into a function, or under `if __name__ == "__main__":`'
            )
        frame = frame.f_back
