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
from colocate.features.checkpoints.contents import compute_digests, find_open_files
from colocate.features.checkpoints.messages import AskState, SavedState
from colocate.worker.device import Device
from colocate.worker.serving import failure
from colocate.worker.serving.definitions import Definitions
from colocate.worker.serving.over import iter_background, wait_for_outcome
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code

SAVE = "save"


class UnfinishedSave:
    """The remaining work of a role's `save` after the state was copied.

    Attributes:
        role: The role.
    """

    def __init__(self, role: RoleInstance) -> None:
        self.role = role
        self._generators: list[Generator[Any, Any, Any]] = []
        self._background: list[Any] = []

    @calls_role_code
    def take_state(self, name: str, hook: Callable[..., Any], *args: Any) -> None:
        """Run the first half of `save`, up to the first `yield` if `save` is a generator."""
        token = second_halves.set(self._generators)
        try:
            result = hook(*args)
            if inspect.isgenerator(result):
                try:
                    next(result)
                except StopIteration as end:  # The generator ended without a `yield`.
                    result = end.value
                else:
                    self._generators.append(result)
                    return
            self._background += iter_background(name, result)
        finally:
            second_halves.reset(token)

    def add_background(self, going_on: Sequence[Any]) -> None:
        """Add futures or threads that the second half waits for."""
        self._background += going_on

    def has_more(self) -> bool:
        """Return whether work of this `save` remains."""
        return bool(self._generators or self._background)

    @calls_role_code
    def run_next_part(self) -> bool:
        """Run the remaining work up to the next `yield`, and return whether more work remains.

        Raises:
            BaseException: The role's code or future failed.
        """
        token = set_current(self.role.ctx)
        try:
            self._generators = [rest for rest in self._generators if not self._is_exhausted(rest)]
            while self._background and not self._generators:
                wait_for_outcome(SAVE, self._background.pop())
        finally:
            reset_current(token)
        return self.has_more()

    def _is_exhausted(self, rest: Generator[Any, Any, Any]) -> bool:
        try:
            next(rest)
        except StopIteration as end:
            self._background.append(end.value)
            return True
        return False

    def discard_rest(self) -> None:
        """Abandon the remaining work by closing the generators."""
        for rest in self._generators:
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
        self._device, self._codec, self._definitions, self._send = device, codec, definitions, say
        self._thread = JobThread(f"colocate-save-{worker}", lambda error: report_exception())
        self._pending: list[UnfinishedSave] = []

    def set_pending(self, halves: Sequence[UnfinishedSave]) -> None:
        """Store the second halves to run at the next `AskState`, and abandon those of an earlier checkpoint."""
        former, self._pending = self._pending, [*halves]
        for half in former:
            self._thread.call_soon(half.discard_rest)

    def on_request(self, message: AskState) -> None:
        """Schedule a request of the driver. Called on the receiving thread."""
        try:
            self._thread.call_soon(partial(self._handle_request, message))
        except RuntimeError as error:  # No thread could be started.
            self._report_failure(message, error, None)

    def close(self) -> None:
        """Close the thread without waiting for work in progress."""
        self._thread.close(0.0)

    def _handle_request(self, asked: AskState) -> None:
        open_ones: Sequence[str] = ()
        digests: Mapping[str, str] = {}
        halves: list[UnfinishedSave] = []
        later: list[UnfinishedSave] = []  # Second halves that continue once all ranks have finished this step.
        try:
            if asked.names is not None:
                folder = Path(asked.directory)
                open_ones, digests = find_open_files(folder), compute_digests(folder, asked.names)
            else:
                halves, self._pending = self._pending, []
                with self._device.use_side_stream():
                    while halves:
                        if halves[0].run_next_part():
                            later.append(halves[0])
                        del halves[0]
        except BaseException as error:
            self._report_failure(asked, error, halves[0].role.name if halves else None)
            for half in halves + later:
                half.discard_rest()
        else:
            self._pending += later
            self._send(SavedState(asked.token, bool(later), open_ones, digests, None), None)

    def _report_failure(self, asked: AskState, error: BaseException, role: str | None) -> None:
        failed_call, body = failure.describe_failure(error, self._codec, self._definitions, role, False)
        self._send(SavedState(asked.token, False, (), {}, failed_call), body)
