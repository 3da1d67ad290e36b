"""Parts of residents that a worker has for others of its machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate.worker.residents.passing import Sharing
from colocate.worker.residents.store import Entry, Store
from colocate.worker.serving.scope import Scope

PART = (("group", 0, 1), 7)


def test_who_has_it_for_a_machine() -> None:
    """The first; another one where that has it no more, unless it was given it again meanwhile."""
    store, entry = Store(False, Scope()), Entry()
    first, second = ("machine", "first"), ("machine", "second")
    assert store.sharer(entry, first, 0) == ("first", 1)
    assert store.sharer(entry, second, 0) == ("first", 1)
    assert store.sharer(entry, ("elsewhere", "third"), 0) == ("third", 1)
    assert store.sharer(entry, first, 0) == ("first", 2)  # in its next call
    assert store.sharer(entry, second, 1) == ("first", 2)
    assert store.sharer(entry, second, 2) == ("second", 3)
    assert store.sharer(entry, first, 0) == ("second", 3)


@pytest.mark.parametrize("end", ["arrives", "forgotten", "closed"])
def test_what_is_about_to_arrive(end: str) -> None:
    """Whoever asks waits until it begins to arrive, or won't; when its call is over it isn't here."""
    sharing = Sharing()
    assert sharing.find(PART) is None
    assert sharing.expect(PART, 1)
    assert not sharing.expect(PART, 2)
    sharing.forget(2)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(sharing.find, PART)
        wait_until(lambda: sharing._news._waiters, "it waits")  # type: ignore[attr-defined]
        assert not found.done()
        arriving = None
        if end == "arrives":
            arriving = sharing.arrives(PART, 1, [3], 3)
        elif end == "forgotten":
            sharing.forget(1, PART)
        else:
            sharing.close()
        assert found.result(PATIENCE_S) is arriving
    sharing.forget(1)
    assert sharing.find(PART) is None
