"""The processes that the roles of a worker have started (`ctx.start`): who fails of their end, and when they end.

A child has two supervisors of its own (`birth/supervisor.py`), also where workers are threads of the driver: what it
has started ends with it, and it with the thread that has started it, that of an event loop, which ends with the worker.

The end of a child fails the calls of its role that run, and those of roles that use that one. In a worker process the
lane is the main thread: a signal breaks what it waits for, and its handler raises in role code. What an async method
awaits is cancelled. Of a call with `rows=` the rows that run here fail, each by itself. On `local` threads nothing
breaks a wait: such a call fails when it ends, or by what it waits for.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from colocate._protocol import to_worker
from colocate._role.context import Context, RowState, current, running_call
from colocate._system.limits import CHILD_SUSPECTED_S, CHILD_TOLD_WITHIN_S, TOLD_AGAIN_AFTER_S
from colocate._system.numbers import seconds
from colocate._system.room import private_bytes
from colocate._version import __version__
from colocate.errors import ClosedError, ColocateError, ConfigError, SerializationError
from colocate.features.children.messages import HasChildren
from colocate.wire import LOOPBACK, EventLoop
from colocate.worker.birth import supervisor
from colocate.worker.birth.imports import own_sources
from colocate.worker.birth.signals import ASKS
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Work
from colocate.worker.serving import signal_handlers
from colocate.worker.serving.output import say_for
from colocate.worker.serving.role_instance import RoleInstance

if TYPE_CHECKING:
    from colocate.features.children.child import Child, Fails, Health, Ready

T = TypeVar("T")
_LAUNCHER = (sys.executable, "-I", "-S", supervisor.__file__)
_NUDGE_S, _LONGEST_NUDGE_S = 0.005, 0.1


class ChildrenOfWorker(OfWorker):
    """The children of a worker, in the order in which they were started.

    Attributes:
        dead: Those that have ended by themselves and that a role has neither stopped nor started again.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
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
        from colocate.features.children.child import (  # as all that few workers need: when one needs it
            Child,
            Parent,
            is_url,
        )

        words, title = _words(program, python, port)
        what = f"ctx.start({name or title!r})"
        if ctx.role is None:
            raise ConfigError(f"{what}: children belong to a role, which a function isn't: have a method start it")
        if fails not in ("call", "group", None):
            raise ConfigError(f"{what}: fails={fails!r}; it is 'call', 'group' or None")
        within = seconds(within, f"{what}: within")
        hung_after = seconds(hung_after, f"{what}: hung_after", positive=True)
        for word, asked, others in ("ready", ready, (str, re.Pattern)), ("health", health, ()):
            if not (asked is None or callable(asked) or is_url(asked) or isinstance(asked, others)):
                kinds = f"a URL{', a line that it prints' if others else ''}"
                raise ConfigError(f"{what}: {word}={asked!r}; it is {kinds} or a function of the child")
        loop, parent = self._have_loop(), Parent(ctx.group, ctx.role, ctx.rank, ctx.node)
        for known in list(self._all.values()):
            known._settle(CHILD_TOLD_WITHIN_S)  # who starts it again may know of its end already
        with self._lock:
            names = [name] if name else (f"{title}-{n}" if n > 1 else title for n in itertools.count(1))
            free = (each for each in names if (found := self._all.get((ctx.role, each))) is None or not found.alive)
            if (own := next(free, None)) is None:
                raise ConfigError(
                    f"{what}: role {ctx.role!r} has a child of this name that runs: give each a name of its own, as "
                    "those of rows that run beside each other, or leave name= out"
                )
            former = self._all.pop((ctx.role, own), None)
            row = state if isinstance(state := running_call.get(), RowState) else None
            asks = ASKS if callable(program) else signal.SIGTERM
            child = Child(parent, own, fails, row, loop, asks, supervisor.ENDS, self._printed, self._changed)
            self._all[ctx.role, own] = child
        if row is not None:
            import asyncio  # the row has it

            row.at_end.append(partial(asyncio.to_thread, child.stop))
        try:
            if cwd is not None and not Path(cwd).is_dir():
                raise ConfigError(f"{what}: cwd={str(cwd)!r} is no folder on node {ctx.node}")
            if wrong := [each for each in (env or {}).items() if not all(isinstance(word, str) for word in each)]:
                raise ConfigError(f"{what}: env={dict(wrong)!r}; names and values of variables are text")
            environ = self._environ(env or {})
            _check_program(what, words[0] if words else python or sys.executable, environ, cwd, ctx)
            if callable(program):
                ready = child._awaits(ready)
                self._begin_function(child, program, python, environ, cwd)
            else:
                values = _port_of(child, words, port)
                ready = child._awaits(_filled(ready, values))
                health = _filled(health, values)
                words = [_filled(word, values) for word in words]
                environ = {each: _filled(value, values) for each, value in environ.items()}
                child._begin(_LAUNCHER, words, environ, cwd, [int(values["{fd}"])] if "{fd}" in values else [])
                if "{fd}" in values:
                    child._let_go_of_port()  # its end shows that of the child
                self._tell()
            child._become_ready(ready, within, lambda: self._given_up(ctx))
        except BaseException:
            child.stop(0)
            with self._lock:
                del self._all[ctx.role, own]
                if former is not None:
                    self._all[ctx.role, own] = former
            self._tell()
            raise
        finally:
            child._let_go_of_port()
        with self._lock:
            if former is not None:
                self._note(former)
        if child._failed:
            self._changed(child)
        if health is not None:
            child._look_after(health, hung_after)
        self._tell()
        return child

    def _begin_function(
        self,
        child: Child,
        function: Callable[[Any], object],
        python: str | None,
        environ: Mapping[str, str],
        cwd: str | None,
    ) -> None:
        """Have an interpreter run a function, and give it that. Another one has a path of its own."""
        import multiprocessing

        from colocate.features.children.connection import ChildConnection

        signal_handlers.waits_for_role_code(ChildConnection.recv)  # as for all of its methods
        data = _packed(function, f"ctx.start({child.name!r})")
        here, there = socket.socketpair()
        with there:  # closed here, its end shows that of the child
            child.connection = ChildConnection(here.detach(), child)
            fd = there.fileno()
            words = [python or sys.executable, "-P", "-m", "colocate.features.children.process", str(fd), child.name]
            child._begin(_LAUNCHER, words, environ, cwd, [fd])
        self._tell()
        try:
            key = bytes(multiprocessing.current_process().authkey)
            child.connection.send((__version__, key, None if python else sys.path, own_sources(), data))
        except OSError:  # it isn't ready, so that its end is no failure of another kind
            child._settle(CHILD_TOLD_WITHIN_S, signs=True)
            raise child._error() from None

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

    def _given_up(self, ctx: Context) -> bool:
        """Whether nobody waits any more for what runs, or the constructors that do."""
        last = self._worker_context.lane.last()
        if last is not None and isinstance(last.message, to_worker.Build) and last.cancelled:
            return True
        return self._worker_context.scope.closed is not None or ctx.cancelled

    def _have_loop(self) -> EventLoop:
        from colocate.features.children.child import Child

        if self._worker_context.scope.closed is not None:
            raise ClosedError("ctx.start: this worker is about to end", closed_by=self._worker_context.scope.closed)
        with self._lock:
            if self._loop is None:
                signal_handlers.waits_for_role_code(Child.wait)
                self._loop = EventLoop(f"children-{self._worker_context.boot.worker}")
                if not self._worker_context.in_process:
                    signal_handlers.on_interrupt(self._raise_here)
            return self._loop

    # -- hooks

    def begins(self, role: RoleInstance, tags: Collection[str] | None, label: str, row: RowState | None = None) -> None:
        """Refuse a call of a role that needs a child which has ended."""
        if self.dead:
            self._check(role, row=row)

    def reached(self, asking: Context, role: RoleInstance, tags: Collection[str]) -> None:
        """Refuse to hand out a role that needs a child which has ended; functions get it, to look at it."""
        if self.dead and asking.role is not None:
            self._check(role)

    def ended(self, role: RoleInstance, began: float, row: RowState | None = None) -> None:
        """Fail a call during which a child that its role needs has ended."""
        if self.dead:
            self._check(role, began, row)

    def is_bereft(self, role: RoleInstance) -> bool:
        """Return whether a child has ended that all rows of a role need."""
        return any(child._row is None and child._parent.role in _used(role.ctx) for child in self.dead)

    def closed(self, role: str) -> None:
        """End the children of a role, the last first."""
        self._stop(role)

    def adopted(self) -> None:
        """Tell another driver which there are."""
        if self._all:
            self._tell()

    def _check(self, role: RoleInstance, since: float = 0.0, row: RowState | None = None) -> None:
        """Raise when a child that a role, or a row, needs has ended since then, and nothing was done about that."""
        if role.name is not None:
            for child in self.dead:
                if child._ended_at >= since and child._row in (None, row) and child._parent.role in _used(role.ctx):
                    raise child._error()

    def blamed(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Return what a failure in role code is: `ChildDied` where a child's end is its cause.

        Args:
            error: What was raised.
            role: The role's name; None for a function, which may have to do with any.
            row: The row of a call that has failed, where it is one alone.
        """
        if (
            not self.dead
            or isinstance(error, ColocateError)
            or (role is None and not _causes(error, OSError, EOFError))
        ):
            return error
        for child in self._used_by(role, row):
            if child in self.dead:
                found = child._error()
                found.__cause__ = error
                return found.with_traceback(error.__traceback__)
        return error

    def awaits_cause(
        self, error: BaseException, role: str | None, row: RowState | None, waited_s: float, is_alone: bool
    ) -> bool:
        """Return whether the end of a child that a failure may come from is still to be told.

        A broken connection is heard of before the end that broke it. Unless the call is alone, a child without any
        sign of its end isn't suspected for long: the row that waits keeps a place from others.
        """
        if not self._all or waited_s >= CHILD_TOLD_WITHIN_S or isinstance(error, ColocateError):
            return False
        if not _causes(error, OSError, EOFError):
            return False
        is_suspect = (is_alone or waited_s < CHILD_SUSPECTED_S) and _causes(error, ConnectionError, EOFError)
        return any(child.alive and (is_suspect or child._is_ending) for child in self._used_by(role, row))

    def _used_by(self, role: str | None, row: RowState | None) -> list[Child]:
        """Return the children that role code, or one row's code, may use; a function may use all."""
        hosted = self._worker_context.roles.get(role)
        used = {role} if hosted is None else _used(hosted.ctx)
        children = [child for child in list(self._all.values()) if child._row in (None, row)]
        return [child for child in children if role is None or child._parent.role in used]

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Return the memory that children have for themselves, by role and name."""
        found: dict[str, dict[str, int]] = {}
        for (owner, name), child in list(self._all.items()):
            if child.alive and child.pid:
                pids = supervisor.below(child._top)[1:]  # the first is a supervisor, too
                found.setdefault(owner, {})[name] = max(0, sum(map(private_bytes, pids)) - child.managed)
        return found

    def _stop(self, role: str | None = None) -> None:
        """End those of a role, or all, the last first."""
        for (owner, _), child in reversed([*self._all.items()]):
            if role in (None, owner):
                child.stop()

    def close(self) -> None:
        """End all, and what looks after them. On the thread that ends the worker."""
        self._stop()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def kill(self) -> None:
        """End all without waiting: the lane of a thread hangs."""
        for child in list(self._all.values()):
            child._kill()

    def _tell(self) -> None:
        rows = tuple((role, name, child.pid, child.port, child.state) for (role, name), child in self._all.items())
        self._worker_context.say(HasChildren(rows))

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
        lane = self._worker_context.lane_for(child._parent.role)
        if child._fails == "group":
            self._worker_context.broken(str(child._error().message), child.output)
            return
        lane.do(partial(self._fail_awaiting, child))
        if lane is self._worker_context.lane and not self._worker_context.in_process:  # else no signal breaks a wait
            self._nudge(child, _NUDGE_S)

    def _note(self, child: Child) -> bool:
        """Have `dead` say whether a child is among them; whether it has come to that. With the lock held."""
        key = child._parent.role, child.name
        is_dead = child._failed and child._is_ready and child._fails is not None and self._all.get(key) is child
        was = child in self.dead
        self.dead = (*(each for each in self.dead if each is not child), *([child] if is_dead else ()))
        if child._is_ready and not child.alive and not is_dead and self._all.get(key) is child:
            del self._all[key]
        return is_dead and not was

    def _nudge(self, child: Child, after_s: float) -> None:
        """Have the calls that a child's end concerns hear of it where they wait, until none runs."""
        lane, loop = self._worker_context.lane, self._loop
        if child not in self.dead or loop is None:
            return
        if any(self._concerns(child, work) for work in list(lane.running.values())):
            signal.pthread_kill(lane.thread.ident or 0, signal_handlers.INTERRUPT)
            loop.later(after_s, partial(self._nudge, child, min(2 * after_s, _LONGEST_NUDGE_S)))

    def _concerns(self, child: Child, work: Work) -> bool:
        """Whether a call that runs may wait for a child that has ended; one that began later has been told."""
        if work.began > child._ended_at or (child._row is not None and work is not child._row.of):
            return False
        if not isinstance(work.message, to_worker.Call):
            return True
        if not work.may_wait:
            return False
        role = self._worker_context.roles.get(work.message.role)
        return role is None or role.name is None or child._parent.role in _used(role.ctx)

    # -- on the lane

    def _fail_awaiting(self, child: Child) -> None:
        """While no step of theirs runs: async calls."""
        lane = self._worker_context.lane_for(child._parent.role)
        tasks = lane.tasks
        for work in list(lane.running.values()):
            if tasks is None or not work.concurrency or child not in self.dead or not self._concerns(child, work):
                continue
            work.interrupt(tasks, child._error, child._row)  # of rows that begin it is found out then

    def _raise_here(self) -> None:
        """In role code, wherever that is."""
        ctx, call = current(), running_call.get()
        if ctx is None:
            return
        began = getattr(call.of if isinstance(call, RowState) else call, "began", 0.0)
        for child in self.dead:
            if began > child._ended_at or child._row not in (None, call) or child._parent.role not in _used(ctx):
                continue
            if time.monotonic() - child._told_at > TOLD_AGAIN_AFTER_S:
                child._told_at = time.monotonic()
                raise child._error()


def _used(ctx: Context) -> set[str | None]:
    """Return the roles that code with a context has to do with."""
    return {ctx.role, *ctx._asked, *ctx._borrowed}


def _causes(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Return whether an error or a cause in the chain has one of these types."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
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
    if not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise ConfigError(f"{what}: port={port!r}; ports are whole numbers up to 65535, and 0 takes a free one")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who isn't given it binds the port while it is held
    try:
        made.bind((LOOPBACK, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"{what}: port {port} of {LOOPBACK} is taken ({error.strerror}): port=0 takes a free one"
        ) from None
    return made


def _port_of(child: Child, words: Sequence[str], port: int | None) -> dict[str, str]:
    """Hold a port for a command, and return what is put in the place of what."""
    takes_socket = any("{fd}" in word for word in words)
    if port is None:
        if takes_socket or any("{port}" in word for word in words):
            raise ConfigError(f"ctx.start({child.name!r}): its words name a port, and it has none: port=0 gives it one")
        return {}
    held = child._held = _bound(f"ctx.start({child.name!r})", port)
    child.port = held.getsockname()[1]
    if not takes_socket:
        return {"{port}": str(child.port)}
    held.listen(128)
    return {"{port}": str(child.port), "{fd}": str(held.fileno())}


def _filled(value: T, values: Mapping[str, str]) -> T:
    """Return a text with values in their places; anything else as it is."""
    if isinstance(value, str):
        for name, each in values.items():
            value = value.replace(name, each)  # type: ignore[assignment]
    return value


def _packed(function: Callable[[Any], object], what: str) -> bytes:
    from colocate._definitions.pickler import ByValue

    file = io.BytesIO()
    try:
        ByValue(file).dump(function)
        return file.getvalue()
    except Exception as error:  # whatever classes of users raise
        raise SerializationError(f"{what}: the function can't be sent: {error}", argument="function") from error
