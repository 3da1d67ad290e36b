"""The worker: receives messages, and has its lane do what they ask for. The same everywhere.

Messages are `(head, body)`; a head's first item says what it is. To the worker: define, build, call, batch, free,
hold, resume, cancel, stop, withdraw, decided, stack, fetch, listen, answer, close.
From it: hello, done, failed, held, alive, can_withdraw, stacks, fetched, address, ask, define, progress,
broken, closed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from colocate._codec import Codec
from colocate._jobs import JobThread, error_text, report_exception
from colocate._values import describe
from colocate.errors import ColocateError
from colocate.executor import Boot
from colocate.wire import Turns
from colocate.worker import failure
from colocate.worker.batch import take_apart
from colocate.worker.consequence import LET_GO, Consequence
from colocate.worker.functions import hosted_functions
from colocate.worker.hosted import HostedRole
from colocate.worker.lane import Lane, Work
from colocate.worker.runner import Runner
from colocate.worker.site import Send, Site
from colocate.worker.uses import Peers

LANE = "colocate-lane-"  # names of lanes begin with it, and go on with the id of their worker


class WorkerHost(Site):
    """One worker: what it does about each message.

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
        super().__init__(boot, codec, send, in_process)
        self.ended = self._is_broken = False
        self._on_end = on_end
        self._make_peers = peers
        self.peers = peers(self)
        self._transfer = JobThread(  # waits for residents and sends them, so that the lane never does
            f"colocate-transfer-{boot.worker}", partial(self._thread_failed, "the thread that sends its residents")
        )
        self.lane = Lane(f"{LANE}{boot.worker}", self._held, partial(self._thread_failed, "its lane"), turns)
        self._runner = Runner(self)
        self._handlers: dict[str, Callable[..., None]] = {
            "define": self.definitions.arrived,
            "build": self._on_build,
            "call": self._on_call,
            "batch": self._on_batch,
            "free": self._on_free,
            "hold": self._on_hold,
            "resume": self._on_resume,
            "cancel": self._on_cancel,
            "stop": self._on_stop,
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
        work = Work(0, self._runner.build, "build", head, body)
        work.lots = self.definitions.count
        self.lane.put(work)

    def _on_call(self, head: tuple[Any, ...], body: Any) -> None:
        _, seq, role, method, keep, _valid, _uses, frees = head
        if frees:
            self.store.free(frees)
        if self.ended:
            return
        hosted = self.roles.get(role) or self._for_functions(role)
        spec = hosted.spec(method)
        concurrency = spec.concurrency if spec.is_async else 0
        work = Work(seq, self._runner.call, hosted.label(method), head, body, concurrency)
        work.lots = self.definitions.count
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
        self.send(("alive", number), None)
        self.lane.hold(number, failed)
        what = "a call" if failed else "the constructor of a role on another rank"
        self._interrupt(failed, f"{what} of group {self.boot.group!r} has failed")
        if cut and any(running >= failed for running in list(self.lane.running)):  # an earlier call goes on
            self.groups.cut()

    def _on_resume(self, head: tuple[Any, ...], body: Any) -> None:
        _, number, withdrawn = head
        if not self.lane.closing:
            self._interrupted = None
        self.lane.resume(number, frozenset(withdrawn))

    def _on_cancel(self, head: tuple[Any, ...], body: Any) -> None:
        self.lane.cancel(head[1])

    def _on_stop(self, head: tuple[Any, ...], body: Any) -> None:
        self.lane.stop()

    def _on_withdraw(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, seq = head
        self.send(("can_withdraw", token, self.lane.hold_up(token, seq)), None)

    def _on_decided(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, seq, drop = head
        if not drop:
            self.lane.cancel(seq)
        self.lane.decide(token, seq if drop else None)

    def _on_stack(self, head: tuple[Any, ...], body: Any) -> None:
        self.send(("stacks", head[1], self.stack(), tuple(self.lane.running)), None)

    def _on_fetch(self, head: tuple[Any, ...], body: Any) -> None:
        _, token, key, contents = head
        self._transfer.soon(partial(self._fetch, token, key, contents))

    def _on_listen(self, head: tuple[Any, ...], body: Any) -> None:
        self.send(("address", self.peers.address), None)

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
        self._transfer.soon(self._end)

    # -- from driver to driver, on the receiving thread

    def renew(self, base: int) -> None:
        """Its driver has let go: what that asked for is dropped, what runs is cancelled, what it kept is forgotten.

        Args:
            base: The numbers of the next driver's calls, holds and residents are above this.
        """
        self.base = base
        self.definitions.renew()
        self.store.renew(base)
        self._interrupted = None
        for token in list(self._asks):
            if (asked := self._asks.pop(token, None)) is not None:
                asked[1].set_exception(Consequence(LET_GO))
        self.lane.renew(base)
        self.peers.abort(LET_GO)
        self.groups.interrupt(-1, LET_GO)
        self.groups.cut()

    def adopt(self, boot: Boot) -> None:
        """Another driver commands it from now on, with a secret of its own for what workers tell each other."""
        self.boot = boot
        former, self.peers = self.peers, self._make_peers(self)
        self._transfer.soon(former.close)

    def _thread_failed(self, what: str, error: BaseException) -> None:
        """A thread of the worker has met an exception that nothing of a user's can cause, but a mistake here can."""
        report_exception()  # first: the process ends with the group
        self.broken(f"{what} was ended by {error_text(error)}")

    def broken(self, reason: str) -> None:
        """Leave: without one of its threads it is of no use. Its group fails of that at once instead of waiting."""
        if not self._is_broken:
            self._is_broken = True
            self.send(("broken", reason), None)
            self.close(reason)

    def _end(self) -> None:
        self.lane.thread.join()
        self.groups.close()
        self._transfer.close()
        self.peers.close()
        self.ended = True
        if self.in_process:  # a process takes its roles with it; here the driver may hold the group for long
            self.roles.clear()
            self.instances.clear()  # by which the roles' contexts know each other
        self.send(("closed",), None)
        self._on_end()

    def stack(self) -> str:
        """What the lane is doing, as a Python stack."""
        stack = "".join(failure.stack_of_role_code(self.lane.thread))
        running = ", ".join(work.label for work in list(self.lane.running.values())) or "nothing"
        return f"running {running}\n{stack}" if stack else f"running {running}; its lane has ended"

    # -- on the lane

    def _held(self, number: int, begun: int) -> None:
        self.send(("held", number, begun, self.groups.renew(number)), None)

    # -- on the transfer thread

    def _fetch(self, token: int, key: int, contents: bool) -> None:
        try:
            entry = self.store.wait(key)
            # The structure is made of the value's own containers, of which some are of users' classes.
            body = self.packed(entry.value if contents else describe(entry.value), entry.maker)
        except BaseException as error:  # users' classes say how they are packed
            told, body = failure.failed(error, self.codec, self.definitions, None, False)
            self.send(("fetched", token, None, told.head()), body)
        else:
            self.send(("fetched", token, entry.rows, None), body)
