"""An engine of the user's own."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import colocate
from colocate_rollout import Engine, Finish, Prompt, Row, Sampling
from colocate_rollout.role import EngineRole


class Dice:
    def __init__(self, ctx: colocate.Context, sides: int = 6) -> None:
        self.sides, self.version = sides, 0

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        for prompt in prompts:
            for sample, seed in enumerate(prompt.seeds):
                draw, ids = random.Random(seed), list[int]()
                finish: Finish = "length"
                while finish == "length" and len(ids) < sampling.max_tokens:
                    if stop():
                        finish = "aborted"
                        break
                    ids.append(draw.randrange(self.sides))
                    if ids[-1] in (sampling.stop_token_ids or ()):
                        finish = "stop"
                yield Row(prompt.index, sample, tuple(ids), (0.0,) * len(ids), finish, ((self.version, len(ids)),))
                yield Row(prompt.index, sample, (), (), "ended", ())  # E: no such reason

    def update(self, weights: colocate.Weights, version: int) -> None:
        self.version = version

    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def managed(self) -> Mapping[str, int]:
        return {}

    def abort(self) -> None: ...
    def close(self) -> None: ...


def used(ctx: colocate.Context) -> None:
    engine: Engine = Dice(ctx)
    other: Engine = object()  # E: an object is no engine
    for each in (engine, other):
        each.wake(())
    colocate.role(EngineRole, Dice, sides=2)
