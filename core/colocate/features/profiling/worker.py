"""The worker's half of profiles: runs torch's profiler between two calls, and marks each call in between as a range."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from colocate._protocol.message import Message
from colocate._role.method import method
from colocate._role.method_spec import MethodSpec
from colocate._system.imported import find_imported
from colocate._system.jobs import format_error
from colocate.executor import Boot
from colocate.features.profiling.collectives import CollectiveRecorder
from colocate.features.profiling.messages import BEGIN, END, AskClock, Clock, RankProfile
from colocate.features.profiling.sampling import Sampler
from colocate.features.profiling.traces import CLOCK, RankTrace, TraceSummary, convert_trace, find_waits
from colocate.gpus import KIND, in_use
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.role_instance import RoleInstance

_MOST_ALLOCATIONS = 100_000
"""The maximal number of entries in the history of a memory snapshot."""
_LOOKS = 8
"""The number of clock readings, because the first range takes torch a millisecond, and any range may be interrupted."""


class ProfilingOfWorker(WorkerFeature, calls={BEGIN: "begin", END: "end"}):
    """The worker's half of profiles. The hooks for calls are only installed while a profile runs."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._session: Session | None = None

    def on_message(self, message: Message, body: Any) -> None:
        """Answer at once with the current time, on the receiving thread."""
        assert isinstance(message, AskClock)
        self._worker_context.send_message(Clock(message.token, time.time()))

    def on_driver_changed(self) -> None:
        """Drop a profile that the former driver has begun."""
        self._worker_context.lane.run_action(self._drop_session)

    @method
    def begin(self, token: str, slots: Sequence[int], memory: bool, folder: str) -> str | None:
        """Start a profile if this worker's slot is in `slots`. Return an error text, or None for success.

        Neither `begin` nor `end` raises, because a failed call would make later calls fail.

        Args:
            token: The profile's id.
            slots: The profiled slots.
            memory: Whether to take snapshots of memory.
            folder: The folder for py-spy's output; "" for a profile by torch.
        """
        context = self._worker_context
        if context.boot.slot not in slots:
            return None
        if self._session is not None:
            return f"worker {context.boot.slot} of group {context.boot.group!r} is being profiled already"
        sampler = Sampler(Path(folder) / f"{_file_stem(context.boot)}.samples") if folder else None
        session = Session(token, context.boot.device, memory, sampler)
        try:
            session.start_profiler()
        except Exception as error:
            return self._failure_text("begin", error)
        self._session = session
        self.before_call, self.after_call = session.before_call, session.after_call  # type: ignore[method-assign]
        context.list_hooks()
        return None

    @method
    def end(
        self, token: str, folder: str, places: Sequence[Sequence[int]], ahead: Sequence[float], zero: float
    ) -> RankProfile | str | None:
        """End the profile and write the trace. Return the other results, an error text, or None without a profile.

        Args:
            token: The profile's id.
            folder: The folder for the trace; "" to drop the results.
            places: By slot, the rank's index among all profiled ranks (-1: none), and its threads' place in the trace:
                process, first thread number, maximal count, and position in viewers.
            ahead: By slot, how many seconds the worker's clock is ahead of the driver's clock.
            zero: The time that becomes 0 in the trace, in seconds of the driver's clock.
        """
        session, boot = self._session, self._worker_context.boot
        if session is None or session.token != token:
            return None
        try:
            stem = Path(folder) / _file_stem(boot)
            session.stop_profiler(stem.with_name(f"memory-{stem.name}.pickle") if folder else None)
            if not folder:
                return None
            if not session.clocks:  # Without torch in this process, nothing was recorded.
                return RankProfile({}, (), False, 0, 0)
            index, process, first, most, place = places[boot.slot]
            clock_and_ids = ahead[boot.slot], zero, os.getpid(), threading.get_native_id()
            return session.write_trace(
                stem,
                RankTrace(index, f"slot {boot.slot}", process, (first, most), place, session.clocks, *clock_and_ids),
            )
        except Exception as error:  # The folder may have been removed, if nobody waits for the result any more.
            return self._failure_text("end", error)
        finally:
            self._drop_session()

    def _failure_text(self, what: str, error: Exception) -> str:
        boot = self._worker_context.boot
        return f"the profile of worker {boot.slot} of group {boot.group!r} can't {what}: {format_error(error)}"

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            del self.before_call, self.after_call
            self._worker_context.list_hooks()
            session.stop_profiler()


def _file_stem(boot: Boot) -> str:
    return f"{boot.group}-{boot.slot}".replace("/", "_")


@attrs.define(eq=False)
class Session:
    """One profile of a worker, used only on the worker's lane."""

    token: str
    device: str
    memory: bool  # Whether to record the memory's history.
    sampler: Sampler | None  # The py-spy sampler, or None for a profile by torch.
    _torch: Any = attrs.field(default=None, init=False)  # The torch module, or None if torch isn't imported.
    _profile: Any = attrs.field(default=None, init=False)
    _collectives: CollectiveRecorder = attrs.field(factory=CollectiveRecorder, init=False)
    _open_ranges: dict[int, Any] = attrs.field(factory=dict, init=False)  # Open ranges, by sequence number of the call.
    clocks: list[float] = attrs.field(factory=list, init=False)  # The time of each `CLOCK` range, in seconds.
    _nvtx: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=True, init=False)

    def start_profiler(self) -> None:
        """Start torch's profiler, or py-spy if there is a sampler.

        Raises:
            RuntimeError: Another profiler of torch's runs in this process, such as one of the role's own.
            CapabilityError: py-spy can't sample this process.
        """
        if self.sampler is not None:
            self.sampler.start_sampling()
            self.clocks += self.sampler.clocks
            self._is_over = False
            return
        if (torch := find_imported("torch")) is None:
            return
        # This silences messages of the profiler on the driver's screen.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        cuda = KIND.device == "cuda" and in_use(self.device) is not None
        # Use the base of torch.profiler.profile, because that module would import torch's compiler for seconds.
        profile = torch.autograd.profiler.profile(use_device="cuda" if cuda else None, use_kineto=True)
        profile.__enter__()
        self._torch, self._profile, self._nvtx, self._is_over = torch, profile, cuda, False
        if self.memory and cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._collectives.start_recording()
        self._mark_clock()

    def stop_profiler(self, snapshot: Path | None = None) -> None:
        """Stop the profiler, if still running.

        Args:
            snapshot: The file for a snapshot of memory, if recorded.
        """
        if self._is_over:
            return
        self._is_over = True
        if self.sampler is not None:
            self.sampler.stop_sampling()
            return
        self._collectives.stop_recording()
        for seq in [*self._open_ranges]:  # Close the range of the call that ends the profile.
            self.after_call(seq)
        self._mark_clock()
        self._profile.__exit__(None, None, None)
        if self.memory and self._nvtx:
            if snapshot is not None:
                self._torch.cuda.memory._dump_snapshot(str(snapshot))
            self._torch.cuda.memory._record_memory_history(enabled=None)

    def write_trace(self, stem: Path, rank: RankTrace) -> RankProfile:
        """Write the trace, and return the rank's results.

        Args:
            stem: The start of file names.
            rank: The settings for the conversion.
        """
        if self.sampler is not None:
            with stem.with_name(f"{stem.name}.part").open("w", encoding="utf-8") as target:
                count = self.sampler.convert(target, rank)
            return RankProfile({}, (), True, count, 0)
        stem.parent.stat()  # Fail here if the folder was removed, before torch prints an error.
        raw, part = stem.with_name(f"{stem.name}.raw.json"), stem.with_name(f"{stem.name}.part")
        self._profile.export_chrome_trace(str(raw))
        with part.open("w", encoding="utf-8") as target:
            trace: TraceSummary = convert_trace(raw, target, rank, self._collectives)
        raw.unlink()
        arrived, pieces = find_waits(trace, self._collectives, rank)
        return RankProfile(arrived, pieces, True, trace.events, part.stat().st_size)

    def _mark_clock(self) -> None:
        for _ in range(_LOOKS):
            with self._torch.profiler.record_function(CLOCK):
                before = time.time()
                self.clocks.append((before + time.time()) / 2)

    def before_call(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Open the trace range of a call. Async calls get no range, because they run interleaved on one thread."""
        if self._torch is None or spec.is_async:
            return
        label = role.label(spec.name) if spec.name in role.routes else spec.name
        call_range = self._torch.profiler.record_function(label)
        call_range.__enter__()
        if self._nvtx:
            self._torch.cuda.nvtx.range_push(label)
        self._open_ranges[seq] = call_range

    def after_call(self, seq: int) -> None:
        """Close the trace range of a call."""
        if (call_range := self._open_ranges.pop(seq, None)) is not None:
            if self._nvtx:
                self._torch.cuda.nvtx.range_pop()
            call_range.__exit__(None, None, None)
