"""Roles on rows that stay together or have costs."""

from __future__ import annotations

from typing import Any

from colocate import Concat, Gather, Role, Scatter, method


class Sets(Role):
    """A role whose rows stay together in sets of four, as the samples of a prompt."""

    @method(dispatch=Scatter("prompts"), collect=Concat())
    def sample(self, prompts: list[int], times: int = 4) -> list[int]:
        return [prompt for prompt in prompts for _ in range(times)]

    @method(dispatch=Scatter("samples", "scores", rows_of=4))
    def seen(
        self, samples: list[int], scores: list[int] | None = None
    ) -> tuple[list[int], list[int] | None, int | None]:
        return samples, scores, self.ctx.valid_rows


class Costs(Role):
    """A role whose rows have costs, such as an answer's number of tokens."""

    @method(dispatch=Scatter("batch", balance="tokens"), collect=Concat())
    def same(self, batch: Any, tokens: Any = None) -> Any:
        return batch

    @method(dispatch=Scatter("batch", balance="tokens"), collect=Gather())
    def seen(self, batch: Any, tokens: Any = None) -> Any:
        return batch, tokens

    @method(dispatch=Scatter("batch"), collect=Gather())
    def lies(self, batch: Any, beside: Any = None) -> Any:
        """Return each rank's part of the rows, without balancing."""
        return batch, beside

    @method(dispatch=Scatter("batch", "beside"), collect=Concat())
    def zipped(self, batch: list[Any], beside: list[Any]) -> list[tuple[Any, Any]]:
        return list(zip(batch, beside, strict=True))

    @method(dispatch=Scatter("batch", rows_of=2), collect=Gather())
    def sets(self, batch: list[Any]) -> list[Any]:
        return batch

    @method(dispatch=Scatter("batch", balance="tokens", rows_of=2), collect=Gather())
    def balanced_sets(self, batch: list[Any], tokens: list[Any]) -> list[Any]:
        return batch

    @method(dispatch=Scatter("batch"), collect=Concat())
    def twice(self, batch: list[Any]) -> list[Any]:
        """Return two rows for each row."""
        return batch * 2

    @method(dispatch=Scatter("batch", "tokens"), collect=Concat())
    def tokens(self, batch: list[Any], tokens: list[Any]) -> list[Any]:
        return tokens
