"""Messages of rows that end one by one: the first three go to workers, the last comes from workers."""

from __future__ import annotations

from typing import Any

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

AHEAD = 64
"""The first credit of a rank that yields rows: the number of results sent before any row was read."""


@message
class Row(Message):
    """Run a row of a call of a method with `rows=`; answered by `RowEnded`. Body: the row, by its parameter's name."""

    seq: int  # the call
    row: int  # the row's index in the driver's argument
    number: int  # the number of earlier calls of the method, also before a restart or a restore


@message
class NoMoreRows(Message):
    """Announce that a call gets no more rows: the call ends after the running ones."""

    seq: int  # the call
    withdrawn: bool  # whether running rows are withdrawn, too: these are cancelled, and a batch yields nothing more


@message
class ReadRows(Message):
    """Raise a call's credit after reads: as many more rows may be sent."""

    seq: int  # the call
    count: int  # the number of rows read


@message
class RowEnded(Message):
    """Report the end of one row while the call goes on. Body: the value, or the exception after a failure."""

    seq: int  # the call
    row: int  # the row's index in the driver's argument; for a method that yields, in the rank's part
    failure: Failure | None  # None after a success
    is_bereft: bool = False  # whether other rows fail there, too, since a child of the role has ended
    turn: int | None = None  # the row's place in a fixed order of results; None for any order

    def head(self) -> Head:
        """Return the wire format of the message."""
        failure = None if self.failure is None else values(self.failure)
        return "RowEnded", self.seq, self.row, failure, self.is_bereft, self.turn

    @classmethod
    def of(cls, *values: Any) -> RowEnded:
        """Build the message from the wire format; see `Message.of`."""
        seq, row, failure, is_bereft, turn = values
        return cls(seq, row, None if failure is None else Failure(*failure), is_bereft, turn)
