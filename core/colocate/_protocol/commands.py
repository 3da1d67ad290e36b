"""What a driver and a keeper say to each other, and what keepers of a detached pool and newcomers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message
from colocate.executor import Lease

# -- to the keeper


@message
class Start(Message):
    """Start a worker, whose lane comes by that token.

    Attributes:
        token: The worker's.
        env: What is different in its environment.
        name: Its id.
        imports: What its roles need (`Boot.imports`).
    """

    token: bytes
    env: Mapping[str, str]
    name: str
    imports: tuple[str, ...] | None = ()


@message
class Kill(Message):
    """End a worker.

    Attributes:
        token: The worker's.
        astray: It has closed its lane, and ought to end by itself.
    """

    token: bytes
    astray: bool = False


@message
class Inspect(Message):
    """Look at a worker from outside; answered by `Inspected`.

    Attributes:
        token: The worker's.
        number: The question's.
    """

    token: bytes
    number: int


@message
class List(Message):
    """Say which processes there are; answered by `Listed`.

    Attributes:
        token: The question's number.
    """

    token: int


@message
class Adopt(Message):
    """Give a lane to a worker that an earlier driver has started.

    Attributes:
        ticket: By which the lane comes.
        token: The worker's.
        name: Its id now.
    """

    ticket: bytes
    token: bytes
    name: str


@message
class Detach(Message):
    """Go on without this driver, when that lets go; answered by `Confirmed`.

    Attributes:
        token: The question's number.
        lease: The one on which it goes on.
    """

    token: int
    lease: Lease


@message
class Renew(Message):
    """The lease has changed.

    Attributes:
        lease: The new one.
    """

    lease: Lease


@message
class Retain(Message):
    """Don't go on without this driver; answered by `Confirmed`.

    Attributes:
        token: The question's number; None to be told nothing.
    """

    token: int | None


@message
class GiveUp(Message):
    """It lets go."""


@message
class Look(Message):
    """Somebody asks who has the pool; answered by `Seen`."""


@message
class LookInside(Message):
    """Somebody asks what the workers here do; answered by `SeenInside`."""


@message
class Attach(Message):
    """Somebody wants to command; answered by `Granted` or `Refused`.

    Attributes:
        epoch: What the lead has granted; 0 to the lead itself.
        who: Who it is, in words.
        own: Whether it takes the pool from whoever has it.
    """

    epoch: int
    who: str
    own: bool


# -- from the keeper


@message
class Said(Message):
    """A line of a worker's output.

    Attributes:
        token: The worker's.
        line: The line.
    """

    token: bytes
    line: str


@message
class Ended(Message):
    """A worker is gone.

    Attributes:
        token: The worker's.
        exitcode: Its exit code, if it had one.
        signal: The signal that ended it.
        detail: What else is known.
    """

    token: bytes
    exitcode: int | None
    signal: str | None
    detail: str | None


@message
class Inspected(Message):
    """What a worker does, as it is seen from outside.

    Attributes:
        token: The worker's.
        number: The question's.
        what: In words; None when nothing is seen.
    """

    token: bytes
    number: int
    what: str | None


@message
class Listed(Message):
    """The processes that there are.

    Attributes:
        token: The question's number.
        found: The fields of a `Running` for each.
    """

    token: int
    found: Sequence[Any]


@message
class Confirmed(Message):
    """It has done what it was told.

    Attributes:
        token: The question's number.
    """

    token: int


@message
class Seen(Message):
    """What there is to be seen: of a pool, who has it; through a job's window, what its groups do.

    Attributes:
        facts: As listings show it; None of a pool that isn't detached.
    """

    facts: Mapping[str, Any] | None


@message
class SeenInside(Message):
    """What the workers do that have answered.

    Attributes:
        workers: As each says it, in JSON.
        silent: The ids of the others.
    """

    workers: Sequence[bytes]
    silent: Sequence[str]


@message
class Granted(Message):
    """The newcomer commands now.

    Attributes:
        epoch: Which driver it is, counted.
        record: What it needs to take the pool up.
    """

    epoch: int
    record: bytes


@message
class Refused(Message):
    """The newcomer doesn't command.

    Attributes:
        kind: "borrowed" while another driver does; another word when it comes too late.
        words: Why.
    """

    kind: str
    words: str


@message
class Fenced(Message):
    """Another driver commands now.

    Attributes:
        who: Which, in words.
    """

    who: str
