"""`Saver`: runs the second half of a checkpoint, in which roles write their states while calls continue.

In the first half, a role's `save` copies the state on the lane, in the order of the role's calls. The second half (the
rest of a generator, or a future) runs on a separate thread. If the generator yields again, it resumes when all ranks
have reached that `yield`, so that one rank may write a file about all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colocate._protocol.message import Message
from colocate._role.context import reset_current, second_halves, set_current
from colocate._system.jobs import JobThread, report_exception
from colocate._values.codec import Codec
from colocate.features.checkpoints.contents import being_written, digests_of
from colocate.features.checkpoints.messages import AskSaved, Saved
from colocate.worker.device import Device
from colocate.worker.serving import failure
from colocate.worker.serving.definitions import Definitions
from colocate.worker.serving.over import going_on, wait_until_over
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code

SAVE = "save"


class SecondHalf:
    """The remaining work of a role's `save` after the state was copied.

    Attributes:
        role: The role.
    """

    def __init__(self, role: RoleInstance) -> None:
        self.role = role
        self._rests: list[Generator[Any, Any, Any]] = []
        self._going_on: list[Any] = []

    @calls_role_code
    def take_state(self, name: str, hook: Callable[..., Any], *args: Any) -> None:
        """Run the first half of `save`, up to the first `yield` if `save` is a generator."""
        token = second_halves.set(self._rests)
        try:
            result = hook(*args)
            if inspect.isgenerator(result):
                try:
                    next(result)
                except StopIteration as end:  # The generator ended without a `yield`.
                    result = end.value
                else:
                    self._rests.append(result)
                    return
            self._going_on += going_on(name, result)
        finally:
            second_halves.reset(token)

    def add(self, going_on: Sequence[Any]) -> None:
        """Add futures or threads that the second half waits for."""
        self._going_on += going_on

    def is_left(self) -> bool:
        """Return whether work of this `save` remains."""
        return bool(self._rests or self._going_on)

    @calls_role_code
    def go_on(self) -> bool:
        """Run the remaining work up to the next `yield`, and return whether more work remains.

        Raises:
            BaseException: The role's code or future failed.
        """
        token = set_current(self.role.ctx)
        try:
            self._rests = [rest for rest in self._rests if not self._ends(rest)]
            while self._going_on and not self._rests:
                wait_until_over(SAVE, self._going_on.pop())
        finally:
            reset_current(token)
        return self.is_left()

    def _ends(self, rest: Generator[Any, Any, Any]) -> bool:
        try:
            next(rest)
        except StopIteration as end:
            self._going_on.append(end.value)
            return True
        return False

    def drop(self) -> None:
        """Abandon the remaining work by closing the generators."""
        for rest in self._rests:
            rest.close()


class Saver:
    """The thread of a worker that runs the second halves of `save`, and checks files.

    Args:
        worker: The worker's id, for the thread's name.
        device: The slot's device.
        codec: Encodes errors.
        definitions: The classes that driver and worker have exchanged.
        say: Sends a message to the driver.
    """

    def __init__(
        self,
        worker: object,
        device: Device,
        codec: Codec,
        definitions: Definitions,
        say: Callable[[Message, Any], None],
    ) -> None:
        self._device, self._codec, self._definitions, self._say = device, codec, definitions, say
        self._thread = JobThread(f"colocate-save-{worker}", lambda error: report_exception())
        self._left: list[SecondHalf] = []

    def leave(self, halves: Sequence[SecondHalf]) -> None:
        """Store second halves for a later `AskSaved`, and abandon the halves of an earlier checkpoint."""
        former, self._left = self._left, [*halves]
        for half in former:
            self._thread.soon(half.drop)

    def asked(self, message: AskSaved) -> None:
        """Schedule a request of the driver. Called on the receiving thread."""
        try:
            self._thread.soon(partial(self._do, message))
        except RuntimeError as error:  # No thread could be started.
            self._refuse(message, error, None)

    def close(self) -> None:
        """Close the thread without waiting for work in progress."""
        self._thread.close(0.0)

    def _do(self, asked: AskSaved) -> None:
        open_ones: Sequence[str] = ()
        digests: Mapping[str, str] = {}
        halves: list[SecondHalf] = []
        later: list[SecondHalf] = []  # Halves that continue once all ranks have finished this step.
        try:
            if asked.names is not None:
                folder = Path(asked.directory)
                open_ones, digests = being_written(folder), digests_of(folder, asked.names)
            else:
                halves, self._left = self._left, []
                with self._device.aside():
                    while halves:
                        if halves[0].go_on():
                            later.append(halves[0])
                        del halves[0]
        except BaseException as error:
            self._refuse(asked, error, halves[0].role.name if halves else None)
            for half in halves + later:
                half.drop()
        else:
            self._left += later
            self._say(Saved(asked.token, bool(later), open_ones, digests, None), None)

    def _refuse(self, asked: AskSaved, error: BaseException, role: str | None) -> None:
        failed_call, body = failure.failed(error, self._codec, self._definitions, role, False)
        self._say(Saved(asked.token, False, (), {}, failed_call), body)
