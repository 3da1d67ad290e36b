"""Torch's default process group over the slots of a group, in which the groups of all roles lie.

It is made when the first role asks for any of them, by all slots at once, off their lanes: also by those whose roles
don't ask.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import attrs

from colocate._protocol.consequence import Consequence, Unmade
from colocate._protocol.questions import Meet
from colocate._role import torch_books, torch_groups
from colocate._role.torch_groups import Plan
from colocate._role.torch_meetings import NotMade, can_not
from colocate._system.jobs import message_of
from colocate.errors import ColocateError, ConfigError
from colocate.worker.collective_waits import bury
from colocate.worker.group_making import Making, Worker


@attrs.define(eq=False)
class _Default:
    """One that is there or in the making, and where its store listens.

    The store goes on when the group is renewed; slot 0 serves it as long as it keeps it.

    Attributes:
        epoch: Which one it is.
        asked: The call that it was begun for; None for another slot's.
        made: Ends with it.
        address: Where its store listens.
        store: That, where this slot serves it.
    """

    epoch: int
    asked: int | None
    made: Future[None] = attrs.field(factory=Future)
    address: tuple[str, int] | None = None
    store: Any = None


class DefaultGroup:
    """That of one worker.

    Attributes:
        name: What torch calls it.
        slots: How many it has.
        generation: How often the colocated group has been restarted.
        timeout_s: How long an operation may take.
    """

    def __init__(
        self,
        worker: Worker,
        making: Making,
        group: str,
        slot: int,
        host: str,
        device: str,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """None is made yet.

        Args:
            worker: Whose it is.
            making: What the lane waits by.
            group: Name of the colocated group.
            slot: The worker's.
            host: Address under which the other slots reach this machine.
            device: The slot's.
            ports: The first and the last that its store may listen on; None for any.
        """
        self._worker, self._making = worker, making
        self._group, self._slot, self._host, self._ports, self._device = group, slot, host, ports, device
        self.name = f"{group}/default"
        self._lock = threading.Lock()
        self._now: _Default | None = None
        self._former: _Default | None = None  # of before it was renewed, whose store goes on
        self._doomed = False  # it will be dropped as soon as the lane comes to it
        self._joins_after_that = False
        self._epoch = 0
        self.slots = 1
        self.generation = 0
        self.timeout_s = 1800.0

    def have(self) -> None:
        """Have it made, unless it is there."""
        asked = self._worker.asking()
        default = self.join(asked)
        try:
            self._making.wait_for(default.made)
        except Unmade:
            if default.asked == asked:
                raise
            # That was begun for an earlier call, or another slot's, whose error it is.
            self._making.wait_for(self.join(asked).made)

    def share(self) -> None:
        """Have that of the process, whose threads the slots are."""
        if self._now is None:
            torch_groups.share_default(self)
            self._now = _Default(0, None)
            self._now.made.set_result(None)

    def unshare(self) -> list[Any]:
        """Need that no more; see `forget`."""
        return [] if self._now is None else torch_groups.unshare_default(self)

    def rendezvous(self) -> tuple[str, int]:
        """Where its store listens, on slot 0; it is there."""
        now = self._now
        assert now is not None
        if now.address is None:  # that of a single slot needs no store
            now.store, now.address = torch_groups.serve_store(self._host, self._ports)
        return now.address

    def join(self, asked: int | None = None) -> _Default:
        """Have this slot do its part in making it, if that isn't under way; from any thread.

        Args:
            asked: The call that needs it; None for another slot's.

        Raises:
            RuntimeError: The process may have no more threads just now.
        """
        with self._lock:
            if self._now is not None:
                return self._now
            former, self._former = self._former, None
            default = self._now = _Default(self._epoch, asked)
            if former is not None:
                default.address, default.store = former.address, former.store
        if self.slots == 1:
            self._join(default, former)
        else:
            # Not on the lane, which may be in a call that has nothing to do with it, nor where messages are received.
            arguments = default, former
            try:
                threading.Thread(target=self._join, args=arguments, name="colocate-default-group", daemon=True).start()
            except RuntimeError:
                with self._lock:
                    self._now, self._former = None, former
                raise
        return default

    def asked_to_join(self) -> None:
        """Another slot makes it. It may have dropped the former one before this one has."""
        with self._lock:
            if self._doomed:
                self._joins_after_that = True
                return
        self._join_for_another()

    def _join_for_another(self) -> None:
        try:
            self.join()
        except RuntimeError as error:
            self._refuse(self._board(self._epoch), error)

    def about_to_drop(self) -> None:
        """The lane will be told to drop it; from any thread."""
        with self._lock:
            self._doomed = True

    def dropped(self, epoch: int) -> None:
        """It was: the next one is another. On the lane."""
        with self._lock:
            self._former, self._now, self._epoch = self._now, None, epoch

    def drops_are_over(self) -> None:
        """What was to be dropped has been; a slot that has asked for the next one meanwhile has this one join it."""
        with self._lock:
            joins, self._doomed, self._joins_after_that = self._joins_after_that, False, False
        if joins:
            self._join_for_another()

    def _board(self, epoch: int) -> str:
        return f"{self._group}/{self.generation}/{epoch}/default"

    def _join(self, default: _Default, former: _Default | None) -> None:
        board = self._board(default.epoch)
        plan = Plan(self.name, board, range(self.slots), self._slot, True, False, self._device, self.timeout_s)
        store, have_met = None, self.slots == 1
        try:
            if former is not None:
                former.made.exception()  # it is over
                bury(torch_books.forget(self.name))
            if torch_groups.has_default():
                raise ConfigError(
                    f"slot {self._slot} of group {self._group!r} is to have a default process group that colocate "
                    "makes, but a role has made torch's default one in this process already: leave "
                    "init_process_group() to colocate, and say .on(default_group=True) for it to be there at once"
                )
            store = torch_groups.hash_store()
            if not have_met:
                address = self._meet(board, default)
                have_met = True
                store = torch_groups.connect_store(address, self.timeout_s)
            with self._making.half_made(self.name):
                plan.make(store)
        except BaseException as error:
            with self._lock:
                # Whoever asks next tries again, where the others can't have gone on meanwhile.
                if self._now is default and (self.slots == 1 or not have_met or isinstance(error, Consequence)):
                    self._now, self._former = None, default
            default.made.set_exception(error)
            # Not before: a slot that is told fails, and with that this one would be called back.
            if self.slots > 1 and not isinstance(error, Consequence | NotMade):  # the others would wait for it
                self._refuse(board, error)
            if store is not None:
                can_not(store, board)
        else:
            default.made.set_result(None)

    def _meet(self, board: str, default: _Default) -> tuple[str, int]:
        """Wait until all slots are about to make it; where the store is through which they do."""
        if self._slot == 0 and default.address is None:
            default.store, default.address = torch_groups.serve_store(self._host, self._ports)
        mine = default.address if self._slot == 0 else None
        try:
            host, port = self._worker.ask(Meet(board, self.slots, mine, True, None), apart=True)
        except Consequence:
            raise
        except ColocateError as error:  # a slot that can't take part
            raise NotMade(str(error)) from None
        default.address = host, port
        return host, port

    def _refuse(self, board: str, error: BaseException) -> None:
        """Tell the other slots why this one can't take part. It isn't waited for: there is no answer but that."""
        why = f"slot {self._slot} can't take part in the default group: {message_of(error)}"
        self._worker.tell(Meet(board, self.slots, None, True, why))
