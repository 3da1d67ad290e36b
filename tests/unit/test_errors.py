"""Errors survive pickling and copying, whatever they are made of."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest

from colocate import errors
from colocate._worker_group.spawn import start_error
from colocate.errors import ColocateError
from colocate.worker.birth.imports import find_hint

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ColocateError)]


@pytest.mark.parametrize("cls", ALL)
def test_errors_survive_pickling(cls: type[ColocateError]) -> None:
    """Each error survives pickling, and a copy has the very cause, even one that can't be pickled."""
    error = cls("what happened", group="policy", rank=1)
    error.__cause__ = ValueError("why")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.args) == (cls, str(error), error.args)
    assert (back.group, back.rank) == ("policy", 1)
    assert isinstance(back.__cause__, ValueError)
    error.__cause__ = ValueError(threading.Lock())
    again = copy.copy(error)
    assert again is not error
    assert (type(again), str(again), again.rank) == (cls, str(error), 1)
    assert again.__cause__ is error.__cause__


def test_start_error_omits_consequential_failures() -> None:
    """The error for a failed start leaves out a rank that was stopped only by another rank's failure."""
    follows, cause = (
        errors.RoleError("was given up", rank=0),
        errors.RoleError("raised", rank=1, remote_traceback="at x"),
    )
    follows._is_consequence = True
    assert start_error("policy", {0: follows}).errors == {0: follows}
    error = start_error("policy", {0: follows, 1: cause})
    assert (dict(error.errors), error.rank, error.remote_traceback) == ({1: cause}, 1, "at x")
    assert "1 rank failed" in str(error)


def test_a_module_that_two_threads_import_at_once() -> None:
    """The error for a name that a module lacks, but has later, blames an import by several threads at once."""
    lacking = "cannot import name '%s' from 'json' (/somewhere/json/__init__.py)"
    hint = find_hint(ImportError(lacking % "loads", name="json"))
    assert hint is not None
    assert "json has loads by now: several threads have imported it at once" in hint
    assert find_hint(ImportError(lacking % "nothing", name="json")) is None
