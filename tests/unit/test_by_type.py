"""What is remembered by type: once for each, and only while the type is there."""

from __future__ import annotations

import gc
import weakref

import pytest

from colocate._system.by_type import by_type


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
