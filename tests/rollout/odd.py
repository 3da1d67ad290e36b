"""An engine that misbehaves, whose processes import no torch: that would take a second each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import colocate
from colocate_rollout import Row, Sampling

FINE, EXITS, HANGS, RAISES = range(4)


class Odd:
    """An engine that exits, hangs or raises in its process, as a prompt's first token says."""

    def __init__(self, ctx: colocate.Context, refuses: bool = False) -> None:
        self.ctx, self.weights = ctx, 0
        if refuses:
            raise OddError(ctx, "made")

    def rows(self, prompts: Sequence[Any], sampling: Sampling, stop: Any) -> Iterator[Row]:
        for prompt in prompts:
            what = prompt.token_ids[0]
            if what == EXITS:
                print("it has had enough", flush=True)
                os._exit(3)
            if what == HANGS:
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == RAISES:
                raise OddError(self.ctx, "asked for it")
            ids = (os.getpid(), os.getppid(), len(os.environ.get("OF_THE_ENGINE", "")), self.weights)
            stop()
            yield Row(prompt.index, 0, ids, (0.0,) * len(ids), "length", ((0, len(ids)),))

    def update(self, weights: colocate.Weights, version: int) -> None:
        self.weights = sum(1 for _ in weights)

    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def managed(self) -> dict[str, int]:
        return {}

    def abort(self) -> None: ...
    def close(self) -> None: ...


class OddError(Exception):
    """An error that can't be rebuilt in another process."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(f"{two} by {type(one).__name__}")
