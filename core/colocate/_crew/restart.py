"""Restart: a group that has failed is rebuilt in its pool, all ranks together, a bounded number of times.

What was pending, and every resident, belonged to the generation that failed: each use of it raises `GroupRestarted`.
New calls are refused with it too until somebody has asked `group.wait_ready()`: roles are then as the last checkpoint
has them, and nobody goes on with that by accident.
"""

from __future__ import annotations

import abc
import copy
import logging
import threading
from typing import TYPE_CHECKING, Any

import attrs

from colocate._calls.link import Link
from colocate._calls.order import CallOrder
from colocate._crew.saved import Checkpoint, Tag
from colocate._crew.workforce import Workforce
from colocate._system.deadline import Deadline
from colocate._system.jobs import message_of, report_exception
from colocate._system.limits import BACKOFF_S, LONGEST_BACKOFF_S, RESTART_ENDS_WITHIN_S
from colocate.errors import ClosedError, ColocateError, GroupRestarted, WorkerDied

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("colocate")


class Restartable(Link):
    """A group that can be rebuilt.

    Attributes:
        order: The order of its calls.
        workforce: The workers that it has now.
    """

    order: CallOrder
    workforce: Workforce

    @abc.abstractmethod
    def begin_again(self) -> bool:
        """It is being rebuilt from now on; False when it is closed."""

    @abc.abstractmethod
    def rebuild(self) -> None:
        """Start its next generation; the last one's workers are gone.

        Raises:
            ColocateError: It doesn't start.
        """

    @abc.abstractmethod
    def fail_for_good(self, error: ColocateError, why: BaseException) -> None:
        """It could not be restarted."""


class Restarts:
    """Those of one group.

    Attributes:
        limit: How many there may be without a checkpoint in between; 0: the first failure is the last.
        checkpoint: The last one; None as long as there is none.
        restored: The tag of the one that the roles were restored from.
        written: The last one that was made since; None for none.
        writing: Held by whoever writes a checkpoint: they get their names in the order in which their states were.
    """

    def __init__(self, group: Restartable, limit: int) -> None:
        self.limit = limit
        self.checkpoint: Checkpoint | None = None
        self.restored: Tag = None
        self.written: Checkpoint | None = None
        self.writing = threading.Lock()
        self._group = group
        self._used = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what users see

    def check(self) -> None:
        """Raise if the group has been restarted and nobody has taken note of that."""
        overcome = self._group.life.overcome  # of which somebody may take note just now
        if overcome is not None:
            raise overcome.with_traceback(None)

    def wait(self, timeout: float | None) -> Tag:
        """Wait until the group can be called again; the tag of the checkpoint that its roles were restored from.

        Raises:
            TimeoutError: It isn't ready yet.
            ColocateError: It could not be restarted, or is closed.
        """
        group = self._group
        group.refuse_closed()  # also in a forked child, where nothing is under way any more
        deadline = Deadline(timeout)
        while True:
            if not group.life.wait_settled(deadline.left):
                raise TimeoutError(f"group {group.name!r} isn't ready after {timeout} s: it is {group.state}")
            with group.order.lock:
                if not group.life.is_settled:  # it has failed again just now
                    continue
                group.refuse_closed()
                if (failure := group.life.told()) is not None:
                    raise copy.copy(failure)
                group.life.noted()
                return self.restored

    def committed(self, checkpoint: Checkpoint) -> None:
        """There is a new checkpoint: what comes after it is a new attempt."""
        self.checkpoint = self.written = checkpoint
        self.progressed()

    def began_from(self, checkpoint: Checkpoint | None) -> None:
        """The roles are as a checkpoint has them, or as constructed."""
        self.checkpoint = checkpoint
        self.restored = None if checkpoint is None else checkpoint.tag
        self.written = None

    def moved(self, before: Path, after: Path) -> None:
        """A folder that the last checkpoint may lie in has another name."""
        if self.checkpoint is not None and self.checkpoint.folder.is_relative_to(before):
            folder = after / self.checkpoint.folder.relative_to(before)
            self.checkpoint = self.written = attrs.evolve(self.checkpoint, folder=folder)

    def lost(self, folder: Path, before: Checkpoint | None) -> None:
        """What was made in a folder is gone; before that there was another one, or none."""
        if self.checkpoint is not None and self.checkpoint.folder.is_relative_to(folder):
            self.checkpoint, self.written = before, None

    def progressed(self) -> None:
        """There is something new to go on from: what fails from now on has its own number of attempts."""
        self._used = 0

    # -- when the group fails

    def begin(self, cause: ColocateError) -> ColocateError:
        """The group has failed; what its users are told. The order's lock is held.

        A restart begins with `go`, once they have been.
        """
        if self._used >= self.limit:
            return cause
        return _restarted(self._group.name, cause, self.checkpoint)

    def go(self, cause: ColocateError) -> None:
        """Rebuild the group, on a thread of its own."""
        name = f"colocate-restart-{self._group.name}"
        thread = threading.Thread(target=self._main, args=(cause,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is to be had
            self._group.fail_for_good(cause, error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """The group is closing."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until nothing is rebuilt any more, after the workers have been ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(RESTART_ENDS_WITHIN_S)

    # -- on its thread

    def _main(self, cause: ColocateError) -> None:
        group = self._group
        try:
            while True:
                fault = self._attempt()
                if fault is None or group.closed_by is not None:
                    return
                if self._used >= self.limit:
                    group.fail_for_good(cause, fault)
                    return
                self._log(f"group {group.name!r} could not be restarted, and is tried again: {message_of(fault)}")
        except BaseException as error:  # a mistake here: nobody else would rebuild it
            report_exception()
            group.fail_for_good(cause, error)

    def _attempt(self) -> BaseException | None:
        """Rebuild the group once; what went wrong."""
        group = self._group
        if not group.workforce.wait_gone():
            self._used = self.limit
            return ColocateError(f"workers of group {group.name!r} did not go when killed")
        self._used += 1
        if not group.begin_again():
            return None
        if self._stopping.wait(min(BACKOFF_S * (2 ** (self._used - 1) - 1), LONGEST_BACKOFF_S)):
            return None
        checkpoint = self.checkpoint
        try:
            group.rebuild()
        except ClosedError as error:  # just now: whoever closes it ends the workers, here or there
            group.workforce.kill()
            return error
        except BaseException as error:  # packing and unpacking roles is users' code: it may raise SystemExit, say
            group.workforce.kill()
            return error
        source = "anew" if checkpoint is None else f"from its checkpoint {checkpoint.tag!r}"
        self._log(f"group {group.name!r} was restarted {source} (generation {group.generation})")
        return None

    def _log(self, text: str) -> None:
        self._group.services.printer.soon(lambda: _log.warning(text))


def _restarted(name: str, cause: ColocateError, checkpoint: Checkpoint | None) -> GroupRestarted:
    """What users of a failed generation are told."""
    names = (*ColocateError.__annotations__, *(("detail", "running") if isinstance(cause, WorkerDied) else ()))
    facts: dict[str, Any] = {name: getattr(cause, name) for name in names if not name.startswith("_")}
    source = "as constructed" if checkpoint is None else f"as of its checkpoint {checkpoint.tag!r}"
    found = GroupRestarted(
        f"{cause.message}\ngroup {name!r} is being restarted; its calls are refused until group.wait_ready() has "
        f"returned, with roles {source}",
        **facts,
    )
    found.__cause__ = cause
    return found
