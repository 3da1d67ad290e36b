"""The recording of a group's role "a", and a judge: each rank's results occur once, as received by the driver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import attrs
from tests.chaos import model
from tests.chaos.records import Applied, PlayedGroup

import colocate
from colocate import Runtime
from colocate.errors import ColocateError

ROLE = "a"
FOLDER = "recording"
KEPT = "kept-"
"""The prefix of folders with recordings and profiles, which a killed driver may leave."""
SEEN = ("step", "look", "take", "add")  # methods that return a list of each rank's value
KNOWN = (*SEEN, "make", "fail")  # methods with the call's number as an argument


@attrs.define(eq=False)
class PlayedRecording:
    """A recorded group, and the folder of the recording."""

    played: PlayedGroup
    recorder: Any
    folder: str
    # the recorded calls of `KNOWN` methods by number and rank; and whether more calls may be missing
    found: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    hit: bool = False

    @classmethod
    def begin(cls, runtime: Runtime, played: PlayedGroup) -> PlayedRecording | None:
        """Record a group that has just been spawned; return None if the fault came before."""
        assert played.group is not None
        folder = tempfile.mkdtemp(prefix=KEPT)
        try:
            return cls(played, runtime.record([played.group.role(ROLE)], f"{folder}/{FOLDER}"), folder)
        except ColocateError:
            shutil.rmtree(folder)
            return None

    def judge(self, applied: Applied | None) -> None:
        """Add complaints about the recording to the group, which is closed."""
        self.recorder.close()
        # After a short grace on a busy machine a worker may be killed before the last calls are written.
        self.hit = applied is not None or self.played.generation > 0 or self.played.grace < model.AMPLE_S
        self.played.wrong += (f"recording: {words}" for words in self._complaints())

    def forget(self) -> None:
        """Delete the recording."""
        shutil.rmtree(self.folder)

    def _complaints(self) -> Iterator[str]:
        role = colocate.load_recording(f"{self.folder}/{FOLDER}")[ROLE]
        found = self.found
        for call in role.calls:
            if call.method not in KNOWN:
                continue
            for rank in call.ranks:
                ((_, shown),) = call.arguments(rank)["ident"]
                ident = int(shown)
                if (ident, rank) in found:
                    yield f"call {ident} is there twice of rank {rank}"
                found[ident, rank] = call
        for rank in range(self.played.slots):
            yield from self._of_rank(rank)

    def _of_rank(self, rank: int) -> Iterator[str]:
        lost = None
        for sent in self.played.sent:
            if not (sent.fine and sent.role == ROLE and sent.generation == 0 and sent.what in SEEN):
                continue
            if rank not in sent.ranks:
                continue
            call = self.found.get((sent.ident, rank))
            if call is None:
                lost = sent.ident
            elif lost is not None:
                yield f"call {sent.ident} of rank {rank} is there, and call {lost} before it isn't"
            elif (value := call.value(rank)) != sent.value[sent.ranks.index(rank)]:
                yield f"call {sent.ident} of rank {rank} gave {sent.value[sent.ranks.index(rank)]!r}, and has {value!r}"
        if lost is not None and not self.hit:
            yield f"call {lost} of rank {rank}, which nothing was done to, isn't there"
