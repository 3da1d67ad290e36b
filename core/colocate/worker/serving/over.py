"""What a hook of role code has begun may go on when it returns: the hook is over when what it returns is."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from colocate._role.awaited import awaited
from colocate.worker.serving.signal_handlers import calls_role_code


@calls_role_code
def wait_until_over(name: str, found: Any, with_tasks: bool = False) -> None:
    """Wait for what a hook has returned, if that can be waited for; any other value is passed by.

    That is a future, a coroutine or task, what `dcp.async_save` returns, a thread, a process, or several of these.

    Args:
        name: The hook's.
        found: What it has returned.
        with_tasks: Whether an async hook's tasks are waited for, too, which would be cancelled at its end.

    Raises:
        BaseException: What it has failed of.
        TypeError: It is a generator.
        ChildProcessError: It is a process, which has failed.
    """
    if inspect.isgenerator(found) or inspect.isasyncgen(found):
        raise TypeError(f"{name}() is a generator, of which nothing runs: have it do all, and yield nothing")
    if inspect.isawaitable(found):
        wait_until_over(name, _awaited(found, with_tasks))
    elif isinstance(found, list | tuple | set | frozenset):
        for each in found:
            wait_until_over(name, each)
    elif isinstance(found, Mapping):
        wait_until_over(name, [*found.values()])
    elif hasattr(found, "upload_completion"):  # torch's `AsyncSaveResponse`
        wait_until_over(name, [found.staging_completion, found.upload_completion])
    elif callable(result := getattr(found, "result", None)):  # a future
        wait_until_over(name, result())
    elif hasattr(found, "successful"):  # `multiprocessing.pool.AsyncResult`, whose `wait` tells no failure
        found.get()
    elif callable(end := getattr(found, "join" if hasattr(found, "is_alive") else "wait", None)):
        end()
        if code := getattr(found, "exitcode", None) or getattr(found, "returncode", None):
            raise ChildProcessError(f"{found!r}, which {name}() has returned, has ended with exit code {code}")


def going_on(name: str, found: Any) -> Iterator[Any]:
    """Wait until what a hook has returned has what it needs of the role; what goes on by itself then is yielded.

    A future, a thread, a process has it when it was returned. What is awaited runs in the role's own loop, to its end.
    """
    if inspect.isawaitable(found):
        wait_until_over(name, found, with_tasks=True)
    elif isinstance(found, list | tuple | set | frozenset):
        for each in found:
            yield from going_on(name, each)
    elif isinstance(found, Mapping):
        yield from going_on(name, [*found.values()])
    elif hasattr(found, "upload_completion"):
        wait_until_over(name, found.staging_completion)
        yield found.upload_completion
    else:
        yield found


def is_future(value: object) -> bool:
    """Whether it is one, or what `dcp.async_save` returns."""
    return hasattr(value, "upload_completion") or all(
        callable(getattr(value, name, None)) for name in ("result", "done", "add_done_callback")
    )


def _awaited(found: Awaitable[Any], with_tasks: bool) -> Any:
    import asyncio  # which is imported where there is something to await

    from colocate.worker.serving.tasks import current_loop

    if not isinstance(found, asyncio.Future):
        # In the lane's loop is what the role has left there; it isn't told apart from tasks that are waited for.
        here = None if with_tasks else current_loop()
        if here is None or here.is_running():
            return awaited(_whole(found, with_tasks))
        return here.run_until_complete(_whole(found, with_tasks))
    loop = found.get_loop()
    if found.done():
        return found.result()
    if loop.is_running():  # on a thread of the role's
        return asyncio.run_coroutine_threadsafe(_whole(found, False), loop).result()
    return loop.run_until_complete(found)


async def _whole(found: Any, with_tasks: bool) -> Any:
    import asyncio

    before = asyncio.all_tasks()
    while inspect.isawaitable(found):
        found = await found
    while with_tasks and (left := asyncio.all_tasks() - before):
        await asyncio.gather(*left)
    return found
