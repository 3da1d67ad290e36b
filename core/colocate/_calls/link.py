"""`Link`: a group as the parts of it know it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from colocate._calls.pending import PendingCall
from colocate._calls.services import Services
from colocate._owned.owned import Owned, State
from colocate._protocol.message import Message
from colocate.errors import ColocateError


class Link(Owned, abc.ABC):
    """A group as its parts know it: its life, and the way to its workers.

    Attributes:
        services: What it shares with all that its runtime owns.
        size: How many slots it has.
        base: The numbers of its calls, holds and residents are above this: those up to it were an earlier driver's.
        grace: Seconds that ranks have to come back after a failed call.
        generation: How often it has been restarted.
    """

    grace: float = 10.0

    def __init__(self, name: str, owner: Owned, services: Services, size: int, base: int, generation: int) -> None:
        super().__init__("group", name, owner, State.STARTING)
        self.size = size
        self.services = services
        self.base = base
        self.generation = generation

    @property
    def failure(self) -> ColocateError | None:
        """Why it can't be called, if something has gone wrong."""
        return self.life.failure

    @abc.abstractmethod
    def cancel(self, call: PendingCall) -> bool:
        """Withdraw a call from all ranks, if none has begun it."""

    @abc.abstractmethod
    def failed(self, call: PendingCall, error: BaseException) -> None:
        """Have it told that a call has failed, unless somebody asks."""

    @abc.abstractmethod
    def is_paused(self, role: str) -> bool:
        """Whether a background role is paused."""

    @abc.abstractmethod
    def unsettled(self) -> Sequence[PendingCall]:
        """The calls that were sent and aren't done."""

    @abc.abstractmethod
    def send(self, slots: Sequence[int], message: Message, body: Any = None) -> None:
        """Send one message to some workers."""

    @abc.abstractmethod
    def teller(self) -> Callable[[int, Message], None]:
        """What sends a message to one worker of this generation, if it runs."""

    @abc.abstractmethod
    def look(self, slot: int, then: Callable[[str | None], None]) -> None:
        """Have said what a rank does, as it is seen from outside."""

    @abc.abstractmethod
    def node(self, slot: int) -> str:
        """The node of a slot."""

    @abc.abstractmethod
    def live(self) -> list[int]:
        """The slots whose workers run."""

    @abc.abstractmethod
    def has_left(self, slot: int) -> bool:
        """Whether a slot's worker runs no role code any more: its lane has ended, or all of it."""

    @abc.abstractmethod
    def became_ready(self) -> None:
        """Its workers are: it can be called, unless it is closed."""

    @abc.abstractmethod
    def fail(self, error: ColocateError) -> None:
        """It can't go on: every pending call ends with this error, every worker is ended."""

    def refuse_closed(self) -> None:
        """Raise if it is closed, whatever else there is."""
        super().check()

    @abc.abstractmethod
    def unpack(self, body: Any) -> Any:
        """The value of a body."""
