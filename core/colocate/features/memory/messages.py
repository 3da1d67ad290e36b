"""What driver and workers say of memory: the first to workers, the others from them."""

from __future__ import annotations

from typing import Any

import attrs

from colocate._protocol.ledger import Ledger
from colocate._protocol.message import Head, Message, message


@message
class AskLedger(Message):
    """Say what the worker's memory is used for; answered by `LedgerTold`."""

    token: int  # the question's number


@message
class LedgerTold(Message):
    """What the worker's memory is used for."""

    token: int  # the question's number
    ledger: Ledger | None  # it; None where what a role holds can't be looked at
    role: str = ""  # that role
    trace: str = ""  # the traceback of what was raised then

    def head(self) -> Head:
        """Return what travels of it."""
        ledger = None if self.ledger is None else attrs.astuple(self.ledger, recurse=False)
        return "LedgerTold", self.token, ledger, self.role, self.trace

    @classmethod
    def of(cls, *values: Any) -> LedgerTold:
        """As `Message.of`."""
        token, ledger, role, trace = values
        return cls(token, None if ledger is None else Ledger(*ledger), role, trace)
