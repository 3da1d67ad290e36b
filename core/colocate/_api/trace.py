"""`runtime.trace`: what a driver's calls do and when, as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from colocate._api.connection import Connection
from colocate._calls.records import CallRecord, FetchRecord, MoveRecord, TransferRecord
from colocate._system.off_main import off_main
from colocate.errors import ColocateError

_DRIVER = 0
_TRANSFERS = 1 << 20  # beside each slot's thread one of so much more for what came to it


class Trace:
    """A trace that is being written; a context manager that ends it.

    In the form of Chrome's trace events: each group is a process, each of its slots a thread, with what its roles ran,
    slept and woke there, and what a call had waited for, and another one for what came to it from other workers; the
    driver is another process, with each call from when it was submitted to its last answer, and each fetch. What is in
    the file can be read at any time, also after a driver was killed.
    """

    def __init__(self, connection: Connection, path: Path) -> None:
        """Use `runtime.trace`.

        Raises:
            OSError: The file can't be written.
        """
        self._connection = connection
        self._file: IO[str] | None = path.open("w", encoding="utf-8")
        self._process = os.getpid()
        self._lock = threading.Lock()  # observers are told by one thread, and it may be closed by any
        self._lines: list[str] = []
        self._groups: dict[str, int] = {}
        self._last: dict[tuple[int, int], tuple[float, str]] = {}  # what ended last on a slot, and when
        self._asleep: dict[tuple[int, int], dict[str, int]] = {}
        self._receiving: set[tuple[int, int]] = set()  # slots that have got something from other workers
        self._number = 0
        self._named("process_name", _DRIVER, name="driver")
        self._write("[\n")
        connection.services.observers.add(self)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it: what has happened until now is in the file."""
        if os.getpid() != self._process:  # in a child, of which it isn't
            return
        try:
            self._connection.services.settle()
        finally:
            off_main(self._end, waits_s=None, in_any_case=True)

    def _end(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                self._connection.services.observers.remove(self)
                file.write("\n]\n")
                file.close()

    # -- hooks, on the dispatcher's thread

    def colocate_call_finished(self, record: CallRecord) -> None:
        """A call has ended."""
        with self._lock:
            self._call(record)
            self._write()

    def colocate_result_fetched(self, record: FetchRecord) -> None:
        """The driver has fetched a kept result."""
        with self._lock:
            name = f"fetch of {_label(record.role, record.method)}"
            args = {"group": record.group, "ranks": list(record.ranks), "received_bytes": record.nbytes}
            self._on_driver(name, record.start, record.end, args)
            self._write()

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """A role sleeps, or is awake."""
        with self._lock:
            group, slot = self._group(record.group), self._connection.slot_of(record.group, record.role, record.rank)
            asleep = self._asleep.setdefault((group, slot), {})
            change = record.nbytes if record.kind == "sleep" else -record.nbytes
            asleep[record.role] = max(0, asleep.get(record.role, 0) + change)
            args = {"rank": record.rank, "bytes": record.nbytes}
            self._span(group, slot, record.role, f"{record.role} {record.kind}", record.start, record.end, args)
            counter = {"pid": group, "tid": slot, "name": f"asleep on slot {slot} (bytes)", "args": dict(asleep)}
            self._event(record.end, ph="C", **counter)
            self._write()

    def colocate_group_changed(self, name: str, state: str, cause: ColocateError | None) -> None:
        """A group is in another state."""
        with self._lock:
            args = {} if cause is None else {"cause": str(cause).partition("\n")[0]}
            event = {"pid": self._group(name), "tid": 0, "name": f"group {name} is {state}", "args": args}
            self._event(time.time(), ph="i", s="p", **event)
            self._write()

    # -- how, with its lock held

    def _call(self, record: CallRecord) -> None:
        name = _label(record.role, record.method)
        group = self._group(record.group)
        args: dict[str, Any] = {"group": record.group, "ranks": list(record.ranks), "kept": record.kept}
        if record.error is not None:
            args["error"] = record.error
        if record.sent:
            args["sent_bytes"] = record.sent
        if record.received:
            args["received_bytes"] = record.received
        self._on_driver(name, record.submitted, record.finished, args)
        for rank, start, end in record.spans:
            slot = self._connection.slot_of(record.group, record.role, rank)
            more: dict[str, Any] = {"rank": rank, "waited_ms": round(max(0.0, start - record.submitted) * 1e3, 3)}
            before, what = self._last.get((group, slot), (0.0, ""))
            if before > record.submitted:
                more["waited_for"] = what
            self._last[group, slot] = end, name
            self._span(group, slot, record.role or "group", name, start, end, more)
        for each in record.transfers:
            self._transfer(group, self._connection.slot_of(record.group, record.role, each.rank), name, each)

    def _transfer(self, group: int, slot: int, call: str, record: TransferRecord) -> None:
        row = _TRANSFERS + slot
        if (group, slot) not in self._receiving:
            self._receiving.add((group, slot))
            self._named("thread_name", group, row, name=f"slot {slot}: from other workers")
            self._named("thread_sort_index", group, row, sort_index=2 * slot + 1)
        made, rank = _label(record.role, record.method), record.source
        source = None if rank is None else self._connection.slot_of(record.group, record.role, rank)
        args = {"bytes": record.nbytes, "from_group": record.group, "from_slot": source, "made_by": made, "for": call}
        name = f"{made} from {'other slots' if source is None else f'slot {source}'}"
        self._span(group, row, "transfers", name, record.start, record.end, args)

    def _on_driver(self, name: str, start: float, end: float, args: Mapping[str, Any]) -> None:
        self._number += 1
        event = {"cat": "calls", "id": self._number, "pid": _DRIVER, "tid": 0, "name": name}
        self._event(start, ph="b", args=args, **event)
        self._event(max(end, start), ph="e", **event)

    def _group(self, name: str) -> int:
        number = self._groups.get(name)
        if number is None:
            number = self._groups[name] = len(self._groups) + 1
            self._named("process_name", number, name=f"group {name}")
            crew = self._connection.crews.get(name)
            for worker in () if crew is None else crew.workforce.workers:
                where = f"slot {worker.slot} ({worker.boot.node}, {worker.boot.device})"
                self._named("thread_name", number, worker.slot, name=where)
                self._named("thread_sort_index", number, worker.slot, sort_index=2 * worker.slot)
        return number

    def _span(
        self, group: int, slot: int, role: str, name: str, start: float, end: float, args: Mapping[str, Any]
    ) -> None:
        length = round(max(0.0, end - start) * 1e6, 3)
        self._event(start, ph="X", dur=length, cat=role, pid=group, tid=slot, name=name, args=args)

    def _named(self, kind: str, process: int, thread: int = 0, **args: str | int) -> None:
        self._event(0.0, ph="M", pid=process, tid=thread, name=kind, args=args)

    def _event(self, ts: float, **event: Any) -> None:
        """Note one; `ts` in seconds."""
        self._lines.append(json.dumps({"ts": round(ts * 1e6, 3), **event}))

    def _write(self, before: str = ",\n") -> None:
        lines, self._lines = self._lines, []
        if self._file is not None:
            self._file.write(before + ",\n".join(lines))
            self._file.flush()


def _label(role: str, method: str) -> str:
    return f"{role}.{method}" if role else method
