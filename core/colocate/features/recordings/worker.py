"""`RecordingsOfWorker`: what sees the calls of a worker's roles that are recorded, replayed or compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from colocate._protocol.to_worker import Call
from colocate._role.method import method
from colocate._system.numbers import FOREVER_S
from colocate.features.recordings.messages import RECORDING, Noticed, Recorded
from colocate.features.recordings.taps import RecordingTap, Tapped
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Work
from colocate.worker.serving.role_instance import RoleInstance


class RecordingsOfWorker(OfWorker):
    """The roles of a worker whose calls somebody sees."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._tapped: dict[str, Tapped] = {}

    # -- calls

    def work(self, *arguments: Any) -> Work:
        """Make what a lane does for a call."""
        call, spec = arguments[3], arguments[6]
        assert isinstance(call, Call)
        feature = self._tapped[call.role].methods[spec.name].feature
        made = Work if feature is None else self._worker_context.part(feature).work
        return made(*arguments)

    def runs(self, work: Work, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Have a call run, and seen."""
        tapped = self._tapped[str(role.name)]
        feature = tapped.methods[work.spec.name].feature
        code = work.spec.call if feature is None else self._worker_context.part(feature).runs(work, role)
        return tapped.runs(work, code)

    # -- recording

    @method
    def record(self, recorded: tuple[Recorded, ...]) -> None:
        """Record roles, or get ready for it, or record them no more. With all lanes standing still."""
        for each in recorded:
            role = self._worker_context.roles.get(each.role)
            if role is None:  # on other slots
                continue
            tapped = self._of(role)
            if each.folder is None:
                self._end(tapped, FOREVER_S)
            elif each.begins:
                tell = partial(self.tell, role)
                tapped.taps = (*tapped.taps, RecordingTap(each.folder, role.ctx.rank, each.limit, tell))
                tapped.counts_from_here()

    def tell(self, role: RoleInstance, text: str) -> None:
        """Tell the driver's user something."""
        self._worker_context.say(Noticed(f"role {role.name!r}, rank {role.ctx.rank}: {text}"))

    def _of(self, role: RoleInstance) -> Tapped:
        name = str(role.name)
        if name not in self._tapped:
            self._tapped[name] = Tapped(self._worker_context, role)
        return self._tapped[name]

    def _end(self, tapped: Tapped, within_s: float | None = None) -> None:
        for tap in tapped.taps:
            if isinstance(tap, RecordingTap):
                tap.close(within_s)
        tapped.taps = tuple(tap for tap in tapped.taps if not isinstance(tap, RecordingTap))

    def close(self) -> None:
        """Write what is left."""
        for tapped in self._tapped.values():
            self._end(tapped)


RecordingsOfWorker.calls = {RECORDING: RecordingsOfWorker.__dict__["record"].spec}
