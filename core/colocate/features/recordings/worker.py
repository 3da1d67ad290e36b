"""The worker's side of recordings: observes the calls of recorded, replayed or compared roles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate._protocol.to_worker import Call
from colocate._role.method import method
from colocate._system.numbers import FOREVER_S
from colocate._values.collect import Gather
from colocate._values.dispatch import Scatter
from colocate.features.recordings.differences import Compared
from colocate.features.recordings.files import mark_end
from colocate.features.recordings.messages import COMPARISON, RECORDING, Noticed, Played, Recorded
from colocate.features.recordings.playing import Comparing, Found, ReplayedRole, Replaying, find_for
from colocate.features.recordings.taps import NAME, Tapped
from colocate.features.recordings.telling import RecordingTap, TellingTap
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.lane import Work
from colocate.worker.serving.role_instance import RoleInstance


class RecordingsOfWorker(OfWorker, calls={RECORDING: "record", COMPARISON: "compared"}):
    """The recording feature in a worker: starts and stops recordings, replays and comparisons of the roles."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._tapped: dict[str, Tapped] = {}
        self._played: dict[str, Sequence[Played]] = {}

    # -- roles

    def stands_in(self, role: str, cls: type, plain: Sequence[Played]) -> ReplayedRole | None:
        """Return a placeholder for a role that is replayed, or None for any other role."""
        replays = next((recording for recording in plain if recording.replays), None)
        if replays is None:
            return None
        return ReplayedRole(role, replays.folder)

    def built(self, role: RoleInstance, plain: Sequence[Played] | None) -> None:
        """Start the replay or the comparisons of a role that was just constructed."""
        if plain:
            self._played[str(role.name)] = plain
            self._begin(role)

    def _begin(self, role: RoleInstance) -> None:
        tapped, tell = self._of(role), partial(self.tell, role)
        tapped.taps = tuple(tap for tap in tapped.taps if isinstance(tap, RecordingTap))
        for played in self._played.get(str(role.name), ()):
            if played.joins:
                tapped.taps = (*tapped.taps, TellingTap(self._worker_context, tell))
                continue
            role_calls = Found(played, self._worker_context, role, find_for(role.methods), tell)
            role_calls.counts = tapped.counted
            if played.replays:
                tapped.player = Replaying(role_calls)
            else:
                tapped.taps = (*tapped.taps, Comparing(role_calls))

    def saved(self, role: RoleInstance) -> str | None:
        """Return the position and the results of a role's comparisons, as JSON for a checkpoint."""
        name = str(role.name)
        if name not in self._played:
            return None
        comparing = self._comparing(name)
        compared = {} if comparing is None else comparing.methods
        return json.dumps(
            {
                "life": self._played[name][0].life,
                "before": self._tapped[name].before,
                "compared": {called: attrs.asdict(comparison) for called, comparison in compared.items()},
            }
        )

    def restored(self, role: RoleInstance, told: str | None, by_role: bool) -> None:
        """Continue after a restore, from the saved position if the same group has saved the checkpoint."""
        tapped, name = self._tapped.get(str(role.name)), str(role.name)
        if tapped is None:
            return
        for tap in tapped.taps:
            if isinstance(tap, RecordingTap) and tap.has_begun:
                mark_end(tap.folder, why := "it was restored from a checkpoint")
                self.tell(role, f"{why}, with which its recording has ended")
                self._end(tapped)
        self._begin(role)
        tapped.counts_from_here()
        saved = json.loads(told or "{}")
        if name not in self._played or saved.get("life") != self._played[name][0].life:
            return
        tapped.before = saved["before"]
        if (comparing := self._comparing(name)) is not None:
            comparing.methods |= {
                called: Compared.saved(comparison) for called, comparison in saved["compared"].items()
            }

    def arriving(self, role: RoleInstance, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Return the weights of a sync. For a recorded or compared role, this also computes a digest of the weights."""
        tapped = self._tapped.get(str(role.name))
        return tapped.weigh(weights) if tapped is not None and tapped.taps else weights

    # -- calls

    def work(self, *arguments: Any) -> Work:
        """Return the lane's work for a call, created by the feature that runs the method without taps."""
        call, spec = arguments[3], arguments[6]
        assert isinstance(call, Call)
        feature = self._tapped[call.role].methods[spec.name].feature
        work_class = Work if feature is None else self._worker_context.part(feature).work
        return work_class(*arguments)

    def runs(self, work: Work, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Return a function that runs a call and reports the results to the taps."""
        tapped = self._tapped[str(role.name)]
        feature = tapped.methods[work.spec.name].feature
        code = work.spec.call if feature is None else self._worker_context.part(feature).runs(work, role)
        return tapped.runs(work, code)

    # -- recording

    @method
    def record(self, recorded: tuple[Recorded, ...]) -> None:
        """Start, prepare or stop the recording of roles. Called while all lanes are idle."""
        for order in recorded:
            role = self._worker_context.roles.get(order.role)
            if role is None:  # The role runs on other slots.
                continue
            tapped = self._of(role)
            if order.folder is None:
                self._end(tapped, FOREVER_S)
            elif order.begins:
                tell = partial(self.tell, role)
                tap = RecordingTap(order.folder, role.ctx.rank, order.limit, order.inputs, tell)
                tapped.taps = (*tapped.taps, tap)
                tapped.counts_from_here()
                self.finished = self._finished  # type: ignore[method-assign]
                self._worker_context.list_hooks()

    @method(collect=Gather())
    def compared(self, role: str) -> dict[str, Compared] | None:
        """Return the results of a role's comparison by method, or None if the role isn't compared in this worker."""
        comparing = self._comparing(role)
        return None if comparing is None else comparing.table()

    def _comparing(self, role: str) -> Comparing | None:
        taps = self._tapped[role].taps if role in self._tapped else ()
        return next((tap for tap in taps if isinstance(tap, Comparing)), None)

    def _finished(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return a request to write the partition of rows, if the driver may have chosen one for the call."""
        return {NAME: True} if isinstance(work.spec.dispatch, Scatter) else None

    def tell(self, role: RoleInstance, text: str) -> None:
        """Send a notice about a role to the user."""
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
        taps = [tap for tapped_role in self._tapped.values() for tap in tapped_role.taps]
        is_last = not any(isinstance(tap, RecordingTap) for tap in taps)
        if is_last and "finished" in vars(self):
            del self.finished
            self._worker_context.list_hooks()

    def close(self) -> None:
        """End all recordings, and write the queued documents."""
        for tapped in self._tapped.values():
            self._end(tapped)
