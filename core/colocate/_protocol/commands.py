"""Messages between drivers and keepers, and between keepers of a detached pool and newcomers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message
from colocate.executor import Lease

# A connection to a keeper begins with one of these tokens: a worker's lane token, or one of the two below.
TOKEN_BYTES = 16
COMMANDS = bytes(TOKEN_BYTES)  # a connection that carries commands
NEWCOMER = b"\1" * TOKEN_BYTES  # a connection that asks for the command, or only for information

# -- to the keeper


@message
class Start(Message):
    """Start a worker; the worker's lane connects with this token."""

    token: bytes  # the worker's
    env: Mapping[str, str]  # changes to the worker's environment
    name: str  # the worker's id
    imports: tuple[str, ...] | None = ()  # modules to import for the worker's roles (`Boot.imports`)


@message
class Kill(Message):
    """End a worker."""

    token: bytes  # the worker's
    astray: bool = False  # whether the worker has closed its lane and should exit without help


@message
class Inspect(Message):
    """Look at a worker's process from outside; answered by `Inspected`."""

    token: bytes  # the worker's
    number: int  # the question's


@message
class List(Message):
    """List the running processes; answered by `Listed`."""

    token: int  # the question's number


@message
class Adopt(Message):
    """Connect a lane to a worker that an earlier driver has started."""

    ticket: bytes  # the token with which the lane connects
    token: bytes  # the worker's
    name: str  # the worker's new id


@message
class Detach(Message):
    """Keep the pool alive after this driver leaves; answered by `Confirmed`."""

    token: int  # the question's number
    lease: Lease  # the lease under which the pool lives on


@message
class Renew(Message):
    """Replace the lease."""

    lease: Lease  # the new one


@message
class Retain(Message):
    """Undo `Detach`: close the pool with this driver; answered by `Confirmed`."""

    token: int | None  # the question's number; None for no answer


@message
class GiveUp(Message):
    """Announce that the driver leaves the pool."""


@message
class Look(Message):
    """Ask for the pool's state and owner; answered by `Seen`."""


@message
class LookInside(Message):
    """Ask for the state of this keeper's workers; answered by `SeenInside`."""


@message
class Attach(Message):
    """Ask for the command of the pool; answered by `Granted` or `Refused`."""

    epoch: int  # the epoch that the lead keeper has granted; 0 when asking the lead
    who: str  # a description of the newcomer
    own: bool  # whether to take the pool over from its current driver


# -- from the keeper


@message
class Said(Message):
    """A line of a worker's output."""

    token: bytes  # the worker's
    line: str  # the line


@message
class Ended(Message):
    """The exit of a worker."""

    token: bytes  # the worker's
    exitcode: int | None  # the exit code, if there was one
    signal: str | None  # the signal that ended the process
    detail: str | None  # more details, if known


@message
class Inspected(Message):
    """A view of a worker from outside its process."""

    token: bytes  # the worker's
    number: int  # the question's
    what: str | None  # a description; None if there is nothing to see


@message
class Listed(Message):
    """The list of running processes."""

    token: int  # the question's number
    found: Sequence[Any]  # the fields of a `Running` for each process


@message
class Confirmed(Message):
    """Confirm that the keeper has carried out a command."""

    token: int  # the question's number


@message
class Seen(Message):
    """The visible state: the owner of a pool, or the state of groups (through a job's window)."""

    facts: Mapping[str, Any] | None  # the facts for listings; None for a pool that isn't detached


@message
class SeenInside(Message):
    """The state of all workers that have answered."""

    workers: Sequence[bytes]  # the answer of each worker, in JSON
    silent: Sequence[str]  # the ids of workers without an answer


@message
class Granted(Message):
    """Grant the command to a newcomer."""

    epoch: int  # the epoch of the new driver
    record: bytes  # the record from which the newcomer adopts the pool


@message
class Refused(Message):
    """Refuse the command to a newcomer."""

    kind: str  # "borrowed" while another driver commands; another word for a late request
    words: str  # the reason


@message
class Fenced(Message):
    """Fence a driver off: another driver commands now."""

    who: str  # a description of the new driver
