"""Operations that a forked child is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tests.forking import exit_code, fork

import colocate
from colocate import ForkedError

from .landlord import Group, OneRuntime
from .tenants import Tenant

_PATIENCE_S = 30


def refusals(runtimes: Sequence[OneRuntime]) -> list[str]:
    """Fork, try every operation in the child, and return a line for each that isn't refused correctly."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, "\n".join(_not_refused(runtimes)).encode()[:60000])
            status = 0
        except BaseException as error:
            os.write(writing, repr(error).encode()[:1000])
        finally:
            os._exit(status)
    os.close(writing)
    status = exit_code(child, _PATIENCE_S)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    found = text.splitlines()
    return found if status == 0 else [*found, f"the child ended with status {status}"]


def _not_refused(runtimes: Sequence[OneRuntime]) -> Iterator[str]:
    for what, use in _uses(runtimes):
        try:
            use()
        except ForkedError:
            continue
        except BaseException as error:
            yield f"{what}: {error!r}"
        else:
            yield f"{what} worked"
    for each in runtimes:
        each.runtime.__exit__(None, None, None)  # Leaving a with block in a fork closes nothing.
        if each.runtime._node.closed_by is not None:
            yield f"{each.runtime!r} was closed by leaving its with block"


def _enter_scope(group: Group) -> None:
    with group.group.scope():
        pass


def _uses(runtimes: Sequence[OneRuntime]) -> Iterator[tuple[str, Callable[[], Any]]]:
    roles = {"tenant": colocate.role(Tenant)}
    for runtime in runtimes:
        yield "reserve", runtime.runtime.reserve
        yield "runtime.close", runtime.runtime.close
        for pool in runtime.pools:
            yield "spawn", partial(pool.pool.spawn, roles)
            yield "spawn on a part", partial(pool.pool[0:1].spawn, roles)
            yield "pool.close", partial(pool.pool.close, force=True)
        for group in runtime.groups():
            yield "call", group.tenant.echo
            yield "submit", group.tenant.echo.submit
            yield "keep", partial(group.tenant.make.keep, 1)
            yield "scope", partial(_enter_scope, group)
            yield "group.close", partial(group.group.close, force=True)
            for call in group.calls:
                yield "result", call.call.result
                yield "exception", call.call.exception
                yield "callback", partial(call.call.add_done_callback, print)
                yield "wait", partial(colocate.wait, [call.call])
            for kept in group.residents:
                if kept.resident is not None and not kept.freed:
                    yield "fetch", kept.resident.fetch
                    yield "spec", partial(getattr, kept.resident, "spec")
                    yield "use", partial(group.tenant.echo, kept.resident.ref)
                    yield "free", kept.resident.free
