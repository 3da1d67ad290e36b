"""A profile of a group and its judge: the file is whole or missing, and the fault explains an error."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from typing import Any

import attrs
from tests.chaos.machine import Deliberate
from tests.chaos.programs import Profiling
from tests.chaos.recorded import KEPT
from tests.chaos.records import PlayedGroup, short
from tests.chaos.steps import LONG_S, Steps

import colocate
from colocate.errors import ColocateError

BEGIN_S = LONG_S  # py-spy takes a while to begin on a busy machine
AT_ONCE_S = 1.0  # the time for the block's end after an error
LOST = "are others than when its profile began"
BUSY = "the machine is too busy"
"""The words of the error when py-spy lacks samples."""


@attrs.define(eq=False)
class PlayedProfile:
    """A running profile, with the group, the folder for the file, and the result."""

    played: PlayedGroup
    how: Profiling
    steps: Steps
    folder: str = attrs.field(factory=lambda: tempfile.mkdtemp(prefix=KEPT))
    over: bool = False
    _context: Any = None
    _profile: Any = None

    @classmethod
    def begin(cls, played: PlayedGroup, how: Profiling, steps: Steps) -> PlayedProfile:
        made = cls(played, how, steps)
        steps.now(played, "the beginning of a profile", BEGIN_S, made._begin)
        made.over = made._profile is None
        return made

    def _begin(self, group: colocate.ColocatedGroup) -> None:
        context = colocate.profile(group, roles=self.how.role, sampler=self.how.sampler)
        with contextlib.chdir(self.folder):
            self._profile = context.__enter__()
        self._context = context

    def end(self) -> None:
        """Leave the profile's block."""
        self.over = True
        self.steps.now(self.played, "the end of a profile", BEGIN_S, lambda group: self._end())

    def _end(self) -> None:
        try:
            self._context.__exit__(None, None, None)
        except ColocateError as error:
            self._profile = None
            words = short(error)
            if not ((LOST in words and self.played.restarts) or (BUSY in words and self.how.sampler == "py-spy")):
                raise

    def fail(self) -> None:
        """Leave the block with an error: the exit waits for no rank."""
        self.over, self._profile = True, None
        with self.steps.bound("the end of a profile by an error", AT_ONCE_S):
            self._context.__exit__(Deliberate, Deliberate(0, 0), None)

    def judge(self) -> None:
        """Add complaints about the profile to the group, which may be closed or running."""
        self.played.wrong += [f"profile: {words}" for words in self._complaints()]
        shutil.rmtree(self.folder)

    def _complaints(self) -> list[str]:
        left = sorted(os.listdir(self.folder))
        if self._profile is None:
            return [f"{each} is left" for each in left]
        if left != ["profile.json"]:
            return [f"it has left {left}"]
        with open(self._profile.trace, encoding="utf-8") as file:
            events = json.load(file)
        names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
        slots = self._profile.slots[self.played.name]
        missing = [slot for slot in slots if not any(name.startswith(f"slot {slot}: ") for name in names)]
        traced = [slot for slot in missing if (self.played.name, slot) not in self._profile.untraced]
        return [f"nothing of slot {slot} is in it, but {names}" for slot in traced]
