"""`ColocatedGroup`: one worker per slot that holds every role of its slot, and the calls and residents it owns."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast, overload

from colocate import _functions
from colocate._context import Context
from colocate._dispatch import Plan
from colocate._joiner import Joiner
from colocate._mesh import Ranks
from colocate._method import MethodSpec
from colocate._order import CallOrder, PendingCall
from colocate._owned import Owned, caller, raise_together
from colocate._pipeline import Draft, pipeline, recording, refuse_unsent
from colocate._questions import Questions
from colocate._resident import Kept, Reference
from colocate._residents import Residents
from colocate._spawn import Declared
from colocate._view import RoleInfo, RoleView
from colocate._workforce import Workforce
from colocate.errors import ClosedError, ColocateError, ConfigError
from colocate.executor import Place
from colocate.worker.uses import Source

if TYPE_CHECKING:
    from colocate._pool import Pool

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


class ColocatedGroup(Owned):
    """Several roles in one worker per slot. Made by `pool.spawn`; a context manager that closes it."""

    grace: float = 10.0

    def __init__(self, pool: Pool, places: Sequence[Place], declared: Declared, name: str) -> None:
        """Use `pool.spawn`."""
        super().__init__("group", name, pool)
        self.state = "starting"
        self.pool = pool
        self.runtime = pool.runtime
        self.generation = 0
        self.declared = declared
        self.failure: ColocateError | None = None
        self.order = CallOrder(self, self.runtime.dispatcher)
        self.workforce = Workforce(self, places)
        self.questions = Questions(self)
        self._roles = declared.infos
        self._views: dict[str, RoleView] = {}
        self.residents = Residents(self)

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
        if cls is not None and cls is not info.cls and not issubclass(info.cls, cls):
            raise ConfigError(
                f"role {name!r} of group {self.name!r} is a {info.cls.__qualname__}, not a {cls.__qualname__}"
            )
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = RoleView(self, info)
        return view

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Callable[..., R]) -> R: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.role(key)
        found = [name for name, info in self._roles.items() if issubclass(info.cls, key)]
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
        """Raise unless it can be called: it is closed, or has failed."""
        if self.failure is not None and self.alive:
            self.workforce.failure_seen = True
            raise self.failure.with_traceback(None)  # of who was told before
        super().check()

    def submit(
        self,
        call: PendingCall,
        role: RoleInfo,
        spec: MethodSpec,
        planned: Plan,
        uses: list[Reference],
        timeout: float | None,
        keep: bool,
    ) -> PendingCall:
        """Send a call to its ranks. Everything that can't be sent is found out before anything is."""
        executor = self.runtime.executor
        codec = executor.codec
        bodies: dict[int, Any] = {}
        for arguments in planned.arguments:
            if id(arguments) not in bodies:
                bodies[id(arguments)] = codec.pack_arguments(cast("dict[str, Any]", arguments), call.label)
        call.uses = uses
        call.line = caller()
        call._joiner = Joiner(self, role, spec)
        key = call.keep = self.runtime.new_key() if keep else None
        if self.runtime.observers or uses:
            call.on_end = self._ended
        found = recording(self)
        refuse_unsent(uses, call.label, found)
        if found is not None:
            self.check()
            packed = [bodies[id(arguments)] for arguments in planned.arguments]
            found.add(Draft(self, call, role.key, call.method, packed, planned.valid, timeout), uses)
            return call
        with self.order.lock:
            self.check()
            sent: list[int] = []
            try:
                self._send_call(call, role, planned, bodies, sent)
            except BaseException as error:  # Ctrl-C, or no descriptor or memory is left
                self.order.give_up(call, error, bool(sent))
                if key is not None:
                    self.residents.end(key)
                raise
        if timeout is not None:
            self.order.watch(call, timeout)
        return call

    def _send_call(
        self, call: PendingCall, role: RoleInfo, planned: Plan, bodies: dict[int, Any], sent: list[int]
    ) -> None:
        """Give a call its place in the order and send it. The order's lock is held; `sent` tells how far it came."""
        executor, workers = self.runtime.executor, self.workforce.workers
        lent: list[Reference] = []
        uses, call.uses = call.uses, lent
        for use in uses:
            use._kept.group.residents.lend(call, use._kept, self)
            lent.append(use)
        seq = self.order.enter(call)
        frees = self.residents.take() if self.residents.news and len(call.targets) == len(workers) else ()
        last: tuple[Any, Any] = (None, None)
        frame: Any = None
        for slot, arguments, valid in zip(call.targets, planned.arguments, planned.valid, strict=True):
            if frame is None or last != (id(arguments), valid):
                if frame is not None:
                    executor.discard(frame)
                last = (id(arguments), valid)
                head = ("call", seq, role.key, call.method, call.keep, valid, bool(lent), frees)
                frame = executor.frame(head, bodies[id(arguments)])
            sent.append(slot)
            workers[slot].host.send(frame)
        executor.discard(frame)

    def kept(self, call: PendingCall, role: RoleInfo, spec: MethodSpec) -> Kept:
        """The record of a kept call's resident."""
        assert call.keep is not None
        ranks = role.ranks
        if call.targets is not role.slots:
            ranks = Ranks(ranks.world_size, ranks.meshes, targets=call.ranks)
        source = Source(call.keep, self.name, role.slots, ranks, spec.collect, call.label)
        kept = Kept(source, self, call, call.line)
        self.residents.add(kept)
        found = recording(self)
        if found is not None:
            found.keep(kept)
        return kept

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
        """Free what this thread keeps inside the block; raise the failure of a kept call that nobody has used."""
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

    def borrowers(self, closing: Owned) -> list[str]:
        """Unfinished uses of its residents by groups that don't lie in what is closing."""
        return self.residents.borrowers(closing)

    def done(self, slot: int, seq: int, rows: int | None, start: float, end: float, size: Any, body: Any) -> None:
        """A rank has finished a call."""
        if seq == 0:
            self.workforce.built(slot, None)
            return
        self.order.done(slot, seq, rows, start, end, size if body is None else body)

    def _ended(self, call: PendingCall) -> None:
        """A call is about to be settled."""
        for use in call.uses:
            use._kept.group.residents.give_back(call, use._kept)
        call.uses = ()
        if self.runtime.observers and call.seq >= 0:  # otherwise it was never sent
            self.runtime.dispatcher.soon(lambda: self.runtime.observers.tell_call(self.name, call))

    # -- what its calls and workers need

    def send(self, slots: Sequence[int], head: tuple[Any, ...], body: Any = None) -> None:
        """Send one message to some workers."""
        executor = self.runtime.executor
        frame = executor.frame(head, body)
        for slot in slots:
            self.workforce.workers[slot].host.send(frame)
        executor.discard(frame)

    def node(self, slot: int) -> str:
        """The node of a slot."""
        return self.workforce.workers[slot].boot.node

    def live(self) -> list[int]:
        """The slots whose workers run."""
        return [worker.slot for worker in self.workforce.workers if worker.exit is None]

    def unpack(self, body: Any) -> Any:
        """The value of a body."""
        return None if body is None else self.runtime.executor.codec.unpack(body, None)

    def fail(self, error: ColocateError) -> None:
        """It can't go on: every pending call ends with this error, every worker is ended."""
        with self.order.lock:
            if self.failure is not None or self.closed_by is not None or self.state == "starting":
                return
            self.failure = error
            self.state = "failed"
            self.workforce.failure_seen = any(call.keep is None for call in self.order.pending.values())
            self.order.fail_all(error)
        self.residents.fail(error)
        self.workforce.kill()

    # -- the end

    def close(self, grace: float = 10.0, force: bool = False) -> None:
        """Close it: new calls are refused, running ones have `grace` seconds, then its workers are ended.

        Args:
            grace: Seconds that running calls have to finish.
            force: Close it although other groups use its residents; their calls fail with a clear error.

        Raises:
            BorrowedError: Another group uses one of its residents (without `force`).
            ExceptionGroup: What went wrong, after everything has been freed.
        """
        self.close_for(None, grace, force)

    def close_for(self, by: str | None, grace: float, force: bool) -> None:
        """Close it on behalf of `by` (None: of its caller)."""
        if self.forked:
            self.check()
        if not force and self.closed_by is None:
            self.refuse_if_borrowed()
        if not self.mark_closed(by):
            self.wait_closed()
            return
        try:
            self.state = "closing"
            self.residents.break_borrows()
            errors = self.workforce.end(grace)
        finally:  # also when Ctrl-C has ended the wait
            error = ClosedError(f"group {self.name!r} was closed by {self.closed_by}", closed_by=self.closed_by)
            failed = self.residents.unseen()
            self.order.fail_all(error)
            self.residents.fail(error)
            self.state = "closed"
            self.disown()
            self.pool.vacate(self)
            self._finished.set()
        errors += failed
        if self.runtime.observers:
            self.runtime.dispatcher.soon(lambda: self.runtime.observers.tell("colocate_group_closed", self.name))
        raise_together(f"group {self.name!r} was closed, and this had gone wrong", errors)
