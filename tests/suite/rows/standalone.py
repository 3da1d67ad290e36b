"""Rows of a role object outside any worker, without an executor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.suite.rows.buffers import Buffering, sum_numbers

import colocate
from colocate import Role, Scatter, method
from colocate.errors import ConfigError, DispatchError, SerializationError
from colocate.testing.executors._base import ExecutorCase, needs_feature


class Playing(Role):
    """A role with methods whose rows end one by one."""

    def __init__(self) -> None:
        self.highest_count = self.running_count = 0

    @method(rows="row", concurrency=2)
    async def play(self, row: int, factor: int = 1) -> int:
        """Return a row's product, or raise for a negative row."""
        self.running_count += 1
        self.highest_count = max(self.highest_count, self.running_count)
        await asyncio.sleep(0.002 if row == 0 else 0)
        self.running_count -= 1
        if row < 0:
            raise ValueError(row)
        assert self.ctx.row is not None
        return row * factor + self.ctx.row

    @method(dispatch=Scatter("rows"))
    def double(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the last row first."""
        for index in reversed(range(len(rows))):
            yield index, 2 * rows[index]

    @method(dispatch=Scatter("rows"))
    async def later(self, rows: list[int]) -> AsyncIterator[tuple[int, int]]:
        """Yield all rows but the last."""
        for index in range(len(rows) - 1):
            await asyncio.sleep(0)
            yield index, rows[index]

    @method
    def plain(self) -> int:
        """Return at once."""
        return 1


class StandaloneRows(ExecutorCase):
    """Rows that end one by one outside any worker."""

    @needs_feature("standalone")
    def test_rows_that_end_one_by_one(self) -> None:
        """Outside a worker rows run with the method's concurrency, and streams yield rows as they ended."""
        playing = Playing()
        assert playing.play([0, 1, 2, 3], factor=10) == [0, 11, 22, 33]
        assert playing.highest_count == 2
        assert playing.play.submit([4]).result() == [4]
        assert [index for index, _ in playing.play.stream([0, 1, 2, 3])] == [1, 2, 3, 0]
        assert playing.double([1, 2]) == [2, 4]
        assert list(playing.double.stream([1, 2])) == [(1, 4), (0, 2)]

        async def main() -> list[tuple[int, int]]:
            return [row async for row in playing.double.stream([1, 2])]

        assert asyncio.run(main()) == [(1, 4), (0, 2)]
        with playing.play.stream([1, 2]) as stream:
            next(stream)
        with pytest.raises(colocate.ClosedError, match=r"the stream of Playing.play was closed, and is read"):
            next(stream)
        with playing.play.stream([1, 2]) as stream:
            assert len(list(stream)) == 2
        assert list(stream) == []
        assert playing.play(range(3)) == playing.play([0, 1, 2])

    @needs_feature("standalone")
    def test_rows_with_errors(self) -> None:
        """Outside a worker a row's error is raised as is or returned as the value, and misuse is refused."""
        playing = Playing()
        with pytest.raises(ValueError, match="-1"):
            playing.play([1, -1, 2])
        values = playing.play.options(on_error="return", retry=1)([1, -1, 2])
        assert [values[0], values[2]] == [1, 4]
        assert isinstance(values[1], ValueError)
        with pytest.raises(DispatchError, match="has yielded nothing for 2"):
            playing.later([1, 2, 3])
        with pytest.raises(ConfigError, match="on_error='never'"):
            playing.play.options(on_error="never")  # type: ignore[call-overload]
        with pytest.raises(DispatchError, match=r"Playing.play.keep\(...\): the driver gives out its rows"):
            playing.play.keep([1])
        with pytest.raises(AttributeError, match=r"Playing.plain has no stream: its value comes at once"):
            playing.plain.stream()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    @needs_feature("standalone")
    def test_rows_of_one_buffer(self) -> None:
        """Outside a worker each row keeps its own values, though the role reuses its buffers."""
        pytest.importorskip("torch")
        batch, buffering = [*range(6)], Buffering()
        one = sum_numbers(buffering.fill([1])[0])
        for fill in (buffering.fill, buffering.fill_later, buffering.fill_row):
            for values in (fill(batch), fill.submit(batch).result(), dict(fill.stream(batch)).values()):
                assert [*map(sum_numbers, values)] == [one * number for number in batch]
        assert [*map(sum_numbers, buffering.fill.keep(batch).fetch())] == [one * number for number in batch]

        class Odd(Role):
            @method(dispatch=Scatter("rows"))
            def locks(self, rows: list[int]) -> Iterator[tuple[int, object]]:
                for index in range(len(rows)):
                    yield index, threading.Lock()

        with pytest.raises(SerializationError, match=r"locks, row 0: its value can't be copied \("):
            Odd().locks([1])

    @needs_feature("standalone")
    def test_rows_draw_by_themselves(self) -> None:
        """Rows draw the same numbers whatever runs beside, and other numbers in the next call."""
        torch = pytest.importorskip("torch")

        class Drawing(Role):
            @method(rows="row", concurrency=3)
            async def draw(self, row: int) -> float:
                await asyncio.sleep(0.001 * (row % 2))
                return float(torch.rand((), generator=self.ctx.generator))

        drawing = Drawing()
        first, second = drawing.draw([1, 2, 3, 4]), drawing.draw([1, 2, 3, 4])
        assert len({*first, *second}) == 8
        assert Drawing().draw([2, 2, 2, 2]) == first
