"""Memory of a worker's roles, the worker's half."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any

from colocate._protocol.message import Message
from colocate._system.jobs import JobThread, error_text, report_exception
from colocate.features.memory.messages import AskLedger, LedgerTold
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import OfWorker
from colocate.worker.memory.ledger import LookError


class MemoryOfWorker(OfWorker):
    """What a worker says of the memory of its roles."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        # Neither where messages wait, nor on the lane, where a call may take long; a role's `device_state` may keep it.
        self._looks = JobThread(f"colocate-ledger-{worker_context.boot.worker}", lambda error: report_exception())

    def heard(self, message: Message, body: Any) -> None:
        """Look at what the roles hold, on a thread of its own."""
        assert isinstance(message, AskLedger)
        try:
            self._looks.soon(partial(self._tell, message.token))
        except RuntimeError as error:  # no thread is to be had
            self._worker_context.say(LedgerTold(message.token, None, "", error_text(error)))

    def close(self) -> None:
        """End, without waiting for a look."""
        self._looks.close(0.0)

    def _tell(self, token: int) -> None:
        try:
            told = LedgerTold(token, self._worker_context.accounts.ledger())
        except LookError as error:
            told = LedgerTold(token, None, error.role, error.trace)
        except Exception:  # CUDA's, say, which is out of order
            told = LedgerTold(token, None, "", traceback.format_exc())
        self._worker_context.say(told)
