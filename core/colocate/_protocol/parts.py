"""Messages between workers: requests for parts of residents."""

from __future__ import annotations

from typing import Any

from colocate._protocol.message import Message, message


@message
class Part(Message):
    """Request a whole part; answered by `Value`, or `Redirect` if a worker of the same machine has asked before."""

    key: int  # Key of the resident.
    place: str = ""  # Device of the requester, if device memory may be lent there; otherwise "".
    over: tuple[int, bool] | None = (
        None  # Key of the part received before, and whether the requester keeps that part (`PartReceived`).
    )
    requester: tuple[str, str] | None = None  # Machine and address of a remote requester that may forward the part.
    lacking: int = 0  # In a retry, this is the `times` of the unsuccessful `Redirect`.


@message
class Slice(Message):
    """Request a range of rows of a value; answered by `Value`."""

    key: int  # Key of the resident.
    start: int  # The first row.
    stop: int  # The row after the last row.
    place: str = ""  # Device of the requester, if device memory may be lent there; otherwise "".


@message
class Rows(Message):
    """Request the number of a part's rows; answered by `Number`."""

    key: int  # Key of the resident.


@message
class CheckUnchanged(Message):
    """Ask whether a lent value is unchanged; answered by `Number`, with None if the value has changed."""

    key: int  # Key of the resident.


@message
class Weight(Message):
    """Ask for the number of rows of the call that made a part; answered by `Number`."""

    key: int  # Key of the resident.


@message
class PartReceived(Message):
    """Report that an offered part was received; answered by `Number`. The last requester's report ends the offer."""

    key: int  # Key of the resident.
    keeps: bool = False  # Whether the requester keeps the part.


@message
class PassedOn(Message):
    """Request a driver's message body that the asked worker forwards; answered by `Value`."""

    key: int  # Key of the body.


@message
class FetchShared(Message):
    """Request this worker's copy of another machine's part; answered by `Value`, or `Number` if there is no copy."""

    holder: tuple[str, int, int, int]  # Group name, slot, generation and group number of the worker that made the part.
    key: int  # Key of the resident.


@message
class Redirect(Message):
    """Redirect the requester to another worker that has, or is fetching, a copy of the part (`FetchShared`)."""

    address: str  # Address of the worker with the copy.
    times: int  # How often the worker with the copy was chosen on the requester's machine so far.


@message
class Value(Message):
    """The answer to a request for a value, with the value as the body."""

    waited: float  # Seconds that the request waited for the value to be made.
    lent: int = 0  # Bytes to copy from lent memory. The requester sends `CheckUnchanged` afterwards.
    refusal: str = ""  # Reason why no more memory is lent; "" if nothing prevented lending.
    shared: bool = False  # Whether other requesters of the machine are redirected to this requester.


@message
class Number(Message):
    """The answer to a request for a number."""

    number: int | None  # None if there is no number.


@message
class Poison(Message):
    """Report that a value is unusable."""

    why: str  # Text of the failure that prevented or damaged the value.


@message
class Unsendable(Message):
    """Report that a value can't be packed."""

    text: str  # Text of the `SerializationError`.
    argument: Any
    path: Any
