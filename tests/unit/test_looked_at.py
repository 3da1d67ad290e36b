"""Who looks at a worker amid a sync of weights keeps what the target had for a moment, and the sync isn't refused."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

import colocate
from colocate import Role, Weights, method

torch = pytest.importorskip("torch")


class Gives(Role):
    def __init__(self) -> None:
        self.weight = torch.ones(8)

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        yield "weight", self.weight

    @method
    def nothing(self) -> None: ...


class IsLookedAt(Role):
    """While it takes weights, a thread takes the frames of its lane, as for the stacks of a late call."""

    def __init__(self) -> None:
        self.weight = torch.zeros(8)

    def load_weights(self, weights: Weights, version: int) -> None:
        given = dict(weights)
        self.weight.copy_(given["weight"])
        has_looked = threading.Event()
        threading.Thread(target=_look, args=(threading.get_ident(), has_looked)).start()
        has_looked.wait()

    @method
    def sum(self) -> float:
        return float(self.weight.sum())


def _names(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_qualname
        frame = frame.f_back


def _look(lane: int, has_looked: threading.Event) -> None:
    from colocate.worker.serving.failure import LOOKING

    with LOOKING:
        frames = [frame := sys._current_frames()[lane]]
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            frames.append(frame)
        has_looked.set()
        # Until the lane waits for that, or has gone on without.
        while "WeightsOfWorker._run" in (names := {*_names(sys._current_frames().get(lane))}):
            if "WeightsOfWorker._has_kept" in names:
                break
            time.sleep(0.001)
        del frames, frame


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"processes": True}], ids=str)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_sync_while_stacks_are_taken(options: dict[str, Any], elsewhere: bool) -> None:
    with colocate.connect("local", **options) as runtime, runtime.reserve(slots=1 + elsewhere) as pool:
        gives, taker = colocate.role(Gives), colocate.role(IsLookedAt)
        if elsewhere:
            source = pool[:1].spawn({"gives": gives}).role("gives", Gives)
            target = pool[1:].spawn({"taker": taker}).role("taker", IsLookedAt)
        else:
            group = pool.spawn({"gives": gives, "taker": taker})
            source, target = group.role("gives", Gives), group.role("taker", IsLookedAt)
        assert colocate.sync_weights(source, target).version == 1
        assert target.sum() == [8.0]
