"""What driver and workers say of rows that end one by one: the first three to workers, the last from them."""

from __future__ import annotations

from typing import Any

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

AHEAD = 64
"""How many rows of a call that yields them a rank tells of before any are read."""


@message
class Row(Message):
    """Run a row of a call of a method with `rows=`; answered by `RowEnded`. Body: the row, by its parameter's name."""

    seq: int  # the call
    row: int  # its index in what the driver was given
    number: int  # how many calls of the method came before this one, also before a restart or a restore


@message
class NoMoreRows(Message):
    """A call gets no more rows: it ends when those that run have."""

    seq: int  # the call
    withdrawn: bool  # whether nobody waits for these either: they are cancelled, and of a batch nothing more is said


@message
class ReadRows(Message):
    """Rows of a call that yields them have been read: as many more may come."""

    seq: int  # the call
    count: int  # how many


@message
class RowEnded(Message):
    """A row of a call has ended, and the call goes on. Body: its value; the exception, if it has raised."""

    seq: int  # the call
    row: int  # its index: in what the driver was given, and of a method that yields in what the rank has got
    failure: Failure | None  # what it has raised
    is_bereft: bool = False  # whether others fail there, too: a child of its role has ended
    turn: int | None = None  # its place among the call's rows, where the driver takes these in a given order

    def head(self) -> Head:
        """Return what travels of it."""
        failure = None if self.failure is None else values(self.failure)
        return "RowEnded", self.seq, self.row, failure, self.is_bereft, self.turn

    @classmethod
    def of(cls, *values: Any) -> RowEnded:
        """As `Message.of`."""
        seq, row, failure, is_bereft, turn = values
        return cls(seq, row, None if failure is None else Failure(*failure), is_bereft, turn)
