"""The model sees what the laws forbid, in histories that are made up.

What it makes of memory, budgets, training and closes the mutants of test_mutants.py show.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.chaos import model, rollouts
from tests.chaos.ledger import ROOT, Ledger
from tests.chaos.machine import Deliberate, digest_after, mixed
from tests.chaos.records import Applied, Played, Sent

from colocate import WeightSync
from colocate._calls.order import HAS_LEFT
from colocate.errors import CallTimeout, ChildDied, ClosedError, RoleError, StaleWeightsError, WorkerDied

KILLED = Applied("kill", 0, 1, 42, 5.0, 5.1, "call")
STOPPED = Applied("stop", 0, 1, 42, 5.0, 5.1, "call")


def sent(ident: int, notes: Any = None, **more: Any) -> Sent:
    """A call on two ranks, both of which have begun these calls."""
    made = Sent(ident, "step", (0, 1), 10.0, lambda value: None, submitted=1.0, settled=2.0)
    if notes is not None:
        made.value = [("n0", 0, tuple(notes), None), ("n1", 1, tuple(notes), None)]
    for name, value in more.items():
        setattr(made, name, value)
    return made


def wrong(*calls: Sent, applied: Applied | None = None, **more: Any) -> str:
    """What the model says of a group that has made these calls."""
    played = Played(0, "g", 2, sent=list(calls))
    for name, value in more.items():
        setattr(played, name, value)
    return "\n".join(model.complaints([played], applied))


def test_right() -> None:
    assert wrong(sent(1, [1]), sent(2, [1, 2])) == ""


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([sent(1, settled=None)], "never settled"),
        ([sent(1, [1]), sent(2, [1, 1, 2])], "out of order, or twice"),
        ([sent(1, [1]), sent(2, [2, 1])], "out of order, or twice"),
        ([sent(1, [1]), sent(2, [2])], "had succeeded, and is lost"),
        ([sent(1, [1], settled=2.0), sent(2, [1, 2]), sent(4, [1, 4])], "the calls begun before it were"),
        ([sent(1, [2])], "isn't among the calls"),
        ([sent(1, [1], fails=(0,))], "should have raised"),
        ([sent(1, [1], times_out=True)], "should have timed out"),
        ([sent(1, [1], expected=lambda value: "seven")], "wrong result: seven"),
        ([sent(1, error=ValueError("strange"))], "ended with ValueError"),
        ([sent(1, error=WorkerDied("gone", rank=1, pid=42, signal="SIGKILL"))], "ended with WorkerDied"),
        ([sent(1, error=ClosedError("closed"))], "ended with ClosedError"),
    ],
)
def test_wrong(calls: list[Sent], words: str) -> None:
    assert words in wrong(*calls)


def test_causes() -> None:
    """A death is that of the rank that was killed; a timeout names the rank that was stopped."""
    told = WorkerDied("gone", rank=1, pid=42, signal="SIGKILL")
    assert wrong(sent(1, error=told), applied=KILLED) == ""
    assert wrong(sent(1, error=told), applied=attrs.evolve(KILLED, rank=0))
    assert wrong(sent(1, error=told), applied=attrs.evolve(KILLED, pid=43))
    assert wrong(sent(1, error=WorkerDied("gone", rank=1, pid=42, signal="SIGTERM")), applied=KILLED)
    assert wrong(sent(1, error=told), applied=attrs.evolve(KILLED, group=1))
    assert wrong(sent(1, error=CallTimeout("late", stacks={1: ""})), applied=KILLED)
    assert wrong(sent(1, error=CallTimeout("late", stacks={1: ""})), applied=STOPPED) == ""
    assert wrong(sent(1, error=CallTimeout("late", stacks={0: ""})), applied=STOPPED)
    asking = f'File "{model.AT_A_PEER[0]}", line 94, in part'
    assert wrong(sent(1, error=CallTimeout("late", stacks={0: asking})), applied=STOPPED) == ""
    assert wrong(sent(1, error=CallTimeout("late", stacks={0: asking})), applied=KILLED)
    assert wrong(sent(1, error=CallTimeout("late", stacks={})), applied=STOPPED)
    left = CallTimeout("late", stacks={0: HAS_LEFT})
    assert wrong(sent(1, error=left, settled=2.0), closing=1.0, applied=STOPPED) == ""
    assert wrong(sent(1, error=left, settled=2.0), closing=3.0, applied=STOPPED)
    assert wrong(sent(1, error=left, settled=2.0), applied=STOPPED)
    assert wrong(sent(1, [1], submitted=6.0, settled=7.0), applied=KILLED)
    dropped = attrs.evolve(STOPPED, kind="peer")
    early = RoleError("a.take was given up: unix:x closed the connection before it was authenticated: the keys differ")
    assert wrong(sent(1, error=early), applied=dropped) == ""
    assert wrong(sent(1, error=early), applied=STOPPED)
    assert wrong(sent(1, error=RoleError("a.take raised ValueError")), applied=dropped)


def test_deliberate() -> None:
    """A `RoleError` has the rank that was told to raise, and what it raised as its cause."""
    error = RoleError("it raised", rank=0, remote_traceback="...")
    error.__cause__ = Deliberate(1, 0)
    assert wrong(sent(1, error=error, fails=(0,))) == ""
    assert wrong(sent(1, error=error, fails=(1,)))
    error.__cause__ = Deliberate(2, 0)
    assert wrong(sent(1, error=error, fails=(0,)))


def test_weights() -> None:
    """A target has a whole state of its source, no older than the last sync, unless that has failed."""

    def seen(told: list[int], digest: int | None = None, failed: bool = False) -> str:
        group = Played(0, "g", 1)
        right = digest_after("a", 0, told)
        group.sent = [
            sent(1, [1], ranks=(0,)),
            sent(2, what="weights", role="s", ranks=(), giver=group, given="a", value=WeightSync(1, 0, 0.0, ())),
        ]
        peek = sent(3, what="peek", role="s", ranks=(0,))
        peek.value = [("n0", 0, (1, 3), (1, 0, tuple(told), right if digest is None else digest))]
        group.sent.append(peek)
        if failed:
            group.sent[1].error, peek.error = RoleError("it raised", rank=0), StaleWeightsError("stale", rank=0)
            group.sent[1].error.remote_traceback = "..."
            group.sent[1].error.__cause__ = Deliberate(2, 0)
            group.sent[1].fails = (0,)
        return "\n".join(model.complaints([group], None))

    assert seen([1]) == ""
    assert seen([1], failed=True) == ""
    assert "none of rank 0" in seen([1], digest=7)
    assert "older than" in seen([])
    stale = StaleWeightsError("stale", rank=0)
    assert "ended with StaleWeightsError" in wrong(sent(3, what="peek", role="s", error=stale))


def test_pauses() -> None:
    """Only a pause that may aborts a call; only a rank that hangs makes one late; versions never go back."""
    aborted = RoleError("g.talk was aborted: group.pause('g', how='abort') of group 'g'")
    assert wrong(sent(1, what="talk", role="g", error=aborted, aborted=True)) == ""
    assert "was aborted" in wrong(sent(1, what="talk", role="g", error=aborted))
    late = sent(1, what="pause", role="g", ranks=(), error=TimeoutError("role 'g' isn't paused"))
    assert "isn't paused" in wrong(late)
    assert wrong(late, applied=STOPPED) == ""
    seen = rollouts.versions_of((0, 1))
    assert seen([("n0", 0, (1,), [0, 1]), ("n1", 1, (1,), [1, 1])]) is None
    assert seen([("n0", 0, (1,), [1, 0]), ("n1", 1, (1,), [1, 1])]) is not None
    assert seen([("n0", 0, (1,), [0])]) is not None


def test_rows() -> None:
    """Each row comes once, is right, and fails if it was told to; where a fault ends a call its rows have one error."""
    first, second = (0, (mixed(1, 0, b"row"), 1, 0)), (1, (mixed(1, 1, b"row"), 1, 1))

    def seen(*rows: Any, **more: Any) -> str:
        return wrong(sent(1, what="play", ranks=(), count=2, rows=[*rows], **more))

    assert seen(first, second) == seen(second, first) == seen(first, closed=True) == ""
    assert "only these have come: [0]" in seen(first)
    assert "these have come: [0, 0, 1]" in seen(first, first, second)
    assert "row 1 gave" in seen(first, (1, (mixed(1, 1, b"row"), 2, 1)))
    assert "should have raised" in seen(first, second, failing=(1,))
    assert seen(first, second, sticky=True) == ""
    fourth = (3, (mixed(1, 3, b"row"), 1, 1))  # with the key of the first
    assert "several ranks" in wrong(sent(1, what="play", ranks=(), count=4, rows=[first, fourth], sticky=True))
    told = RoleError("it raised", rank=0, row=1, remote_traceback="...")
    told.__cause__ = Deliberate(1, 1)
    assert seen(first, (1, told), failing=(1,)) == ""
    assert "row 1 ended with RoleError" in seen(first, (1, told))


def test_children() -> None:
    """The death of a child fails the calls of its role, and no others, until there is another one."""
    died = ChildDied("gone", rank=0)
    killed = sent(1, what="orphan", role="k", bereaved=(0,), error=died)
    assert wrong(killed, sent(2, role="k", error=died), sent(3, [3], what="revive", role="k"), sent(4, [3, 4])) == ""
    assert "has lost its child" in wrong(killed, sent(2, [2], role="k"))
    assert "has lost its child" in wrong(sent(1, [1], what="orphan", role="k", bereaved=(0,)))
    assert "ended with ChildDied" in wrong(killed, sent(2, error=died))
    revived = sent(2, [2], what="revive", role="k")
    assert "ended with ChildDied" in wrong(killed, revived, sent(3, role="k", error=died))


def test_ledger(tmp_path: Any) -> None:
    """It is continued when the code is the same, and begun anew when it isn't."""
    path = tmp_path / "chaos.json"
    ledger = Ledger.open(path)
    ledger.tally("local", "kill").tried = 7
    ledger.tally("local", "kill").played(20)
    ledger.problem("local", "kill", 5, "wrong", f'File "{ROOT}/core/colocate/_role/call.py" is here')
    assert ledger.problems[-1]["words"] == 'File "core/colocate/_role/call.py" is here'
    ledger.save()
    again = Ledger.open(path)
    assert (again.tally("local", "kill").tried, again.tally("local", "kill").last) == (7, 20)
    assert again.problems == ledger.problems
    path.write_text(path.read_text().replace(ledger.code, "0" * 16))
    assert Ledger.open(path).tallies == {}


def test_a_part_of_the_ledger_begins_anew_by_itself(tmp_path: Any) -> None:
    """It leaves the rest as it is, and the other way round."""
    path = tmp_path / "chaos.json"
    whole, part = Ledger(path, code="a"), Ledger(path, "outages", code="b")
    whole.tally("ray", "kill").tried = 3
    part.tally("dask", "cut").tried = 2
    for each in (whole, part, whole):
        each.save()
    assert Ledger.open(path, of_any_code=True).tally("ray", "kill").tried == 3
    assert Ledger.open(path, of_any_code=True, part="outages").tally("dask", "cut").tried == 2
    assert Ledger.open(path, part="outages").tally("dask", "cut").tried == 0  # of another code
