"""Replay a recorded role beside a role that runs, amid a fault, and compare the results with the recording."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import attrs
from tests.chaos import model, rollouts
from tests.chaos.machine import Machine, mixed
from tests.chaos.player import Player
from tests.chaos.programs import Episode, Fault
from tests.chaos.recorded import FOLDER, ROLE, PlayedRecording
from tests.chaos.records import PlayedGroup, Sent, chain, leaves, short
from tests.chaos.steps import LONG_S, SHORT_S, Say

import colocate
from colocate import Pool, Runtime
from colocate.errors import ColocateError, ReplayError
from colocate.features.rows.row_stream import RowStream

BESIDE = "c"  # the role that runs
OFTEN = 0.5  # the share of calls that follow a call of that role
NEVER = ("sleep", "wake")  # calls that are bound to the recorded group


class Replayer(Player):
    """Repeats the recorded calls in a group of its own, with the order of submissions and waits of the first driver."""

    def __init__(
        self, runtime: Runtime, pool: Pool, recorded: PlayedRecording, fault: Fault, idents: Iterator[int], say: Say
    ) -> None:
        episode = Episode((recorded.played.slots,), "", False, (), False, False, fault, ())
        super().__init__(runtime, pool, episode, idents, say)
        self._source = recorded
        self._answers = PlayedGroup(0, self._faulty.name, recorded.played.slots)
        self._again: list[tuple[Sent, Sent]] = []  # a recorded call, and the repetition

    def _declared(self, takes_s: float, hangs: int | None) -> dict[str, colocate.RoleSpec[Any]]:
        return {
            ROLE: colocate.role(Machine).on(replay=f"{self._source.folder}/{FOLDER}"),
            BESIDE: colocate.role(Machine),
        }

    def _play(self) -> Any:
        ends = threading.Thread(target=self._end_hang, name="chaos-replay", daemon=True)
        try:
            self._spawn_all()
            if self._faulty.group is not None:
                self._answers.group = self._faulty.group
                if self._fault.kind != "none":
                    self._injector.start()
                    ends.start()
                self._replay()
                if self._fault.kind != "none":
                    self._injector.over.wait(LONG_S)
                    ends.join()
                self._beside()
                self._settle_all()
        finally:
            if self._faulty.closing is None:
                self._close_all()
            self._injector.give_up()
            self._settle_all()
            self._steps.settle(self._answers.sent)
        self._outcome.applied = self._injector.applied
        self._answers.closing = self._faulty.closing
        told = [now.error for _, now in self._again]  # the close reports the error of an unused kept call
        closes = [leaf for error in self._faulty.close_errors for leaf in leaves(error) if leaf not in told]
        self._faulty.close_errors = tuple(closes)
        self._faulty.wrong += (f"replay: {words}" for words in self._complaints())
        return self._outcome

    def _end_hang(self) -> None:
        """Continue a stopped rank soon, or close its group, so that no call waits for longer."""
        self._injector.over.wait(LONG_S)
        applied = self._injector.applied
        if applied is not None and applied.kind in model.HANGING:
            threading.Event().wait(self._fault.grace)
            if self._fault.ending == "cont":
                self._injector.go_on()
            else:
                self._close_all()

    def _replay(self) -> None:
        draw = random.Random(f"{self._fault!r}")
        for sent in self._source.played.sent:
            if sent.timeout is not None and sent.timeout <= SHORT_S:
                break  # the recorded group's fault was near, and a call may time out at any moment
            if sent.role != ROLE or sent.generation or sent.begin is None or sent.what in NEVER:
                continue
            self._steps.settle(now for then, now in self._again if (then.settled or sent.submitted) < sent.submitted)
            if draw.random() < OFTEN:
                self._beside()
            now = attrs.evolve(sent, value=None, error=None, settled=None, call=None, rows=[], generation=0)
            self._again.append((sent, now))
            made = self._steps.submit(self._answers, now, sent.begin, ROLE)
            if sent.kept is not None:
                if made is None:
                    break  # the group takes no calls any more
                sent.kept.resident = made
            elif isinstance(made, RowStream):
                self._steps.read(made, now, self._answers, len(sent.rows) if sent.closed else None)
                rollouts.look_at_errors(now)

    def _beside(self) -> None:
        """Call the role that runs."""
        played = self._faulty
        ranks = tuple(range(played.slots))
        sent = self._steps.call(played, "step", ranks, LONG_S, 0.005, b"", role=BESIDE)
        sent.expected = model.seen_by([(rank, mixed(sent.ident, rank, b"")) for rank in ranks])

    def _complaints(self) -> Iterator[str]:
        hit = self._hits(self._faulty)
        for then, now in self._again:
            words = self._of_call(then, now)
            if then.raised and hit is not None and hit.kind in model.HANGING:
                words = None  # the rank that has to raise may hang: the error is another rank's then
            if words and not (now.error is not None and model.allowed(now, now.error, self._answers, hit)):
                yield f"{now} {words}"

    def _of_call(self, then: Sent, now: Sent) -> str | None:
        if then.raised:
            return None if now.raised else f"raised when it was recorded, and now {now.value!r:.200} {short(now.error)}"
        is_there = then.fine if then.count is not None else self._is_there(then)
        if now.error is None:
            if not is_there:
                return f"gave {now.value!r:.200}, and isn't in the recording"
            if then.fine and (_plain(now.value), _rows(now)) != (_plain(then.value), _rows(then)):
                return f"gave {now.value!r:.200} {now.rows!r:.200} instead of {then.value!r:.200} {then.rows!r:.200}"
            return None
        if not isinstance(now.error, ColocateError):
            return f"ended with {short(now.error)}"
        if then.fine and is_there and not (then.count is not None and self._source.hit):
            return (
                f"ended with {short(now.error)}, and gave {then.value!r:.200} {then.rows!r:.200} when it was recorded"
            )
        if then.fine and not any(isinstance(each, ReplayError) for each in chain(now.error)):
            return f"isn't in the recording, and ended with {short(now.error)}"
        return None

    def _is_there(self, then: Sent) -> bool:
        return all((then.ident, rank) in self._source.found for rank in then.ranks)


def _rows(sent: Sent) -> list[tuple[int, Any]]:
    """Return the rows that were read one by one."""
    return [(index, _plain(value)) for index, value in sent.rows] if not isinstance(sent.value, list) else []


def _plain(value: Any) -> Any:
    """Return a value that is comparable with another group's."""
    return (type(value), getattr(value.__cause__, "args", ())) if isinstance(value, Exception) else value
