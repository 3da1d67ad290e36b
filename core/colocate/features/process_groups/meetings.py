"""Whether a process group is made: decided at a store, and the same for all of its ranks.

In torch the ranks of a group wait for each other while they make it, and nobody can be called back from there. So they
meet before: all of them make it, or none does. And they meet when it is made: all of them have it, or none.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any


class NotMade(ConnectionError):
    """Another rank could not make a process group that this one was to make with it, or was late."""


YES, NO = "yes", "no"
_NEVER = datetime.timedelta(days=20)  # torch counts milliseconds, in 32 bits


def all_make(store: Any, rendezvous_key: str, index: int, members: int) -> bool:
    """Wait until all `members` of a group, of which this is one, are about to make it; whether they do.

    The store is a client that does nothing else meanwhile; they meet under `rendezvous_key`.
    """
    store.set(f"{rendezvous_key}/there/{index}", YES)
    if store.check([f"{rendezvous_key}/there/{each}" for each in range(members)]):  # who comes last sees all of them
        _decide(store, f"{rendezvous_key}/begun", YES)
    store.wait([f"{rendezvous_key}/begun"], _NEVER)
    # Who comes again when that is over would wait in torch for those that have gone on.
    return _is_yes(store, f"{rendezvous_key}/begun") and not store.check([f"{rendezvous_key}/made"])


def all_have(store: Any, rendezvous_key: str, index: int, members: int, seconds: float) -> bool:
    """Wait until all ranks of a group have made it, at most so many seconds; whether they have, and none couldn't.

    The store is a client that does nothing else meanwhile.
    """
    import torch.distributed as dist

    store.set(f"{rendezvous_key}/done/{index}", YES)
    if store.check([f"{rendezvous_key}/done/{each}" for each in range(members)]):
        _decide(store, f"{rendezvous_key}/made", YES)
    try:
        store.wait([f"{rendezvous_key}/made"], datetime.timedelta(seconds=seconds))
    except dist.DistStoreError:  # somebody is late, and is told so, too
        _decide(store, f"{rendezvous_key}/made", NO)
    return _is_yes(store, f"{rendezvous_key}/made")


def can_not(store: Any, rendezvous_key: str) -> None:
    """This rank couldn't make a group that it was to make with the others."""
    with contextlib.suppress(RuntimeError):  # the store is gone, too
        _decide(store, f"{rendezvous_key}/made", NO)


def withdraw(store: Any, rendezvous_key: str) -> bool:
    """Not make a group, and so nobody does, unless all were there before; whether they have made it, once they have.

    The store is another client than that which waits.
    """
    if _decide(store, f"{rendezvous_key}/begun", NO) == NO:
        return False
    store.wait([f"{rendezvous_key}/made"], _NEVER)
    return _is_yes(store, f"{rendezvous_key}/made")


def _decide(store: Any, key: str, decision: str) -> str:
    """Say so, unless it is decided; what is decided."""
    return str(store.compare_set(key, "", decision).decode())


def _is_yes(store: Any, key: str) -> bool:
    return bool(store.get(key).decode() == YES)
