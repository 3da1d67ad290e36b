"""Waits for work that hooks return. A hook is done only when the returned work is done."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from colocate._role.awaited import run_coroutine
from colocate.worker.serving.signal_handlers import calls_role_code


@calls_role_code
def wait_for_outcome(name: str, found: Any, with_tasks: bool = False) -> None:
    """Wait for the work that a hook has returned. Ignore a result that can't be waited for.

    Waitable are futures, coroutines, tasks, results of `dcp.async_save`, threads, processes, and containers of these.

    Args:
        name: The hook's name.
        found: The hook's result.
        with_tasks: Whether to wait for an async hook's tasks, too, which are cancelled otherwise.

    Raises:
        BaseException: The error of the awaited work.
        TypeError: The result is a generator.
        ChildProcessError: A process has failed.
    """
    if inspect.isgenerator(found) or inspect.isasyncgen(found):
        raise TypeError(f"{name}() is a generator, of which nothing runs: have it do all, and yield nothing")
    if inspect.isawaitable(found):
        wait_for_outcome(name, _run_awaitable(found, with_tasks))
    elif isinstance(found, list | tuple | set | frozenset):
        for item in found:
            wait_for_outcome(name, item)
    elif isinstance(found, Mapping):
        wait_for_outcome(name, [*found.values()])
    elif hasattr(found, "upload_completion"):  # This is torch's `AsyncSaveResponse`.
        wait_for_outcome(name, [found.staging_completion, found.upload_completion])
    elif callable(result := getattr(found, "result", None)):  # a future
        wait_for_outcome(name, result())
    elif hasattr(found, "successful"):  # The method `wait` of a `multiprocessing.pool.AsyncResult` hides failures.
        found.get()
    elif callable(end := getattr(found, "join" if hasattr(found, "is_alive") else "wait", None)):
        end()
        if code := getattr(found, "exitcode", None) or getattr(found, "returncode", None):
            raise ChildProcessError(f"{found!r}, which {name}() has returned, has ended with exit code {code}")


def iter_background(name: str, found: Any) -> Iterator[Any]:
    """Wait until a hook's result no longer needs the role, and yield the work that continues without the role.

    Futures, threads and processes don't need the role. Awaitables run in the role's loop, to their end.
    """
    if inspect.isawaitable(found):
        wait_for_outcome(name, found, with_tasks=True)
    elif isinstance(found, list | tuple | set | frozenset):
        for item in found:
            yield from iter_background(name, item)
    elif isinstance(found, Mapping):
        yield from iter_background(name, [*found.values()])
    elif hasattr(found, "upload_completion"):
        wait_for_outcome(name, found.staging_completion)
        yield found.upload_completion
    else:
        yield found


def is_future(value: object) -> bool:
    """Return whether a value is a future, or a result of `dcp.async_save`."""
    return hasattr(value, "upload_completion") or all(
        callable(getattr(value, name, None)) for name in ("result", "done", "add_done_callback")
    )


def _run_awaitable(found: Awaitable[Any], with_tasks: bool) -> Any:
    import asyncio  # Role code that creates an awaitable has usually imported asyncio already.

    from colocate.worker.serving.tasks import get_current_loop

    if not isinstance(found, asyncio.Future):
        # In the lane's loop, the hook's tasks couldn't be distinguished from other tasks of the role.
        lane_loop = None if with_tasks else get_current_loop()
        if lane_loop is None or lane_loop.is_running():
            return run_coroutine(_await_all(found, with_tasks))
        return lane_loop.run_until_complete(_await_all(found, with_tasks))
    loop = found.get_loop()
    if found.done():
        return found.result()
    if loop.is_running():  # The loop runs on a thread that the role has started.
        return asyncio.run_coroutine_threadsafe(_await_all(found, False), loop).result()
    return loop.run_until_complete(found)


async def _await_all(found: Any, with_tasks: bool) -> Any:
    import asyncio

    before = asyncio.all_tasks()
    while inspect.isawaitable(found):
        found = await found
    while with_tasks and (tasks := asyncio.all_tasks() - before):
        await asyncio.gather(*tasks)
    return found
