"""What observers are told of values on their way: between workers, and between them and the driver."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from colocate import CallRecord, ColocatedGroup, FetchRecord, MoveRecord, Runtime, TransferRecord, role
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.probes.sleepers import Dozing
from colocate.testing.probes.tensors import Tensors

_ROWS = 1 << 16
_BYTES = 4 * _ROWS
_MORE = 4096
"""A value's bytes are those of its tensors, and so many more at most."""


@attrs.define(eq=False)
class _Told:
    """An observer that keeps what it is told."""

    runtime: Runtime
    calls: list[CallRecord] = attrs.field(factory=list)
    fetches: list[FetchRecord] = attrs.field(factory=list)
    moves: list[MoveRecord] = attrs.field(factory=list)

    def colocate_call_finished(self, record: CallRecord) -> None:
        """A call has ended."""
        self.calls.append(record)

    def colocate_result_fetched(self, record: FetchRecord) -> None:
        """A kept result has been fetched."""
        self.fetches.append(record)

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        """A role sleeps, or is awake."""
        self.moves.append(record)

    def settle(self) -> None:
        """Wait until what has ended has been told."""
        self.runtime._node.services.settle()

    def last(self, method: str) -> CallRecord:
        """The call of a method that ended last: who has made a value may say so after who has used it."""
        self.settle()
        return next(each for each in reversed(self.calls) if each.method == method)

    def transfers(self, method: str) -> list[TransferRecord]:
        """What that call got from other workers, by rank; none between threads."""
        record = self.last(method)
        spans = {rank: (start, end) for rank, start, end in record.spans}
        for each in record.transfers:
            start, end = spans[each.rank]
            assert start <= each.start <= each.end <= end
        return sorted(record.transfers, key=lambda each: each.rank)


class Transfers(ExecutorCase):
    """Who is told which bytes. Between threads nothing has to travel, so nothing is told."""

    @pytest.fixture
    def told(self, runtime: Runtime) -> Iterator[_Told]:
        """An observer, as long as the test takes."""
        pytest.importorskip("torch")
        told = _Told(runtime)
        runtime.observe(told)
        yield told
        runtime._node.services.observers.remove(told)

    @pytest.fixture
    def travels(self, runtime: Runtime) -> bool:
        """Whether values have to."""
        return not runtime._node.services.executor.in_process

    def test_from_another_worker(self, pair: ColocatedGroup, told: _Told, travels: bool) -> None:
        """The rank that lacks a value gets it from the worker that made it; the other one has it by reference."""
        kept = pair.role("left_tensors", Tensors).make.keep(_ROWS)
        pair.role("tensors", Tensors).whole(kept.ref)
        assert [(each.rank, each.role, each.method, each.source) for each in told.transfers("whole")] == (
            [(1, "left_tensors", "make", 0)] if travels else []
        )
        assert all(_BYTES <= each.nbytes <= _BYTES + _MORE for each in told.last("whole").transfers)
        assert told.last("whole").handed_over == {"left_tensors": _BYTES}

    def test_where_it_lies(self, pair: ColocatedGroup, told: _Told) -> None:
        """Parts that lie where they are used go nowhere; what a role has made itself is nobody else's."""
        tensors = pair.role("tensors", Tensors)
        kept = tensors.make.keep(_ROWS)
        tensors.add.keep(kept.ref).wait()
        assert (told.transfers("add"), told.last("add").handed_over) == ([], {})
        more = pair.role("left_tensors", Tensors).make.keep(_ROWS)
        pair.role("left_tensors", Tensors).echo([more.ref, more.ref])
        assert (told.transfers("echo"), told.last("echo").handed_over) == ([], {})

    def test_from_and_to_the_driver(self, pair: ColocatedGroup, told: _Told, travels: bool) -> None:
        """The bytes of arguments and results, for all ranks; those of a kept result when it is fetched."""
        import torch

        tensors = pair.role("tensors", Tensors)
        tensors.echo(torch.ones(_ROWS))
        record = told.last("echo")
        if travels:
            assert 2 * _BYTES <= record.sent <= 2 * (_BYTES + _MORE)
            assert 2 * _BYTES <= record.received <= 2 * (_BYTES + _MORE)
        else:
            assert (record.sent, record.received) == (0, 0)
        kept = tensors.make.keep(_ROWS)
        kept.wait()
        assert told.last("make").received == 0
        assert told.last("make").sent < _MORE
        assert told.fetches == []
        kept.fetch()
        told.settle()
        assert [(each.role, each.method, each.ranks) for each in told.fetches] == (
            [("tensors", "make", (0, 1))] if travels else []
        )
        assert all(2 * _BYTES <= each.nbytes <= 2 * (_BYTES + _MORE) for each in told.fetches)
        assert all(each.start <= each.end for each in told.fetches)

    def test_sleeps_are_told(self, spawn: Spawn, told: _Told) -> None:
        """Those that somebody asks for, too, and the wakes by a call; and whether it is all of the role."""
        group = spawn({"one": role(Dozing, 1)})
        one = group.role("one", Dozing)

        def moves(nbytes: int, why: str = "asked for") -> list[tuple[int, str, bool]]:
            told.settle()
            found, told.moves = told.moves, []
            assert all(each.role == "one" and each.start <= each.end for each in found)
            assert all(each.why == why for each in found)
            assert sum(each.nbytes for each in found) == nbytes
            return sorted((each.rank, each.kind, each.asleep) for each in found)

        weights = group.sleep("one", ["weights"])
        assert moves(weights) == [(rank, "sleep", False) for rank in (0, 1)]
        rest = group.sleep("one")
        assert moves(rest) == [(rank, "sleep", True) for rank in (0, 1)]
        one.digest()  # which needs all of it
        assert moves(weights + rest, "needed by one.digest") == [(rank, "wake", False) for rank in (0, 1)]
        group.wake("one")
        assert moves(0) == []
