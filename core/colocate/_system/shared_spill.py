"""Files for pages that all workers share which are threads of this process, one after the other as well.

What is freed there is `malloc`'s again, which has somebody else lie in the same pages of the files: these would stay
for all that time, and each worker's files with them. So they stay open as long as pages are there, whoever's.
"""

from __future__ import annotations

import os
import threading

from colocate._system.pages import Spill

_by_folder: dict[str | None, Spill] = {}  # as it was named
_users: dict[Spill, int] = {}
_changing = threading.Lock()


def _begin_in_child() -> None:
    global _changing
    _changing = threading.Lock()  # who had it isn't there


os.register_at_fork(after_in_child=_begin_in_child)


def take(wanted: str | None) -> Spill:
    """Those in the folder that was named, or in one of the usual ones, until they are given back.

    Raises:
        ValueError: There are none; see `Spill.somewhere`.
    """
    with _changing:
        _close_unused()
        spill = _by_folder.get(wanted)
        if spill is None:
            spill = _by_folder[wanted] = Spill.somewhere(wanted)
        _users[spill] = _users.get(spill, 0) + 1
        return spill


def give_back(spill: Spill) -> None:
    """A worker puts nothing there any more."""
    with _changing:
        _users[spill] -= 1
        _close_unused()


def kept_open() -> set[int]:
    """Descriptors of these files."""
    return {number for spill in list(_by_folder.values()) for number in spill.descriptors}


def _close_unused() -> None:
    for wanted, spill in list(_by_folder.items()):
        if not _users[spill] and not spill.is_in_use():
            spill.close()
            del _by_folder[wanted], _users[spill]
