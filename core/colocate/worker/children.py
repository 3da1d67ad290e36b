"""The processes that the roles of a worker have started (`ctx.start`): who fails of their end, and when they end.

A child has two supervisors of its own (`birth/supervisor.py`), also where workers are threads of the driver: what it
has started ends with it, and it with the thread that has started it, that of an event loop, which ends with the worker.

The end of a child fails the calls of its role that run, and those of roles that use that one. In a worker process the
lane is the main thread: a signal breaks what it waits for, and its handler raises in role code. What an async method
awaits is cancelled. On `local` threads nothing breaks a wait: such a call fails when it ends, or by what it waits for.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from colocate._protocol import from_worker, to_worker
from colocate._protocol.message import Message
from colocate._role.context import Context, current, running_call
from colocate._system.limits import TOLD_AGAIN_AFTER_S
from colocate._system.numbers import limit
from colocate.errors import ColocateError, ConfigError, SerializationError
from colocate.executor import Boot
from colocate.wire import LOOPBACK, EventLoop
from colocate.worker.birth import supervisor
from colocate.worker.birth.imports import own_sources
from colocate.worker.lane import Lane, Work
from colocate.worker.memory.context import private_bytes
from colocate.worker.serving import handlers
from colocate.worker.serving.output import say_for
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.scope import Scope

if TYPE_CHECKING:
    from colocate._role.child import Child, Fails, Health, Ready

_NUDGE_S, _LONGEST_NUDGE_S = 0.005, 0.1
_BROKEN_WITHIN_S = 0.1  # what a child's end has broken is heard of before that end


class _Worker(Protocol):
    """What they need of a worker; see `WorkerContext`."""

    boot: Boot
    in_process: bool
    lane: Lane
    scope: Scope
    roles: dict[Any, RoleInstance]

    def say(self, message: Message) -> None:
        """Tell the driver."""
        ...


class Children:
    """Those of a worker, in the order in which they were started.

    Attributes:
        dead: Those that have ended by themselves and that a role has neither stopped nor started again.
    """

    def __init__(self, worker_context: _Worker, broken: Callable[[str, str], None]) -> None:
        """Args: broken: What the worker is told when its group is to fail: of what, and a child's last lines."""
        self._worker_context = worker_context
        self._broken = broken
        self._all: dict[tuple[str, str], Child] = {}
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()
        self.dead: tuple[Child, ...] = ()

    # -- for role code

    def start(
        self,
        ctx: Context,
        program: Sequence[str] | Callable[[Any], object],
        name: str | None,
        ready: Ready | None,
        within: float,
        health: Health | None,
        hung_after: float,
        env: Mapping[str, str] | None,
        python: str | None,
        cwd: str | None,
        port: int | None,
        fails: Fails,
    ) -> Child:
        """See `Context.start`."""
        # As all that few workers need, this is imported when one needs it.
        from multiprocessing.connection import Connection

        from colocate._role.child import Child, Parent

        words, title = _words(program, python, port)
        name = name or title
        what = f"ctx.start({name!r})"
        limit(within, f"{what}: within")
        limit(hung_after, f"{what}: hung_after")
        if fails not in ("call", "group", None):
            raise ConfigError(f"{what}: fails={fails!r}; it is 'call', 'group' or None")
        if ctx.role is None:
            raise ConfigError(f"{what}: children belong to a role, which a function isn't: have a method start it")
        key = ctx.role, name
        former = self._all.get(key)
        if former is not None and former.alive:
            former._settle(_BROKEN_WITHIN_S)  # who starts it again may know of its end already
        if former is not None and former.alive:
            raise ConfigError(f"{what}: role {ctx.role!r} has a child of this name that runs (pid {former.pid})")
        environ = self._environ(env or {})
        if cwd is not None and not Path(cwd).is_dir():
            raise ConfigError(f"{what}: cwd={str(cwd)!r} is no folder on node {ctx.node}")
        _check_program(what, words[0] if words else sys.executable, environ, cwd, ctx)
        if port is None and any("{port}" in word or "{fd}" in word for word in words):
            raise ConfigError(f"{what}: its words name a port or a socket, and it has none: port=0 gives it a free one")
        fds: list[int] = []
        sockets: list[socket.socket] = []
        try:
            if port is not None:
                sockets.append(_bound(what, port))
                port = sockets[0].getsockname()[1]
                if any("{fd}" in word for word in words):
                    sockets[0].listen(128)
                    fds.append(sockets[0].fileno())
            values = {"{port}": str(port), "{fd}": str(fds[0]) if fds else "{fd}"}
            if port is not None:
                words = [_filled(word, values) for word in words]
                environ |= {each: _filled(value, values) for each, value in (env or {}).items()}
                ready = _filled(ready, values) if isinstance(ready, str) else ready
                health = _filled(health, values) if isinstance(health, str) else health
            parent = Parent(ctx.group, ctx.role, ctx.rank, ctx.node)
            child = Child(parent, name, port, fails, self._have_loop(), supervisor.ENDS, self._printed, self._changed)
            data = _packed(program, what) if callable(program) else b""
            if callable(program):
                here, there = socket.socketpair()
                sockets.append(there)
                child.connection = Connection(here.detach())
                fds.append(there.fileno())
                words = [sys.executable, "-P", "-m", "colocate.worker.child", str(there.fileno()), name]
            if isinstance(ready, str) and not ready.startswith(("http://", "https://")):
                ready = re.compile(re.escape(ready))
            if isinstance(ready, re.Pattern):
                child._awaits(ready)
            with self._lock:
                self._all.pop(key, None)
                self._all[key] = child
            try:
                child._begin(
                    [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid())], words, environ, cwd, fds
                )
                if fds:
                    sockets.pop().close()  # its end shows that of the child
                self._tell()
                if callable(program):
                    self._send_function(child, data)
                child._become_ready(ready, within, self._given_up)
            except BaseException:
                child.stop(0)
                with self._lock:
                    del self._all[key]
                    if former is not None:
                        self._all[key] = former
                self._tell()
                raise
        finally:
            for each in sockets:  # a port that it has bound itself
                each.close()
        with self._lock:
            if former is not None:
                self._note(former)
        if child._failed:
            self._changed(child)
        if health is not None:
            child._look_after(health, hung_after)
        self._tell()
        return child

    def _environ(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a child: this process's, with what is asked for and what lies beside the script."""
        boot = self._worker_context.boot
        found = {"PYTHONFAULTHANDLER": "1", **os.environ, **env}  # prints the stacks of what hangs
        found.setdefault(supervisor.MARK, f"{os.getpid()} {boot.worker}")
        beside = [
            each for each in boot.path if not each.startswith((sys.prefix, sys.base_prefix)) and Path(each).is_dir()
        ]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [found.get("PYTHONPATH"), *beside]))
        return found

    def _send_function(self, child: Child, data: bytes) -> None:
        import multiprocessing

        assert child.connection is not None
        try:
            key = bytes(multiprocessing.current_process().authkey)
            child.connection.send((key, sys.path, own_sources(), data))
        except OSError:
            raise child._error() from None

    def _given_up(self) -> bool:
        """Whether nobody waits any more for what runs on the lane."""
        call = running_call.get() or self._worker_context.lane.last()
        return self._worker_context.scope.closed is not None or (call is not None and call.cancelled)

    def _have_loop(self) -> EventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(f"children-{self._worker_context.boot.worker}")
                if not self._worker_context.in_process:
                    handlers.on_interrupt(self._raise_here)
            return self._loop

    # -- for the worker

    def check(self, role: RoleInstance, since: float = 0.0) -> None:
        """Raise when a child that a role needs has ended since some time, and nothing was done about that."""
        if role.name is not None:
            for child in self.dead:
                if child._ended_at >= since and child._parent.role in _used(role.ctx):
                    raise child._error()

    def blamed(self, error: BaseException, name: str | None) -> BaseException:
        """Return what a failure in role code is: `ChildDied` where a child's end is its cause.

        Args:
            error: What was raised.
            name: The role; None for a function, which may have to do with any.
        """
        if not self._all or isinstance(error, ColocateError):
            return error
        role = self._worker_context.roles.get(name)
        used = {name} if role is None else _used(role.ctx)
        broken = _is_of_a_connection(error)
        if name is None and not broken:
            return error
        for child in [each for each in self._all.values() if name is None or each._parent.role in used]:
            if broken and child.alive:
                child._settle(_BROKEN_WITHIN_S)
            if child in self.dead:
                found = child._error()
                found.__cause__ = error
                return found.with_traceback(error.__traceback__)
        return error

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Return the memory that children have for themselves, by role and name."""
        found: dict[str, dict[str, int]] = {}
        for (owner, name), child in list(self._all.items()):
            if child.alive and child.pid:
                pids = supervisor.below(child._top)[1:]  # the first is a supervisor, too
                found.setdefault(owner, {})[name] = sum(map(private_bytes, pids))
        return found

    def stop(self, role: str | None = None) -> None:
        """End those of a role, or all, the last first."""
        for (owner, _), child in reversed([*self._all.items()]):
            if role in (None, owner):
                child.stop()

    def close(self) -> None:
        """End all, and what looks after them. On the thread that ends the worker."""
        self.stop()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def kill(self) -> None:
        """End all without waiting: the lane of a thread hangs."""
        for child in list(self._all.values()):
            child._kill()

    def tell_again(self) -> None:
        """Tell another driver which there are."""
        if self._all:
            self._tell()

    def _tell(self) -> None:
        rows = tuple((role, name, child.pid, child.port, child.state) for (role, name), child in self._all.items())
        self._worker_context.say(from_worker.HasChildren(rows))

    # -- on their event loop's thread, mostly

    def _printed(self, child: Child, line: str) -> None:
        boot, parent = self._worker_context.boot, child._parent
        say_for(
            f"{parent.role} {parent.rank} {child.name}", line, boot.group if self._worker_context.in_process else None
        )

    def _changed(self, child: Child) -> None:
        """A child has ended, or its end is no failure any more."""
        with self._lock:
            if self._all.get((child._parent.role, child.name)) is not child:  # it is just being started, or again
                return
            is_new = self._note(child)
        self._tell()
        if not is_new:
            return
        lane = self._worker_context.lane
        if child._fails == "group":
            self._broken(str(child._error().message), child.output)
            return
        lane.do(partial(self._fail_awaiting, child))
        if not self._worker_context.in_process:
            self._nudge(child, _NUDGE_S)

    def _note(self, child: Child) -> bool:
        """Have `dead` say whether a child is among them; whether it has come to that. With the lock held."""
        is_dead = child._failed and child._is_ready and child._fails is not None and child in self._all.values()
        was = child in self.dead
        self.dead = (*(each for each in self.dead if each is not child), *([child] if is_dead else ()))
        return is_dead and not was

    def _nudge(self, child: Child, after_s: float) -> None:
        """Have the calls that a child's end concerns hear of it where they wait, until none runs."""
        lane, loop = self._worker_context.lane, self._loop
        if child not in self.dead or loop is None:
            return
        if any(self._concerns(child, work) for work in list(lane.running.values())):
            signal.pthread_kill(lane.thread.ident or 0, handlers.INTERRUPT)
            loop.later(after_s, partial(self._nudge, child, min(2 * after_s, _LONGEST_NUDGE_S)))

    def _concerns(self, child: Child, work: Work) -> bool:
        """Whether a call that runs may wait for a child that has ended; one that began later has been told."""
        if work.began > child._ended_at:
            return False
        if not isinstance(work.message, to_worker.Call):
            return True
        role = self._worker_context.roles.get(work.message.role)
        return role is None or role.name is None or child._parent.role in _used(role.ctx)

    # -- on the lane

    def _fail_awaiting(self, child: Child) -> None:
        """While no step of theirs runs: async calls."""
        tasks = self._worker_context.lane.tasks
        for work in list(self._worker_context.lane.running.values()):
            if tasks is not None and work.concurrency and child in self.dead and self._concerns(child, work):
                work.raised = child._error()
                tasks.cancel(work.seq)

    def _raise_here(self) -> None:
        """In role code, wherever that is."""
        ctx, began = current(), getattr(running_call.get(), "began", 0.0)
        if ctx is None:
            return
        for child in self.dead:
            if began > child._ended_at or child._parent.role not in _used(ctx):
                continue
            if time.monotonic() - child._told_at > TOLD_AGAIN_AFTER_S:
                child._told_at = time.monotonic()
                raise child._error()


def _used(ctx: Context) -> set[str | None]:
    """Return the roles that code with a context has to do with."""
    return {ctx.role, *ctx._asked, *ctx._borrowed}


def _is_of_a_connection(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError | EOFError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _words(program: Any, python: str | None, port: int | None) -> tuple[list[str], str]:
    """Return a command's words, none of a function, and what a child is called by default."""
    if callable(program):
        title = str(getattr(inspect.unwrap(getattr(program, "func", program)), "__name__", "function"))
        if inspect.ismethod(getattr(program, "func", program)):
            raise ConfigError(f"ctx.start({title!r}): a method has its object with it: give a function of a module")
        if python is not None:
            raise ConfigError(f"ctx.start({title!r}): a function runs in this worker's Python; python= is for commands")
        if port is not None:
            raise ConfigError(f"ctx.start({title!r}): port= is for commands; a function has a connection")
        return [], title
    if isinstance(program, str) or not program or not all(isinstance(word, str | os.PathLike) for word in program):
        hint = f"; write {program.split()!r}" if isinstance(program, str) and program else ""
        raise ConfigError(f"ctx.start({program!r}): a command is a list of words{hint}")
    words = [str(os.fspath(word)) for word in program]
    title = Path(next((word for word in words if not word.startswith("-")), words[0])).name
    return [*([python] if python is not None else []), *words], title


def _check_program(what: str, program: str, env: Mapping[str, str], cwd: str | None, ctx: Context) -> None:
    import shutil

    path = os.path.join(cwd or "", program) if os.sep in program else program
    if shutil.which(path, path=env.get("PATH", os.defpath)) is None:
        there = "isn't an executable file" if os.sep in program else "is on no folder of PATH"
        hint = ": give python= the interpreter that is to run it" if program.startswith("-") else ""
        raise ConfigError(f"{what}: the program {program!r} isn't found: it {there} on node {ctx.node}{hint}")


def _bound(what: str, port: int) -> socket.socket:
    """Return a socket that has a port of the loopback interface; 0 for any."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who isn't given it binds the port while it is held
    try:
        made.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        made.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{what}: port {port} of {LOOPBACK} is taken ({why}): port=0 takes a free one") from None
    return made


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _packed(function: Callable[[Any], object], what: str) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:  # whatever classes of users raise
        raise SerializationError(f"{what}: the function can't be sent: {error}", argument="function") from error
