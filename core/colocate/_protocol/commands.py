"""What a driver and a keeper say to each other, and what keepers of a detached pool and newcomers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message
from colocate.executor import Lease

# What a connection to a keeper says first, what it is: the token of a worker's lane, or one of these.
TOKEN_BYTES = 16
COMMANDS = bytes(TOKEN_BYTES)  # it carries the commands
NEWCOMER = b"\1" * TOKEN_BYTES  # it would like to, or only asks

# -- to the keeper


@message
class Start(Message):
    """Start a worker, whose lane comes by that token."""

    token: bytes  # the worker's
    env: Mapping[str, str]  # what is different in its environment
    name: str  # its id
    imports: tuple[str, ...] | None = ()  # what its roles need (`Boot.imports`)


@message
class Kill(Message):
    """End a worker."""

    token: bytes  # the worker's
    astray: bool = False  # it has closed its lane, and ought to end by itself


@message
class Inspect(Message):
    """Look at a worker from outside; answered by `Inspected`."""

    token: bytes  # the worker's
    number: int  # the question's


@message
class List(Message):
    """Say which processes there are; answered by `Listed`."""

    token: int  # the question's number


@message
class Adopt(Message):
    """Give a lane to a worker that an earlier driver has started."""

    ticket: bytes  # by which the lane comes
    token: bytes  # the worker's
    name: str  # its id now


@message
class Detach(Message):
    """Go on without this driver, when that lets go; answered by `Confirmed`."""

    token: int  # the question's number
    lease: Lease  # the one on which it goes on


@message
class Renew(Message):
    """The lease has changed."""

    lease: Lease  # the new one


@message
class Retain(Message):
    """Don't go on without this driver; answered by `Confirmed`."""

    token: int | None  # the question's number; None to be told nothing


@message
class GiveUp(Message):
    """Tell a keeper that the driver lets go."""


@message
class Look(Message):
    """Somebody asks who has the pool; answered by `Seen`."""


@message
class LookInside(Message):
    """Somebody asks what the workers here do; answered by `SeenInside`."""


@message
class Attach(Message):
    """Somebody wants to command; answered by `Granted` or `Refused`."""

    epoch: int  # what the lead has granted; 0 to the lead itself
    who: str  # who it is, in words
    own: bool  # whether it takes the pool from whoever has it


# -- from the keeper


@message
class Said(Message):
    """A line of a worker's output."""

    token: bytes  # the worker's
    line: str  # the line


@message
class Ended(Message):
    """A worker is gone."""

    token: bytes  # the worker's
    exitcode: int | None  # its exit code, if it had one
    signal: str | None  # the signal that ended it
    detail: str | None  # what else is known


@message
class Inspected(Message):
    """What a worker does, as it is seen from outside."""

    token: bytes  # the worker's
    number: int  # the question's
    what: str | None  # in words; None when nothing is seen


@message
class Listed(Message):
    """The processes that there are."""

    token: int  # the question's number
    found: Sequence[Any]  # the fields of a `Running` for each


@message
class Confirmed(Message):
    """Tell that a keeper has done what it was told."""

    token: int  # the question's number


@message
class Seen(Message):
    """What there is to be seen: of a pool, who has it; through a job's window, what its groups do."""

    facts: Mapping[str, Any] | None  # as listings show it; None of a pool that isn't detached


@message
class SeenInside(Message):
    """What the workers do that have answered."""

    workers: Sequence[bytes]  # as each says it, in JSON
    silent: Sequence[str]  # the ids of the others


@message
class Granted(Message):
    """The newcomer commands now."""

    epoch: int  # which driver it is, counted
    record: bytes  # what it needs to take the pool up


@message
class Refused(Message):
    """The newcomer doesn't command."""

    kind: str  # "borrowed" while another driver does; another word when it comes too late
    words: str  # why


@message
class Fenced(Message):
    """Another driver commands now."""

    who: str  # which, in words
