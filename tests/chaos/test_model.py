"""The model sees what the laws forbid, in histories that are made up."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.chaos import model
from tests.chaos.ledger import ROOT, Ledger, ranges, spelled_out
from tests.chaos.machine import Deliberate
from tests.chaos.programs import KINDS, kind_of, program
from tests.chaos.records import Applied, Played, Sent

from colocate.errors import CallCancelled, CallTimeout, ClosedError, RoleError, WorkerDied

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
    """What is as it should be is no matter."""
    assert wrong(sent(1, [1]), sent(2, [1, 2]), sent(3, error=CallCancelled("it was"), withdrawn=True)) == ""


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([sent(1, settled=None)], "never settled"),
        ([sent(1, [1]), sent(2, [1, 1, 2])], "out of order, or twice"),
        ([sent(1, [1]), sent(2, [2, 1])], "out of order, or twice"),
        ([sent(1, [1]), sent(2, [2])], "had succeeded, and is lost"),
        ([sent(1, [1], settled=2.0), sent(2, [1, 2]), sent(4, [1, 4])], "the calls begun before it were"),
        ([sent(1, [2])], "isn't among the calls"),
        ([sent(1, error=CallCancelled("it was"), withdrawn=True), sent(2, [1, 2])], "which was withdrawn"),
        ([sent(1, [1], withdrawn=True)], "said that it was withdrawn"),
        ([sent(1, [1], fails=(0,))], "should have raised"),
        ([sent(1, [1], times_out=True)], "should have timed out"),
        ([sent(1, [1], expected=lambda value: "seven")], "wrong result: seven"),
        ([sent(1, error=ValueError("strange"))], "ended with ValueError"),
        ([sent(1, error=WorkerDied("gone", rank=1, pid=42, signal="SIGKILL"))], "ended with WorkerDied"),
        ([sent(1, error=ClosedError("closed"))], "ended with ClosedError"),
    ],
)
def test_wrong(calls: list[Sent], words: str) -> None:
    """Each of these is."""
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
    asking = f'File "{model.AT_A_PEER}", line 94, in part'
    assert wrong(sent(1, error=CallTimeout("late", stacks={0: asking})), applied=STOPPED) == ""
    assert wrong(sent(1, error=CallTimeout("late", stacks={0: asking})), applied=KILLED)
    assert wrong(sent(1, error=CallTimeout("late", stacks={})), applied=STOPPED)
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


def test_later_call() -> None:
    """One that waits for other ranks may fail of an earlier call's failure, and of nothing else."""
    first = RoleError("it raised", rank=0, remote_traceback="...")
    first.__cause__ = Deliberate(1, 0)
    second = RoleError("it was begun before", rank=1)
    second.__cause__ = first
    failed = sent(1, error=first, fails=(0,))
    assert wrong(failed, sent(2, what="take", error=second)) == ""
    assert wrong(failed, sent(2, error=second))
    assert wrong(sent(1, [1]), sent(2, what="take", error=second))


def test_behind() -> None:
    """A call may outlive its timeout behind one that waits for the value of a group that is stopped; no other may."""
    elsewhere = attrs.evolve(STOPPED, group=1)
    late = CallTimeout("late", stacks={0: ""})
    waits = sent(1, what="take", error=late, uses=sent(0))
    assert wrong(waits, sent(2, error=late), applied=elsewhere) == ""
    assert wrong(waits, sent(2, error=late))
    assert wrong(sent(1, [1]), sent(2, error=late), applied=elsewhere)
    assert wrong(sent(1, error=late), sent(2, what="take", error=late, uses=sent(0)), applied=elsewhere)
    assert wrong(waits, sent(2, error=late, ranks=(2,)), applied=elsewhere)
    assert wrong(waits, sent(2, error=RoleError("it raised", rank=0)), applied=elsewhere)


def test_close() -> None:
    """The close of a group with a rank that hangs says so; that of any other says nothing."""
    hung = ExceptionGroup("closed", [RoleError("worker 1 did not end within 0.2 s", rank=1)])
    assert wrong(applied=STOPPED, closing=9.0, close_errors=(hung,)) == ""
    assert "said nothing of rank 1" in wrong(applied=STOPPED, closing=9.0)
    assert "close raised" in wrong(closing=9.0, close_errors=(hung,), grace=5.0)


def test_ledger(tmp_path: Any) -> None:
    """It is continued when the code is the same, and begun anew when it isn't."""
    path = tmp_path / "chaos.json"
    ledger = Ledger.open(path)
    ledger.tally("local", "kill").tried = 7
    ledger.tally("local", "kill").seeds += [0, 5, 10, 20]
    ledger.problem("local", "kill", 5, "wrong", f'File "{ROOT}/core/colocate/_role/call.py" is here')
    assert ledger.problems[-1]["words"] == 'File "core/colocate/_role/call.py" is here'
    ledger.save()
    again = Ledger.open(path)
    assert (again.tally("local", "kill").tried, again.tally("local", "kill").seeds) == (7, [0, 5, 10, 20])
    assert again.problems == ledger.problems
    path.write_text(path.read_text().replace(ledger.code, "0" * 16))
    assert Ledger.open(path).tallies == {}


def test_seeds() -> None:
    """A seed is a program, always the same; its kind can be told from it alone."""
    assert list(spelled_out(ranges([0, 5, 10, 20]))) == [0, 5, 10, 20]
    for seed in range(50):
        assert program("ray", seed) == program("ray", seed)
        assert program("ray", seed).kind == kind_of(seed) in KINDS
