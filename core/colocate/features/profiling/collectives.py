"""Records the operations on process groups that a profiled process starts and waits for.

Torch's profiler records when gloo's operations ran, but neither the waiting thread nor the process group. So this
module wraps torch's Python functions.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from colocate.features import FEATURES
from colocate.features.profiling.messages import Meeting
from colocate.worker.serving.signal_handlers import waits_for_role_code

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


@attrs.define(eq=False)
class CollectiveRecorder:
    """The operations that this process starts and awaits between `start_recording` and `stop_recording`.

    Times are those of `time.time_ns()`.

    Attributes:
        calls: Each operation, in order, with the start and end of the call that started it.
        waits: Each wait of the thread that called `start_recording`: the operation (None if unknown), start and end.
    """

    calls: list[tuple[Meeting, int, int]] = attrs.field(factory=list, init=False)
    waits: list[tuple[Meeting | None, int, int]] = attrs.field(factory=list, init=False)
    _counts: Counter[str] = attrs.field(factory=Counter, init=False)
    _names: weakref.WeakKeyDictionary[ProcessGroup, str] = attrs.field(factory=weakref.WeakKeyDictionary, init=False)
    _works: weakref.WeakKeyDictionary[Work, Meeting] = attrs.field(factory=weakref.WeakKeyDictionary, init=False)
    _undo: list[Callable[[], object]] = attrs.field(factory=list, init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)
    # This function returns a process group's name, which is the same on all ranks.
    _shared_name: Callable[[Any], str] = attrs.field(default=str, init=False)

    def start_recording(self) -> None:
        """Start recording, by wrapping torch's functions."""
        from torch import distributed

        if distributed.is_available() and "process_groups" in FEATURES:
            from colocate.features.process_groups.books import shared_name
            from colocate.features.process_groups.works import METHODS

            self._shared_name = shared_name
            for name in (*METHODS, "barrier"):
                if hasattr(distributed.ProcessGroup, name):
                    self._replace_method(distributed.ProcessGroup, name, self._wrap_begin(name))
            self._replace_method(distributed.Work, "wait", self._wrap_wait)

    def stop_recording(self) -> None:
        """Stop recording, by restoring torch's functions."""
        while self._undo:
            self._undo.pop()()

    def _replace_method(self, owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        before = getattr(owner, name)
        setattr(owner, name, by(before))
        self._undo.append(lambda: setattr(owner, name, before))

    def _wrap_begin(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def by(original: Callable[..., Any]) -> Callable[..., Any]:
            @waits_for_role_code
            def begun(group: Any, *args: Any, **kwargs: Any) -> Any:
                key = self._operation_key(group, name, args)
                meeting = key, self._counts[key]
                self._counts[key] += 1
                start = time.time_ns()
                work = original(group, *args, **kwargs)
                self.calls.append((meeting, start, time.time_ns()))
                if work is not None:
                    self._works[work] = meeting
                return work

            return begun

        return by

    def _operation_key(self, group: Any, name: str, args: tuple[Any, ...]) -> str:
        """Return the key for numbering operations: the process group's name, and both ranks for `send` and `recv`."""
        group_name = self._names.get(group)
        if group_name is None:
            group_name = self._names[group] = self._shared_name(group)
        if name not in ("send", "recv"):
            return group_name
        rank, peer = int(group.rank()), int(args[1])
        return f"{group_name} {rank}>{peer}" if name == "send" else f"{group_name} {peer}>{rank}"

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @waits_for_role_code
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.time_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:
                    self.waits.append((self._works.get(work), start, time.time_ns()))

        return wait
