"""The driver's end of a worker that a keeper has started."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import attrs

from colocate import wire
from colocate._protocol import commands
from colocate._protocol.message import Message
from colocate._protocol.requests import Requests
from colocate._system.jobs import error_text, report_exception
from colocate._system.limits import (
    KEEPER_CONNECTS_WITHIN_S,
    KEEPER_KILLS_WITHIN_S,
    LANE_ENDS_WITHIN_S,
    LAST_WORDS_S,
)
from colocate.errors import ClosedError, EngineError
from colocate.executor import Boot, Exit, Host, HostEvents
from colocate.keeper.greeting import TOKEN_BYTES
from colocate.keeper.process import AFTER_LANE_S
from colocate.worker.serving.service import first_message

_LOOK_S = 0.05


@attrs.frozen
class Patience:
    """How long a driver waits for keepers, in seconds.

    Attributes:
        dial_s: For one that takes a connection.
        kill_s: For one that confirms a kill; then it is stuck, and the engine is told (`on_stuck`).
        words_s: For the engine's words about one whose connection has ended (`KeptSlot.lost`), which come another way.
        cut_s: For a sign of life of its machine; then the connections to that are taken for cut.
    """

    dial_s: float = KEEPER_CONNECTS_WITHIN_S
    kill_s: float = KEEPER_KILLS_WITHIN_S
    words_s: float = LAST_WORDS_S
    cut_s: float = wire.CUT_AFTER_S


class Dialler(Protocol):
    """What a host needs of all keepers' connections."""

    hub: wire.Hub

    @property
    def patience(self) -> Patience:
        """How long they are waited for."""
        ...

    def dial(
        self, address: str, token: bytes, on_message: wire.OnMessage, on_closed: wire.OnClosed, key: bytes | None
    ) -> wire.SocketLane:
        """Connect to a keeper."""
        ...


class SlotLink(Protocol):
    """What a host needs of the connection to its slot's keeper."""

    address: str
    key: bytes | None
    hosts: dict[bytes, KeptHost]

    @property
    def keepers(self) -> Dialler:
        """All keepers."""
        ...

    def command(self, command: Message) -> None:
        """Have the keeper do something."""

    def wait_connected(self) -> str | None:
        """Wait until it is reached; why it isn't."""

    def stuck(self, then: Callable[[], None]) -> None:
        """It is reached no more: have its process ended."""


class KeptHost(Host):
    """The driver's end of one worker that a keeper has started."""

    def __init__(
        self, slot: SlotLink, boot: Boot, events: HostEvents, env: Mapping[str, str], token: bytes | None = None
    ) -> None:
        self.slot = slot
        self.boot = boot
        self.events = events
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self._taken = token is not None
        self._env = dict(env)
        self._lock = threading.Lock()
        self._early: list[wire.Frame] = []  # what was sent before there was a lane
        self._exit: Exit | None = None
        self._looks: Requests[None, str | None] = Requests()
        self._killed = False
        self._over = False

    def send(self, frame: Any) -> None:
        """Send a message."""
        if (lane := self.lane) is None:
            with self._lock:
                if self._over:
                    return
                if (lane := self.lane) is None:
                    frame.hold()
                    self._early.append(frame)
                    return
        lane.send(frame)

    def kill(self) -> None:
        """End it now."""
        self._kill()

    def look(self, then: Callable[[str | None], None]) -> None:
        """Have its keeper say what it does, as its memory shows."""
        asked = self._looks.open([None])
        asked.then(lambda: then(asked.answers.get(None)))
        self.slot.command(commands.Inspect(self.token, asked.token))

    def _kill(self, astray: bool = False) -> None:
        if self._killed or self._over:
            return
        self._killed = True
        self.slot.command(commands.Kill(self.token, astray))
        self.slot.keepers.hub.later(self.slot.keepers.patience.kill_s, self._check_killed)

    # -- on a dialling thread

    def connect(self) -> None:
        """Have the keeper start it, and open its lane."""
        try:
            self._connect()
        except BaseException as error:  # a mistake here: there is a group that waits
            report_exception()
            exit = Exit(detail=f"the thread that opens its lane was ended by {error_text(error)}")
            self.slot.keepers.hub.later(0.0, partial(self.ended, exit))
            self.slot.command(commands.Kill(self.token))

    def _connect(self) -> None:
        slot, hub = self.slot, self.slot.keepers.hub
        lost = slot.wait_connected()
        if lost is not None or self._killed:
            hub.later(0.0, partial(self.ended, Exit(detail=lost)))
            return
        ticket = self.token
        if self._taken:
            ticket = secrets.token_bytes(TOKEN_BYTES)
            slot.command(commands.Adopt(ticket, self.token, self.boot.worker))
        else:
            slot.command(commands.Start(self.token, self._env, self.boot.worker, self.boot.imports))
        try:
            # Nothing comes before the boot.
            lane = slot.keepers.dial(slot.address, ticket, self.events.received, self._lane_closed, slot.key)
        except (OSError, ClosedError) as error:
            hub.later(0.0, partial(self.ended, Exit(detail=f"its lane could not be opened: {error}")))
            slot.command(commands.Kill(self.token))
            return
        with self._lock:
            if self._over:
                lane.close()
                return
            lane.send(*first_message(self.boot))
            for frame in self._early:
                lane.send(frame)
                frame.close()
            self._early.clear()
            self.lane = lane
        if self._killed:  # meanwhile, perhaps before there was anything to kill
            slot.command(commands.Kill(self.token))

    # -- on the hub's thread

    def seen(self, found: commands.Inspected) -> None:
        """The keeper has said what it does."""
        self._looks.answered(found.number, None, found.what)

    def ended(self, exit: Exit) -> None:
        """It is gone. What it has said before is taken first."""
        if self._exit is not None:
            return
        self._exit = exit
        if self.lane is None or self.lane.finished:
            self._finish()
        else:
            self.slot.keepers.hub.later(LANE_ENDS_WITHIN_S, self._finish)

    def lost(self, reason: str) -> None:
        """The driver hears nothing of it any more."""
        self._exit = self._exit or Exit(detail=reason)
        self._finish()

    def _lane_closed(self, reason: str) -> None:
        if self._exit is not None:
            self._finish()
        else:  # a worker without its lane is of no use: it leaves by itself, or is made to
            self.slot.keepers.hub.later(AFTER_LANE_S, partial(self._kill, astray=True))

    def _check_killed(self) -> None:
        # This process may have been stopped: what has come meanwhile is taken first.
        self.slot.keepers.hub.later(_LOOK_S, self._doubt)

    def _doubt(self) -> None:
        if not self._over:
            self.slot.stuck(partial(self.ended, Exit(detail="it was killed, which its keeper hasn't confirmed")))

    def _finish(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            for frame in self._early:
                frame.close()
            self._early.clear()
        if self.lane is not None and not self.lane.finished:
            self.lane.finish("the worker has ended")
        self.slot.hosts.pop(self.token, None)
        self._looks.fail_all(EngineError("the worker has ended"))
        assert self._exit is not None
        self.events.exited(self._exit)
