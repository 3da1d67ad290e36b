"""Agreements of ranks at a store on making a process group: the same decision on all ranks.

In torch, ranks wait for each other while they make a group, and no wait there can be ended. So they meet
before: all of them make it, or none does. And they meet afterwards: all of them have it, or none.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any


class NotMade(ConnectionError):
    """Another rank couldn't make a process group together with this one, or was late."""


YES, NO = "yes", "no"
_NEVER = datetime.timedelta(days=20)  # torch counts milliseconds, in 32 bits


def all_make(store: Any, rendezvous_key: str, index: int, members: int) -> bool:
    """Wait until all `members` of a group are ready to make the group; return whether all go ahead.

    `store` must be a client of this thread alone; the ranks meet under `rendezvous_key`.
    """
    store.set(f"{rendezvous_key}/there/{index}", YES)
    if store.check([f"{rendezvous_key}/there/{member}" for member in range(members)]):  # the last rank sees all others
        _decide(store, f"{rendezvous_key}/begun", YES)
    store.wait([f"{rendezvous_key}/begun"], _NEVER)
    # A rank that retries after the rendezvous would block: all peers have moved on.
    return _is_yes(store, f"{rendezvous_key}/begun") and not store.check([f"{rendezvous_key}/made"])


def all_have(store: Any, rendezvous_key: str, index: int, members: int, seconds: float) -> bool:
    """Wait until all ranks have made a group, at most `seconds`; return whether all have succeeded.

    `store` must be a client of this thread alone.
    """
    import torch.distributed as dist

    store.set(f"{rendezvous_key}/done/{index}", YES)
    if store.check([f"{rendezvous_key}/done/{member}" for member in range(members)]):
        _decide(store, f"{rendezvous_key}/made", YES)
    try:
        store.wait([f"{rendezvous_key}/made"], datetime.timedelta(seconds=seconds))
    except dist.DistStoreError:  # a rank is late, and will read the decision
        _decide(store, f"{rendezvous_key}/made", NO)
    return _is_yes(store, f"{rendezvous_key}/made")


def can_not(store: Any, rendezvous_key: str) -> None:
    """Decide against a group, after a failure of this rank."""
    with contextlib.suppress(RuntimeError):  # the store is gone, too
        _decide(store, f"{rendezvous_key}/made", NO)


def withdraw(store: Any, rendezvous_key: str) -> bool:
    """Withdraw from making a group: nobody makes the group, unless all were ready; return whether the group exists.

    `store` must be another client than the waiting one.
    """
    if _decide(store, f"{rendezvous_key}/begun", NO) == NO:
        return False
    store.wait([f"{rendezvous_key}/made"], _NEVER)
    return _is_yes(store, f"{rendezvous_key}/made")


def _decide(store: Any, key: str, decision: str) -> str:
    """Set a decision unless there is one; return the decision."""
    return str(store.compare_set(key, "", decision).decode())


def _is_yes(store: Any, key: str) -> bool:
    return bool(store.get(key).decode() == YES)
