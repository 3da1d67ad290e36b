"""The driver's questions to a group's workers about their memory use."""

from __future__ import annotations

from collections.abc import Sequence

from colocate._protocol.requests import Requests
from colocate._system.deadline import Deadline
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError, RoleError
from colocate.features.memory.messages import AskLedger, Ledger, LedgerReport


class LedgerRequests:
    """Asks a group's workers for their memory use and collects the answers, until the group is restarted."""

    def __init__(self, link: WorkerGroup) -> None:
        self._link = link
        self._requests: Requests[int, Ledger] = Requests(link.base)

    def request_all(self, slots: Sequence[int], deadline: Deadline) -> list[Ledger]:
        """Ask the workers on these slots for their memory use, and return the answers in the order of the slots.

        Raises:
            TimeoutError: A worker hasn't answered in time.
            RoleError: A role's memory can't be inspected, for example because `device_state` has raised an error.
            ColocateError: The group has failed or is closed.
        """
        tell = self._link.make_sender()

        def ask(slot: int, token: int) -> None:
            tell(slot, AskLedger(token))

        return self._requests.ask(slots, ask, deadline, self._timeout_text)

    def _timeout_text(self, owing: str) -> str:
        return (
            f"worker {owing} of group {self._link.name!r} has not reported its memory use in time: the process is "
            "stopped, or C code holds the GIL, or a role's device_state() still runs, or the machine is overloaded"
        )

    def request_each(self, slots: Sequence[int], deadline: Deadline) -> dict[int, Ledger | Exception]:
        """Ask the workers on these slots for their memory use, and return an answer or an error for each slot."""
        tell = self._link.make_sender()
        requests = {slot: self._requests.open([slot]) for slot in slots}
        answers: dict[int, Ledger | Exception] = {}
        try:
            for slot, request in requests.items():
                tell(slot, AskLedger(request.token))
            for slot, request in requests.items():
                try:
                    (answers[slot],) = request.result(deadline)
                except TimeoutError:
                    answers[slot] = TimeoutError(self._timeout_text(str(slot)))
                except ColocateError as error:
                    answers[slot] = error
        finally:
            for request in requests.values():
                self._requests.drop_request(request)
        return answers

    def on_answer(self, worker: Worker, told: LedgerReport) -> None:
        """Complete a pending question with a worker's report, or with an error if the worker's inspection failed."""
        if told.ledger is not None:
            self._requests.add_answer(told.token, worker.slot, told.ledger)
            return
        group = self._link.name
        subject = f"what role {told.role!r} of group {group!r} holds" if told.role else f"the memory of group {group!r}"
        error = RoleError(
            f"{subject} in worker {worker.slot} on {worker.boot.node} could not be looked at: "
            f"{told.trace.strip().splitlines()[-1]}",
            group=group,
            role=told.role or None,
            node=worker.boot.node,
            pid=worker.pid,
            remote_traceback=told.trace,
        )
        self._requests.add_refusal(told.token, error)

    def fail_requests(self, error: ColocateError) -> None:
        """Fail all pending questions, because no worker will answer."""
        self._requests.fail_all(error)
