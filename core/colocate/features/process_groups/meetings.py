"""Agreements of ranks on making a process group: through a store, all ranks reach the same decision.

In torch, ranks wait for each other while they make a group, and nothing can end such a wait. So the ranks agree before
that either all or none make the group, and agree afterwards that either all or none have the group.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any


class GroupNotMade(ConnectionError):
    """Raised if another rank couldn't make a process group together with this rank, or was late."""


YES, NO = "yes", "no"
_NEVER = datetime.timedelta(days=20)  # Torch counts milliseconds in 32 bits, so the timeout can't be much longer.


def wait_all_ready(store: Any, rendezvous_key: str, index: int, members: int) -> bool:
    """Wait until all `members` ranks are ready to make a group, and return whether all ranks go ahead.

    `store` must be a client of this thread alone. The ranks meet under `rendezvous_key`.
    """
    store.set(f"{rendezvous_key}/there/{index}", YES)
    # The last rank to arrive finds the other ranks' entries, and decides to begin.
    if store.check([f"{rendezvous_key}/there/{member}" for member in range(members)]):
        _decide(store, f"{rendezvous_key}/begun", YES)
    store.wait([f"{rendezvous_key}/begun"], _NEVER)
    # A rank that retries after the rendezvous must not make the group, because all peers have moved on.
    return _answered_yes(store, f"{rendezvous_key}/begun") and not store.check([f"{rendezvous_key}/made"])


def wait_all_made(store: Any, rendezvous_key: str, index: int, members: int, seconds: float) -> bool:
    """Wait at most `seconds` until all ranks have made a group, and return whether all ranks have succeeded.

    `store` must be a client of this thread alone.
    """
    import torch.distributed as dist

    store.set(f"{rendezvous_key}/done/{index}", YES)
    if store.check([f"{rendezvous_key}/done/{member}" for member in range(members)]):
        _decide(store, f"{rendezvous_key}/made", YES)
    try:
        store.wait([f"{rendezvous_key}/made"], datetime.timedelta(seconds=seconds))
    except dist.DistStoreError:  # Another rank is late, and will read this decision.
        _decide(store, f"{rendezvous_key}/made", NO)
    return _answered_yes(store, f"{rendezvous_key}/made")


def report_failure(store: Any, rendezvous_key: str) -> None:
    """Decide against making a group, because this rank has failed."""
    with contextlib.suppress(RuntimeError):  # The store may no longer exist.
        _decide(store, f"{rendezvous_key}/made", NO)


def withdraw_rank(store: Any, rendezvous_key: str) -> bool:
    """Withdraw this rank from making a group, and return whether the group exists nonetheless.

    No rank makes the group, unless all ranks were ready before. `store` must be another client than the waiting client.
    """
    if _decide(store, f"{rendezvous_key}/begun", NO) == NO:
        return False
    store.wait([f"{rendezvous_key}/made"], _NEVER)
    return _answered_yes(store, f"{rendezvous_key}/made")


def _decide(store: Any, key: str, decision: str) -> str:
    """Store a decision unless there is one already, and return the stored decision."""
    return str(store.compare_set(key, "", decision).decode())


def _answered_yes(store: Any, key: str) -> bool:
    return bool(store.get(key).decode() == YES)
