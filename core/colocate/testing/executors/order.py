"""Tests of the order of calls on all ranks, of the hold after a failed call, and of the caller's error."""

from __future__ import annotations

from typing import Any

import pytest

from colocate import Call, ColocatedGroup
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.executors.calls import clear_log
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.waiting import PATIENCE_S

RAISE, ADD = "raise", "add"


def get_error(call: Call[Any]) -> BaseException:
    """Return the error with which a call ends."""
    error = call.exception(PATIENCE_S)
    assert error is not None
    return error


class Order(ExecutorCase):
    """Tests of the order of calls, and of the hold after a failed call."""

    def test_later_call_begun(self, pair: ColocatedGroup) -> None:
        """If a call fails, a later call that has begun on a rank continues there; other ranks run it after the hold."""
        log = clear_log(pair)
        with Gate() as first, Gate() as second:
            failing = log.at.submit([first.address, None], [RAISE, ADD], "a")  # type: ignore[arg-type]
            begun = log.at.submit([None, second.address], [ADD, ADD], "b")  # type: ignore[arg-type]
            last = log.add.submit("c")
            first.wait_for()
            second.wait_for()
            first.open()
            error = get_error(failing)
            assert isinstance(error, RoleError)
            assert error.rank == 0
            assert not begun.done()
        assert begun.result(PATIENCE_S) == ["b", "b"]
        last.result(PATIENCE_S)
        assert log.read() == [["b", "c"], ["a", "b", "c"]]


class Failures(ExecutorCase):
    """Tests of exceptions that role code raises."""

    @smoke
    def test_role_error(self, pair: ColocatedGroup) -> None:
        """A role's exception is raised as `RoleError`, with the remote traceback and the original as the cause."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(ranks=(1,))
        error = caught.value
        assert isinstance(error, RuntimeError)
        assert (error.group, error.role, error.method, error.rank) == (pair.name, "faulty", "fail", 1)
        assert error.node == pair.owner.slots[1].node
        assert isinstance(error.__cause__, ValueError)
        assert error.__cause__.args == ("a plain one", 42)
        assert f"faulty.fail raised ValueError on rank 1 of group {pair.name!r}" in str(error)
        assert "Traceback in the worker:" in str(error)
        assert "[done on rank 0]" in str(error) or "[not done on rank 0]" in str(error)
        assert str(error.called_at).rpartition(":")[0] == __file__
