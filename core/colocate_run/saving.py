"""Write a run's checkpoints atomically, even if groups write in the background."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from colocate.driver import CheckpointsOfGroup, Saving, Thread
from colocate.texts import format_error
from colocate_run.folder import RunFolder


class Checkpoints:
    """The writer of a run's checkpoints.

    Args:
        folder: The run's folder.
        groups: Returns the checkpoint state of all groups.
        written: Called with the step and path of each complete checkpoint.
        bring: Copies the checkpoint of a step to the store; None without a store.

    Attributes:
        times: Times of the saved states, one per complete checkpoint.
        answers: The number of the last notice that a complete or unfinished checkpoint answers.
    """

    def __init__(
        self,
        folder: RunFolder,
        groups: Callable[[], list[CheckpointsOfGroup]],
        written: Callable[[int, Path], object],
        bring: Callable[[int], object] | None,
    ) -> None:
        self._folder, self._groups, self._written, self._bring = folder, groups, written, bring
        self.times: list[float] = []
        self.answers = 0
        self._last_seconds = 0.0
        self._under_way: tuple[int, Future[None]] | None = None
        self._process = os.getpid()

    @contextlib.contextmanager
    def open_checkpoint(self, step: int, answers: int) -> Iterator[Path]:
        """A context manager that yields a folder for a step's checkpoint, which is complete if the block doesn't raise.

        If groups write in the background, or a store gets a copy, a thread completes the checkpoint.

        Args:
            step: The step.
            answers: The number of notices before the block.
        """
        whole = self._complete_or_remove(step)
        directory = whole.__enter__()
        try:
            yield directory
        except BaseException as error:
            for saving in self._savings_in(directory):
                saving.wait()
                saving.is_void = True
            whole.__exit__(type(error), error, error.__traceback__)
            raise
        self._last_seconds = time.time()
        if not (begun := self._savings_in(directory)):
            whole.__exit__(None, None, None)
            if self._bring is None:
                self.answers = answers
                self._written(step, self._folder.find_checkpoint(step))
                return
        over: Future[None] = Future()
        self._under_way = step, over
        before, self.answers = self.answers, answers
        go_on = partial(self._complete_in_background, step, whole, begun, over, before)
        try:
            Thread(target=go_on, name=f"colocate-checkpoint-{step}").start()
        except RuntimeError:  # If no new thread can start, complete the checkpoint here.
            go_on()

    def _complete_in_background(
        self, step: int, whole: AbstractContextManager[Path], begun: list[Saving], over: Future[None], before: int
    ) -> None:
        """Complete a checkpoint on a thread: wait for the groups' writes, then copy the folder to the store."""
        try:
            if begun:
                try:
                    for saving in begun:
                        saving.result()
                except BaseException as error:
                    whole.__exit__(type(error), error, error.__traceback__)
                    raise
                whole.__exit__(None, None, None)
            if self._bring is not None:
                self._bring(step)
            self._written(step, self._folder.find_checkpoint(step))
        except BaseException as error:
            self.answers = before
            over.set_exception(error)
        else:
            over.set_result(None)

    def wait_pending(self) -> None:
        """Wait for the unfinished checkpoint, if any. A forked child doesn't wait, because it lacks the thread.

        Raises:
            BaseException: The error of the checkpoint, which is reported only here.
        """
        if self._under_way is not None and self._process == os.getpid():
            _, over = self._under_way
            try:
                over.result()
            finally:
                if over.done():
                    self._under_way = None

    def wait_pending_quietly(self, say: Callable[[str], object]) -> None:
        """Wait for the unfinished checkpoint, and print a failure instead of raising an error."""
        step = None if self._under_way is None else self._under_way[0]
        try:
            self.wait_pending()
        except Exception as error:
            say(f"the checkpoint of step {step} isn't there: {format_error(error).partition(chr(10))[0]}")

    @contextlib.contextmanager
    def _complete_or_remove(self, step: int) -> Iterator[Path]:
        before = {group: group.checkpoint for group in self._groups()}
        directory: Path | None = None
        try:
            with self._folder.write_checkpoint(step) as directory:
                yield directory
        except BaseException:
            if directory is not None:
                for group in self._groups():
                    group.on_folder_lost(directory, before.get(group))
            raise
        self.times.append(self._last_seconds)
        for group in self._groups():
            group.on_folder_moved(directory, self._folder.find_checkpoint(step))
            group.on_progress()

    def _savings_in(self, directory: Path) -> list[Saving]:
        """Return the groups' background writes into a folder that are still running, or have an unreported failure."""
        begun = [item.saving for item in self._groups()]
        return [item for item in begun if item is not None and item.is_open and item.folder.is_relative_to(directory)]
