"""Play one episode of a program: spawn its groups, make its calls, inject the fault, and close."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
from tests.chaos import model
from tests.chaos.debugged import Debugger
from tests.chaos.faults import Injector
from tests.chaos.machine import Generator, Machine, Parent, Target, holds_the_gil
from tests.chaos.profiled import PlayedProfile
from tests.chaos.programs import BACKGROUND, PEERS, TURNERS, Episode, Step
from tests.chaos.recorded import PlayedRecording
from tests.chaos.records import Applied, Outcome, PlayedGroup, Sent, leaves
from tests.chaos.steps import HANG_S, LONG_S, SHORT_S, SPAWN_S, STACKS_S, Say, Steps
from tests.chaos.trainer import Trainer

import colocate
from colocate import Pool, Runtime
from colocate.testing.waiting import becomes_true

SPAWN_HUNG_S = 2.0
CLOSE_S = 1.0  # the bound for a close beyond its grace
ENVOY_S = 10.0  # the time for an envoy to exit on request, as Ray shuts down first
RESTARTS = 9  # more than the steps that can make a group restart
KEEPER_S = 3.0  # the time for a keeper to end its worker


class Player:
    """Plays one episode on a pool."""

    def __init__(self, runtime: Runtime, pool: Pool, episode: Episode, idents: Iterator[int], say: Say) -> None:
        self._runtime = runtime
        self.pool = pool
        self.episode = episode
        self._fault = episode.fault
        self._idents = idents
        self._played = [PlayedGroup(index, f"g{next(idents)}", slots) for index, slots in enumerate(episode.groups)]
        self._steps = Steps(self._played, idents, say)
        self._injector = Injector(episode.fault, runtime, pool, self._played)
        self._outcome = Outcome([*self._played], hangs=self._steps.hangs)
        self.recorded: list[PlayedRecording] = []
        self._profiled: PlayedProfile | None = None
        self._ends_profile: threading.Thread | None = None

    @property
    def _faulty(self) -> PlayedGroup:
        """The group that the fault is for."""
        return self._played[self._fault.group]

    def play(self) -> Outcome:
        with Debugger(repr(self.episode.fault)) if self.episode.stops else contextlib.nullcontext():
            return self._play()

    def _play(self) -> Outcome:
        try:
            self._spawn_all()
            if all(played.group is not None for played in self._played):
                self._profile(late=False)
                for step in self.episode.before:
                    self._do(step)
                self._profile(late=True)
                if self.episode.settled:
                    self._settle_all()
                    if self._fault.moment != "spawn":  # else a worker may still die, or hang
                        self._weigh_all()
                    if self.episode.restart:
                        self._steps.do(Step("checkpoint", group=self._fault.group))
                self._strike()
                if self._profiled is not None and self._profiled.how.again:
                    self._end_profile()
                self._aftermath()
        finally:
            self._end_profile()
            self._close_all()
            if self._ends_profile is not None:
                self._ends_profile.join()
            self._injector.give_up()
            self._settle_all()
            if self._profiled is not None:
                self._profiled.judge()
            for recorded in self.recorded:
                recorded.judge(self._hits(recorded.played))
            for folder in self._steps.folders:
                shutil.rmtree(folder)
        self._outcome.applied = self._injector.applied
        return self._outcome

    def _settle_all(self) -> None:
        for played in self._played:
            self._steps.settle(played.sent)

    def _weigh_all(self) -> None:
        """Check the memory of groups whose roles take turns."""
        for played in self._played:
            if played.budget:
                self._steps.do(Step("memory", group=played.index))

    def _hits(self, played: PlayedGroup) -> Applied | None:
        applied = self._injector.applied
        return applied if applied is not None and model.concerns(applied, played) else None

    # -- spawn

    def _spawn_all(self) -> None:
        for played in self._played:
            struck = played is self._faulty and self._fault.moment == "spawn"
            hangs = self._fault.rank if struck and self._fault.kind == "gil" else None
            timeout = SPAWN_HUNG_S if struck and self._fault.kind in model.HANGING else SPAWN_S
            if struck and self._fault.kind not in ("gil", "none"):
                self._injector.start()
            began = time.monotonic()
            self._spawn(played, timeout, 0.03 if struck else 0.0, hangs)
            if hangs is not None:
                self._injector.note("gil", 0, began)
            if played.group is None:
                return

    def _spawn(self, played: PlayedGroup, timeout: float, takes_s: float = 0.0, hangs: int | None = None) -> None:
        episode = self.episode
        roles = self._declared(takes_s, hangs)
        if episode.second:
            played.second = (0,) if episode.second == "first" else tuple(range(played.slots))
        played.budget, played.background = episode.budget, episode.background
        played.restarts = episode.restart and played is self._faulty
        played.hurried = timeout < SPAWN_S
        more: dict[str, Any] = {"on_failure": "restart" if played.restarts else "fail", "restarts": RESTARTS}
        if episode.budget:
            more |= {"residency": "swap", "device_memory": episode.budget, "step": episode.declared or None}
        first = sum(episode.groups[: played.index])
        part = self.pool[first : first + played.slots]
        with self._steps.bound("spawn", timeout + CLOSE_S):
            try:
                played.group = part.spawn(roles, name=played.name, timeout=timeout, **more)
            except Exception as error:
                played.spawn_error = error
        if episode.records and played.group is not None:
            with self._steps.bound("record", SPAWN_HUNG_S):
                recorded = PlayedRecording.begin(self._runtime, played)
            if recorded is not None:
                self.recorded.append(recorded)

    def _declared(self, takes_s: float, hangs: int | None) -> dict[str, colocate.RoleSpec[Any]]:
        return declared(self.episode, takes_s, hangs)

    # -- profiles

    def _profile(self, late: bool) -> None:
        """Begin the episode's profile if a profile is due now, and not amid the fault."""
        how = self.episode.profile
        if how is not None and how.late == late and self._fault.moment != "profile":
            self._profiled = PlayedProfile.begin(self._played[how.group], how, self._steps)

    def _end_profile(self) -> None:
        """End a running profile. With a hanging rank, a thread waits for the end until the group is closed."""
        profiled = self._profiled
        if profiled is None or profiled.over:
            return
        applied = self._hits(profiled.played)
        if profiled.how.fails:
            profiled.fail()
        elif applied is None or applied.kind not in model.HANGING or applied.went_on is not None:
            profiled.end()
        elif self._ends_profile is None:
            self._ends_profile = threading.Thread(target=profiled.end, name="chaos-profile", daemon=True)
            self._ends_profile.start()

    def _another_profile(self, played: PlayedGroup) -> None:
        """Take another profile after the end of the first one."""
        how = self.episode.profile
        if how is None or played.group is None or (self._profiled is not None and not self._profiled.over):
            return
        another = PlayedProfile.begin(played, attrs.evolve(how, sampler="torch"), self._steps)
        self._steps.do(Step("step", group=played.index))
        if not another.over:
            another.end()
        another.judge()

    # -- steps

    def _do(self, step: Step) -> None:
        if step.what == "tear":
            self._tear(step)
        else:
            self._steps.do(step)

    def _tear(self, step: Step) -> None:
        """Tear the weights of a group, which restarts then, or is replaced by another group."""
        if self._fault.moment == "spawn":
            self._injector.over.wait(LONG_S)  # a late fault must hit this group, and not the next one
        played = self._played[step.group]
        sent = self._steps.do(step)
        if sent is None or not sent.raised:  # the fault has ended the call before
            return
        assert played.group is not None
        if played.restarts:
            self._restarted(played)
            return
        self._close(played, 5 * model.AMPLE_S)
        anew = PlayedGroup(played.index, f"g{next(self._idents)}", played.slots)
        self._played[played.index] = anew
        self._outcome.played.append(anew)
        self._spawn(anew, SPAWN_S)

    # -- the fault

    def _strike(self) -> None:
        """Inject the fault during its moment."""
        fault, injector = self._fault, self._injector
        self._faulty.struck = self._faulty.generation
        if fault.kind == "none":
            self._moment()
            return
        if fault.moment == "spawn":
            injector.over.wait(LONG_S)
            return
        if fault.ending == "grace" and fault.kind in model.HANGING:
            assert self._faulty.group is not None
            self._settle_all()  # with the group's usual grace
            self._steps.do(Step("step", group=fault.group))  # so that a failed call leaves no hold
            self._faulty.group._node.grace = SHORT_S
        if fault.kind == "gil":
            self._hold_the_gil()
        elif fault.moment == "close":
            return
        elif fault.target in PEERS:
            self._steps.do(Step("use", group=fault.group, size=1000))  # so that the workers know each other
            self._steps.do(Step("sync", group=fault.group))
            injector.start()
        else:
            injector.start()
        if fault.moment != "close":
            self._moment()
            injector.over.wait(LONG_S)  # so that later steps come after the fault

    def _hold_the_gil(self) -> None:
        rank, played = self._fault.rank, self._faulty
        began = time.monotonic()
        timeout = None if self._fault.moment == "close" else SHORT_S
        self._settle_all()  # so that the lane starts the call at once
        sent = self._steps.call(played, "hold", (rank,), timeout, chosen=True, times_out=timeout is not None)
        if sent.call is None:  # the group has failed before
            return
        assert played.group is not None
        pid = played.group._node.workforce.workers[rank].pid or 0
        if becomes_true(lambda: holds_the_gil(pid), LONG_S):
            self._injector.note("gil", pid, began)
        else:
            self._steps.hangs.append(f"{sent} has not begun to hold the GIL of process {pid}")

    def _moment(self) -> None:
        """Start the activity during which the fault is injected."""
        group, moment = self._fault.group, self._fault.moment
        timeout = SHORT_S if self._fault.kind in model.HANGING else LONG_S
        if moment == "transfer":
            for size in (200_000, 4_000_000):
                self._steps.do(Step("use", group=group, size=size), timeout)
        elif moment == "queue":
            self._steps.do(Step("submit", group=group, work_s=0.03, count=4), timeout)
        elif moment == "turns":
            self._steps.do(Step("turns", group=group, work_s=0.02, count=2, roles=("a", *TURNERS)), timeout)
        elif moment == "train":
            self._steps.do(Step("train", group=group, count=3), timeout)
        elif moment == "renewal":
            self._steps.do(Step("train_failing", group=group, ranks=(0,), where="backward"), timeout)
        elif moment == "weights":
            target, giver = self._fault.others
            self._steps.do(Step("weights", "b", target, 0.02, size=1 << 16, count=3, giver=giver), timeout)
        elif moment == "profile":
            assert self.episode.profile is not None
            self._profiled = PlayedProfile.begin(self._played[group], self.episode.profile, self._steps)
            self._steps.do(Step("submit", group=group, work_s=0.02, count=4), timeout)
            self._end_profile()
        elif moment == "rows":
            fault = self._fault
            self._steps.do(Step("rows", group=group, work_s=0.02, where=fault.where, retry=fault.retry), timeout)
        elif moment == "pause":
            fault = self._fault
            self._steps.do(Step("pause", group=group, work_s=0.02, where=fault.where, how=fault.how), timeout)
        elif moment not in ("idle", "spawn", "close"):
            what = {"call": "submit", "collective": "add"}.get(moment, moment)
            self._steps.do(Step(what, group=group, work_s=0.12), timeout)

    def _aftermath(self) -> None:
        """Check that a hit group reports the fault, and that every other group works."""
        # The hit group comes first: an error's time is measured when the player looks.
        for played in sorted(self._played, key=lambda each: self._hits(each) is None):
            applied = self._hits(played)
            if applied is not None and applied.kind in model.DEADLY:
                self._probe_dead(played, applied)
                if played.restarts:
                    self._restarted(played)
                    self._works(played)
            elif applied is not None and applied.kind == "stop" and self._fault.ending == "cont":
                self._steps.settle(_soon(played))
                self._injector.go_on()
                self._works(played)
            elif applied is not None and applied.kind in model.HANGING:
                if self._probe_hung(played) and played.restarts:
                    self._restarted(played)
                    self._works(played)
            else:
                self._works(played)

    def _works(self, played: PlayedGroup) -> None:
        for step in self.episode.after:
            if step.group == played.index:
                self._do(step)
        self._steps.do(Step("step", group=played.index))
        if self.episode.profile is not None and self.episode.profile.again:
            self._another_profile(played)
        if self.episode.trains:
            self._steps.do(Step("train", group=played.index))
        if played.background:
            self._steps.do(Step("pause", group=played.index, where="talk", how="keep"))
        if played.budget:
            self._steps.do(Step("turns", group=played.index, count=2, roles=("a", *TURNERS)))
            self._steps.do(Step("memory", group=played.index))

    def _probe_dead(self, played: PlayedGroup, applied: Applied) -> None:
        """Check that a call fails after the death of a worker, and measure the time of the first error."""
        # After the end of an envoy or keeper the workers answer for a while, until other processes end the workers.
        deadline = time.monotonic() + {"envoy": ENVOY_S, "keeper": KEEPER_S}.get(applied.kind, 0.0)
        while True:
            sent = self._steps.do(Step("submit", group=played.index))
            self._steps.settle(played.sent)
            assert sent is not None
            if not sent.fine:
                break
            if time.monotonic() > deadline:
                self._steps.hangs.append(f"{played.name}: {sent} has succeeded after the end of rank {applied.rank}")
                break
        told = [each.settled for each in played.sent if each.error is not None and each.settled is not None]
        after = [at - applied.began for at in told if at >= applied.began]
        # A wait for rows that begin again isn't an error.
        if after and applied.moment != "spawn" and not (played.restarts and applied.moment == "rows"):
            self._outcome.error_s = min([self._outcome.error_s or after[0], *after])

    def _restarted(self, played: PlayedGroup) -> None:
        """Wait for the restart of a group, and check its checkpoint and generation."""
        assert played.group is not None
        self._steps.settle(played.sent)
        with self._steps.bound("restart", SPAWN_S):
            tag = played.group.wait_ready(SPAWN_S)
        played.generation += 1
        if (tag, played.group.generation) != (played.checkpoint, played.generation):
            played.wrong.append(
                f"restarted from {tag!r} as generation {played.group.generation}, "
                f"not from {played.checkpoint!r} as {played.generation}"
            )
        played.restored[played.generation] = played.checkpoint

    def _probe_hung(self, played: PlayedGroup) -> bool:
        """Make calls to a group with a hanging worker; return whether the group fails by its own grace."""
        if self._fault.moment == "close":
            return False
        assert played.group is not None
        group = played.group
        fails = self._fault.ending == "grace"
        if fails and any(
            sent.timeout is None and sent.call is not None and not sent.call.done() for sent in played.sent
        ):
            fails = False  # the worker was stopped in a call without a timeout: no later call makes that one late
        if fails:
            self._steps.do(Step("submit", group=played.index), SHORT_S)
            bound = 2 * SHORT_S + 2 * STACKS_S + CLOSE_S
            if any(sent.settled is None for sent in _patient(played)):
                bound += LONG_S  # the grace of a hold is for the failed call and later ones, not for an earlier one
            with self._steps.bound("the group's failure by its own grace", bound):
                before = played.generation
                becomes_true(lambda: group._node.failure is not None or group.generation > before, bound + HANG_S)
        self._steps.do(Step("submit", group=played.index), SHORT_S)
        if self._fault.grace > 0.15:  # otherwise the close comes before the timeouts
            self._steps.settle(_soon(played))
        return fails

    # -- close

    def _close_all(self) -> None:
        if self._fault.moment == "close" and self._fault.kind not in ("gil", "none") and self._faulty.group is not None:
            self._injector.start()
            if self._fault.kind == "stop":
                self._injector.over.wait(LONG_S)  # a late stop would have no effect
        if self._fault.ending == "pool":
            self._close_pool()
            return
        for played in reversed(self._played):
            if played.group is not None:
                self._close(played, self._fault.grace if played is self._faulty else 5 * model.AMPLE_S)

    def _close(self, played: PlayedGroup, grace: float) -> None:
        assert played.group is not None
        group, played.grace = played.group, grace
        began = played.closing = time.monotonic()
        with self._steps.bound("close", grace + CLOSE_S):
            try:
                group.close(grace, force=True)
            except BaseExceptionGroup as error:
                played.close_errors += (error,)
        self._note_close(played, began)

    def _close_pool(self) -> None:
        began = time.monotonic()
        for played in self._played:
            played.closing, played.grace = began, self._fault.grace
        with self._steps.bound("close of the pool", self._fault.grace * len(self._played) + CLOSE_S):
            try:
                self.pool.close(self._fault.grace, force=True)
            except BaseExceptionGroup as error:
                for played in self._played:
                    mine = tuple(leaf for leaf in leaves(error) if getattr(leaf, "group", None) == played.name)
                    played.close_errors += mine
                strange = [leaf for leaf in leaves(error) if not self._of_a_group(leaf)]
                self._faulty.close_errors += tuple(strange)
        self._outcome.pool_closed = True
        self._note_close(self._faulty, began)

    def _of_a_group(self, leaf: BaseException) -> bool:
        return getattr(leaf, "group", None) in [played.name for played in self._played]

    def _note_close(self, played: PlayedGroup, began: float) -> None:
        applied = self._hits(played)
        if applied is not None and applied.kind in model.HANGING and applied.went_on is None:
            self._outcome.close_over_s = time.monotonic() - began - self._fault.grace


def _soon(played: PlayedGroup) -> list[Sent]:
    return [sent for sent in played.sent if sent.timeout is not None and sent.timeout <= SHORT_S]


def _patient(played: PlayedGroup) -> list[Sent]:
    return [sent for sent in played.sent if sent.timeout is None or sent.timeout > SHORT_S]


def declared(episode: Episode, takes_s: float, hangs: int | None) -> dict[str, colocate.RoleSpec[Any]]:
    roles: dict[str, colocate.RoleSpec[Any]] = {
        "a": colocate.role(Machine, takes_s, hangs, child=episode.child, stops=episode.stops)
    }
    if episode.second:
        second = colocate.role(Machine, 0.0, None, "a")
        roles["b"] = second.on(slots=[0]) if episode.second == "first" else second
    if "weights" in episode.rollout:
        roles["s"] = colocate.role(Target, "a")
    if "child" in episode.rollout:
        roles["k"] = colocate.role(Parent, "a")
    if episode.background:
        roles[BACKGROUND] = colocate.role(Generator).on(background=True)
    if episode.trains:
        roles["t"] = colocate.role(Trainer, "a")
    if episode.budget:
        roles |= dict.fromkeys(TURNERS, colocate.role(Machine))
    return roles
