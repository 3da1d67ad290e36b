"""The worker receives messages, and queues their work on lanes. It is the same for every executor.

`_protocol.to_worker` defines the messages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from colocate._protocol import from_worker, to_worker
from colocate._protocol.bundle import take_apart
from colocate._protocol.message import Head, Message, read
from colocate._protocol.to_worker import Call
from colocate._system.jobs import OUR_FAULT, JobThread, error_text, report_exception
from colocate._system.own_modules import keep_modules
from colocate._values.codec import Codec
from colocate._values.leaving import describe
from colocate.errors import CapabilityError, ColocateError
from colocate.executor import Boot
from colocate.features import CALLS, of_message
from colocate.wire import Arriving, Turns
from colocate.worker.background import Background, LaneBarrier
from colocate.worker.birth.imports import importing
from colocate.worker.birth.template import tell_imports
from colocate.worker.context import Send, WorkerContext
from colocate.worker.lane import Lane, Work
from colocate.worker.residents.peers import Peers
from colocate.worker.runner import Runner
from colocate.worker.serving import failure
from colocate.worker.serving.build import FUNCTION, GROUP_WIDE_CALLS, hosted_functions
from colocate.worker.serving.signal_handlers import is_role_code

LANE = "colocate-lane-"  # Prefix of the names of lanes' threads; the worker's id follows.


class WorkerHost(WorkerContext):
    """One worker, which handles the driver's messages.

    Args:
        boot: The worker's boot message.
        codec: Serializes values.
        send: Sends a message to the driver; ordered, callable from any thread.
        peers: Creates this host's access to other workers' residents.
        in_process: Whether the other workers are threads of this process.
        on_end: Called once the lanes have ended after `close`.
        turns: Receives messages on the idle lane itself.
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
        keep_modules()
        super().__init__(boot, codec, send, in_process)
        self.ended = self._is_broken = False
        self._on_end = on_end
        self._make_peers = peers
        self.peers = peers(self)
        self._transfer = JobThread(  # This thread waits for residents and sends values, so that the lane never has to.
            f"colocate-transfer-{boot.worker}", partial(self._thread_failed, "the thread that sends its residents")
        )
        # Started now, so that a failed start is reported: without this thread, the worker couldn't even close.
        self._transfer.start()
        # Inspections have their own thread, because the receiving thread must not wait, and the lane may be busy.
        self._snapshots = JobThread(f"colocate-glimpse-{boot.worker}", lambda error: report_exception())
        self._lane_broken = partial(self._thread_failed, "its lane")
        self.lane = Lane(
            f"{LANE}{boot.worker}",
            self.scope,
            self._held,
            self._lane_broken,
            turns,
            in_process,
            lambda: self._runner.close(),
        )
        self._runner = Runner(self, self.broken)
        self._stands = threading.Condition()
        self.scope.ends(lambda concerns, reason: self._look_again())

    # -- messages, on the receiving thread: no role code, and no wait except for the rest of a message

    def arrives(self, head: Head, sizes: Sequence[int], length: int) -> Arriving | None:
        """Return the buffer for a body that is forwarded to other workers; None for all other messages."""
        message = read(head)
        passed = message.passed if isinstance(message, to_worker.Call | to_worker.Batch) else None
        return None if passed is None else self.peers.arrives(passed, sizes, length)

    def receive(self, head: Head, body: Any) -> None:
        """Pass a message to a handler in this class, or to a feature."""
        message = read(head)
        if (handler := _HANDLERS.get(type(message))) is not None:
            handler(self, message, body)
            return
        feature = of_message(type(message).__name__)
        assert feature is not None, message
        self.part(feature).heard(message, body)

    def _on_call(self, call: to_worker.Call, body: Any) -> None:
        if call.passed is not None and call.passed[2]:
            body = self.peers.passed(call.passed)
        self._queue(call, body)

    def _on_batch(self, batch: to_worker.Batch, body: Any) -> None:
        if batch.passed is not None and batch.passed[2]:
            body = self.peers.passed(batch.passed)
        if batch.frees:
            self.store.free(batch.frees)
        for call, call_body in take_apart(batch.calls, body):
            self._queue(call, call_body)

    def _queue(self, call: to_worker.Call, body: Any) -> None:
        if (work := self._work_of(call, body)) is not None:
            self.lane_for(call.role).put(work)

    def _on_free(self, free: to_worker.Free, body: Any) -> None:
        self.store.free(free.keys)
        for part in self.parts.values():
            part.freed()

    def _on_define(self, define: to_worker.Define, body: Any) -> None:
        self.definitions.arrived(define, body)

    def _on_build(self, build: to_worker.Build, body: Any) -> None:
        self.slots, self.collective_timeout = build.slots, build.collective_timeout
        for name in build.background:
            background = Background(name, self.boot, self.scope, partial(self._stopped, name), self._lane_broken)
            background.runner = Runner(self, self.broken, background)
            self.background[name] = background
        work = Work(0, self._runner.build, "build", build, body)
        work.bundles_seen = self.definitions.received.count
        self.lane.put(work)

    def _on_hold(self, hold: to_worker.Hold, body: Any) -> None:
        self.say(from_worker.Alive(hold.number, hold.lane))
        self._named(hold.lane).hold(hold.number, hold.failed)
        culprit = "a call" if hold.failed else "the constructor of a role on another rank"
        self.scope.end(hold.failed, f"{culprit} of group {self.boot.group!r} has failed", hold.lane)
        if hold.cut and not hold.lane:  # Earlier calls continue; only the failed call and later calls are unblocked.
            self.frees(lambda: any(running >= hold.failed for running in list(self.lane.running)))

    def _on_resume(self, resume: to_worker.Resume, body: Any) -> None:
        self.scope.resume(resume.lane)
        for role in list(self.roles.values()):
            role.take_back(resume.withdrawn)
        self._named(resume.lane).resume(resume.number, frozenset(resume.withdrawn))

    def _on_unwanted(self, unwanted: to_worker.Unwanted, body: Any) -> None:
        for part in self.parts.values():
            part.unwanted(unwanted.seq)
        for lane in self.lanes:
            lane.give_up(unwanted.seq, unwanted.seq)

    def _on_stop(self, stop: to_worker.Stop, body: Any) -> None:
        for lane in self.lanes:
            lane.stop()
        for part in self.parts.values():
            part.stops()

    def _on_withdraw(self, withdraw: to_worker.Withdraw, body: Any) -> None:
        can = self._named(withdraw.lane).hold_up(withdraw.token, withdraw.seq)
        self.say(from_worker.CanWithdraw(withdraw.token, can))

    def _on_decided(self, decided: to_worker.Decided, body: Any) -> None:
        if not decided.drop:
            self._named(decided.lane).cancel(decided.seq, decided.seq)
        self._named(decided.lane).decide(decided.token, decided.seq if decided.drop else None)

    def _on_ask_stack(self, question: to_worker.AskStack, body: Any) -> None:
        running = tuple(seq for lane in self.lanes for seq in _runs(lane))
        self.say(from_worker.Stack(question.token, self.stack(), running))

    def _on_fetch(self, fetch: to_worker.Fetch, body: Any) -> None:
        self._transfer.soon(partial(self._fetch, fetch))

    def _on_listen(self, listen: to_worker.Listen, body: Any) -> None:
        try:
            self.say(from_worker.Address(self.peers.address))
        except (OSError, RuntimeError) as error:  # No descriptor is free, or no thread can start.
            self.say(from_worker.Address(None, error_text(error)))

    def _on_answer(self, answer: to_worker.Answer, body: Any) -> None:
        if answer.error is None:
            self._questions.answered(answer.token, None, answer.answer)
        else:
            self._questions.refused(answer.token, ColocateError(answer.error))

    def _on_close(self, close: to_worker.Close, body: Any) -> None:
        self.close(close.reason)

    def _work_of(self, call: to_worker.Call, body: Any) -> Work | None:
        if call.frees:
            self.store.free(call.frees)
        if self.ended:
            return None
        hosted = self.roles.get(call.role)
        if hosted is None:  # The call is for the nameless role, with a key that describes the context.
            call_name, label = call.method, call.method
            if call_name not in GROUP_WIDE_CALLS:
                call_name, label = FUNCTION, f"function {call.method}"
            key: Any = *call.role, CALLS[call_name]
            if (hosted := self.roles.get(key)) is None:
                hosted = self.roles[key] = hosted_functions(self, *key)
            spec = hosted.methods[call_name]
        else:
            spec, label = hosted.routes[call.method]
        concurrency = spec.concurrency if spec.is_async else 0
        create = Work if spec.feature is None else self.part(spec.feature).work
        work = create(call.seq, self._runner.call, label, call, body, concurrency, spec)
        work.role = hosted
        if self.background:
            self._place(work, call)
        work.bundles_seen = self.definitions.received.count
        if call.keep is not None:
            self.store.expect(call.keep)
            work.on_drop = partial(self.store.fail, call.keep, f"{work.label} was withdrawn after a failure")
        return work

    # -- background roles

    def _named(self, role: str) -> Lane:
        """Return the lane of a background role, or the main lane for ""."""
        return self.background[role].lane if role else self.lane

    def _place(self, work: Work, call: to_worker.Call) -> None:
        """Assign a call to the role's lane. For a call on the whole worker, add a barrier for the other lanes."""
        if (background := self.background.get(call.role)) is not None:
            work.run = background.runner.call
        elif call.method in GROUP_WIDE_CALLS:
            standing = LaneBarrier(call.seq, work.label, self.lanes[1:], self._stands, self.scope)
            work.run, work.on_drop = partial(self._alone, standing), standing.end

    def _alone(self, standing: LaneBarrier, work: Work) -> bool | None:
        """Run a call while the other lanes stand still, or return None if the call must be queued again."""
        self.lane.waits()
        if not standing.wait():
            return None
        result: bool | None = self._runner.call(work)
        if result is not None:
            standing.end()
        return result

    def _look_again(self) -> None:
        with self._stands:
            self._stands.notify_all()

    def _stopped(self, role: str, number: int, begun: int) -> None:
        """Report that a background role's lane has reached a hold's barrier. Runs on that lane."""
        self.say(from_worker.Held(number, begun, {}, role, self.background[role].lane.take_unfinished()))

    def frees(self, waits: Callable[[], bool]) -> None:
        """Unblock the main lane's wait for other ranks if `waits()` is true."""
        for part in self.parts.values():
            part.frees(waits)

    def close(self, reason: str) -> None:
        """Close the lanes after their running calls, and then call `on_end`.

        Waits for other workers fail with the reason.
        """
        self.scope.close(reason)
        self.store.close()
        for lane in self.lanes:
            lane.close()
        self._transfer.soon(self._end)

    # -- inspections, on the receiving thread

    def look(self, then: Callable[[Mapping[str, Any]], object]) -> None:
        """Pass a snapshot of this worker to `then` on another thread. Do nothing if no thread can start."""
        with suppress(RuntimeError):
            self._snapshots.soon(lambda: then(snapshot(self)))

    # -- the change of drivers, on the receiving thread

    def renew(self, base: int) -> None:
        """Drop a former driver's queued calls and residents, and cancel the driver's running calls.

        Process groups aren't cut yet. A step that all ranks have begun ends by itself. If some ranks drop a step, the
        other ranks wait in vain until the next driver's hold ends their wait. Cutting a group amid a transfer would
        make gloo lose the waiting threads (`features/process_groups/waits.py`), and in a backward pass nothing else
        unblocks them.
        """
        self.scope.renew(base)
        self.definitions.renew()
        self.store.renew()
        for lane in self.lanes:
            lane.renew()

    def adopt(self, boot: Boot) -> None:
        """Switch to another driver's boot message, with a new secret for messages between workers."""
        self.boot = boot
        former, self.peers = self.peers, self._make_peers(self)
        self._transfer.soon(former.close)
        for part in self.parts.values():
            part.adopted()

    def _thread_failed(self, what: str, error: BaseException) -> None:
        """Report an error of one of the worker's own threads.

        It is a bug in colocate, because user code can't cause it.
        """
        report_exception()  # The error is printed first, because the process may end with the group.
        self.broken(f"{what} was ended by {error_text(error)}. {OUR_FAULT}")

    def broken(self, reason: str, log_tail: str = "") -> None:
        """Report this worker as broken and close the lanes, so that the group fails at once instead of waiting."""
        if not self._is_broken:
            self._is_broken = True
            self.say(from_worker.Broken(reason, log_tail))
            self.close(reason)

    def _end(self) -> None:
        for lane in self.lanes:
            lane.join()
        for part in self.parts.values():
            part.close()
        for thread in (self._transfer, self._snapshots):
            thread.close(0.0)
        if not self.in_process:
            self.peers.close()
            tell_imports()  # Imports are reported late, to include modules imported for unpickled values.
        self.ended = True
        self.roles.clear()  # If workers are threads, the driver may refer to the group for long.
        self.instances.clear()  # The roles' contexts refer to each other through this dict.
        self.say(from_worker.Closed())
        self._on_end()

    def stack(self) -> str:
        """Return the Python stacks of all lanes except idle background lanes."""
        return "".join(_stack(lane) for lane in self.lanes if lane is self.lane or _runs(lane))

    # -- on the lane

    def _held(self, number: int, begun: int) -> None:
        parts = self.told(lambda part: part.back(number))
        self.say(from_worker.Held(number, begun, parts, "", self.lane.take_unfinished()))

    # -- on the transfer thread

    def _fetch(self, asked: to_worker.Fetch) -> None:
        try:
            entry = self.store.wait(asked.key)
            # The description contains the value's containers, which may be of users' classes.
            with self.store.reading(entry):
                body = self.packed(entry.value if asked.contents else describe(entry.value), entry.maker)
            self.say_result(from_worker.Fetched(asked.token, entry.weight, None), body, entry.maker)
        except BaseException as error:  # Users' classes control pickling, and may raise anything.
            report, body = failure.failed(error, self.codec, self.definitions, None, False)
            self.say(from_worker.Fetched(asked.token, None, report), body)


_HANDLERS: Mapping[type[Message], Callable[[WorkerHost, Any, Any], None]] = {
    to_worker.Call: WorkerHost._on_call,
    to_worker.Batch: WorkerHost._on_batch,
    to_worker.Free: WorkerHost._on_free,
    to_worker.Define: WorkerHost._on_define,
    to_worker.Build: WorkerHost._on_build,
    to_worker.Hold: WorkerHost._on_hold,
    to_worker.Resume: WorkerHost._on_resume,
    to_worker.Unwanted: WorkerHost._on_unwanted,
    to_worker.Stop: WorkerHost._on_stop,
    to_worker.Withdraw: WorkerHost._on_withdraw,
    to_worker.Decided: WorkerHost._on_decided,
    to_worker.AskStack: WorkerHost._on_ask_stack,
    to_worker.Fetch: WorkerHost._on_fetch,
    to_worker.Listen: WorkerHost._on_listen,
    to_worker.Answer: WorkerHost._on_answer,
    to_worker.Close: WorkerHost._on_close,
}
"""Handlers of the core's messages; features handle the others."""


def _runs(lane: Lane) -> dict[int, Work]:
    return {seq: work for seq, work in dict(lane.running).items() if not work.stands}


def _stack(lane: Lane) -> str:
    with failure.LOOKING:  # The lock is held until all frames are released again.
        return _stack_now(lane)


def _stack_now(lane: Lane) -> str:
    running, frames = _runs(lane), failure.frames_of(lane.thread)
    awaiting = lane.tasks.awaiting() if lane.tasks is not None else {}
    texts = [
        f"awaiting in {where}\n{''.join(failure.role_code_in(frames))}"
        for seq, task_frames in awaiting.items()
        if seq in running
        for where, frames in running[seq].awaiting(task_frames)
    ]
    if len(texts) < len(running) or not texts:  # At least one call computes on the lane's thread, or no call runs.
        computing = ", ".join(work.label for seq, work in running.items() if seq not in awaiting) or "nothing"
        if (module := importing(frames)) is not None:
            computing += f", importing {module}"
        if computing == "nothing" and frames and not is_role_code(frames[0]):
            texts.insert(0, "idle\n")
        else:
            stack = "".join(failure.role_code_in(frames[::-1]))
            texts.insert(0, f"running {computing}\n{stack}" if frames else f"running {computing}; its lane has ended")
    if not running and lane.tasks is not None:
        texts += [f"awaiting in a task\n{''.join(failure.role_code_in(frames))}" for frames in lane.tasks.left()]
    return "".join(texts)


def snapshot(worker_context: WorkerContext) -> dict[str, Any]:
    """Return a worker's running calls, queue and roles' memory as plain data.

    May run on any thread, and take a while.
    """
    now, work = time.time(), worker_context.lane.last()
    boot = worker_context.boot
    held: Mapping[str, tuple[int, int]] | None = None
    looks = 0
    try:
        memory: Any = worker_context.part("memory")
    except CapabilityError as error:
        trouble = error.message
    else:
        held, trouble = memory.glimpse()
        looks = memory.is_looking
    running = [
        (work.message.role, work.began, now)
        for lane in worker_context.lanes
        for work in lane.started()
        if isinstance(work.message, Call)
    ]
    busy = {} if worker_context.recent is None else worker_context.recent.shares(now, running)
    roles = [
        {
            "role": role.name,
            "rank": role.ctx.rank,
            "busy": round(busy.get(role.name, 0.0), 4),
            "bytes": None if held is None else held.get(role.name, (0, 0))[0],
            "asleep": None if held is None else held.get(role.name, (0, 0))[1],
        }
        for role in list(worker_context.roles.values())
        if role.name is not None
    ]
    status = {
        "group": boot.group,
        "generation": boot.generation,
        "slot": boot.slot,
        "node": boot.node,
        "device": boot.device,
        "pid": os.getpid(),
        "queue": max(0, sum(lane.waiting for lane in worker_context.lanes) - looks),
        "call": None if work is None else work.label,
        "age": None if work is None or not work.began else round(now - work.began, 3),
        "roles": roles,
    }
    return status if trouble is None else {**status, "memory": trouble}
