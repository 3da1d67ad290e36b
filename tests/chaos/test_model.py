"""The model sees what the laws forbid, in histories that are made up."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.chaos import model, training
from tests.chaos.ballast import Ballast, digest_after, size_of
from tests.chaos.ledger import ROOT, Ledger
from tests.chaos.machine import Deliberate
from tests.chaos.programs import TURNERS
from tests.chaos.records import Applied, Played, Sent

from colocate import GroupMemory, RoleMemory, SlotMemory
from colocate._calls.stacks import HAS_LEFT
from colocate.errors import (
    CallTimeout,
    ClosedError,
    GroupRestarted,
    RenewalError,
    RoleError,
    WorkerDied,
)

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


def test_held() -> None:
    """Ranks that run nothing are kept from a call while one that hangs doesn't come back from an earlier failure."""
    kept = CallTimeout("late", stacks={0: "running nothing\n  File ..."})
    first = sent(1, error=CallTimeout("late", stacks={0: ""}), times_out=True)
    assert wrong(first, sent(2, error=kept), applied=STOPPED) == ""
    assert wrong(first, sent(2, error=kept))
    assert wrong(first, sent(2, error=kept), applied=KILLED)
    assert wrong(sent(1, [1]), sent(2, error=kept), applied=STOPPED)
    assert wrong(first, sent(2, error=CallTimeout("late", stacks={0: "running a.step"})), applied=STOPPED)


def trained(ident: int, number: int, other: int | None = None, **more: Any) -> Sent:
    """A step of training on two ranks, after which there are so many updates."""
    made = sent(ident, what="train", **more)
    due = training.losses.of_ranks(number - 1, 2)
    told = zip((number, number if other is None else other), due, strict=True)
    made.value = [(f"n{rank}", rank, (ident,), own) for rank, own in enumerate(told)]
    return made


def torn(ident: int) -> tuple[Sent, RenewalError]:
    """A step that rank 1 has left before its update, and what the group fails of then."""
    error = RoleError("it raised", rank=1, remote_traceback="...")
    error.__cause__ = Deliberate(ident, 1)
    failed = RenewalError("no common state")
    failed.__cause__ = error
    return sent(ident, what="train", where="after", fails=(1,), error=error), failed


def of_training(*calls: Sent, **more: Any) -> str:
    """What the model says of steps alone."""
    played = Played(0, "g", 2, sent=list(calls))
    for name, value in more.items():
        setattr(played, name, value)
    return "\n".join(training.complaints(played))


def test_training() -> None:
    """Each step has one update more than the one before, the same on all ranks, and the loss that is due then."""
    pytest.importorskip("torch")
    assert of_training(trained(1, 1), trained(2, 2), trained(3, 3)) == ""
    assert "it made update 2, after [0]" in of_training(trained(1, 2))
    assert "it made update 1, after [1]" in of_training(trained(1, 1), trained(2, 1))
    assert "different numbers of updates" in of_training(trained(1, 1, other=2))
    assert of_training(trained(1, 1), sent(2, what="train", error=CallTimeout("late")), trained(3, 3)) == ""
    assert "it made update 3" in of_training(trained(1, 1), sent(2, what="train", error=RoleError("x")), trained(3, 3))
    stale = trained(2, 2)
    stale.value = trained(2, 1).value[:1] + stale.value[1:]
    stale.value = [(nonce, rank, notes, (2, own[1])) for nonce, rank, notes, own in stale.value]
    assert "wrong losses in update 2" in of_training(trained(1, 1), stale)


def test_training_from_a_checkpoint() -> None:
    """A generation goes on with the updates that its checkpoint has, or with none."""
    pytest.importorskip("torch")
    before = trained(1, 1), trained(2, 2), trained(4, 3)
    known: dict[str, Any] = {"saved": {3: 0}, "restored": {1: 3}}
    assert of_training(*before, trained(5, 3, generation=1), **known) == ""
    assert "it made update 4, after [2]" in of_training(*before, trained(5, 4, generation=1), **known)
    assert of_training(*before, trained(5, 1, generation=1), restored={1: None}) == ""


def test_weights_of_two_steps() -> None:
    """They are the end of the group: nothing succeeds after them, and nothing else ends it so."""
    pytest.importorskip("torch")
    step, failed = torn(1)
    later = sent(2, what="train", error=failed)
    assert wrong(step, later) == ""
    assert "had left ranks without a common state" in wrong(step, sent(2, [2]))
    restarted = GroupRestarted("it is being restarted")
    restarted.__cause__ = failed
    assert wrong(step, sent(2, error=restarted), restarts=True) == ""
    assert wrong(step, sent(2, error=restarted))
    assert wrong(sent(1, [1]), later)
    step.where = "backward"
    assert wrong(step, later)
    late = CallTimeout("late", stacks={1: ""})
    failed.__cause__ = late
    assert wrong(sent(1, what="train", error=late), later, applied=STOPPED) == ""


def looked(group: Played, role: str, ident: int, notes: tuple[int, ...], digest: int | None = None) -> None:
    """A look at a role's memory on two ranks; the second one's is another."""
    made = sent(ident, what="look", role=role)
    of = digest_after(role, 0, notes[:-1]), digest_after(role, 1, notes[:-1]) if digest is None else digest
    made.value = [(f"{role}{rank}", rank, notes, own) for rank, own in enumerate(of)]
    made.expected = model.as_written(group, role, 2)
    group.sent.append(made)


@pytest.mark.parametrize("role", ["a", *TURNERS])
def test_memory(role: str) -> None:
    """It is what the role's own calls have made of it, in their order, and no call that only looks."""
    played = Played(0, "g", 2, sent=[sent(1, [1], role=role), sent(2, [1, 2], role=role)])
    looked(played, role, 3, (1, 2, 3))
    assert model.complaints([played], None) == []
    for digest in (digest_after(role, 1, (1,)), digest_after(role, 1, (2, 1, 3)), digest_after(role, 0, (1, 2))):
        other = Played(0, "g", 2, sent=played.sent[:2])
        looked(other, role, 3, (1, 2, 3), digest)
        assert "memory that isn't what it was" in "\n".join(model.complaints([other], None))


def test_memory_is_what_a_role_has(tmp_path: Any) -> None:
    """The model works out what a role has, in an array or in a tensor, also when that has come from a checkpoint."""
    pytest.importorskip("torch")
    for tensor in (False, True):
        ballast = Ballast("c", 1, tensor)
        for ident in (3, 5):
            ballast.use(ident)
        ballast.save(tmp_path / "memory")
        ballast.use(7)
        assert ballast.look(8) == digest_after("c", 1, (3, 5, 7))
        ballast.restore(tmp_path / "memory")
        assert ballast.look(8) == digest_after("c", 1, (3, 5))
        ballast.array[-1] ^= 1
        with pytest.raises(AssertionError, match="isn't what it was"):
            ballast.use(9)


def test_within_a_budget() -> None:
    """No more is awake than may be, and all that roles have is awake or asleep."""

    def memory(awake: int, asleep: int) -> GroupMemory:
        role = RoleMemory("c", 0, {"tensors": awake}, {}, 0, asleep, None, complete=True)
        functions = RoleMemory("", 0, {}, {}, 0, 0, None, complete=True)
        return GroupMemory("g", (SlotMemory(0, "n", "cpu", (role, functions), None, None, None, None),))

    size = size_of("c")
    assert model.within(size)(memory(size, 0)) is None
    assert model.within(size)(memory(0, size)) is None
    assert "bytes may be" in str(model.within(size - 1)(memory(size, 0)))
    assert "have less" in str(model.within(size)(memory(0, size - 1)))


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
