"""Messages about rows that end one by one. `RowEnded` comes from workers, the others go to workers."""

from __future__ import annotations

from typing import Any

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

AHEAD = 64
"""The number of results that a rank may send before the driver has read any row: the rank's first credit."""


@message
class Row(Message):
    """Run one row of a call of a method with `rows=`; answered by `RowEnded`.

    The body has the row, by the name of the parameter.
    """

    seq: int  # Sequence number of the call.
    row: int  # Index of the row in the driver's argument.
    number: int  # Number of earlier calls of the method, including calls before a restart or a restore.


@message
class NoMoreRows(Message):
    """Announce that a call gets no more rows. The call ends after the running rows."""

    seq: int  # Sequence number of the call.
    withdrawn: bool  # Whether running rows are cancelled, and a batched method must yield no more rows.


@message
class ReadRows(Message):
    """Raise a call's credit after the driver has read rows. The rank may then send as many more rows."""

    seq: int  # Sequence number of the call.
    count: int  # Number of rows that the driver has read.


@message
class RowEnded(Message):
    """Report the end of one row while the call continues.

    The body has the row's value, or the exception after a failure.
    """

    seq: int  # Sequence number of the call.
    row: int  # Index of the row in the driver's argument. For a method that yields, the index in the rank's part.
    failure: Failure | None  # None if the row has succeeded.
    is_bereft: bool = False  # Whether other rows fail on this rank too, because a child process of the role has ended.
    turn: int | None = None  # Position of the row in a fixed order of results; None for any order.

    def head(self) -> Head:
        """Return the message in the wire format."""
        failure = None if self.failure is None else values(self.failure)
        return "RowEnded", self.seq, self.row, failure, self.is_bereft, self.turn

    @classmethod
    def from_values(cls, *values: Any) -> RowEnded:
        """Rebuild the message from the wire format (see `Message.from_values`)."""
        seq, row, failure, is_bereft, turn = values
        return cls(seq, row, None if failure is None else Failure(*failure), is_bereft, turn)
