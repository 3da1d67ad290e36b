"""What is recorded of a group's role "a", as it is judged: what each rank gave, once, as the driver has got it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import attrs
from tests.chaos.records import Applied, Played

import colocate
from colocate import Runtime
from colocate.errors import ColocateError

ROLE = "a"
SEEN = ("step", "look", "take", "add")  # methods of which the driver gets what each rank gave, in a list


@attrs.frozen
class Recorded:
    """A group that is recorded, and where."""

    played: Played
    recorder: Any
    folder: str

    @classmethod
    def begin(cls, runtime: Runtime, played: Played) -> Recorded | None:
        """Record a group that has just been spawned; None where the fault came before."""
        assert played.group is not None
        folder = tempfile.mkdtemp()
        try:
            return cls(played, runtime.record([played.group.role(ROLE)], f"{folder}/recording"), folder)
        except ColocateError:
            shutil.rmtree(folder)
            return None

    def judge(self, applied: Applied | None) -> None:
        """Note what isn't as the laws want it. The group is closed."""
        self.recorder.close()
        self.played.wrong += (f"recording: {words}" for words in self._complaints(applied))
        shutil.rmtree(self.folder)

    def _complaints(self, applied: Applied | None) -> Iterator[str]:
        role = colocate.load_recording(f"{self.folder}/recording")[ROLE]
        found: dict[tuple[int, int], Any] = {}
        for call in role.calls:
            if call.method not in SEEN:
                continue
            for rank in call.ranks:
                ((_, shown),) = call.arguments(rank)["ident"]
                ident = int(shown)
                if (ident, rank) in found:
                    yield f"call {ident} is there twice of rank {rank}"
                found[ident, rank] = call
        for rank in range(self.played.slots):
            yield from self._of_rank(rank, found, applied)

    def _of_rank(self, rank: int, found: dict[tuple[int, int], Any], applied: Applied | None) -> Iterator[str]:
        lost = None
        for sent in self.played.sent:
            if not (sent.fine and sent.role == ROLE and sent.generation == 0 and sent.what in SEEN):
                continue
            if rank not in sent.ranks:
                continue
            call = found.get((sent.ident, rank))
            if call is None:
                lost = sent.ident
            elif lost is not None:
                yield f"call {sent.ident} of rank {rank} is there, and call {lost} before it isn't"
            elif (value := call.value(rank)) != sent.value[sent.ranks.index(rank)]:
                yield f"call {sent.ident} of rank {rank} gave {sent.value[sent.ranks.index(rank)]!r}, and has {value!r}"
        if lost is not None and applied is None and self.played.generation == 0:
            yield f"call {lost} of rank {rank}, which nothing was done to, isn't there"
