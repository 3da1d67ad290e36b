"""Errors survive pickling, whatever they are made of."""

from __future__ import annotations

import pickle

import pytest

from colocate import errors
from colocate.errors import ColocateError

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ColocateError)]


@pytest.mark.parametrize("cls", ALL)
def test_each_comes_back_as_it_was(cls: type[ColocateError]) -> None:
    error = cls("what happened", group="policy", rank=1)
    error.__cause__ = ValueError("why")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == str(error)
    assert back.args == error.args
    assert (back.group, back.rank) == ("policy", 1)
    assert isinstance(back.__cause__, ValueError)
