"""Write the calls of a driver to a trace file for Perfetto or chrome://tracing (`runtime.trace`)."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from colocate.driver import (
    CallRecord,
    Driver,
    FetchRecord,
    GrowingFile,
    MoveRecord,
    NodeHandle,
    TransferRecord,
    run_deferred,
)
from colocate.errors import ColocateError

_DRIVER = 1  # Viewers reserve process 0 for the kernel.
_RUNS, _MEMORY, _TRANSFERS, _BELOW = "", ": memory", ": from other workers", ": what others know of it"
_ROWS = (_RUNS, _MEMORY, _TRANSFERS, _BELOW)
# Thread numbers are above all process numbers, because a thread with the process's number is the main thread.
_FIRST_ROW, _ROWS_OF_SLOT = 1 << 20, 1 << 12
_LINES = _ROWS_OF_SLOT // len(_ROWS)
_LOOKED_AT = 64  # Compare only this many recent spans, because spans arrive nearly in order.
_END = "\n]\n"
_log = logging.getLogger("colocate")


class Trace:
    """An observer that writes a trace file. As a context manager, it ends the file when the block ends.

    The format is Chrome's trace events. Each group is a process; each slot is a thread with the calls of its roles, and
    the calls that these had to wait for. Further threads have moves of memory, and transfers from other workers.
    Overlapping spans, as of async methods, get additional threads, because viewers drop overlaps. The driver is another
    process, with each call from submission to the last answer, and each fetch. Viewers read the file at any time, also
    after the driver was killed before the closing bracket. A full disk ends the trace with a warning.
    """

    def __init__(
        self,
        runtime: NodeHandle[Any],
        path: Path,
        ahead: Mapping[tuple[str, int], float] = MappingProxyType({}),
        zero: float = 0.0,
        without: Collection[str] = (),
    ) -> None:
        """Open the trace file; users call `runtime.trace`.

        Args:
            runtime: The runtime to trace.
            path: The file.
            ahead: By group and slot, how far the worker's clock is ahead of the driver's, in seconds.
            zero: The time of the file's 0, in seconds of time.time().
            without: Methods to leave out among calls without a role.

        Raises:
            OSError: The file can't be written, or another trace is being written there.
        """
        driver = Driver(runtime)
        if any(isinstance(observer, Trace) and observer._writes_to(path) for observer in driver.observers):
            raise OSError(errno.EBUSY, "another trace is being written there", str(path))
        self._driver = driver
        self._offsets = ahead
        self._zero = zero
        self._without = without
        self._file: GrowingFile | None = GrowingFile(path, anew=True)
        self._process = os.getpid()
        self._lock = threading.Lock()  # Hooks run on one thread, but `close` runs on any thread.
        self._lines: list[str] = []
        self._groups: dict[str, int] = {}
        self._last_calls: dict[
            tuple[int, int], tuple[float, str]
        ] = {}  # The end and the name of each slot's last call.
        self._asleep: dict[tuple[int, int], dict[str, int]] = {}
        # Threads by group, slot and kind, each with the bounds of recent spans in microseconds.
        self._rows: dict[tuple[int, int, str], list[tuple[int, deque[tuple[int, int]]]]] = {}
        self._number = 0
        self._name_process(_DRIVER, "driver")
        try:
            self._file.append_text("[\n" + ",\n".join(self._lines))
            self._lines.clear()
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write all events so far, and end the file."""
        if os.getpid() != self._process:  # This is a forked child, which must not write.
            return
        try:
            self._driver.flush_observers()
        finally:
            run_deferred(self._finish, waits_s=None, in_any_case=True)

    def _writes_to(self, path: Path) -> bool:
        file = self._file
        return file is not None and path.is_file() and file.path.is_file() and path.samefile(file.path)

    def _finish(self) -> None:
        with self._lock:
            self._add_text(_END)
            self._stop_writing()

    def below(self, group: str, slot: int) -> tuple[int, int, int, int]:
        """Return the unused rows of the trace below a slot, for events that are added to the file later.

        Returns:
            The group's process, the first free thread number, the number of free threads, and the sort index.
        """
        with self._lock:
            number = self._group_process(group)
            self._write_events()
        index = _ROWS.index(_BELOW)
        return number, _FIRST_ROW + _ROWS_OF_SLOT * slot + _LINES * index, _LINES, len(_ROWS) * slot + index

    # -- hooks, on the dispatcher's thread

    def colocate_call_finished(self, record: CallRecord) -> None:
        """Write a finished call to the trace."""
        if record.role or record.method not in self._without:
            with self._lock:
                self._add_call(record)
                self._write_events()

    def colocate_result_fetched(self, record: FetchRecord) -> None:
        """Write the fetch of a resident to the trace."""
        with self._lock:
            name = f"fetch of {_call_label(record.role, record.method)}"
            args = {"group": record.group, "ranks": list(record.ranks), "received_bytes": record.nbytes}
            self._add_driver_span(name, record.start, record.end, args)
            self._write_events()

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """Write that a role fell asleep or woke up."""
        with self._lock:
            group, slot = (
                self._group_process(record.group),
                self._driver.slot_of(record.group, record.role, record.rank),
            )
            asleep = self._asleep.setdefault((group, slot), {})
            change = record.nbytes if record.kind == "sleep" else -record.nbytes
            asleep[record.role] = max(0, asleep.get(record.role, 0) + change)
            args: dict[str, Any] = {"rank": record.rank, "bytes": record.nbytes, "why": record.why}
            if record.kept_awake:
                args["kept awake"] = dict(record.kept_awake)
            name = f"{record.role} {record.kind}"
            offset = self._offsets.get((record.group, slot), 0.0)
            self._add_span(group, slot, _MEMORY, record.role, name, record.start - offset, record.end - offset, args)
            self._add_counters(group, slot, record.end - offset)
            self._write_events()

    def colocate_group_changed(self, name: str, state: str, cause: ColocateError | None) -> None:
        """Write a group's new state."""
        with self._lock:
            args = {} if cause is None else {"cause": str(cause).partition("\n")[0]}
            group = self._group_process(name)
            event = {"pid": group, "tid": group, "name": f"group {name} is {state}", "args": args}
            now = time.time()
            self._add_event(now, ph="i", s="p", **event)
            if state == "restarting":  # All roles of the group are new and awake.
                for where in [where for where in self._asleep if where[0] == group]:
                    self._asleep[where] = dict.fromkeys(self._asleep[where], 0)
                    self._add_counters(*where, now)
            self._write_events()

    # -- what a run does, on the thread of its job

    def phase(self, name: str, start: float, end: float) -> None:
        """Write a phase of a job."""
        with self._lock:
            self._add_driver_span(name, start, end, {}, "phases")
            self._write_events()

    def step(self, number: int) -> None:
        """Write a mark for a logged step."""
        with self._lock:
            self._add_event(time.time(), ph="i", s="g", pid=_DRIVER, tid=_DRIVER, name=f"step {number}")
            self._write_events()

    # -- how, with its lock held

    def _add_counters(self, group: int, slot: int, now: float) -> None:
        asleep = dict(self._asleep[group, slot])
        self._add_event(now, ph="C", pid=group, tid=group, name=f"asleep on slot {slot} (bytes)", args=asleep)

    def _add_call(self, record: CallRecord) -> None:
        name = _call_label(record.role, record.method)
        group = self._group_process(record.group)
        args: dict[str, Any] = {"group": record.group, "ranks": list(record.ranks), "kept": record.kept}
        if record.error is not None:
            args["error"] = record.error
        if record.sent:
            args["sent_bytes"] = record.sent
        if record.received:
            args["received_bytes"] = record.received
        self._add_driver_span(name, record.submitted, record.finished, args)
        unfinished = {rank for rank, _ in record.unfinished}
        for rank, start, end in record.ran:
            slot = self._driver.slot_of(record.group, record.role, rank)
            offset = self._offsets.get((record.group, slot), 0.0)
            start, end = start - offset, end - offset
            more: dict[str, Any] = {"rank": rank, "waited_ms": round(max(0.0, start - record.submitted) * 1e3, 3)}
            if rank in record.raised:
                more["error"] = record.error
            elif rank in unfinished:
                more["not done when it failed"] = record.error
            before, earlier_call = self._last_calls.get((group, slot), (0.0, ""))
            if before > record.submitted:
                more["waited_for"] = earlier_call
            self._last_calls[group, slot] = end, name
            self._add_span(group, slot, _RUNS, record.role or "group", name, start, end, more)
        for transfer in record.transfers:
            slot = self._driver.slot_of(record.group, record.role, transfer.rank)
            self._add_transfer(group, slot, name, transfer, self._offsets.get((record.group, slot), 0.0))

    def _add_transfer(self, group: int, slot: int, call: str, record: TransferRecord, ahead: float) -> None:
        maker, rank = _call_label(record.role, record.method), record.source
        source = None if rank is None else self._driver.slot_of(record.group, record.role, rank)
        args = {"bytes": record.nbytes, "from_group": record.group, "from_slot": source, "made_by": maker, "for": call}
        if record.lent:
            args["bytes_from_gpu_to_gpu"] = record.lent
        if record.refusal:
            args["not_from_gpu_to_gpu"] = record.refusal
        name = f"{maker} from {'other slots' if source is None else f'slot {source}'}"
        self._add_span(group, slot, _TRANSFERS, "transfers", name, record.start - ahead, record.end - ahead, args)

    def _add_driver_span(
        self, name: str, start: float, end: float, args: Mapping[str, Any], category: str = "calls"
    ) -> None:
        self._number += 1
        event = {"cat": category, "id2": {"local": hex(self._number)}, "pid": _DRIVER, "tid": _DRIVER, "name": name}
        self._add_event(start, ph="b", args=args, **event)
        self._add_event(max(end, start), ph="e", **event)

    def _group_process(self, name: str) -> int:
        number = self._groups.get(name)
        if number is None:
            number = self._groups[name] = _DRIVER + 1 + len(self._groups)
            self._name_process(number, f"group {name}")
            for slot, node, device in self._driver.places_of(name):
                self._add_row(number, slot, _RUNS, f"slot {slot} ({node}, {device})")
        return number

    def _add_span(
        self, group: int, slot: int, kind: str, role: str, name: str, start: float, end: float, args: Mapping[str, Any]
    ) -> None:
        first = self._to_microseconds(start)
        last = max(first, self._to_microseconds(end))
        row = self._find_row(group, slot, kind, first, last)
        self._add_event(start, ph="X", dur=last - first, cat=role, pid=group, tid=row, name=name, args=args)

    def _find_row(self, group: int, slot: int, kind: str, start: int, end: int) -> int:
        """Return a trace row of a slot and kind that is free in the given time span; add a row if none is free."""
        rows = self._rows.get((group, slot, kind), ())
        for row, spans in rows:
            if all(end <= first or last <= start for first, last in spans):
                spans.append((start, end))
                return row
        row, spans = self._add_row(group, slot, kind, f"slot {slot}{kind}")
        spans.append((start, end))
        return row

    def _add_row(self, group: int, slot: int, kind: str, name: str) -> tuple[int, deque[tuple[int, int]]]:
        rows = self._rows.setdefault((group, slot, kind), [])
        # Viewers sort by thread number or by `sort_index`, so both numbers keep the threads of a slot together.
        row = _FIRST_ROW + _ROWS_OF_SLOT * slot + _LINES * _ROWS.index(kind) + len(rows)
        rows.append((row, deque(maxlen=_LOOKED_AT)))
        self._name_thread("thread_name", group, row, name=name)
        self._name_thread("thread_sort_index", group, row, sort_index=len(_ROWS) * slot + _ROWS.index(kind))
        return rows[-1]

    def _name_process(self, number: int, name: str) -> None:
        self._name_thread("process_name", number, name=name)
        self._name_thread(
            "process_sort_index", number, sort_index=number
        )  # Viewers show processes without a sort index last.

    def _name_thread(self, kind: str, process: int, thread: int | None = None, **args: str | int) -> None:
        self._add_event(self._zero, ph="M", pid=process, tid=thread or process, name=kind, args=args)

    def _add_event(self, ts: float, **event: Any) -> None:
        """Queue an event at the time `ts`, in seconds."""
        self._lines.append(json.dumps({"ts": self._to_microseconds(ts), **event}))

    def _to_microseconds(self, seconds: float) -> int:
        # Use whole microseconds, because rounded fractions would make adjacent spans overlap.
        return max(0, int((seconds - self._zero) * 1e6))  # Viewers drop negative times.

    def _write_events(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        self._add_text(",\n" + ",\n".join(lines))

    def _add_text(self, text: str) -> None:
        if self._file is not None:
            try:
                self._file.append_text(text)
            except OSError as error:  # A full disk must not stop the traced run.
                _log.warning("the trace ends here, and so it isn't whole: %s", error)
                with contextlib.suppress(OSError):  # A few bytes may still fit on the disk.
                    self._file.append_text(_END)
                self._stop_writing()

    def _stop_writing(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._driver.remove_observer(self)
            file.close()


def _call_label(role: str, method: str) -> str:
    return f"{role}.{method}" if role else method
