"""The next role's memory comes while the present one computes, and memory of roles that make room for it goes.

What moves is found and noted on the lane, as where nobody computes meanwhile; a thread does the copying. Whoever needs
to know that it is done waits for it (`settle`). What can't be done so is as it was, and is done, or fails, when its
turn comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial

import attrs

from colocate._definitions.cuda_driver import beside_captures
from colocate._protocol import from_worker
from colocate._system.jobs import JobThread, report_exception
from colocate.worker.asleep import Coming, Going
from colocate.worker.memory_site import Worker
from colocate.worker.sleeping import Sleeper


@attrs.define(eq=False)
class _Moves:
    """What is under way.

    Attributes:
        going: By role.
        name: Whose memory comes.
        coming: That.
        writes: Whether that role is about to train.
        gone: Of those, the roles whose memory has gone.
        has_come: Whether it has.
        is_over: Whether nothing more is done.
    """

    going: Mapping[str, Going]
    name: str
    coming: Coming
    writes: bool
    gone: set[str] = attrs.field(factory=set)
    has_come: bool = False
    is_over: threading.Event = attrs.field(factory=threading.Event)


class Prefetch:
    """Moves memory of a worker's roles beside the lane."""

    def __init__(self, site: Worker, sleeper: Sleeper) -> None:
        self._site = site
        self._sleeper = sleeper
        self._thread = JobThread(f"colocate-prefetch-{site.boot.worker}", lambda error: report_exception())
        self._moves: _Moves | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether something moves, or has and isn't settled yet."""
        return self._moves is not None

    @property
    def moving(self) -> set[str]:
        """The roles of which memory moves."""
        return set() if self._moves is None else {self._moves.name, *self._moves.going}

    def can_begin(self) -> bool:
        """Whether there is a thread for it. Where none can be started, memory moves when its turn comes."""
        try:
            self._thread.start()
        except RuntimeError:
            return False
        return True

    def begin(self, going: Mapping[str, Going], name: str, coming: Coming, writes: bool) -> None:
        """Begin to move memory, which `can_begin`: it counts as moved from now on.

        Args:
            going: What goes first, by role.
            name: Whose comes then.
            coming: What comes.
            writes: Whether that role is about to train.
        """
        for each, its in going.items():
            self._sleeper.asleep.add(each, its)
        self._sleeper.asleep.remove(name, coming)
        moves = self._moves = _Moves(going, name, coming, writes)
        self._thread.soon(partial(self._move, moves))

    def settle(self) -> set[str]:
        """Wait until it is done, on the lane: all is then where it is noted to be.

        Returns:
            The roles whose memory was to go and hasn't.
        """
        moves = self._moves
        if moves is None:
            return set()
        moves.is_over.wait()
        self._moves = None
        stayed = moves.going.keys() - moves.gone
        for each in stayed:
            self._sleeper.asleep.remove(each, moves.going[each])
        if moves.has_come:
            self._sleeper._have_come(moves.coming, moves.writes)
        else:
            self._sleeper.asleep.add(moves.name, moves.coming)
        return stayed

    def close(self) -> None:
        """The worker ends."""
        if self._moves is not None:
            self._moves.is_over.wait()
        self._thread.close()

    # -- on the thread

    def _move(self, moves: _Moves) -> None:
        room, turn = f"room for role {moves.name!r}", "its turn is next"
        try:
            with beside_captures(self._site.boot.device):
                for name, going in moves.going.items():
                    start = time.time()
                    written = self._sleeper.offload.write(going.storages, going.emptied)
                    written.put_away(gives_back=False)
                    moves.gone.add(name)
                    told = name, True, going.size, start, time.time(), True, room, True, False
                    self._site.say(from_worker.Moved(*told, self._sleeper.asleep.kept_awake(name)))
                start = time.time()
                self._sleeper.offload.bring_back(moves.coming.pieces)
                moves.has_come = True
                size = moves.coming.size
                self._site.say(from_worker.Moved(moves.name, False, size, start, time.time(), False, turn, True))
        except (OSError, MemoryError, ValueError):
            pass  # there is no room, or it can't be read: whoever needs it finds that, and tells it
        finally:
            moves.is_over.set()
