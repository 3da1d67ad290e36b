"""Messages between drivers and keepers, including new drivers that ask for a detached pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message
from colocate.executor import Lease

# A connection to a keeper begins with a token: a worker's lane token, or one of the next two constants.
TOKEN_BYTES = 16
COMMANDS = bytes(TOKEN_BYTES)  # This token marks a connection for a driver's commands.
NEWCOMER = b"\1" * TOKEN_BYTES  # This token marks a new driver that asks for the pool, or only for information.

# -- to the keeper


@message
class Start(Message):
    """Start a worker. The worker's lane connects to the keeper with the token."""

    token: bytes  # The token of the worker's lane.
    env: Mapping[str, str]  # Environment variables to change for the worker.
    name: str  # The worker's id.
    imports: tuple[str, ...] | None = ()  # The worker imports these modules for the roles (`Boot.imports`).


@message
class Kill(Message):
    """Kill a worker's process."""

    token: bytes  # This token identifies the worker.
    astray: bool = False  # Whether the worker is killed because the process still runs after closing the lane.


@message
class Inspect(Message):
    """Inspect a worker's process from outside; answered by `InspectReport`."""

    token: bytes  # This token identifies the worker.
    number: int  # Number of the question.


@message
class ListProcesses(Message):
    """List the keeper's running processes; answered by `ProcessList`."""

    token: int  # Number of the question.


@message
class Adopt(Message):
    """Connect a lane to a worker that an earlier driver has started."""

    ticket: bytes  # The new lane connects with this token.
    token: bytes  # This token identifies the worker.
    name: str  # The worker's new id.


@message
class Detach(Message):
    """Keep the pool alive after this driver leaves; answered by `Ack`."""

    token: int  # Number of the question.
    lease: Lease  # The pool continues under this lease.


@message
class Renew(Message):
    """Replace the lease of a detached pool."""

    lease: Lease


@message
class Retain(Message):
    """Undo `Detach`, so that the pool closes with this driver; answered by `Ack`."""

    token: int | None  # Number of the question; None if no answer is wanted.


@message
class ExpirePool(Message):
    """Announce that the driver leaves the pool."""


@message
class InspectPool(Message):
    """Ask for the pool's state and owner; answered by `PoolStatus`."""


@message
class InspectWorkers(Message):
    """Ask for the state of this keeper's workers; answered by `WorkerStatus`."""


@message
class Attach(Message):
    """Ask to become the driver of the pool; answered by `LeadGranted` or `LeadRefused`."""

    epoch: int  # The epoch granted by the lead keeper; 0 in the request to the lead keeper.
    driver: str  # Description of the new driver.
    is_owner: bool  # Whether to own the pool, even if another driver commands the pool now.


# -- from the keeper


@message
class OutputLine(Message):
    """A line of a worker's output."""

    token: bytes  # This token identifies the worker.
    line: str


@message
class WorkerExited(Message):
    """Report that a worker has exited."""

    token: bytes  # This token identifies the worker.
    exitcode: int | None  # Exit code of the process, if known.
    signal: str | None  # Name of the signal that ended the process, if any.
    detail: str | None  # Further details, if known.


@message
class InspectReport(Message):
    """The result of inspecting a worker's process from outside."""

    token: bytes  # This token identifies the worker.
    number: int  # Number of the answered question.
    text: str | None  # Description of the process; None if there is nothing to see.


@message
class ProcessList(Message):
    """The list of the keeper's running processes."""

    token: int  # Number of the answered question.
    processes: Sequence[Any]  # The fields of an `executor.Running` object for each process.


@message
class Ack(Message):
    """Confirm that the keeper has carried out a command."""

    token: int  # Number of the answered question.


@message
class PoolStatus(Message):
    """The public state of a pool, including the owner, or of a job's groups."""

    facts: Mapping[str, Any] | None  # Facts for listings; None for a pool that isn't detached.


@message
class WorkerStatus(Message):
    """The state of the keeper's workers, as far as the workers have answered."""

    workers: Sequence[bytes]  # The answer of each worker, in JSON.
    silent: Sequence[str]  # The ids of the workers without an answer.


@message
class LeadGranted(Message):
    """Accept a new driver of the pool."""

    epoch: int  # The epoch of the new driver.
    record: bytes  # The new driver adopts the pool from this data.


@message
class LeadRefused(Message):
    """Refuse a new driver of the pool."""

    kind: str  # "borrowed": a driver commands the pool; "late": the epoch is outdated; "closed": it can't be attached.
    words: str  # The reason, as text for users.


@message
class LeadLost(Message):
    """Notify a driver that another driver commands the pool from now on."""

    driver: str  # Description of the new driver.
