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
from colocate._protocol.bundle import split_bundle
from colocate._protocol.message import Head, Message, decode_head
from colocate._protocol.to_worker import Call
from colocate._system.jobs import OUR_FAULT, JobThread, format_error, report_exception
from colocate._system.own_modules import preload_modules
from colocate._values.codec import Codec
from colocate._values.leaving import describe_value
from colocate.errors import CapabilityError, ColocateError
from colocate.executor import Boot
from colocate.features import CALLS, import_messages
from colocate.wire import IncomingBody, Turns
from colocate.worker.background import Background, LaneBarrier
from colocate.worker.birth.imports import get_importing_module
from colocate.worker.birth.template import announce_imports
from colocate.worker.context import Send, WorkerContext
from colocate.worker.lane import Lane, Work
from colocate.worker.residents.peers import Peers
from colocate.worker.runner import Runner
from colocate.worker.serving import failure
from colocate.worker.serving.build import FUNCTION, GROUP_WIDE_CALLS, create_function_host
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
        preload_modules()
        super().__init__(boot, codec, send, in_process)
        self.has_ended = self._is_broken = False
        self._on_end = on_end
        self._make_peers = peers
        self.peers = peers(self)
        self._transfer = JobThread(  # This thread waits for residents and sends values, so that the lane never has to.
            f"colocate-transfer-{boot.worker}", partial(self._on_thread_failed, "the thread that sends its residents")
        )
        # Started now, so that a failed start is reported: without this thread, the worker couldn't even close.
        self._transfer.start()
        # Inspections have their own thread, because the receiving thread must not wait, and the lane may be busy.
        self._snapshots = JobThread(f"colocate-glimpse-{boot.worker}", lambda error: report_exception())
        self._on_lane_broken = partial(self._on_thread_failed, "its lane")
        self.lane = Lane(
            f"{LANE}{boot.worker}",
            self.scope,
            self._on_held,
            self._on_lane_broken,
            turns,
            in_process,
            lambda: self._runner.close(),
        )
        self._runner = Runner(self, self.report_broken)
        self._barrier_news = threading.Condition()
        self.scope.add_ender(lambda concerns, reason: self._notify_barriers())

    # -- messages, on the receiving thread: no role code, and no wait except for the rest of a message

    def open_buffer(self, head: Head, sizes: Sequence[int], length: int) -> IncomingBody | None:
        """Return the buffer for a body that is forwarded to other workers; None for all other messages."""
        message = decode_head(head)
        passed = message.passed if isinstance(message, to_worker.Call | to_worker.Batch) else None
        return None if passed is None else self.peers.arrival_buffer(passed, sizes, length)

    def receive(self, head: Head, body: Any) -> None:
        """Pass a message to a handler in this class, or to a feature."""
        message = decode_head(head)
        if (handler := _HANDLERS.get(type(message))) is not None:
            handler(self, message, body)
            return
        feature = import_messages(type(message).__name__)
        assert feature is not None, message
        self.get_feature(feature).on_message(message, body)

    def _on_call(self, call: to_worker.Call, body: Any) -> None:
        if call.passed is not None and call.passed[2]:
            body = self.peers.fetch_passed(call.passed)
        self._enqueue_call(call, body)

    def _on_batch(self, batch: to_worker.Batch, body: Any) -> None:
        if batch.passed is not None and batch.passed[2]:
            body = self.peers.fetch_passed(batch.passed)
        if batch.frees:
            self.store.free(batch.frees)
        for call, call_body in split_bundle(batch.calls, body):
            self._enqueue_call(call, call_body)

    def _enqueue_call(self, call: to_worker.Call, body: Any) -> None:
        if (work := self._create_work(call, body)) is not None:
            self.lane_for(call.role).enqueue(work)

    def _on_free(self, free: to_worker.Free, body: Any) -> None:
        self.store.free(free.keys)
        for part in self.parts.values():
            part.on_residents_freed()

    def _on_define(self, define: to_worker.Define, body: Any) -> None:
        self.definitions.on_bundle(define, body)

    def _on_build(self, build: to_worker.Build, body: Any) -> None:
        self.slots, self.collective_timeout = build.slots, build.collective_timeout
        for name in build.background:
            background = Background(
                name, self.boot, self.scope, partial(self._on_background_held, name), self._on_lane_broken
            )
            background.runner = Runner(self, self.report_broken, background)
            self.background[name] = background
        work = Work(0, self._runner.build_roles, "build", build, body)
        work.bundles_seen = self.definitions.received.count
        self.lane.enqueue(work)

    def _on_hold(self, hold: to_worker.Hold, body: Any) -> None:
        self.send_message(from_worker.Heartbeat(hold.number, hold.lane))
        self._get_lane(hold.lane).hold(hold.number, hold.failed)
        culprit = "a call" if hold.failed else "the constructor of a role on another rank"
        self.scope.end_waits(hold.failed, f"{culprit} of group {self.boot.group!r} has failed", hold.lane)
        if hold.cut and not hold.lane:  # Earlier calls continue; only the failed call and later calls are unblocked.
            self.unblock_lane(lambda: any(running >= hold.failed for running in list(self.lane.running)))

    def _on_resume(self, resume: to_worker.Resume, body: Any) -> None:
        self.scope.resume_waits(resume.lane)
        for role in list(self.roles.values()):
            role.rewind_generator(resume.withdrawn)
        self._get_lane(resume.lane).resume(resume.number, frozenset(resume.withdrawn))

    def _on_cancel_call(self, unwanted: to_worker.CancelCall, body: Any) -> None:
        for part in self.parts.values():
            part.on_call_cancelled(unwanted.seq)
        for lane in self.lanes:
            lane.abandon_calls(unwanted.seq, unwanted.seq)

    def _on_stop(self, stop: to_worker.Stop, body: Any) -> None:
        for lane in self.lanes:
            lane.stop_beginning()
        for part in self.parts.values():
            part.on_group_closing()

    def _on_offer_cancel(self, withdraw: to_worker.OfferCancel, body: Any) -> None:
        can = self._get_lane(withdraw.lane).defer_call(withdraw.token, withdraw.seq)
        self.send_message(from_worker.CancelVote(withdraw.token, can))

    def _on_cancel_decision(self, decided: to_worker.CancelDecision, body: Any) -> None:
        if not decided.drop:
            self._get_lane(decided.lane).cancel_calls(decided.seq, decided.seq)
        self._get_lane(decided.lane).decide_deferred(decided.token, decided.seq if decided.drop else None)

    def _on_ask_stack(self, question: to_worker.AskStack, body: Any) -> None:
        running = tuple(seq for lane in self.lanes for seq in _list_running(lane))
        self.send_message(from_worker.Stack(question.token, self.format_stacks(), running))

    def _on_fetch(self, fetch: to_worker.Fetch, body: Any) -> None:
        self._transfer.call_soon(partial(self._send_resident, fetch))

    def _on_listen(self, listen: to_worker.Listen, body: Any) -> None:
        try:
            self.send_message(from_worker.Address(self.peers.address))
        except (OSError, RuntimeError) as error:  # No descriptor is free, or no thread can start.
            self.send_message(from_worker.Address(None, format_error(error)))

    def _on_answer(self, answer: to_worker.Answer, body: Any) -> None:
        if answer.error is None:
            self._questions.add_answer(answer.token, None, answer.answer)
        else:
            self._questions.add_refusal(answer.token, ColocateError(answer.error))

    def _on_close(self, close: to_worker.Close, body: Any) -> None:
        self.close(close.reason)

    def _create_work(self, call: to_worker.Call, body: Any) -> Work | None:
        if call.frees:
            self.store.free(call.frees)
        if self.has_ended:
            return None
        hosted = self.roles.get(call.role)
        if hosted is None:  # The call is for the nameless role: `call.role` has arguments of `create_function_host`.
            call_name, label = call.method, call.method
            if call_name not in GROUP_WIDE_CALLS:
                call_name, label = FUNCTION, f"function {call.method}"
            key: Any = *call.role, CALLS[call_name]
            if (hosted := self.roles.get(key)) is None:
                hosted = self.roles[key] = create_function_host(self, *key)
            spec = hosted.methods[call_name]
        else:
            spec, label = hosted.routes[call.method]
        concurrency = spec.concurrency if spec.is_async else 0
        create = Work if spec.feature is None else self.get_feature(spec.feature).create_work
        work = create(call.seq, self._runner.call, label, call, body, concurrency, spec)
        work.role = hosted
        if self.background:
            self._place_work(work, call)
        work.bundles_seen = self.definitions.received.count
        if call.keep is not None:
            self.store.expect_value(call.keep)
            work.on_drop = partial(self.store.fail_value, call.keep, f"{work.label} was withdrawn after a failure")
        return work

    # -- background roles

    def _get_lane(self, role: str) -> Lane:
        """Return the lane of a background role, or the main lane for ""."""
        return self.background[role].lane if role else self.lane

    def _place_work(self, work: Work, call: to_worker.Call) -> None:
        """Assign a call to the role's lane. For a call on the whole worker, add a barrier for the other lanes."""
        if (background := self.background.get(call.role)) is not None:
            work.run = background.runner.call
        elif call.method in GROUP_WIDE_CALLS:
            standing = LaneBarrier(call.seq, work.label, self.lanes[1:], self._barrier_news, self.scope)
            work.run, work.on_drop = partial(self._run_alone, standing), standing.release_lanes

    def _run_alone(self, standing: LaneBarrier, work: Work) -> bool | None:
        """Run a call while the other lanes stand still, or return None if the call must be queued again."""
        self.lane.on_waiting()
        if not standing.wait_for_lanes():
            return None
        result: bool | None = self._runner.call(work)
        if result is not None:
            standing.release_lanes()
        return result

    def _notify_barriers(self) -> None:
        with self._barrier_news:
            self._barrier_news.notify_all()

    def _on_background_held(self, role: str, number: int, begun: int) -> None:
        """Report that a background role's lane has reached a hold's barrier. Runs on that lane."""
        self.send_message(
            from_worker.HoldReached(number, begun, {}, role, self.background[role].lane.take_unfinished())
        )

    def unblock_lane(self, waits: Callable[[], bool]) -> None:
        """Unblock the main lane's wait for other ranks if `waits()` is true."""
        for part in self.parts.values():
            part.unblock_lane(waits)

    def close(self, reason: str) -> None:
        """Close the lanes after their running calls, and then call `on_end`.

        Waits for other workers fail with the reason.
        """
        self.scope.close(reason)
        self.store.close()
        for lane in self.lanes:
            lane.close()
        self._transfer.call_soon(self._end_worker)

    # -- inspections, on the receiving thread

    def send_snapshot(self, then: Callable[[Mapping[str, Any]], object]) -> None:
        """Pass a snapshot of this worker to `then` on another thread. Do nothing if no thread can start."""
        with suppress(RuntimeError):
            self._snapshots.call_soon(lambda: then(take_snapshot(self)))

    # -- the change of drivers, on the receiving thread

    def forget_driver(self, base: int) -> None:
        """Drop a former driver's queued calls and residents, and cancel the driver's running calls.

        Process groups aren't cut yet. A step that all ranks have begun ends by itself. If some ranks drop a step, the
        other ranks wait in vain until the next driver's hold ends their wait. Cutting a group amid a transfer would
        make gloo lose the waiting threads (`features/process_groups/waits.py`), and in a backward pass nothing else
        unblocks them.
        """
        self.scope.forget_driver(base)
        self.definitions.forget_driver()
        self.store.forget_driver()
        for lane in self.lanes:
            lane.forget_driver()

    def change_driver(self, boot: Boot) -> None:
        """Switch to another driver's boot message, with a new secret for messages between workers."""
        self.boot = boot
        former, self.peers = self.peers, self._make_peers(self)
        self._transfer.call_soon(former.close)
        for part in self.parts.values():
            part.on_driver_changed()

    def _on_thread_failed(self, what: str, error: BaseException) -> None:
        """Report an error of one of the worker's own threads.

        It is a bug in colocate, because user code can't cause it.
        """
        report_exception()  # The error is printed before the group fails, because this process may end with the group.
        self.report_broken(f"{what} was ended by {format_error(error)}. {OUR_FAULT}")

    def report_broken(self, reason: str, log_tail: str = "") -> None:
        """Report this worker as broken and close the lanes, so that the group fails at once instead of waiting."""
        if not self._is_broken:
            self._is_broken = True
            self.send_message(from_worker.WorkerBroken(reason, log_tail))
            self.close(reason)

    def _end_worker(self) -> None:
        for lane in self.lanes:
            lane.join()
        for part in self.parts.values():
            part.close()
        for thread in (self._transfer, self._snapshots):
            thread.close(0.0)
        if not self.in_process:
            self.peers.close()
            announce_imports()  # Imports are reported late, to include modules imported for unpickled values.
        self.has_ended = True
        self.roles.clear()  # If workers are threads, the driver may refer to the group for long.
        self.instances.clear()  # The roles' contexts refer to each other through this dict.
        self.send_message(from_worker.LaneClosed())
        self._on_end()

    def format_stacks(self) -> str:
        """Return the Python stacks of all lanes except idle background lanes."""
        return "".join(_format_stack(lane) for lane in self.lanes if lane is self.lane or _list_running(lane))

    # -- on the lane

    def _on_held(self, number: int, begun: int) -> None:
        parts = self.collect_reports(lambda part: part.hold_report(number))
        self.send_message(from_worker.HoldReached(number, begun, parts, "", self.lane.take_unfinished()))

    # -- on the transfer thread

    def _send_resident(self, asked: to_worker.Fetch) -> None:
        try:
            entry = self.store.wait_for_entry(asked.key)
            # The description contains the value's containers, which may be of users' classes.
            with self.store.reading_entry(entry):
                body = self.pack_result(entry.value if asked.contents else describe_value(entry.value), entry.maker)
            self.send_result(from_worker.Fetched(asked.token, entry.weight, None), body, entry.maker)
        except BaseException as error:  # Users' classes control pickling, and may raise anything.
            report, body = failure.describe_failure(error, self.codec, self.definitions, None, False)
            self.send_message(from_worker.Fetched(asked.token, None, report), body)


_HANDLERS: Mapping[type[Message], Callable[[WorkerHost, Any, Any], None]] = {
    to_worker.Call: WorkerHost._on_call,
    to_worker.Batch: WorkerHost._on_batch,
    to_worker.Free: WorkerHost._on_free,
    to_worker.Define: WorkerHost._on_define,
    to_worker.Build: WorkerHost._on_build,
    to_worker.Hold: WorkerHost._on_hold,
    to_worker.Resume: WorkerHost._on_resume,
    to_worker.CancelCall: WorkerHost._on_cancel_call,
    to_worker.Stop: WorkerHost._on_stop,
    to_worker.OfferCancel: WorkerHost._on_offer_cancel,
    to_worker.CancelDecision: WorkerHost._on_cancel_decision,
    to_worker.AskStack: WorkerHost._on_ask_stack,
    to_worker.Fetch: WorkerHost._on_fetch,
    to_worker.Listen: WorkerHost._on_listen,
    to_worker.Answer: WorkerHost._on_answer,
    to_worker.Close: WorkerHost._on_close,
}
"""Handlers of the core's messages; features handle the others."""


def _list_running(lane: Lane) -> dict[int, Work]:
    return {seq: work for seq, work in dict(lane.running).items() if not work.is_barrier}


def _format_stack(lane: Lane) -> str:
    with failure.INSPECTION_LOCK:  # The lock is held until all frames are released again.
        return _format_stack_locked(lane)


def _format_stack_locked(lane: Lane) -> str:
    running, frames = _list_running(lane), failure.list_frames(lane.thread)
    awaiting = lane.tasks.list_awaiting() if lane.tasks is not None else {}
    texts = [
        f"awaiting in {where}\n{''.join(failure.format_role_frames(frames))}"
        for seq, task_frames in awaiting.items()
        if seq in running
        for where, frames in running[seq].describe_awaits(task_frames)
    ]
    if len(texts) < len(running) or not texts:  # At least one call computes on the lane's thread, or no call runs.
        computing = ", ".join(work.label for seq, work in running.items() if seq not in awaiting) or "nothing"
        if (module := get_importing_module(frames)) is not None:
            computing += f", importing {module}"
        if computing == "nothing" and frames and not is_role_code(frames[0]):
            texts.insert(0, "idle\n")
        else:
            stack = "".join(failure.format_role_frames(frames[::-1]))
            texts.insert(0, f"running {computing}\n{stack}" if frames else f"running {computing}; its lane has ended")
    if not running and lane.tasks is not None:
        texts += [
            f"awaiting in a task\n{''.join(failure.format_role_frames(frames))}"
            for frames in lane.tasks.list_leftovers()
        ]
    return "".join(texts)


def take_snapshot(worker_context: WorkerContext) -> dict[str, Any]:
    """Return a worker's running calls, queue and roles' memory as plain data.

    May run on any thread, and take a while.
    """
    now, work = time.time(), worker_context.lane.get_last_work()
    boot = worker_context.boot
    held: Mapping[str, tuple[int, int]] | None = None
    looks = 0
    try:
        memory: Any = worker_context.get_feature("memory")
    except CapabilityError as error:
        trouble = error.message
    else:
        held, trouble = memory.role_bytes()
        looks = memory.is_looking
    running = [
        (work.message.role, work.began, now)
        for lane in worker_context.lanes
        for work in lane.list_started()
        if isinstance(work.message, Call)
    ]
    busy = {} if worker_context.recent is None else worker_context.recent.get_shares(now, running)
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
        "queue": max(0, sum(lane.waiting_count for lane in worker_context.lanes) - looks),
        "call": None if work is None else work.label,
        "age": None if work is None or not work.began else round(now - work.began, 3),
        "roles": roles,
    }
    return status if trouble is None else {**status, "memory": trouble}
