"""`Checkpoints`: those of a run, each complete or not there, also where a job goes on while its groups write."""

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
from colocate.texts import error_text
from colocate_run.folder import RunFolder


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: The run's.
        groups: Returns what is known of all groups' checkpoints.
        written: Is told of each that is complete: its step, and where it lies.
        bring: Brings one to where it is kept besides, by its step; None for nowhere.

    Attributes:
        times: When the states that they have were taken, of those that are complete.
        answers: The last notice that one answers: of the last that is complete, or that is under way.
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
        self._taken = 0.0
        self._under_way: tuple[int, Future[None]] | None = None
        self._process = os.getpid()

    @contextlib.contextmanager
    def write(self, step: int, answers: int) -> Iterator[Path]:
        """A folder to write the checkpoint of a step into. It counts when the block ends well.

        What groups have begun to write in it is waited for on a thread, before it counts, and so is its way to where it
        is kept besides.

        Args:
            step: The step.
            answers: The last notice that there was before it.
        """
        whole = self._whole(step)
        directory = whole.__enter__()
        try:
            yield directory
        except BaseException as error:
            for each in self._begun_in(directory):
                each.wait()
                each.is_void = True
            whole.__exit__(type(error), error, error.__traceback__)
            raise
        self._taken = time.time()
        if not (begun := self._begun_in(directory)):
            whole.__exit__(None, None, None)
            if self._bring is None:
                self.answers = answers
                self._written(step, self._folder.of(step))
                return
        over: Future[None] = Future()
        self._under_way = step, over
        before, self.answers = self.answers, answers
        go_on = partial(self._go_on, step, whole, begun, over, before)
        try:
            Thread(target=go_on, name=f"colocate-checkpoint-{step}").start()
        except RuntimeError:  # no thread is to be had
            go_on()

    def _go_on(
        self, step: int, whole: AbstractContextManager[Path], begun: list[Saving], over: Future[None], before: int
    ) -> None:
        """Complete a checkpoint: when groups have written what they have begun, and where it is kept besides."""
        try:
            if begun:
                try:
                    for each in begun:
                        each.result()
                except BaseException as error:
                    whole.__exit__(type(error), error, error.__traceback__)
                    raise
                whole.__exit__(None, None, None)
            if self._bring is not None:
                self._bring(step)
            self._written(step, self._folder.of(step))
        except BaseException as error:
            self.answers = before
            over.set_exception(error)
        else:
            over.set_result(None)

    def settle(self) -> None:
        """Wait for the one that is under way, if one is; not in a forked child, where nobody completes it.

        Raises:
            BaseException: It has failed, by this; nobody else is told.
        """
        if self._under_way is not None and self._process == os.getpid():
            _, over = self._under_way
            try:
                over.result()
            finally:
                if over.done():
                    self._under_way = None

    def settle_quietly(self, say: Callable[[str], object]) -> None:
        """Wait for it, and only say what it has failed of: there is something else to be told."""
        step = None if self._under_way is None else self._under_way[0]
        try:
            self.settle()
        except Exception as error:
            say(f"the checkpoint of step {step} isn't there: {error_text(error).partition(chr(10))[0]}")

    @contextlib.contextmanager
    def _whole(self, step: int) -> Iterator[Path]:
        before = {each: each.checkpoint for each in self._groups()}
        directory: Path | None = None
        try:
            with self._folder.checkpoint(step) as directory:
                yield directory
        except BaseException:
            if directory is not None:
                for each in self._groups():
                    each.lost(directory, before.get(each))
            raise
        self.times.append(self._taken)
        for each in self._groups():
            each.moved(directory, self._folder.of(step))
            each.progressed()

    def _begun_in(self, directory: Path) -> list[Saving]:
        """Return what groups write there, or have failed to, and nobody was told."""
        begun = [each.saving for each in self._groups()]
        return [each for each in begun if each is not None and each.is_open and each.folder.is_relative_to(directory)]
