"""The record of a detached pool: one that this version can't read is refused before anything in it is unpickled."""

from __future__ import annotations

import pickle
import platform

import pytest

import colocate
from colocate import ColocateError
from colocate._detached import load

HERE = platform.python_version().rpartition(".")[0]


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ((colocate.__version__, HERE), rf"colocate {colocate.__version__} \(records of form 1\) and Python {HERE}"),
        (("0.0.1", "3.8", 7), r"colocate 0\.0\.1 \(records of form 7\) and Python 3\.8"),
    ],
)
def test_of_another_form(versions: tuple[str | int, ...], words: str) -> None:
    record = pickle.dumps((versions, b"no pickle at all"))
    with pytest.raises(ColocateError, match=rf"pool 'theirs' was detached by a driver with {words}, and this one has"):
        load(record, "theirs")
