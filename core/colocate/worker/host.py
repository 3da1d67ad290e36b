"""The worker: receives messages, constructs roles, runs their methods on the lane, answers. The same everywhere.

Messages are `(head, body)`; a head's first item says what it is. To the worker: build, call, batch, free, hold, resume,
withdraw, decided, stack, fetch, listen, answer, close. From it: hello, done, failed, held, alive, can_withdraw, stacks,
fetched, address, ask, progress, closed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from colocate import _batch
from colocate._codec import Codec
from colocate._context import Context, reset_current, running_call, set_current
from colocate._dispatch import Scatter
from colocate._method import MethodSpec
from colocate._values import describe, ordinary
from colocate.errors import CapabilityError, ColocateError, DispatchError, RoleError, SerializationError
from colocate.executor import Boot
from colocate.wire import Turns
from colocate.worker import checkpoint, failure
from colocate.worker.batch import take_apart
from colocate.worker.build import RoleBuild, construct
from colocate.worker.consequence import LET_GO, Consequence
from colocate.worker.functions import hosted_functions
from colocate.worker.hosted import HostedRole
from colocate.worker.lane import Lane, Work
from colocate.worker.process_groups import ProcessGroups
from colocate.worker.results import counts, rows_to_join, without_padding
from colocate.worker.store import Store
from colocate.worker.transfer import Transfer
from colocate.worker.uses import Peers, Resolver

Send = Callable[[tuple[Any, ...], Any], None]
LANE = "colocate-lane-"  # names of lanes begin with it, and go on with the id of their worker
_HOST_ERRORS = (DispatchError, RoleError, SerializationError)


class WorkerHost:
    """One worker: its lane, its residents, its roles.

    Args:
        boot: Who it is.
        codec: How values travel.
        send: Sends a message to the driver; ordered, callable from any thread.
        peers: Makes the access to other workers' residents, given this host.
        in_process: Whether the other workers are threads of this process.
        on_end: Called once its lane has ended after `close`.
        turns: How its lane receives messages itself while it idles.
    """

    def __init__(
        self,
        boot: Boot,
        codec: Codec,
        send: Send,
        peers: Callable[[WorkerHost], Peers],
        *,
        in_process: bool = False,
        on_end: Callable[[], None] = lambda: None,
        turns: Turns | None = None,
    ) -> None:
        self.boot = boot
        self.codec = codec
        self.store = Store(boot.strict)
        self.roles: dict[Any, HostedRole] = {}
        self.instances: dict[str, object] = {}
        self.ended = False
        self._send = send
        self._strict = boot.strict
        self._on_end = on_end
        self._asks: dict[int, tuple[int, Future[Any]]] = {}
        self._interrupted: tuple[int, str] | None = None
        self._tokens = itertools.count(1)
        self._base = 0  # calls up to this are of a driver that has let go
        self.groups = ProcessGroups(self.ask, in_process, boot.host)
        self._make_peers = peers
        self.peers = peers(self)
        self._transfer = Transfer(f"colocate-transfer-{boot.worker}")
        self.lane = Lane(f"{LANE}{boot.worker}", self._held, self._broken, turns)
        self._handlers: dict[str, Callable[..., None]] = {
            "build": self._on_build,
            "call": self._on_call,
            "batch": self._on_batch,
            "free": self._on_free,
            "hold": self._on_hold,
            "resume": self._on_resume,
            "cancel": self._on_cancel,
            "withdraw": self._on_withdraw,
            "decided": self._on_decided,
            "stack": self._on_stack,
            "fetch": self._on_fetch,
            "listen": self._on_listen,
            "answer": self._on_answer,
            "close": self._on_close,
        }

    # -- messages, on the receiving thread: nothing here blocks or runs role code

    def receive(self, head: tuple[Any, ...], body: Any) -> None:
        """Take a message."""
        self._handlers[head[0]](head, body)

    def _on_build(self, head: tuple[Any, ...], body: Any) -> None:
        self.lane.put(Work(0, self._build, "build", head, body))

    def _on_call(self, head: tuple[Any, ...], body: Any) -> None:
        _, seq, role, method, keep, _valid, _uses, frees = head
        if frees:
            self.store.free(frees)
        hosted = self.roles.get(role) or self._for_functions(role)
        spec = hosted.spec(method)
        concurrency = spec.concurrency if spec.is_async else 0
        work = Work(seq, self._call, hosted.label(method), head, body, concurrency)
        if keep is not None:
            self.store.expect(keep)
            work.on_drop = partial(self.store.fail, keep, f"{work.label} was withdrawn after a failure")
        self.lane.put(work)

    def _on_batch(self, head: tuple[Any, ...], body: Any) -> None:
        _, frees, entries = head
        if frees:
            self.store.free(frees)
        for each, its_body in take_apart(entries, body):
            self._on_call(each, its_body)

    def _for_functions(self, key: tuple[int, int]) -> HostedRole:
        """What functions run in; its key tells what their context needs."""
        role = self.roles[key] = hosted_functions(self, *key)
        return role

    def _on_free(self, head: tuple[Any, ...], body: Any) -> None:
        self.store.free(head[1])

    def _on_hold(self, head: tuple[Any, ...], body: Any) -> None:
        _, number, failed, cut = head
        self._send(("alive", number), None)
        self.lane.hold(number, failed)
        if cut and any(running >= failed for running in list(self.lane.running)):  # an earlier call goes on
            self.groups.cut()
        self._interrupt(failed, f"a call of group {self.boot.group!r} failed on another rank")

    def _on_resume(self, head: tuple[Any, ...], body: Any) -> None:
        _, number, withdrawn = head
        if not self.lane.closing:
            self._interrupted = None
        self.lane.resume(number, frozenset(withdrawn))

    def _on_cancel(self, head: tuple[Any, ...], body: Any) -> None:
        self.lane.cancel(head[1])

    def _on_withdraw(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, seq = head
        self._send(("can_withdraw", token, self.lane.hold_up(token, seq)), None)

    def _on_decided(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, seq, drop = head
        if not drop:
            self.lane.cancel(seq)
        self.lane.decide(token, seq if drop else None)

    def _on_stack(self, head: tuple[Any, ...], body: Any) -> None:
        self._send(("stacks", head[1], self.stack()), None)

    def _on_fetch(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, key, contents = head
        self._transfer.put(partial(self._fetch, token, key, contents))

    def _on_listen(self, head: tuple[Any, ...], body: Any) -> None:
        self._send(("address", self.peers.address), None)

    def _on_answer(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, answer, error = head
        _, waiting = self._asks.pop(token, (0, None))
        if waiting is not None:
            if error is None:
                waiting.set_result(answer)
            else:
                waiting.set_exception(ColocateError(error))

    def _on_close(self, head: tuple[Any, ...], body: Any) -> None:
        self.close(head[1] if len(head) > 1 else "the group is closing")

    def close(self, reason: str) -> None:
        """End the lane after what runs now; `on_end` follows. What waits for other workers is told the reason."""
        self.store.close(reason)
        self._interrupt(-1, reason)
        self.groups.cut()
        self.lane.close()
        self._transfer.put(self._end)

    # -- from driver to driver, on the receiving thread

    def renew(self, base: int) -> None:
        """Its driver has let go: what that asked for is dropped, what runs is cancelled, what it kept is forgotten.

        Args:
            base: The numbers of the next driver's calls, holds and residents are above this.
        """
        self._base = base
        self.store.renew(base)
        self._interrupted = None
        for token in list(self._asks):
            if (asked := self._asks.pop(token, None)) is not None:
                asked[1].set_exception(Consequence(LET_GO))
        self.lane.renew(base)
        self.peers.abort(LET_GO)
        self.groups.give_up_making()
        self.groups.cut()

    def adopt(self, boot: Boot) -> None:
        """Another driver commands it from now on, with a secret of its own for what workers tell each other."""
        self.boot = boot
        former, self.peers = self.peers, self._make_peers(self)
        self._transfer.put(former.close)

    def _broken(self) -> None:
        """Without its lane the worker is of no use: it leaves, and its group fails instead of waiting for it."""
        self.close("its lane broke")

    def _end(self) -> None:
        self.lane.thread.join()
        self.groups.close()
        self._transfer.close()
        self.peers.close()
        self.ended = True
        self._send(("closed",), None)
        self._on_end()

    def _interrupt(self, seq: int, reason: str) -> None:
        """End the waits of calls from `seq` on, those under way and those to come: what they wait for may never be."""
        self._interrupted = seq, reason
        for token, (asker, waiting) in list(self._asks.items()):
            if asker >= seq and self._asks.pop(token, None) is not None:
                waiting.set_exception(Consequence(reason))
        if any(running >= seq for running in list(self.lane.running)):
            self.peers.abort(reason)
            self.groups.give_up_making()

    def interruption(self) -> str | None:
        """Why the call that asks mustn't wait for another worker; None when it may."""
        state = running_call.get()
        if state is not None and 0 < state.seq <= self._base:
            return LET_GO
        if self._interrupted is not None and (state is None or state.seq >= self._interrupted[0]):
            return self._interrupted[1]
        return None

    # -- what the lane and roles ask the driver

    def ask(self, *question: Any) -> Any:
        """Ask the driver something and wait; ColocateError says its refusal, or what broke the wait."""
        token = next(self._tokens)
        waiting: Future[Any] = Future()
        state = running_call.get()
        self._asks[token] = 0 if state is None else state.seq, waiting
        reason = self.interruption()
        if reason is not None:
            self._asks.pop(token, None)
            raise Consequence(reason)
        self._send(("ask", token, *question), None)
        return waiting.result()

    def stack(self) -> str:
        """What the lane is doing, as a Python stack."""
        frame = failure.frame_of(self.lane.thread)
        running = ", ".join(work.label for work in list(self.lane.running.values())) or "nothing"
        if frame is None:
            return f"running {running}; its lane has ended"
        return f"running {running}\n" + "".join(failure.stack_of_role_code(frame))

    # -- on the lane

    def _held(self, number: int, begun: int) -> None:
        self._send(("held", number, begun, self.groups.renew(number)), None)

    def _build(self, work: Work) -> bool:
        _, seq, self.groups.generation, self.groups.default_role, restored = work.head
        start = time.time()
        builds: list[RoleBuild] = self.codec.unpack(work.body, None)
        for build in builds:
            if self.boot.slot not in build.slots:
                continue
            try:
                self.roles[build.name] = construct(build, self)
            except BaseException as error:
                self._failed(seq, None, build.name, error)
                return False
            self.instances[build.name] = self.roles[build.name].instance
        if restored is not None:
            for role in list(self.roles.values()):
                try:
                    checkpoint.restore(role, restored)
                except BaseException as error:
                    self._failed(seq, None, role.name, error)
                    return False
        self._send(("done", seq, None, start, time.time(), None), None)
        return True

    def _call(self, work: Work) -> Any:
        _, seq, key, method, keep, valid, uses, _ = work.head
        body, work.body = work.body, None  # it may be large, and the role remembers its last call
        role = self.roles[key]
        spec = role.spec(method)
        start = time.time()
        tokens = set_current(role.ctx), running_call.set(work)
        role.ctx.last_call = work
        try:
            resolver = self._resolver(seq) if uses else None
            arguments = self._arguments(body, resolver, role, spec)
            work.valid_rows = resolver.valid if valid is None and resolver is not None else valid
            if spec.padded is not None:
                work.rows = _batch.rows(arguments[spec.padded], spec.padded)
            result = spec.call(role.instance, arguments)
            if spec.is_async:
                return self._finish_async(result, work, role, spec, resolver, start)
            self._finish(result, work, role, spec, resolver, start)
        except BaseException as error:  # whatever role code raises is the caller's to see, SystemExit included
            self._failed(seq, keep, role.name, error)
            return False
        finally:
            running_call.reset(tokens[1])
            reset_current(tokens[0])
        return True

    def _resolver(self, seq: int) -> Resolver:
        return Resolver(self.peers, self.boot.group, self.boot.slot, partial(self.ask, "aligned", seq))

    async def _finish_async(
        self,
        coroutine: Any,
        work: Work,
        role: HostedRole,
        spec: MethodSpec,
        resolver: Resolver | None,
        start: float,
    ) -> bool:
        # A task has a context of its own, in which nothing has to be reset.
        set_current(role.ctx)
        running_call.set(work)
        try:
            self._finish(await coroutine, work, role, spec, resolver, start)
        except BaseException as error:
            self._failed(work.seq, work.head[4], role.name, error)
            return False
        return True

    def _arguments(self, body: Any, resolver: Resolver | None, role: HostedRole, spec: MethodSpec) -> dict[str, Any]:
        if body is None:
            return {}
        arguments: dict[str, Any] = self.codec.unpack(body, self.boot.device)
        if resolver is None:
            return arguments
        arguments = resolver.resolve(arguments)
        for key, maker in self.store.written(resolver.keys):
            raise RoleError(f"resident {key}, returned by {maker}, was changed in place after that; it can't be used")
        dispatch = spec.dispatch
        nothing = resolver.total if isinstance(dispatch, Scatter) and dispatch.pad else resolver.valid
        if nothing == 0 and isinstance(dispatch, Scatter) and dispatch.empty == "error":
            raise DispatchError(
                f"{role.label(spec.name)}: rank {role.ctx.rank} has no rows of {dispatch.parameters[0]!r} (a resident "
                'keeps its producer\'s partition); declare Scatter(..., empty="run") or pass the fetched value',
                parameter=dispatch.parameters[0],
            )
        return arguments

    def _finish(
        self, result: Any, work: Work, role: HostedRole, spec: MethodSpec, resolver: Resolver | None, start: float
    ) -> None:
        seq, label, keep = work.seq, work.label, work.head[4]
        result = ordinary(result)
        if work.rows is not None and (result is not None or counts(spec, role.ctx)):
            result = without_padding(result, work.rows, work.valid_rows, label)
        if len(self.store):
            self._check_writes(label, role, resolver)
        valid = work.valid_rows
        if keep is None:
            body = None if result is None else self._packed(result, label)
            self._send(("done", seq, valid, start, time.time(), None), body)
        else:
            rows = rows_to_join(result, spec, role.ctx)
            nbytes = self.store.put(keep, result, label, valid)
            self._send(("done", seq, valid, start, time.time(), (nbytes, rows)), None)

    def _packed(self, result: Any, label: str) -> Any:
        return self.codec.pack_named(result, "result", f"the result of {label}")

    def _check_writes(self, label: str, role: HostedRole, resolver: Resolver | None) -> None:
        # A role may write into what it got now, or into what it returned before and still refers to.
        used = resolver.keys if resolver is not None else ()
        everything = self._strict or role.name is None  # a function may have asked any role for anything
        keys = None if everything else [*used, *self.store.made_by(role.name or "")]
        for key, maker in self.store.written(keys):
            raise RoleError(
                f"{label} changed in place a value that {maker} had returned (resident {key}); "
                "a role method changes neither its arguments nor what it has returned: clone it first"
            )

    def _failed(self, seq: int, keep: int | None, role: str | None, error: BaseException) -> None:
        host = isinstance(error, CapabilityError) or (
            isinstance(error, _HOST_ERRORS) and not failure.raised_by_role(error)
        )
        secondary = isinstance(error, Consequence) or self.groups.lost_a_peer()
        told = failure.describe(error, role=role, host=host, secondary=secondary)
        if not 0 < seq <= self._base:  # otherwise nobody would lead the hold that follows
            self._send(("failed", seq, told.head()), failure.sendable(error, self.codec))
        if keep is not None:  # who uses it fails of that in turn, and is to be heard of later than this
            self.store.fail(keep, f"{told.type}: {told.text}")
        del error
        self.groups.cut()

    # -- on the transfer thread

    def _fetch(self, token: int, key: int, contents: bool) -> None:
        try:
            entry = self.store.wait(key)
            body = self._packed(entry.value, entry.maker) if contents else None
            structure = None if contents else describe(entry.value)
        except Exception as error:
            self._send(("fetched", token, None, f"{type(error).__name__}: {error}", None), None)
            return
        self._send(("fetched", token, entry.rows, None, structure), body)

    def part(self, key: int) -> Any:
        """This worker's part of a resident, once it is there."""
        return self.store.wait(key).value

    def part_rows(self, key: int) -> int:
        """How many rows it has."""
        return _batch.rows(self.part(key), f"resident {key}")

    def part_weight(self, key: int) -> int | None:
        """How many rows the call that made it worked on."""
        return self.store.wait(key).rows

    def report(self, ctx: Context, done: int, total: int | None) -> None:
        """A role's progress."""
        self._send(("progress", ctx.role, done, total), None)
