"""Profiles, a worker's half: torch's profiler, begun and ended between calls, with a range for each call meanwhile."""

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
from colocate._system.imported import imported
from colocate._system.jobs import error_text
from colocate.executor import Boot
from colocate.features.profiling.collectives import Collectives
from colocate.features.profiling.messages import BEGIN, END, AskClock, Clock, Profiled
from colocate.features.profiling.sampling import Sampler
from colocate.features.profiling.traces import CLOCK, Rank, Read, convert, waits
from colocate.gpus import KIND, in_use
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.serving.role_instance import RoleInstance

_MOST_ALLOCATIONS = 100_000
"""Of so many a snapshot of memory has the history."""
_LOOKS = 8
"""So often it looks at its clock: the first range takes torch a millisecond, and any of them may be interrupted."""


class ProfilingOfWorker(OfWorker, calls={BEGIN: "begin", END: "end"}):
    """The profile of a worker. While there is none, no call asks for it (`WorkerContext.list_hooks`)."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._session: Session | None = None

    def heard(self, message: Message, body: Any) -> None:
        """Tell the time, at once."""
        assert isinstance(message, AskClock)
        self._worker_context.say(Clock(message.token, time.time()))

    def adopted(self) -> None:
        """End a profile of the driver before."""
        self._worker_context.lane.do(self._drop)

    @method
    def begin(self, token: str, slots: Sequence[int], memory: bool, folder: str) -> str | None:
        """Begin to profile these slots' workers, and return why this one can't.

        Nothing is raised, here nor in `end`: the call would fail, and with it others' calls that follow it.

        Args:
            token: What tells the profile from others.
            slots: These.
            memory: Whether it has snapshots of memory.
            folder: Where py-spy writes what it samples; "" for a profile of torch's.
        """
        context = self._worker_context
        if context.boot.slot not in slots:
            return None
        if self._session is not None:
            return f"worker {context.boot.slot} of group {context.boot.group!r} is being profiled already"
        sampler = Sampler(Path(folder) / f"{_stem(context.boot)}.samples") if folder else None
        session = Session(token, context.boot.device, memory, sampler)
        try:
            session.begin()
        except Exception as error:
            return self._trouble("begin", error)
        self._session = session
        self.enters, self.leaves = session.enters, session.leaves  # type: ignore[method-assign]
        context.list_hooks()
        return None

    @method
    def end(
        self, token: str, folder: str, places: Sequence[Sequence[int]], ahead: Sequence[float], zero: float
    ) -> Profiled | str | None:
        """End the profile, write the trace into a folder, and return the rest or an error text; None without a profile.

        Args:
            token: Of the profile.
            folder: The folder; "" to forget all.
            places: By slot, which of all profiled ranks it is (-1: none), and where its threads are in the trace:
                their process, the first one's number, how many there are at most, and where viewers have them.
            ahead: By slot, by how much its clock is ahead of the driver's, in seconds.
            zero: What is 0 in the trace, in seconds of the driver's clock.
        """
        session, boot = self._session, self._worker_context.boot
        if session is None or session.token != token:
            return None
        try:
            stem = Path(folder) / _stem(boot)
            session.end(stem.with_name(f"memory-{stem.name}.pickle") if folder else None)
            if not folder:
                return None
            if not session.clocks:  # torch isn't imported here
                return Profiled({}, (), False, 0, 0)
            index, process, first, most, place = places[boot.slot]
            its = ahead[boot.slot], zero, os.getpid(), threading.get_native_id()
            return session.written(
                stem, Rank(index, f"slot {boot.slot}", process, (first, most), place, session.clocks, *its)
            )
        except Exception as error:  # the folder is gone, say, as nobody waits for this any more
            return self._trouble("end", error)
        finally:
            self._drop()

    def _trouble(self, what: str, error: Exception) -> str:
        boot = self._worker_context.boot
        return f"the profile of worker {boot.slot} of group {boot.group!r} can't {what}: {error_text(error)}"

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            del self.enters, self.leaves
            self._worker_context.list_hooks()
            session.end()


def _stem(boot: Boot) -> str:
    return f"{boot.group}-{boot.slot}".replace("/", "_")


@attrs.define(eq=False)
class Session:
    """One profile of a worker, on its lane."""

    token: str  # what tells it from others
    device: str  # the slot's
    memory: bool  # whether the history of its memory is recorded
    sampler: Sampler | None  # what samples it; None for a profile of torch's
    _torch: Any = attrs.field(default=None, init=False)  # None where it isn't imported
    _profile: Any = attrs.field(default=None, init=False)
    _noted: Collectives = attrs.field(factory=Collectives, init=False)
    _open: dict[int, Any] = attrs.field(factory=dict, init=False)  # ranges by the numbers of their calls
    clocks: list[float] = attrs.field(factory=list, init=False)  # in seconds of time.time(), at each `CLOCK`
    _nvtx: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=True, init=False)

    def begin(self) -> None:
        """Begin it.

        Raises:
            RuntimeError: Another profile of torch's goes on in this process, say one of the role's own.
            CapabilityError: It can't be sampled.
        """
        if self.sampler is not None:
            self.sampler.begin()
            self.clocks += self.sampler.clocks
            self._is_over = False
            return
        if (torch := imported("torch")) is None:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on the driver's screen that it begins and ends
        cuda = KIND.device == "cuda" and in_use(self.device) is not None
        # What is behind torch.profiler.profile, which would import torch's compiler: that takes seconds.
        profile = torch.autograd.profiler.profile(use_device="cuda" if cuda else None, use_kineto=True)
        profile.__enter__()
        self._torch, self._profile, self._nvtx, self._is_over = torch, profile, cuda, False
        if self.memory and cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._noted.begin()
        self._look_at_clock()

    def end(self, snapshot: Path | None = None) -> None:
        """End it, once. Args: snapshot: Where a snapshot of memory is written, if it has one."""
        if self._is_over:
            return
        self._is_over = True
        if self.sampler is not None:
            self.sampler.end()
            return
        self._noted.end()
        for seq in [*self._open]:  # that of the call which ends it
            self.leaves(seq)
        self._look_at_clock()
        self._profile.__exit__(None, None, None)
        if self.memory and self._nvtx:
            if snapshot is not None:
                self._torch.cuda.memory._dump_snapshot(str(snapshot))
            self._torch.cuda.memory._record_memory_history(enabled=None)

    def written(self, stem: Path, rank: Rank) -> Profiled:
        """Write the trace; see `ProfilingOfWorker.end`. Args: stem: How its files begin. rank: What becomes of it."""
        if self.sampler is not None:
            with stem.with_name(f"{stem.name}.part").open("w", encoding="utf-8") as target:
                count = self.sampler.convert(target, rank)
            return Profiled({}, (), True, count, 0)
        stem.parent.stat()  # without the folder nobody waits for the trace: fail before torch prints an error
        raw, part = stem.with_name(f"{stem.name}.raw.json"), stem.with_name(f"{stem.name}.part")
        self._profile.export_chrome_trace(str(raw))
        with part.open("w", encoding="utf-8") as target:
            found: Read = convert(raw, target, rank, self._noted)
        raw.unlink()
        arrived, pieces = waits(found, self._noted, rank)
        return Profiled(arrived, pieces, True, found.events, part.stat().st_size)

    def _look_at_clock(self) -> None:
        for _ in range(_LOOKS):
            with self._torch.profiler.record_function(CLOCK):
                before = time.time()
                self.clocks.append((before + time.time()) / 2)

    def enters(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Begin the range of a call. Those of an async method have none: several go on at once, on one thread."""
        if self._torch is None or spec.is_async:
            return
        label = role.label(spec.name) if spec.name in role.routes else spec.name
        found = self._torch.profiler.record_function(label)
        found.__enter__()
        if self._nvtx:
            self._torch.cuda.nvtx.range_push(label)
        self._open[seq] = found

    def leaves(self, seq: int) -> None:
        """End the range of a call."""
        if (found := self._open.pop(seq, None)) is not None:
            if self._nvtx:
                self._torch.cuda.nvtx.range_pop()
            found.__exit__(None, None, None)
