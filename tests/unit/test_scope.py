"""`Scope`: which calls of a worker may wait, and who hears when they mustn't any more."""

from __future__ import annotations

from colocate._protocol.consequence import LET_GO
from colocate.worker.serving.scope import Scope


def test_from_a_call_on() -> None:
    """Earlier calls may wait, the failed one and later ones mustn't, until the hold is over."""
    scope, told = Scope(), list[tuple[int, str]]()
    scope.ends(lambda seq, reason: told.append((seq, reason)))
    scope.end(5, "it failed")
    assert [scope.why(seq) for seq in (4, 5, 6, None)] == [None, "it failed", "it failed", "it failed"]
    scope.resume()
    assert scope.why(6) is None
    assert told == [(5, "it failed")]


def test_a_driver_lets_go() -> None:
    """What it asked for waits no longer; the construction of roles, and the next driver's calls, may."""
    scope, told = Scope(), list[tuple[int, str]]()
    scope.ends(lambda seq, reason: told.append((seq, reason)))
    scope.end(3, "it failed")
    scope.renew(100)
    assert [scope.why(seq) for seq in (0, 1, 100, 101, None)] == [None, LET_GO, LET_GO, None, None]
    assert told[1:] == [(-1, LET_GO)]


def test_the_end_is_for_good() -> None:
    scope = Scope()
    scope.close("the group is closing")
    scope.resume()
    assert scope.closed == scope.why(1) == scope.why(None) == "the group is closing"
