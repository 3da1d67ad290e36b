"""What a caller gets when role code raises."""

from __future__ import annotations

import asyncio
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, smoke
from colocate.testing.probes.faulty import Faulty
from colocate.testing.waiting import PATIENCE_S, becomes_true


async def _awaited(submit: Callable[[], Call[Any]]) -> weakref.ref[RoleError]:
    try:
        await submit()
    except RoleError as error:  # in here: what `asyncio.run` raises is in a cycle with its own frame
        return weakref.ref(error)
    raise AssertionError("it went well")


def _refused(ask: Callable[[], object]) -> weakref.ref[RoleError]:
    try:
        ask()
    except RoleError as error:
        return weakref.ref(error)
    raise AssertionError("it went well")


class Failures(ExecutorCase):
    """Exceptions of roles."""

    @pytest.mark.parametrize("asked", ["called", "result", "exception", "await", "kept", "run"])
    def test_error_let_go_of(self, pair: ColocatedGroup, asked: str) -> None:
        """An error that nobody holds is gone, with what frames of role code held: it needs no garbage collector."""
        faulty = pair.role("faulty", Faulty)

        ways: dict[str, Callable[[], weakref.ref[Any]]] = {
            "called": lambda: _refused(faulty.fail),
            "result": lambda: _refused(lambda: faulty.fail.submit().result(PATIENCE_S)),
            "exception": lambda: weakref.ref(faulty.fail.submit().exception(PATIENCE_S)),
            "await": lambda: asyncio.run(_awaited(faulty.fail.submit)),
            "kept": lambda: _refused(lambda: faulty.fail.keep().fetch()),
            "run": lambda: _refused(lambda: pair.run(_fails)),
        }
        collecting = gc.isenabled()
        gc.disable()
        try:
            left = ways[asked]()
            assert becomes_true(lambda: left() is None), gc.get_referrers(left())
        finally:
            if collecting:
                gc.enable()

    @smoke
    def test_role_error(self, pair: ColocatedGroup) -> None:
        """A role's exception comes as RoleError: where, what, the remote traceback, and the original as its cause."""
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
        assert "[done on rank 0]" in str(error) or "[not back from rank 0]" in str(error)
        assert str(error.called_at).rpartition(":")[0] == __file__

    def test_traceback(self, pair: ColocatedGroup) -> None:
        """The remote traceback is that of the role's code: it begins in the method and ends where it was raised."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail()
        text = caught.value.remote_traceback
        assert text is not None
        lines = [line for line in text.splitlines() if line.strip().startswith("File ")]
        assert lines[0].endswith("in fail")
        assert lines[-1].endswith("in deep_inside")
        assert text.rstrip().endswith("ValueError: ('a plain one', 42)")

    @pytest.mark.parametrize(
        ("kind", "cause"), [("exit", SystemExit), ("interrupt", KeyboardInterrupt), ("generator", GeneratorExit)]
    )
    def test_exceptions_that_are_none(self, pair: ColocatedGroup, kind: str, cause: type[BaseException]) -> None:
        """SystemExit, KeyboardInterrupt and their like from a role are the caller's to see; the worker goes on."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(kind)
        assert isinstance(caught.value.__cause__, cause)
        assert pair.role("faulty", Faulty).fine() == [0, 1]

    @pytest.mark.parametrize(
        ("kind", "name", "text"),
        [
            ("two", "TwoArguments", "it broke because it was old"),
            ("unpicklable", "Unpicklable", "it holds a lock"),
            ("mute", "Mute", "its __str__ raised"),
            ("mute value", "MuteValue", "its __str__ raised"),
            ("mute runtime", "MuteRuntime", "its __str__ raised"),
            ("frozen", "Frozen", "raised"),
            ("chained", "ValueError", "the last"),
        ],
    )
    def test_odd_exceptions(self, pair: ColocatedGroup, kind: str, name: str, text: str) -> None:
        """One that can't be pickled, rebuilt, shown, set, or told to its end, is told in words: type, text, place."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(kind)
        assert name in str(caught.value)
        assert text in str(caught.value)
        assert "in deep_inside" in str(caught.value.remote_traceback)
        assert caught.value.__cause__ is not None
        assert name in f"{type(caught.value.__cause__).__name__} {caught.value.__cause__!r}"
        assert pair.role("faulty", Faulty).fine() == [0, 1]

    def test_pickle(self, pair: ColocatedGroup) -> None:
        """The error survives pickling with its attributes and its cause."""
        with pytest.raises(RoleError) as caught:
            pair.role("faulty", Faulty).fail(ranks=(1,))
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value)
        for name in ("group", "role", "method", "rank", "node", "remote_traceback"):
            assert getattr(again, name) == getattr(caught.value, name), name
        assert again.__cause__.args == ("a plain one", 42)


def _fails(ctx: colocate.Context) -> None:
    """A function that fails."""
    raise ValueError("a function's")
