"""What is recorded of a group's role "a", as it is judged: what each rank gave, once, as the driver has got it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import attrs
from tests.chaos import model
from tests.chaos.records import Applied, ReplaySource

import colocate
from colocate import Runtime
from colocate.errors import ColocateError

ROLE = "a"
FOLDER = "recording"
KEPT = "kept-"
"""How folders begin that a driver which is killed leaves, as it should: they have what it has recorded, or profiled."""
SEEN = ("step", "look", "take", "add")  # methods of which the driver gets what each rank gave, in a list
KNOWN = (*SEEN, "make", "fail")  # those of which each call has its number as an argument


@attrs.define(eq=False)
class RecordingOrder:
    """A group that is recorded, and where."""

    played: ReplaySource
    recorder: Any
    folder: str
    # what is there of calls of these methods, by their numbers and ranks; and whether more may be missing
    found: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    hit: bool = False

    @classmethod
    def begin(cls, runtime: Runtime, played: ReplaySource) -> RecordingOrder | None:
        """Record a group that has just been spawned; None where the fault came before."""
        assert played.group is not None
        folder = tempfile.mkdtemp(prefix=KEPT)
        try:
            return cls(played, runtime.record([played.group.role(ROLE)], f"{folder}/{FOLDER}"), folder)
        except ColocateError:
            shutil.rmtree(folder)
            return None

    def judge(self, applied: Applied | None) -> None:
        """Note what isn't as the laws want it. The group is closed."""
        self.recorder.close()
        # By a short grace a worker may be killed, on a busy machine, before it has written its last calls.
        self.hit = applied is not None or self.played.generation > 0 or self.played.grace < model.AMPLE_S
        self.played.wrong += (f"recording: {words}" for words in self._complaints())

    def forget(self) -> None:
        """Remove it."""
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
