"""Rows keep the values from the moment when they were given, returned or yielded."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.rows.reading import OUT, RowsCase

import colocate
from colocate import Concat, First, Role, RoleSpec, Runtime, Scatter, method
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Shared, Spawn, needs
from colocate.testing.gate import Address, Gate, pass_gate_async
from colocate.testing.waiting import PATIENCE_S

_SIZE = 1024  # Elements of a row: enough for its memory to travel beside the pickle.


def sum_numbers(value: Any) -> float:
    """Sum a value's numbers."""
    if isinstance(value, dict):
        return sum(map(sum_numbers, value.values()))
    return float(sum(value)) if isinstance(value, (list, bytearray)) else float(value.sum())


class Buffering(Role):
    """A role that reuses its buffers."""

    def __init__(self) -> None:
        import numpy as np
        import torch

        self.turn = 0
        self.frames = torch.zeros(3, _SIZE)
        self.buffers: dict[str, Any] = {
            "array": np.zeros(_SIZE, np.float32),
            "view": self.frames[1],
            "ids": [0],
            "inside": {"array": np.zeros((2, 2), np.int64)},
        }

    def _fill(self, number: int) -> dict[str, Any]:
        self.buffers["array"][:] = number
        self.frames.fill_(number)
        self.buffers["ids"][0] = number
        self.buffers["inside"]["array"].fill(number)
        return self.buffers

    @method(rows="row", concurrency=2)
    async def add(self, row: Any, beside: Any, gate: Address, how: str = "") -> float:
        """Sum a row and the shared argument behind a gate; `how` names a fault."""
        await pass_gate_async(gate)
        if how == "raise" and self.ctx.rank == 0:
            raise ValueError(how)
        if how == "die" and self.ctx.generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return sum_numbers(row) + sum_numbers(beside)

    @method(dispatch=Scatter("batch"))
    def fill(self, batch: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield the same buffers for each row."""
        for index, number in enumerate(batch):
            yield index, self._fill(number)

    @method(dispatch=Scatter("batch"))
    async def fill_later(self, batch: list[int]) -> AsyncIterator[tuple[int, Any]]:
        """Yield the same buffers for each row."""
        for index, number in enumerate(batch):
            yield index, self._fill(number)

    @method(rows="row", concurrency=2)
    async def fill_row(self, row: int) -> Any:
        """Return the same buffers for each row."""
        return self._fill(row)

    @method(dispatch=Scatter("rows"), collect=Concat())
    def totals(self, rows: list[Any]) -> list[float]:
        """Sum each row."""
        return [*map(sum_numbers, rows)]

    @method(collect=First())
    def step(self) -> Any:
        """Return the same buffers each time."""
        self.turn += 1
        return self._fill(self.turn)


class Buffers(RowsCase):
    """Buffers that are reused."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_buffering(cls, runtime: Runtime) -> Iterator[Shared]:
        """Share two slots of a runtime that copies values, by `strict=True` if need be."""
        pytest.importorskip("torch")
        roles: dict[str, RoleSpec[Any]] = {"buffering": colocate.role(Buffering)}
        if runtime._node.services.executor.codec.name != "reference":
            yield Shared(runtime, roles, 2, "buffering")
            return
        with cls().connect(strict=True) as strict:
            yield Shared(strict, roles, 2, "buffering")

    @pytest.fixture
    def buffering(self, no_leaks: None, shared_buffering: Shared) -> Buffering:
        """Return the view of the role."""
        return shared_buffering.get().role("buffering", Buffering)

    @mark_executor_part
    @pytest.mark.parametrize("kind", ["array", "tensor", "mapping"])
    @pytest.mark.parametrize("how", ["", "raise"])
    def test_rows_are_taken_when_the_call_is_written(self, buffering: Buffering, kind: str, how: str) -> None:
        """Rows and shared arguments are taken at the call, though the caller overwrites both before the sending."""
        add = buffering.add.options(retry=1) if how else buffering.add
        for begin in (add.stream, add.submit):
            rows, overwrite = _make_rows(kind, 3 * OUT)
            with Gate() as gate:
                other, expected = _make_rows("array", 2)[0], _expected_sums(rows, kind)
                call: Any = begin(rows, other, gate.address, how)
                gate.wait_for(4)
                overwrite()
                other[:] = -1
                gate.open()
                values = call.result(PATIENCE_S) if begin == add.submit else [value for _, value in sorted(call)]
            assert values == expected

    @needs(OwnProcess)
    def test_rows_after_a_restart(self, spawn: Spawn) -> None:
        """A restarted group's workers get the original rows and shared argument, which the caller overwrote."""
        pytest.importorskip("torch")
        buffering = spawn({"buffering": colocate.role(Buffering)}, on_failure="restart").role("buffering", Buffering)
        rows, overwrite = _make_rows("array", 3 * OUT)
        with Gate() as gate:
            other, expected = _make_rows("array", 2)[0], _expected_sums(rows, "array")
            stream = buffering.add.options(retry=1).stream(rows, other, gate.address, "die")
            gate.wait_for(4)
            overwrite()
            other[:] = -1
            gate.open()
            assert [value for _, value in sorted(stream)] == expected

    @mark_executor_part
    def test_values_of_one_buffer(self, buffering: Buffering) -> None:
        """Each row and each call keeps its own values, though the role returns the same buffers."""
        batch = [*range(12)]
        sizes = sum_numbers({"array": [1] * _SIZE, "view": [1] * _SIZE, "ids": [1], "inside": [1] * 4})
        expected = [sizes * number for number in batch]
        for fill in (buffering.fill, buffering.fill_later, buffering.fill_row):
            assert [*map(sum_numbers, fill(batch))] == expected
            assert [*map(sum_numbers, fill.submit(batch).result(PATIENCE_S))] == expected
            assert [sum_numbers(value) for _, value in sorted(fill.stream(batch), key=_index_row)] == expected
        for resident in (buffering.fill.keep(batch), buffering.fill_later.keep(batch)):
            assert buffering.totals(resident.ref) == expected
            assert [*map(sum_numbers, resident.fetch())] == expected
        calls = [buffering.step.submit() for _ in range(6)]
        calls[-1].result(PATIENCE_S)
        totals = [sum_numbers(call.result(PATIENCE_S)) for call in calls]
        assert [after - before for before, after in itertools.pairwise(totals)] == [sizes] * 5


def _index_row(row: tuple[int, Any]) -> int:
    return row[0]


def _make_rows(kind: str, count: int) -> tuple[Any, Callable[[], object]]:
    """Return rows, and a function that overwrites their memory."""
    import numpy as np
    import torch

    array = np.arange(count * _SIZE, dtype=np.float64).reshape(count, _SIZE) % 97
    tensor = torch.from_numpy(array.copy())
    rows: dict[str, Any] = {"array": array, "tensor": tensor, "mapping": {"array": array, "tensor": tensor}}

    def overwrite() -> None:
        array[:] = -1
        tensor.fill_(-1)

    return rows[kind], overwrite


def _expected_sums(rows: Any, kind: str) -> list[float]:
    arrays = rows.values() if kind == "mapping" else [rows]
    total_beside = sum_numbers(_make_rows("array", 2)[0])
    return [sum(map(sum_numbers, parts)) + total_beside for parts in zip(*arrays, strict=True)]
