"""Messages between workers: requests for parts of residents."""

from __future__ import annotations

from typing import Any

from colocate._protocol.message import Message, message


@message
class Part(Message):
    """Request a whole part; answered by `Value`, or `Elsewhere` if a worker of the same machine has asked before."""

    key: int  # the resident
    place: str = ""  # device place of the requester, if device memory may be lent there; otherwise ""
    over: tuple[int, bool] | None = None  # the previous part, and whether the requester keeps that part; see `Took`
    here: tuple[str, str] | None = None  # machine and address of a remote requester that may forward the part
    lacking: int = 0  # for a retry after a failed `Elsewhere`: the message's `times`


@message
class Slice(Message):
    """Request some rows of a value; answered by `Value`."""

    key: int  # the resident
    start: int  # the first row
    stop: int  # the row after the last
    place: str = ""  # see `Part`


@message
class Rows(Message):
    """Request the number of a part's rows; answered by `Number`."""

    key: int  # the resident


@message
class Still(Message):
    """Ask whether a lent value is unchanged; answered by `Number`, with None if the value has changed."""

    key: int  # the resident


@message
class Weight(Message):
    """Ask for the number of rows of the call that made a part; answered by `Number`."""

    key: int  # the resident


@message
class Took(Message):
    """Report that the requester has taken a part; answered by `Number`. The offer ends with the last requester."""

    key: int  # the resident
    keeps: bool = False  # whether the requester keeps the part


@message
class Passed(Message):
    """Request a message body of the driver's that this worker forwards; answered by `Value`."""

    key: int  # the body


@message
class Shared(Message):
    """Request a part that lives on another machine; answered by `Value`, or `Number` if this worker has no copy."""

    who: tuple[str, int, int, int]  # the part's home worker, in the form of `WhereIs`
    key: int  # the resident


@message
class Elsewhere(Message):
    """Redirect the requester: that worker has, or is fetching, the part (`Shared`)."""

    address: str  # that worker's address
    times: int  # how often a sharer was named for the requester's machine


@message
class Value(Message):
    """The answer with a value. Body: the value."""

    waited: float  # seconds that the request waited for the value to be made
    lent: int = 0  # bytes to copy from lent memory, followed by a `Still`
    refusal: str = ""  # why no more memory is lent; "" if nothing prevented lending
    shared: bool = False  # whether other requesters of the machine will be redirected there


@message
class Number(Message):
    """The answer with a count."""

    number: int | None  # the count; None if unknown


@message
class Poison(Message):
    """Report that a value is unusable."""

    why: str  # the failure that prevented the value, or wrote into the value


@message
class Unsendable(Message):
    """Report that a value can't be packed."""

    text: str  # the text of the `SerializationError`
    argument: Any  # the error's `argument`
    path: Any  # the error's `path`
