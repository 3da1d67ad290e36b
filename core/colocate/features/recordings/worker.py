"""`RecordingsOfWorker`: what sees the calls of a worker's roles that are recorded, replayed or compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from colocate._protocol.to_worker import Call
from colocate._role.method import method
from colocate._system.numbers import FOREVER_S
from colocate._values.collect import Gather
from colocate.features.recordings.messages import COMPARISON, RECORDING, Noticed, Played, Recorded
from colocate.features.recordings.playing import Compared, Comparing, Found, ReplayedRole, Replaying, find_for
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
        self._classes: dict[str, type] = {}  # of roles that are replayed

    # -- roles

    def stands_in(self, role: str, cls: type, plain: Sequence[Played]) -> ReplayedRole | None:
        """Have an object stand in for a role that is replayed."""
        replays = next((each for each in plain if each.replays), None)
        if replays is None:
            return None
        self._classes[role] = cls
        return ReplayedRole(role, replays.folder)

    def built(self, role: RoleInstance, plain: Sequence[Played] | None) -> None:
        """Have recordings answer the calls of a role, or be compared with them."""
        for played in plain or ():
            tapped, cls = self._of(role), self._classes.get(str(role.name), type(role.instance))
            parts = self._worker_context, role, find_for(cls, role.methods), partial(self.tell, role)
            found = Found(played, *parts)
            found.counts = tapped.counted
            if played.replays:
                tapped.player = Replaying(found)
            else:
                tapped.taps = (*tapped.taps, Comparing(found))

    def restored(self, role: RoleInstance, told: str | None, by_role: bool) -> None:
        """Count calls from a checkpoint on: what is recorded before is no part of what comes."""
        tapped = self._tapped.get(str(role.name))
        if tapped is None:
            return
        if any(isinstance(tap, RecordingTap) and tap.has_begun for tap in tapped.taps):
            self.tell(role, "it was restored from a checkpoint, with which its recording has ended")
            self._end(tapped)
        tapped.counts_from_here()

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

    @method(collect=Gather())
    def compared(self, role: str) -> dict[str, Compared] | None:
        """Return what came of comparing a role, by method; None where it isn't, or on other slots."""
        found = [tap for tap in (self._tapped[role].taps if role in self._tapped else ()) if isinstance(tap, Comparing)]
        return found[0].methods if found else None

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


_METHODS = {RECORDING: "record", COMPARISON: "compared"}
RecordingsOfWorker.calls = {said: RecordingsOfWorker.__dict__[name].spec for said, name in _METHODS.items()}
