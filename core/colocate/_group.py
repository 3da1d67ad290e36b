"""`ColocatedGroup`: one worker per slot that holds every role of its slot, and the calls and residents it owns."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from colocate import _checkpoint, _functions
from colocate._context import Context
from colocate._jobs import error_text
from colocate._mesh import Ranks
from colocate._method import MethodSpec
from colocate._numbers import limit, seconds
from colocate._off_main import off_main
from colocate._order import CallOrder, PendingCall
from colocate._owned import Owned, raise_together
from colocate._pipeline import pipeline, recording
from colocate._questions import Questions
from colocate._resident import Kept
from colocate._residents import Residents
from colocate._restart import Restarts
from colocate._spawn import Declared, warn_of_rebound
from colocate._taught import Taught
from colocate._view import RoleInfo, RoleView
from colocate._workforce import Workforce
from colocate.errors import ClosedError, ColocateError, ConfigError
from colocate.worker.uses import Source

if TYPE_CHECKING:
    from colocate._pool import Pool

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


class ColocatedGroup(Owned):
    """Several roles in one worker per slot. Made by `pool.spawn`; a context manager that closes it.

    Its `state` is "starting", "ready", "closing", "closed", "failed" or "restarting".
    """

    grace: float = 10.0

    def __init__(
        self,
        pool: Pool,
        indices: Sequence[int],
        declared: Declared,
        name: str,
        restarts: int = 0,
        generation: int = 0,
    ) -> None:
        """Use `pool.spawn`."""
        super().__init__("group", name, pool)
        self.state = "starting"
        self.indices = indices
        self.pool = pool
        self.runtime = pool.runtime
        self.generation = generation
        self.seed = self.runtime.seed
        self._start_timeout: float | None = None
        self.declared = declared
        self.failure: ColocateError | None = None
        self.order = CallOrder(self, self.runtime.timers, self.runtime.dispatcher, pool.base)
        self.workforce = Workforce(self, [pool.places[index] for index in indices])
        self.questions = Questions(self)
        self.restarts = Restarts(self, restarts)
        self.taught = Taught(self)
        self._roles = declared.infos
        self._views: dict[str, RoleView] = {}
        self.residents = Residents(self)
        self._tell_state("starting", None)  # before `join`: from there on something else may be told
        self.join()

    # -- views

    @overload
    def role(self, name: str) -> Any: ...
    @overload
    def role(self, name: str, cls: Callable[..., R]) -> R: ...
    def role(self, name: str, cls: Any = None) -> Any:
        """The view of a role. With its class it is typed as that class, so type checkers check calls.

        Args:
            name: The role's name.
            cls: Its class.

        Raises:
            ConfigError: There is no such role, or it is of another class.
        """
        info = self._roles.get(name)
        if info is None:
            raise ConfigError(f"group {self.name!r} has no role {name!r}: it has {', '.join(self._roles)}")
        if cls is not None and cls is not info.cls and not issubclass(info.cls, cls) and not self._is_of(info, cls):
            raise ConfigError(
                f"role {name!r} of group {self.name!r} is a {info.cls.__qualname__}, not a {cls.__qualname__}"
            )
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = RoleView(self, info)
        return view

    def _is_of(self, info: RoleInfo, cls: type) -> bool:
        """Whether a role's class is the one of that name here: that of an attached pool may have come by value."""
        names = [(each.__module__, each.__qualname__) for each in info.cls.__mro__]
        return self.pool.tenancy is not None and (cls.__module__, cls.__qualname__) in names

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Callable[..., R]) -> R: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.role(key)
        found = [name for name, info in self._roles.items() if issubclass(info.cls, key) or self._is_of(info, key)]
        if len(found) != 1:
            has = ", ".join(f"{name} ({info.cls.__qualname__})" for name, info in self._roles.items())
            raise ConfigError(
                f"group {self.name!r} has {len(found) or 'no'} roles of class {key.__qualname__}: it has {has}; "
                "use group.role(name, cls)"
            )
        return self.role(found[0])

    def __getattr__(self, name: str) -> Any:
        roles = self.__dict__.get("_roles", {})
        if name in roles:
            raise AttributeError(
                f"a group has no attribute {name!r}; for the view of that role use group.role({name!r})"
            )
        raise AttributeError(f"a group has no attribute {name!r}")

    @property
    def roles(self) -> dict[str, RoleInfo]:
        """Its roles by name."""
        return dict(self._roles)

    # -- calls

    def check(self) -> None:
        """Raise unless it can be called: it is closed, or has failed, or nobody has noted that it was restarted."""
        failure = self.failure  # which a restart may end just now
        if failure is not None and self.alive:
            self.workforce.failure_seen = True
            raise failure.with_traceback(None)  # of who was told before
        super().check()
        self.restarts.check()

    def refuse_closed(self) -> None:
        """Raise if it is closed, whatever else there is."""
        super().check()

    def kept(self, call: PendingCall, role: RoleInfo, spec: MethodSpec) -> Kept:
        """The record of a kept call's resident."""
        assert call.keep is not None
        ranks = role.ranks
        if call.targets is not role.slots:
            ranks = Ranks(ranks.world_size, ranks.meshes, targets=call.ranks)
        source = Source(call.keep, self.name, role.slots, ranks, spec.collect, call.label, self.generation)
        return Kept(source, self, call, call.line)

    @overload
    def run(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    @overload
    def run(self, function: Callable[Concatenate[Context, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a plain function on every worker, in the order of the group's calls, and wait.

        Args:
            function: Its first parameter is the worker's context: `role` is None, every slot is a rank. One from an
                installed distribution goes by name, any other by value. An async one is run to its end.
            *args: Its further arguments; residents arrive as their values.
            **kwargs: Its further arguments by name.

        Returns:
            What it returned, one item per worker.
        """
        results: list[Any] = _functions.run(self, function, args, kwargs).result()
        return results

    def scope(self) -> AbstractContextManager[None]:
        """Free what this thread or task keeps inside the block; raise the failures of kept calls that nobody has used.

        These are what was kept inside, and what was dropped before outside of any block that is open.
        """
        if self.forked:
            self.check()
        return self.residents.scope()

    def pipeline(self) -> AbstractContextManager[None]:
        """Send the `.submit` and `.keep` calls made inside the block as one message per worker, when it ends.

        They take their places in the group's order together. Residents kept inside can be used by later calls inside.
        Calls of other threads and tasks, and of other groups, go out at once as ever; pipelines of several groups may
        be nested, and are all sent when the outermost block ends. An exception in the block sends nothing.

        Raises:
            PipelineError: Inside the block, by what needs an answer: a plain call, `result()`, `fetch()`.
        """
        self.check()
        return pipeline(self)

    def checkpoint(self, directory: str | os.PathLike[str], tag: str | int | float | None = None) -> None:
        """Have every role that has `save(dir)` and `restore(dir)` save itself, between the group's calls.

        Each role gets a folder of its own, the same for all of its ranks; the states of `ctx.generator` are kept too.
        A restart goes on from the last checkpoint.

        Args:
            directory: Becomes the checkpoint's folder when all of it is written. An earlier checkpoint of the same
                roles, or an empty folder, is replaced then. The driver and all workers have to see it.
            tag: What `wait_ready` returns after a restart from it; None for the folder's name.

        Raises:
            ConfigError: A role has only one of the two methods, or no role has them. Or something else lies there
                (other files, the working directory, a file, a link): nothing was touched.
            RoleError: A `save` raised, or a kept call has failed whose resident was dropped before anybody used it:
                what was in the directory stays.
        """
        self.check()
        if (found := recording(self)) is not None:
            found.refuse_call("checkpoint")
        folder = Path(directory)
        off_main(lambda: _checkpoint.write(self, folder, folder.name if tag is None else tag))

    def wait_ready(self, timeout: float | None = None) -> str | int | float | None:
        """Wait until it can be called; after a restart calls are refused until somebody has.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Returns:
            The tag of the checkpoint that the roles were restored from; None when they are as constructed.

        Raises:
            TimeoutError: It isn't ready yet.
            ColocateError: It has failed for good, or is closed.
        """
        limited = limit(timeout, "wait_ready(timeout)")
        return off_main(lambda: self.restarts.wait(limited))

    def borrowers(self, closing: Owned) -> list[str]:
        """Unfinished uses of its residents by groups that don't lie in what is closing."""
        return self.residents.borrowers(closing)

    def done(self, slot: int, seq: int, rows: int | None, start: float, end: float, size: Any, body: Any) -> None:
        """A rank has finished a call."""
        if seq == 0:
            self.workforce.built(slot, None)
            return
        self.order.done(slot, seq, rows, start, end, size if body is None else body)

    # -- what its calls and workers need

    def send(self, slots: Sequence[int], head: tuple[Any, ...], body: Any = None) -> None:
        """Send one message to some workers."""
        executor = self.runtime.executor
        if body is not None:
            self.taught.before(slots, (body,))
        frame = executor.frame(head, body)
        for slot in slots:
            self.workforce.workers[slot].host.send(frame)
        executor.discard(frame)

    def look(self, slot: int, then: Callable[[str | None], None]) -> None:
        """Have said what a rank does, as it is seen from outside."""
        self.workforce.workers[slot].host.look(then)

    def node(self, slot: int) -> str:
        """The node of a slot."""
        return self.workforce.workers[slot].boot.node

    def live(self) -> list[int]:
        """The slots whose workers run."""
        return [worker.slot for worker in self.workforce.workers if worker.exit is None]

    def unpack(self, body: Any) -> Any:
        """The value of a body."""
        if body is None:
            return None
        value = self.runtime.executor.codec.unpack(body, None)
        self.taught.given.refuse_late()  # that has perhaps imported something
        return value

    def enter(self, state: str, cause: ColocateError | None = None) -> None:
        """It is in another state now, of which observers are told."""
        self.state = state
        self.restarts.look()
        self._tell_state(state, cause)

    def _tell_state(self, state: str, cause: ColocateError | None) -> None:
        if self.runtime.observers:
            tell = self.runtime.observers.tell
            self.runtime.dispatcher.soon(lambda: tell("colocate_group_changed", self.name, state, cause))

    def fail(self, error: ColocateError) -> None:
        """It can't go on: every pending call ends with this error, every worker is ended."""
        with self.order.lock:
            if self.failure is not None or self.closed_by is not None or not self.workforce.started:
                return
            self.failure = told = self.restarts.begin(error)
            self.enter("failed", error)
            self.workforce.failure_seen = any(call.keep is None for call in self.order.pending.values())
            self.order.fail_all(told)
        self.residents.fail(told)
        self.workforce.kill()
        if told is not error:
            self.restarts.go(error)

    def fail_for_good(self, error: ColocateError, why: BaseException) -> None:
        """It could not be restarted."""
        error.add_note(f"and group {self.name!r} could not be restarted: {error_text(why)}")
        with self.order.lock:
            self.failure = error
            self.workforce.failure_seen = False
            self.enter("failed", error)

    def start(self, timeout: float | None, restore: Path | None) -> None:
        """Start its workers, with roles as constructed or as a checkpoint has them.

        Raises:
            RoleStartError: They don't start; everything is ended.
        """
        self._start_timeout = timeout
        if not self.runtime.executor.in_process:
            warn_of_rebound(self.declared, self.name, self.line)
        if restore is not None:
            self.restarts.checkpoint = _checkpoint.Checkpoint.read(restore.absolute(), self._roles)
        self._start()

    def _start(self) -> None:
        found = self.restarts.checkpoint
        self.workforce.start(self._start_timeout, None if found is None else found.folder)
        self.restarts.restored = None if found is None else found.tag
        self.workforce.ready()
        self.pool.changed()

    def rebuild(self) -> None:
        """Start its next generation; the last one's workers are gone.

        Raises:
            ColocateError: It doesn't start.
        """
        places = self.pool.places_for(self)
        with self.order.lock:
            self.refuse_closed()
            self.generation += 1
            self.order.renew()
            self.questions = Questions(self)
            self.taught.renew()
            self.workforce = Workforce(self, places)
            self.workforce.failure_seen = True  # of the last generation: it was told
            if self.failure is not None:
                self.residents.renew(self.failure)
        self._start()

    # -- the end

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close it: new calls are refused, running ones have `grace` seconds, then its workers are ended.

        Args:
            grace: Seconds that running calls have to finish; `math.inf` waits for them for ever.
            force: Close it although other groups use its residents; their calls fail with a clear error.

        Raises:
            BorrowedError: Another group uses one of its residents (without `force`).
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self.close_here(self.by_caller(), seconds(grace, "close(grace)"), force)

    def wind_down(self, grace: float, deadline: float) -> None:
        """Have its workers begin nothing any more, and tell the calls that run that nobody waits for them."""
        if self.state == "ready":
            self.send(self.live(), ("stop",))
        self.workforce.wind_down(grace, deadline)

    def hurry(self) -> None:
        """Nobody waits any more for what still runs in it: its grace period is over."""
        super().hurry()
        self.workforce.hurry()

    def close_for(self, by: str | None, grace: float, force: bool) -> None:
        """Close it on behalf of `by` (None: of its caller)."""
        if self.forked:
            self.check()
        if self.pool.goes_on(self):
            _detached().let_go(self, by)
            return
        if not force and self.closed_by is None:
            self.refuse_if_borrowed()
        if not self.take_closing(by):
            return
        try:
            with self.order.lock:  # whoever rebuilds it has either made its new workers or will make none
                self.enter("closing")
            self.restarts.stop()
            self.residents.break_borrows()
            errors = self.workforce.end(grace)
            self.restarts.join()
        finally:
            error = ClosedError(f"group {self.name!r} was closed by {self.closed_by}", closed_by=self.closed_by)
            failed = self.residents.unseen()
            self.order.fail_all(error)
            self.residents.fail(error)
            self.enter("closed")
            self.disown()
            self.pool.vacate(self)
            self._finished.set()
        errors += failed
        if self.runtime.observers:
            self.runtime.dispatcher.soon(lambda: self.runtime.observers.tell("colocate_group_closed", self.name))
        raise_together(f"group {self.name!r} was closed, and this had gone wrong", errors)


def _detached() -> ModuleType:
    import colocate._detached as module  # which needs groups

    return module
