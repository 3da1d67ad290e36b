"""Starts and ends the child processes of a worker's roles (`ctx.start`), and fails calls that need a dead child.

Each child has two supervisors (`birth/supervisor.py`), also if workers are threads of the driver. They end the child's
own processes when the child ends, and end the child when the thread that started it ends. That thread runs an event
loop, and ends with the worker.

When a child dies, the running calls of its role fail, and also the calls of roles that use this role. In a worker
process, a signal interrupts a blocking wait on the main thread, and the signal handler raises in role code. Awaits of
async methods are cancelled. In a call with `rows=`, each row on this worker fails separately. On `local` threads
nothing can interrupt a wait, so the call fails when the wait has ended.
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
from colocate._system.numbers import parse_seconds
from colocate._system.room import read_private_bytes
from colocate._version import __version__
from colocate.errors import ClosedError, ColocateError, ConfigError, SerializationError
from colocate.features.children.messages import ChildrenReport
from colocate.wire import LOOPBACK, EventLoop
from colocate.worker.birth import supervisor
from colocate.worker.birth.imports import get_own_sources
from colocate.worker.birth.signals import END_REQUEST
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.lane import Work
from colocate.worker.serving import signal_handlers
from colocate.worker.serving.output import print_for
from colocate.worker.serving.role_instance import RoleInstance

if TYPE_CHECKING:
    from colocate.features.children.child import Child, Fails, Health, Ready

T = TypeVar("T")
_LAUNCHER = (sys.executable, "-I", "-S", supervisor.__file__)
_NUDGE_S, _LONGEST_NUDGE_S = 0.005, 0.1


class ChildrenOfWorker(WorkerFeature):
    """The child processes that the roles of one worker have started, in the order of starting.

    Attributes:
        dead_children: Children that have ended by themselves, and that the role has neither stopped nor started again.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._children: dict[tuple[str, str], Child] = {}
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()
        self.dead_children: tuple[Child, ...] = ()

    # -- for role code

    def start_child(
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
        """Start a child process; see `Context.start`."""
        from colocate.features.children.child import (  # Imported here, because few workers have children.
            Child,
            Parent,
            is_url,
        )

        words, title = _build_command(program, python, port)
        call = f"ctx.start({name or title!r})"
        if ctx.role is None:
            raise ConfigError(f"{call}: children belong to a role, which a function isn't: have a method start it")
        if fails not in ("call", "group", None):
            raise ConfigError(f"{call}: fails={fails!r}; it is 'call', 'group' or None")
        within = parse_seconds(within, f"{call}: within")
        hung_after = parse_seconds(hung_after, f"{call}: hung_after", positive=True)
        for word, option, kinds_besides in ("ready", ready, (str, re.Pattern)), ("health", health, ()):
            if not (option is None or callable(option) or is_url(option) or isinstance(option, kinds_besides)):
                kinds = f"a URL{', a line that it prints' if kinds_besides else ''}"
                raise ConfigError(f"{call}: {word}={option!r}; it is {kinds} or a function of the child")
        loop, parent = self._ensure_loop(), Parent(ctx.group, ctx.role, ctx.rank, ctx.node)
        for other_child in list(self._children.values()):
            # A role may restart a child before this worker is notified of the former child's end.
            other_child._await_exit(CHILD_TOLD_WITHIN_S)
        with self._lock:
            names = [name] if name else (f"{title}-{n}" if n > 1 else title for n in itertools.count(1))
            free = (
                item
                for item in names
                if (child_of_name := self._children.get((ctx.role, item))) is None or not child_of_name.alive
            )
            if (child_name := next(free, None)) is None:
                raise ConfigError(
                    f"{call}: role {ctx.role!r} has a child of this name that runs: give each a name of its own, as "
                    "those of rows that run beside each other, or leave name= out"
                )
            former = self._children.pop((ctx.role, child_name), None)
            row = state if isinstance(state := running_call.get(), RowState) else None
            asks = END_REQUEST if callable(program) else signal.SIGTERM
            child = Child(parent, child_name, fails, row, loop, asks, supervisor.ENDS, self._on_line, self._on_change)
            self._children[ctx.role, child_name] = child
        if row is not None:
            import asyncio  # This import costs nothing, because rows already run on asyncio.

            row.at_end.append(partial(asyncio.to_thread, child.stop))
        try:
            if cwd is not None and not Path(cwd).is_dir():
                raise ConfigError(f"{call}: cwd={str(cwd)!r} is no folder on node {ctx.node}")
            if wrong := [item for item in (env or {}).items() if not all(isinstance(word, str) for word in item)]:
                raise ConfigError(f"{call}: env={dict(wrong)!r}; names and values of variables are text")
            environ = self._child_environ(env or {})
            _check_program(call, words[0] if words else python or sys.executable, environ, cwd, ctx)
            if callable(program):
                ready = child._set_ready_line(ready)
                self._start_function(child, program, python, environ, cwd)
            else:
                values = _reserve_port(child, words, port)
                ready = child._set_ready_line(_fill_in(ready, values))
                health = _fill_in(health, values)
                words = [_fill_in(word, values) for word in words]
                environ = {item: _fill_in(value, values) for item, value in environ.items()}
                child._start(_LAUNCHER, words, environ, cwd, [int(values["{fd}"])] if "{fd}" in values else [])
                if "{fd}" in values:
                    child._release_port()  # Only the child keeps the socket, so the port closes when the child ends.
                self._send_list()
            child._wait_ready(ready, within, lambda: self._is_abandoned(ctx))
        except BaseException:
            child.stop(0)
            with self._lock:
                del self._children[ctx.role, child_name]
                if former is not None:
                    self._children[ctx.role, child_name] = former
            self._send_list()
            raise
        finally:
            child._release_port()
        with self._lock:
            if former is not None:
                self._update_dead(former)
        if child._has_failed:
            self._on_change(child)
        if health is not None:
            child._watch_health(health, hung_after)
        self._send_list()
        return child

    def _start_function(
        self,
        child: Child,
        function: Callable[[Any], object],
        python: str | None,
        environ: Mapping[str, str],
        cwd: str | None,
    ) -> None:
        import multiprocessing

        from colocate.features.children.connection import ChildConnection

        signal_handlers.waits_for_role_code(ChildConnection.recv)  # The other wrapped methods share this code object.
        data = _pack_function(function, f"ctx.start({child.name!r})")
        parent_end, child_end = socket.socketpair()
        with child_end:  # Close this process's copy, so that the connection breaks when the child ends.
            child.connection = ChildConnection(parent_end.detach(), child)
            fd = child_end.fileno()
            words = [python or sys.executable, "-P", "-m", "colocate.features.children.process", str(fd), child.name]
            child._start(_LAUNCHER, words, environ, cwd, [fd])
        self._send_list()
        try:
            key = bytes(multiprocessing.current_process().authkey)
            child.connection.send((__version__, key, None if python else sys.path, get_own_sources(), data))
        except OSError:  # The child's end is the error to raise, not the broken pipe.
            child._await_exit(CHILD_TOLD_WITHIN_S, signs=True)
            raise child._exit_error() from None

    def _child_environ(self, env: Mapping[str, str]) -> dict[str, str]:
        boot = self._worker_context.boot
        environ = {"PYTHONFAULTHANDLER": "1", **os.environ, **env}  # This prints the stacks of a hung child.
        environ.setdefault(supervisor.MARK, f"{os.getpid()} {boot.worker}")
        script_paths = [
            folder
            for folder in boot.path
            if not folder.startswith((sys.prefix, sys.base_prefix)) and Path(folder).is_dir()
        ]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), *script_paths]))
        return environ

    def _is_abandoned(self, ctx: Context) -> bool:
        last = self._worker_context.lane.get_last_work()
        if last is not None and isinstance(last.message, to_worker.Build) and last.cancelled:
            return True
        return self._worker_context.scope.closed is not None or ctx.cancelled

    def _ensure_loop(self) -> EventLoop:
        from colocate.features.children.child import Child

        if self._worker_context.scope.closed is not None:
            raise ClosedError("ctx.start: this worker is about to end", closed_by=self._worker_context.scope.closed)
        with self._lock:
            if self._loop is None:
                signal_handlers.waits_for_role_code(Child.wait)
                self._loop = EventLoop(f"children-{self._worker_context.boot.worker}")
                if not self._worker_context.in_process:
                    signal_handlers.set_interrupt_callback(self._raise_in_role)
            return self._loop

    # -- hooks

    def check_begin(
        self, role: RoleInstance, tags: Collection[str] | None, label: str, row: RowState | None = None
    ) -> None:
        """Raise `ChildDied` for a new call if the called role needs a child that has died."""
        if self.dead_children:
            self._check_children(role, row=row)

    def check_sibling(self, asking: Context, role: RoleInstance, tags: Collection[str]) -> None:
        """Raise `ChildDied` if role code asks for a sibling that needs a dead child. `group.run` is exempt."""
        if self.dead_children and asking.role is not None:
            self._check_children(role)

    def check_end(self, role: RoleInstance, began: float, row: RowState | None = None) -> None:
        """Raise `ChildDied` if a child that the called role needs died during the call."""
        if self.dead_children:
            self._check_children(role, began, row)

    def fails_other_rows(self, role: RoleInstance) -> bool:
        """Return whether a dead child makes all rows of a role fail, and not only the row that started the child."""
        return any(child._row is None and child._parent.role in _used_roles(role.ctx) for child in self.dead_children)

    def on_role_closed(self, role: str) -> None:
        """Stop all children of a closed role, in reverse order of starting."""
        self._stop_children(role)

    def on_driver_changed(self) -> None:
        """Report all children to the worker's new driver."""
        if self._children:
            self._send_list()

    def _check_children(self, role: RoleInstance, since: float = 0.0, row: RowState | None = None) -> None:
        """Raise `ChildDied` if a child needed by a role or row died at `since` (seconds of `time.time()`) or later."""
        if role.name is not None:
            for child in self.dead_children:
                if (
                    child._ended_at >= since
                    and child._row in (None, row)
                    and child._parent.role in _used_roles(role.ctx)
                ):
                    raise child._exit_error()

    def explain_failure(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Return the cause of a failure in role code: `ChildDied` if a child's death is the cause, else `error`.

        Args:
            error: The exception.
            role: The role's name; None for a function, which may use any role.
            row: The row that has failed, if a single one has.
        """
        if (
            not self.dead_children
            or isinstance(error, ColocateError)
            or (role is None and not _has_cause(error, OSError, EOFError))
        ):
            return error
        for child in self._list_children(role, row):
            if child in self.dead_children:
                child_error = child._exit_error()
                child_error.__cause__ = error
                return child_error.with_traceback(error.__traceback__)
        return error

    def awaits_cause(
        self, error: BaseException, role: str | None, row: RowState | None, waited_s: float, is_alone: bool
    ) -> bool:
        """Return whether to wait before a failure is explained, because a child that is just ending may be the cause.

        A connection may break before the end of the process behind it is reported. Unless the call is alone, a child
        without a sign of its end is suspected only briefly, because the waiting row blocks other rows.
        """
        if not self._children or waited_s >= CHILD_TOLD_WITHIN_S or isinstance(error, ColocateError):
            return False
        if not _has_cause(error, OSError, EOFError):
            return False
        is_suspect = (is_alone or waited_s < CHILD_SUSPECTED_S) and _has_cause(error, ConnectionError, EOFError)
        return any(child.alive and (is_suspect or child._is_ending) for child in self._list_children(role, row))

    def _list_children(self, role: str | None, row: RowState | None) -> list[Child]:
        hosted = self._worker_context.roles.get(role)
        used = {role} if hosted is None else _used_roles(hosted.ctx)
        children = [child for child in list(self._children.values()) if child._row in (None, row)]
        return [child for child in children if role is None or child._parent.role in used]

    def external_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of private memory of each child's processes, by role name and child name."""
        sizes: dict[str, dict[str, int]] = {}
        for (owner, name), child in list(self._children.items()):
            if child.alive and child.pid:
                pids = supervisor.list_descendants(child._root_pid)[1:]  # The first pid is the lower supervisor's.
                sizes.setdefault(owner, {})[name] = max(0, sum(map(read_private_bytes, pids)) - child.managed)
        return sizes

    def _stop_children(self, role: str | None = None) -> None:
        for (owner, _), child in reversed([*self._children.items()]):
            if role in (None, owner):
                child.stop()

    def close(self) -> None:
        """Stop all children and the event loop. Called on the thread that ends the worker."""
        self._stop_children()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def kill(self) -> None:
        """Kill all children without waiting, because the worker was abandoned."""
        for child in list(self._children.values()):
            child._kill()

    def _send_list(self) -> None:
        rows = tuple((role, name, child.pid, child.port, child.state) for (role, name), child in self._children.items())
        self._worker_context.send_message(ChildrenReport(rows))

    # -- mostly on the event loop's thread

    def _on_line(self, child: Child, line: str) -> None:
        boot, parent = self._worker_context.boot, child._parent
        print_for(
            f"{parent.role} {parent.rank} {child.name}", line, boot.group if self._worker_context.in_process else None
        )

    def _on_change(self, child: Child) -> None:
        """Handle a child's end, or a request (`stop`, `wait`) after which the end is no failure."""
        with self._lock:
            # Ignore a child that was replaced or failed to start.
            if self._children.get((child._parent.role, child.name)) is not child:
                return
            is_new = self._update_dead(child)
        self._send_list()
        if not is_new:
            return
        lane = self._worker_context.lane_for(child._parent.role)
        if child._failure_scope == "group":
            self._worker_context.report_broken(str(child._exit_error().message), child.output)
            return
        lane.run_action(partial(self._fail_async_calls, child))
        # A signal interrupts only the main thread, which runs the main lane of a worker process.
        if lane is self._worker_context.lane and not self._worker_context.in_process:
            self._interrupt_calls(child, _NUDGE_S)

    def _update_dead(self, child: Child) -> bool:
        """Update `dead_children` for one child, and return whether the child was added. The caller holds the lock."""
        key = child._parent.role, child.name
        is_dead = (
            child._has_failed
            and child._is_ready
            and child._failure_scope is not None
            and self._children.get(key) is child
        )
        was = child in self.dead_children
        self.dead_children = (
            *(dead_child for dead_child in self.dead_children if dead_child is not child),
            *([child] if is_dead else ()),
        )
        if child._is_ready and not child.alive and not is_dead and self._children.get(key) is child:
            del self._children[key]
        return is_dead and not was

    def _interrupt_calls(self, child: Child, after_s: float) -> None:
        """Interrupt the main thread repeatedly, until no running call may be waiting for a dead child."""
        lane, loop = self._worker_context.lane, self._loop
        if child not in self.dead_children or loop is None:
            return
        if any(self._affects_call(child, work) for work in list(lane.running.values())):
            signal.pthread_kill(lane.thread.ident or 0, signal_handlers.INTERRUPT)
            loop.call_later(after_s, partial(self._interrupt_calls, child, min(2 * after_s, _LONGEST_NUDGE_S)))

    def _affects_call(self, child: Child, work: Work) -> bool:
        """Return whether a running call may be waiting for a dead child. Calls begun after the death were refused."""
        if work.began > child._ended_at or (child._row is not None and work is not child._row.call):
            return False
        if not isinstance(work.message, to_worker.Call):
            return True
        if not work.may_wait:
            return False
        role = self._worker_context.roles.get(work.message.role)
        return role is None or role.name is None or child._parent.role in _used_roles(role.ctx)

    # -- on the lane

    def _fail_async_calls(self, child: Child) -> None:
        """Fail async calls that may await a dead child. Runs on the lane, between the steps of async calls."""
        lane = self._worker_context.lane_for(child._parent.role)
        tasks = lane.tasks
        for work in list(lane.running.values()):
            if (
                tasks is None
                or not work.concurrency
                or child not in self.dead_children
                or not self._affects_call(child, work)
            ):
                continue
            work.fail_awaits(tasks, child._exit_error, child._row)  # Rows that begin after this are refused.

    def _raise_in_role(self) -> None:
        ctx, call = current(), running_call.get()
        if ctx is None:
            return
        began = getattr(call.call if isinstance(call, RowState) else call, "began", 0.0)
        for child in self.dead_children:
            if began > child._ended_at or child._row not in (None, call) or child._parent.role not in _used_roles(ctx):
                continue
            if time.monotonic() - child._notified_at > TOLD_AGAIN_AFTER_S:
                child._notified_at = time.monotonic()
                raise child._exit_error()


def _used_roles(ctx: Context) -> set[str | None]:
    return {ctx.role, *ctx._asked_siblings, *ctx._borrowed}


def _has_cause(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if isinstance(error, kinds):
            return True
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _build_command(program: Any, python: str | None, port: int | None) -> tuple[list[str], str]:
    """Return the words of a command (an empty list for a function) and the child's default name."""
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
        problem = "isn't an executable file" if os.sep in program else "is on no folder of PATH"
        hint = ": give python= the interpreter that is to run it" if program.startswith("-") else ""
        raise ConfigError(f"{what}: the program {program!r} isn't found: it {problem} on node {ctx.node}{hint}")


def _bind_port(what: str, port: int) -> socket.socket:
    if not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise ConfigError(f"{what}: port={port!r}; ports are whole numbers up to 65535, and 0 takes a free one")
    sock = socket.socket()
    # With this option, the child can bind the port while this socket still reserves the port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOOPBACK, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{what}: port {port} of {LOOPBACK} is taken ({error.strerror}): port=0 takes a free one"
        ) from None
    return sock


def _reserve_port(child: Child, words: Sequence[str], port: int | None) -> dict[str, str]:
    """Reserve the requested port for a command, and return values for the placeholders `{port}` and `{fd}`."""
    takes_socket = any("{fd}" in word for word in words)
    if port is None:
        if takes_socket or any("{port}" in word for word in words):
            raise ConfigError(f"ctx.start({child.name!r}): its words name a port, and it has none: port=0 gives it one")
        return {}
    held = child._port_socket = _bind_port(f"ctx.start({child.name!r})", port)
    child.port = held.getsockname()[1]
    if not takes_socket:
        return {"{port}": str(child.port)}
    held.listen(128)
    return {"{port}": str(child.port), "{fd}": str(held.fileno())}


def _fill_in(value: T, values: Mapping[str, str]) -> T:
    if isinstance(value, str):
        for name, filler in values.items():
            value = value.replace(name, filler)  # type: ignore[assignment]
    return value


def _pack_function(function: Callable[[Any], object], what: str) -> bytes:
    from colocate._definitions.pickler import ByValue

    file = io.BytesIO()
    try:
        ByValue(file).dump(function)
        return file.getvalue()
    except Exception as error:  # Pickling objects of users' classes may raise any exception.
        raise SerializationError(f"{what}: the function can't be sent: {error}", argument="function") from error
