"""What is remembered by type: once for each, and only while the type is there."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import tensordict
import torch

from colocate._system.by_type import by_type
from colocate._values.leaves import is_collection, kind_of


def test_no_type_is_held_and_none_mistaken_for_another() -> None:
    """Classes that have the id of one that is gone have results of their own."""

    @by_type
    def name(kind: type) -> str:
        return kind.__name__

    ids: list[int] = []
    for number in range(50):
        made = type(f"Made{number}", (), {})
        ids.append(id(made))
        assert [name(made), name(made)] == [f"Made{number}"] * 2
        gone = weakref.ref(made)
        del made
        gc.collect()
        assert gone() is None
        if len(set(ids)) < len(ids):
            break
    else:
        pytest.fail("no id was used again, so this has shown nothing")


@pytest.mark.parametrize("ask", [is_collection, kind_of])
def test_tensordict_gets_no_type_to_keep(ask: Any) -> None:
    """It remembers every type that it is asked about, for ever; of its own kinds it is asked."""
    assert ask(tensordict.TensorDict)
    assert ask(tensordict.tensorclass(type("Rows", (), {"__annotations__": {"x": torch.Tensor}})))
    made = type("Made", (), {})
    assert not ask(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
