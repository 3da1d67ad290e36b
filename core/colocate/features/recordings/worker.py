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
from colocate.features.recordings.differences import MethodComparison
from colocate.features.recordings.files import mark_end
from colocate.features.recordings.messages import COMPARISON, RECORDING, RecordingNotice, RecordingOrder, ReplaySource
from colocate.features.recordings.playing import ComparingTap, ReplayedRole, ReplayPlayer, RoleCalls, make_class_finder
from colocate.features.recordings.taps import NAME, TappedRole
from colocate.features.recordings.telling import RecordingTap, ReportingTap
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature
from colocate.worker.lane import Work
from colocate.worker.serving.role_instance import RoleInstance


class RecordingsOfWorker(WorkerFeature, calls={RECORDING: "record", COMPARISON: "compared"}):
    """The recording feature in a worker: starts and stops recordings, replays and comparisons of the roles."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        self._tapped_roles: dict[str, TappedRole] = {}
        self._sources: dict[str, Sequence[ReplaySource]] = {}

    # -- roles

    def substitute_role(self, role: str, cls: type, plain: Sequence[ReplaySource]) -> ReplayedRole | None:
        """Return a placeholder for a role that is replayed, or None for any other role."""
        replays = next((recording for recording in plain if recording.replays), None)
        if replays is None:
            return None
        return ReplayedRole(role, replays.folder)

    def on_role_built(self, role: RoleInstance, plain: Sequence[ReplaySource] | None) -> None:
        """Start the replay or the comparisons of a role that was just constructed."""
        if plain:
            self._sources[str(role.name)] = plain
            self._begin_recordings(role)

    def _begin_recordings(self, role: RoleInstance) -> None:
        tapped, tell = self._tapped_role(role), partial(self.notify_user, role)
        tapped.taps = tuple(tap for tap in tapped.taps if isinstance(tap, RecordingTap))
        for played in self._sources.get(str(role.name), ()):
            if played.joins:
                tapped.taps = (*tapped.taps, ReportingTap(self._worker_context, tell))
                continue
            role_calls = RoleCalls(played, self._worker_context, role, make_class_finder(role.methods), tell)
            role_calls.call_counter = tapped.count_calls
            if played.replays:
                tapped.player = ReplayPlayer(role_calls)
            else:
                tapped.taps = (*tapped.taps, ComparingTap(role_calls))

    def save_state(self, role: RoleInstance) -> str | None:
        """Return the position and the results of a role's comparisons, as JSON for a checkpoint."""
        name = str(role.name)
        if name not in self._sources:
            return None
        comparing = self._find_comparing(name)
        compared = {} if comparing is None else comparing.methods
        return json.dumps(
            {
                "life": self._sources[name][0].life,
                "before": self._tapped_roles[name].counts_before,
                "compared": {called: attrs.asdict(comparison) for called, comparison in compared.items()},
            }
        )

    def load_state(self, role: RoleInstance, told: str | None, by_role: bool) -> None:
        """Continue after a restore, from the saved position in the recording if this group has saved the checkpoint."""
        tapped, name = self._tapped_roles.get(str(role.name)), str(role.name)
        if tapped is None:
            return
        for tap in tapped.taps:
            if isinstance(tap, RecordingTap) and tap.has_begun:
                mark_end(tap.folder, why := "it was restored from a checkpoint")
                self.notify_user(role, f"{why}, with which its recording has ended")
                self._close_taps(tapped)
        self._begin_recordings(role)
        tapped.reset_counts()
        saved = json.loads(told or "{}")
        if name not in self._sources or saved.get("life") != self._sources[name][0].life:
            return
        tapped.counts_before = saved["before"]
        if (comparing := self._find_comparing(name)) is not None:
            comparing.methods |= {
                called: MethodComparison.from_dict(comparison) for called, comparison in saved["compared"].items()
            }

    def wrap_weights(self, role: RoleInstance, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Return the weights of a sync. For a recorded or compared role, this also computes a digest of the weights."""
        tapped = self._tapped_roles.get(str(role.name))
        return tapped.digest_weights(weights) if tapped is not None and tapped.taps else weights

    # -- calls

    def create_work(self, *arguments: Any) -> Work:
        """Return the lane's work for a call, created by the feature that would run the method if there were no taps."""
        call, spec = arguments[3], arguments[6]
        assert isinstance(call, Call)
        feature = self._tapped_roles[call.role].methods[spec.name].feature
        work_class = Work if feature is None else self._worker_context.get_feature(feature).create_work
        return work_class(*arguments)

    def get_runner(self, work: Work, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Return a function that runs a call and reports the results to the taps."""
        tapped = self._tapped_roles[str(role.name)]
        feature = tapped.methods[work.spec.name].feature
        code = work.spec.call if feature is None else self._worker_context.get_feature(feature).get_runner(work, role)
        return tapped.wrap_runner(work, code)

    # -- recording

    @method
    def record(self, recorded: tuple[RecordingOrder, ...]) -> None:
        """Start, prepare or stop the recording of roles. Called while all lanes are idle."""
        for order in recorded:
            role = self._worker_context.roles.get(order.role)
            if role is None:  # The role runs on other slots.
                continue
            tapped = self._tapped_role(role)
            if order.folder is None:
                self._close_taps(tapped, FOREVER_S)
            elif order.begins:
                tell = partial(self.notify_user, role)
                tap = RecordingTap(order.folder, role.ctx.rank, order.limit, order.inputs, tell)
                tapped.taps = (*tapped.taps, tap)
                tapped.reset_counts()
                self.call_report = self._report_rows  # type: ignore[method-assign]
                self._worker_context.list_hooks()

    @method(collect=Gather())
    def compared(self, role: str) -> dict[str, MethodComparison] | None:
        """Return the results of a role's comparison by method, or None if the role isn't compared in this worker."""
        comparing = self._find_comparing(role)
        return None if comparing is None else comparing.table()

    def _find_comparing(self, role: str) -> ComparingTap | None:
        taps = self._tapped_roles[role].taps if role in self._tapped_roles else ()
        return next((tap for tap in taps if isinstance(tap, ComparingTap)), None)

    def _report_rows(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return a request to the driver to write which rank got which rows, if the driver may have chosen this."""
        return {NAME: True} if isinstance(work.spec.dispatch, Scatter) else None

    def notify_user(self, role: RoleInstance, text: str) -> None:
        """Send a notice about a role to the user."""
        self._worker_context.send_message(RecordingNotice(f"role {role.name!r}, rank {role.ctx.rank}: {text}"))

    def _tapped_role(self, role: RoleInstance) -> TappedRole:
        name = str(role.name)
        if name not in self._tapped_roles:
            self._tapped_roles[name] = TappedRole(self._worker_context, role)
        return self._tapped_roles[name]

    def _close_taps(self, tapped: TappedRole, within_s: float | None = None) -> None:
        for tap in tapped.taps:
            if isinstance(tap, RecordingTap):
                tap.close(within_s)
        tapped.taps = tuple(tap for tap in tapped.taps if not isinstance(tap, RecordingTap))
        taps = [tap for tapped_role in self._tapped_roles.values() for tap in tapped_role.taps]
        is_last = not any(isinstance(tap, RecordingTap) for tap in taps)
        if is_last and "call_report" in vars(self):
            del self.call_report
            self._worker_context.list_hooks()

    def close(self) -> None:
        """End all recordings, and write the queued documents."""
        for tapped in self._tapped_roles.values():
            self._close_taps(tapped)
