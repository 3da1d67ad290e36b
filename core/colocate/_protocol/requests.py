"""`Requests`: questions that messages carry, and their answers. Whoever asks another process waits here.

A question has a number, and parties that owe an answer to it. It is over when all have answered, or when it has failed:
because a party can't answer any more, or because nobody can.
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
    """One question.

    Attributes:
        token: Its number.
        about: What it is asked for, where that says when to give it up.
        parties: Who was asked, in order.
        answers: What has come.
        error: Why no more will.
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
        """Return who hasn't answered."""
        return [party for party in self.parties if party not in self.answers]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, at most so many seconds; whether it is."""
        return self._over.wait(timeout)

    def result(self, deadline: Deadline = NEVER) -> list[Answer]:
        """All answers, in the order of the parties.

        Args:
            deadline: Until when to wait for them.

        Raises:
            TimeoutError: They haven't come in time.
            BaseException: It has failed, by this.
        """
        if not self.wait(deadline.left):
            raise TimeoutError(f"no answer in time from {', '.join(map(str, self.owing))}")
        if self.error is not None:
            # Others may fail of the same, on other threads.
            raise copy.copy(self.error) if isinstance(self.error, ColocateError) else self.error.with_traceback(None)
        return [self.answers[party] for party in self.parties]

    @property
    def over(self) -> bool:
        """Whether nothing more is waited for."""
        return self._over.is_set

    def then(self, call: Callable[[], object]) -> None:
        """Have something called when it is over, once, by whoever ends it; here and now if it is over already."""
        self._then.append(call)
        if self.over:
            self._tell()

    def end(self) -> None:
        """Note that the request is over."""
        self._over.set()
        self._tell()

    def _tell(self) -> None:
        while self._then:
            with contextlib.suppress(IndexError):  # another thread tells
                self._then.pop()()


class Requests(Generic[Party, Answer]):
    """The questions that somebody has asked. All methods may be called from any thread, and none waits.

    Numbers are taken and entries made and taken away by single steps, so no lock is needed: who takes a question out
    ends it.
    """

    def __init__(self, base: int = 0) -> None:
        """Args: base: Numbers are above this; those up to it were an earlier driver's."""
        self._tokens = itertools.count(base + 1)
        self._open: dict[int, Request[Party, Answer]] = {}
        self._failed: BaseException | None = None

    def open(self, parties: Iterable[Party], about: int = 0) -> Request[Party, Answer]:
        """A question that is about to be sent.

        Args:
            parties: Who owes an answer.
            about: What it is asked for.
        """
        request = Request[Party, Answer](next(self._tokens), parties, about)
        self._open[request.token] = request
        if self._failed is not None:
            self.fail(request, self._failed)
        elif not request.parties:
            self.drop(request)
        return request

    def ask(
        self,
        parties: Iterable[Party],
        send: Callable[[Party, int], object],
        deadline: Deadline,
        late: Callable[[str], str],
    ) -> list[Answer]:
        """Ask, and wait for all answers.

        Args:
            parties: Who owes an answer.
            send: Sends the question of that number to one of them.
            deadline: Until when to wait.
            late: What the error says when it is too late, given those who haven't answered.

        Returns:
            The answers, in the order of the parties.

        Raises:
            TimeoutError: They haven't come in time.
            BaseException: It has failed, by this.
        """
        request = self.open(parties)
        try:
            for party in request.parties:
                send(party, request.token)
            return request.result(deadline)
        except TimeoutError:
            raise TimeoutError(late(", ".join(map(str, request.owing)))) from None
        finally:
            self.drop(request)

    def answered(self, token: int, party: Party, answer: Answer) -> Request[Party, Answer] | None:
        """Somebody has answered; the question, if it isn't over. The last answer ends it."""
        request = self._open.get(token)
        if request is not None:
            request.answers[party] = answer
            if len(request.answers) == len(request.parties):
                self.drop(request)
        return request

    def refused(self, token: int, error: BaseException) -> None:
        """Somebody has answered that there is no answer."""
        if (request := self._open.get(token)) is not None:
            self.fail(request, error)

    def drop(self, request: Request[Party, Answer]) -> None:
        """Nobody waits for more answers."""
        if self._take(request):
            request.end()

    def fail(self, request: Request[Party, Answer], error: BaseException) -> None:
        """No answer will come to a question."""
        if self._take(request):
            request.error = error
            request.end()

    def _take(self, request: Request[Party, Answer]) -> bool:
        if self._open.get(request.token) is not request:  # it is over, or these are the questions of other workers
            return False
        return self._open.pop(request.token, None) is not None

    def gone(self, party: Party, error: BaseException) -> None:
        """Somebody will answer nothing more."""
        for request in list(self._open.values()):
            if party in request.owing:
                self.fail(request, error)

    def fail_those(self, concerns: Callable[[int], bool], error: Callable[[], BaseException]) -> None:
        """No answer will come to what is asked for some."""
        for request in list(self._open.values()):
            if concerns(request.about):
                self.fail(request, error())

    def fail_all(self, error: BaseException) -> None:
        """No answer will come to any question, nor to those still to be asked."""
        self._failed = error
        for request in list(self._open.values()):
            self.fail(request, error)
