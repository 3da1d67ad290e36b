"""What a rank asks others for to make up the arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest

from colocate import First, Gather
from colocate._protocol.taken import Taken
from colocate._protocol.uses import Origin, Part, Peers, Resolver, Source
from colocate._values.collect import Collect
from colocate._values.mesh import Ranks


class Elsewhere(Peers):
    """Everybody has the same value."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.asked: list[int] = []

    @property
    def address(self) -> str | None:
        return None

    def part(self, source: Source, rank: int, taken: list[Taken] | None) -> Any:
        self.asked.append(rank)
        return self.value

    def rows(self, source: Source, rank: int) -> int:
        raise NotImplementedError

    def weight(self, source: Source, rank: int) -> int | None:
        return None

    def slice(self, source: Source, rank: int, start: int, stop: int, taken: list[Taken] | None) -> Any:
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("collect", "ranks"), [(First(), [0]), (Gather(), [0, 1, 2])])
def test_rows_of_a_value_that_is_not_joined_of_rows(collect: Collect[Any], ranks: list[int], padding: bool) -> None:
    """It is put together once to be counted and cut, for all parameters."""
    peers = Elsewhere([10, 11, 12])
    source = Source(7, Origin("group", range(3), Ranks(3), collect, "role.make"))
    part = Part(source, 1, 3, padding, None)
    resolver = Resolver(peers, "other", 0, lambda key, others: [])
    found = resolver.resolve({"x": part, "y": part})
    whole = [10, 11, 12] if ranks == [0] else [[10, 11, 12]] * 3
    assert found == {"x": whole[1:2], "y": whole[1:2]}
    assert peers.asked == ranks
    assert resolver.valid == 1
