"""Ask other processes numbered questions, and wait for the answers (`Requests`).

A question has a number, and parties that owe an answer. The question ends when all parties have answered, or when it
has failed: because a party, or nobody, can answer any more.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from colocate._signals.deferred import Flag
from colocate._system.deadline import NEVER, Deadline
from colocate.errors import ColocateError

Party = TypeVar("Party")
Answer = TypeVar("Answer")


class Request(Generic[Party, Answer]):
    """One open question to one or several parties.

    Attributes:
        token: The question's number.
        about: The subject (a call, say), for `fail_matching`.
        parties: The parties asked, in order.
        answers: The answers so far.
        error: The failure, if there will be no more answers.
    """

    def __init__(self, token: int, parties: Iterable[Party], about: int) -> None:
        self.token = token
        self.about = about
        self.parties = list(dict.fromkeys(parties))
        self.answers: dict[Party, Answer] = {}
        self.error: BaseException | None = None
        self._over = Flag()
        self._then: list[Callable[[], object]] = []

    @property
    def owing(self) -> list[Party]:
        return [party for party in self.parties if party not in self.answers]

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until the question ends; return False if the time is over."""
        return self._over.wait(timeout)

    def result(self, deadline: Deadline = NEVER) -> list[Answer]:
        """Wait for all answers; return the answers in the order of the parties.

        Args:
            deadline: Until when to wait.

        Raises:
            TimeoutError: Some answers are late.
            BaseException: The question's own error.
        """
        if not self.wait_over(deadline.seconds_left):
            raise TimeoutError(f"no answer in time from {', '.join(map(str, self.owing))}")
        if self.error is not None:
            # Raise a copy, because other threads may raise the same error.
            raise copy.copy(self.error) if isinstance(self.error, ColocateError) else self.error.with_traceback(None)
        return [self.answers[party] for party in self.parties]

    @property
    def is_over(self) -> bool:
        return self._over.is_set

    def add_callback(self, call: Callable[[], object]) -> None:
        """Run a callback on the thread that ends the question. If the question has ended, run the callback at once."""
        self._then.append(call)
        if self.is_over:
            self._run_callbacks()

    def finish(self) -> None:
        self._over.set()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._then:
            with contextlib.suppress(IndexError):  # Another thread may have just taken the callback.
                self._then.pop()()


class Requests(Generic[Party, Answer]):
    """All open questions of a process. Any thread may call any method.

    Each step on the table of questions is atomic, so no lock is needed: the thread that removes a question ends it.
    """

    def __init__(self, base: int = 0) -> None:
        """Args: base: Numbers start above `base`, because an earlier driver has used the lower numbers."""
        self._tokens = itertools.count(base + 1)
        self._open: dict[int, Request[Party, Answer]] = {}
        self._failed: BaseException | None = None

    def open(self, parties: Iterable[Party], about: int = 0) -> Request[Party, Answer]:
        """Register a question that is about to be sent.

        Args:
            parties: The parties that owe an answer.
            about: The subject.
        """
        request = Request[Party, Answer](next(self._tokens), parties, about)
        self._open[request.token] = request
        if self._failed is not None:
            self.fail_request(request, self._failed)
        elif not request.parties:
            self.drop_request(request)
        return request

    def ask(
        self,
        parties: Iterable[Party],
        send: Callable[[Party, int], object],
        deadline: Deadline,
        late: Callable[[str], str],
    ) -> list[Answer]:
        """Send a question to all parties, and wait for all answers.

        Args:
            parties: The parties that owe an answer.
            send: Sends the question of this number to one party.
            deadline: Until when to wait.
            late: Returns the error text for the parties without an answer.

        Returns:
            The answers, in the order of the parties.

        Raises:
            TimeoutError: Some answers are late.
            BaseException: The question's own error.
        """
        request = self.open(parties)
        try:
            for party in request.parties:
                send(party, request.token)
            return request.result(deadline)
        except TimeoutError:
            raise TimeoutError(late(", ".join(map(str, request.owing)))) from None
        finally:
            self.drop_request(request)

    def add_answer(self, token: int, party: Party, answer: Answer) -> Request[Party, Answer] | None:
        """Record a party's answer; return the question if still open. The last answer ends the question."""
        request = self._open.get(token)
        if request is not None:
            request.answers[party] = answer
            if len(request.answers) == len(request.parties):
                self.drop_request(request)
        return request

    def add_refusal(self, token: int, error: BaseException) -> None:
        """Fail a question, because a party has refused to answer."""
        if (request := self._open.get(token)) is not None:
            self.fail_request(request, error)

    def drop_request(self, request: Request[Party, Answer]) -> None:
        """End a question without waiting for more answers."""
        if self._remove(request):
            request.finish()

    def fail_request(self, request: Request[Party, Answer], error: BaseException) -> None:
        if self._remove(request):
            request.error = error
            request.finish()

    def _remove(self, request: Request[Party, Answer]) -> bool:
        if self._open.get(request.token) is not request:  # The question has ended, or belongs to another `Requests`.
            return False
        return self._open.pop(request.token, None) is not None

    def on_party_gone(self, party: Party, error: BaseException) -> None:
        """Fail all questions that a lost party hasn't answered."""
        for request in list(self._open.values()):
            if party in request.owing:
                self.fail_request(request, error)

    def fail_matching(self, concerns: Callable[[int], bool], error: Callable[[], BaseException]) -> None:
        """Fail all questions with a subject for which `concerns` returns true."""
        for request in list(self._open.values()):
            if concerns(request.about):
                self.fail_request(request, error())

    def fail_all(self, error: BaseException) -> None:
        """Fail all questions, open and future."""
        self._failed = error
        for request in list(self._open.values()):
            self.fail_request(request, error)
