"""Where in a value that can't be packed the fault is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from tensordict import TensorDict

from colocate.errors import SerializationError
from colocate.wire import explain, pack

LARGE = 1 << 14  # elements: always out of band


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Stateful(Holder):
    """Its lock stays at home, so the fault lies elsewhere."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: part for name, part in self.__dict__.items() if name != "lock"}


@attrs.define
class Slotted:
    part: Any


def with_closure(lock: Any) -> Callable[[], Any]:
    return lambda: lock


def fault(value: Any) -> SerializationError:
    try:
        pack(value)
    except Exception as error:
        return explain(value, "batch", error)
    raise AssertionError("it can be packed")


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: lock, "batch"),
        (lambda lock: {"y": 1, "x": [1, 2, Holder(a=1, lock=lock)]}, "batch['x'][2].lock"),
        (lambda lock: (torch.zeros(LARGE), {3: lock}), "batch[1][3]"),
        (lambda lock: Stateful(lock=lock, inner=Holder(deep=lock)), "batch.inner.deep"),
        (lambda lock: Slotted(Slotted(lock)), "batch.part.part"),
        (lambda lock: {lock: 1}, "batch.keys()[0]"),
        (lambda lock: with_closure(lock), "the variable lock of <lambda>"),
        (lambda lock: functools.partial(max, 1, lock), "batch.__reduce__()[2][1][1]"),
        (
            lambda lock: TensorDict({"x": torch.ones(2)}, []).set_non_tensor("thing", lock),
            "batch._tensordict['thing'].",
        ),
    ],
)
def test_explain_finds_the_deepest_fault(make: Callable[[Any], Any], path: str) -> None:
    error = fault(make(threading.Lock()))
    assert error.argument == "batch"
    assert error.path is not None
    assert error.path.startswith(path)
    assert error.path in str(error)
    assert "_thread.lock" in str(error)
    assert "cannot pickle" in str(error)
    assert "Send plain data" in str(error)
