import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import colocate
from colocate_rollout import Prompt, Row, Sampling
from colocate_rollout.contract import Finish
from colocate_rollout.models import check_prompts


class Dice:
    """Throws dice, whatever the prompt."""

    def __init__(self, ctx: colocate.Context, sides: int = 6) -> None:
        """Take dice.

        Args:
            ctx: The role's context.
            sides: Of each.
        """
        self.sides, self.version = sides, 0

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        check_prompts(prompts, vocabulary=100)
        stops = sampling.stop_token_ids or ()
        left = max(1, min(sampling.top_k or self.sides, math.ceil(sampling.top_p * self.sides)))
        for prompt in prompts:
            for sample, seed in enumerate(prompt.seeds):
                draw, ids = random.Random(seed), list[int]()
                finish: Finish = "length"
                while finish == "length" and len(ids) < sampling.max_tokens:
                    if stop():
                        finish = "aborted"
                        break
                    ids.append(draw.randrange(left) if sampling.temperature else 0)
                    if ids[-1] in stops:
                        finish = "stop"
                log_probs = (-math.log(left),) * len(ids)
                yield Row(prompt.index, sample, tuple(ids), log_probs, finish, ((self.version, len(ids)),))

    def update(self, weights: colocate.Weights, version: int) -> None:
        self.sides, self.version = next(int(tensor) for _, tensor in weights), version

    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def managed(self) -> Mapping[str, int]:
        return {}

    def abort(self) -> None: ...
    def close(self) -> None: ...


@colocate.hookimpl
def colocate_engine() -> type[Dice]:
    return Dice
