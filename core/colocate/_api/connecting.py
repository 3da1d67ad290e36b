"""`connect`: the executor is told before the rest of colocate is imported, which takes as long as a worker's start."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from colocate._plugins.plugins import find_executor
from colocate._signals.off_main import off_main
from colocate._system.nearest import nearest
from colocate.errors import ConfigError
from colocate.worker.birth.imports import refuse_while_importing

if TYPE_CHECKING:
    from colocate._api.runtime import Runtime
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
    replace: bool = False,
    **options: Any,
) -> Runtime:
    """Connect to an executor.

    Args:
        executor: Its name: "local", or that of another installed executor plugin.
        seed: What every `ctx.generator` is derived from.
        strict: Check what is otherwise trusted: values go through the wire format even between threads, and residents
            and arguments are checked for writes by their contents.
        call_timeout: Seconds after which a call is given up that names no `options(timeout=...)` of its own; None for
            never.
        collective_timeout: Seconds after which torch gives up an operation of a process group that colocate makes.
        spill_dir: A folder on a disk of the workers' machines, where memory of roles that sleep lies (`group.sleep`);
            None for the folder of temporary files, or `/var/tmp`.
        ports: The first and the last of the TCP ports that colocate may listen on, as "20000-20100", on every machine;
            None for any that are free. The engine, gloo and NCCL have ports of their own.
        replace: Close this process's earlier runtimes on this executor first, with all that they own: for a notebook's
            cell that is run again. What had gone wrong in them is logged.
        **options: The executor's own options.

    Returns:
        The runtime; a context manager that closes everything in it.

    Raises:
        PluginError: There is no such executor, or it can't be imported.
        ConfigError: It has no such option, or the option can't be that.
    """
    refuse_while_importing(f"connect({executor!r})")
    cls = find_executor(executor)
    off_main(lambda: cls.foresee(options))
    from colocate._api.runtime import begin

    with suggesting(connect, cls):
        return begin(executor, cls, options, seed, strict, call_timeout, collective_timeout, spill_dir, ports, replace)


@contextmanager
def suggesting(function: Callable[..., Any], cls: type[Executor]) -> Iterator[None]:
    """Have what an error says of options that an executor doesn't take suggest those that a function takes itself."""
    try:
        yield
    except ConfigError as error:
        from colocate._signatures.arguments import options_of

        own, its = inspect.signature(function).parameters, options_of(cls).parameters
        error.mistakes = [
            each if each.nearest or each.path in its else attrs.evolve(each, nearest=nearest(each.path, own))
            for each in error.mistakes
        ]
        raise
