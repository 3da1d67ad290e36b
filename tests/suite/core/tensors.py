"""Tensors: residents, optimizers, writes, and the records of their transfers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import pytest
from tests.suite.probes.sleepers import Dozing
from tests.suite.probes.tensors import Trainer, changes_weights

import colocate
from colocate import CallRecord, ColocatedGroup, FetchRecord, MoveRecord, Runtime, TransferRecord, role
from colocate.errors import DispatchError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors import tensors
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.probes.rows import Rows
from colocate.testing.probes.tensors import Tensors
from colocate.testing.waiting import PATIENCE_S, wait_until


class TensorResidents(tensors.TensorResidents):
    """A tensor's resident behaves like its collected value."""

    def test_memory_goes(self, tensors: Tensors) -> None:
        """A tensor that was kept, used and freed is released in its workers without the garbage collector."""
        resident = tensors.make_uncollected.keep(1000)
        try:
            assert resident.spec.bytes_per_rank[0] == 4000
            tensors.echo(resident.ref)
            resident.fetch()
            assert any(tensors.is_there())
            resident.free()
            wait_until(lambda: not any(tensors.is_there()), "it is gone everywhere")
        finally:
            tensors.is_there(collects=True)

    @pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
    @pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")
    def test_sparse(self, torch: Any, pair: ColocatedGroup, tensors: Tensors, layout: str) -> None:
        """Sparse tensors can be kept and fetched, and scattered if torch can split their rows."""
        value = torch.eye(4).to_sparse(layout=getattr(torch, layout))
        with tensors.echo.keep([value]) as resident:
            assert resident.spec.bytes_per_rank[0] >= 4 * 4 + 4 * 8
            (back,) = resident.fetch()
            assert back.layout == value.layout
            assert torch.equal(back.to_dense(), torch.eye(4))
            assert torch.equal(tensors.echo(resident.ref)[0].to_dense(), torch.eye(4))
        if layout == "sparse_coo":
            parts = [part.to_dense() for part, _ in pair.role("rows", Rows).seen(value)]
            assert torch.equal(torch.cat(parts), torch.eye(4))
        else:
            with pytest.raises(DispatchError, match=f"layout torch.{layout} can't be cut by rows"):
                tensors.mean(value)

    def test_use(self, torch: Any, pair: ColocatedGroup, tensors: Tensors) -> None:
        """Every way of passing a resident gives the same result as passing its value."""
        with tensors.make.keep(3) as resident:
            value = resident.fetch()
            assert torch.equal(value, torch.tensor([0.0, 1, 2, 100, 101, 102]))
            assert torch.equal(tensors.add(resident.ref), tensors.add(value))
            assert tensors.seen(resident.ref) == tensors.seen(value)
            assert tensors.whole(resident.ref) == tensors.whole(value)
            assert torch.equal(tensors.padded(resident.ref), tensors.padded(value))
            assert tensors.mean(resident.ref) == tensors.mean(value)
            assert torch.equal(tensors.echo({"deep": (resident.ref,)})["deep"][0], value)
            assert pair.role("right", Rows).seen(resident.ref)[0][0].tolist() == value.tolist()

    def test_gradients_stay(self, torch: Any, tensors: Tensors) -> None:
        """Results arrive detached from autograd as plain tensors; an argument that is a leaf keeps `requires_grad`."""
        leaf = torch.ones(2, requires_grad=True)
        assert [tensors.facts(x)[0]["requires_grad"] for x in (leaf, leaf * 2, torch.ones(2))] == [True, False, False]
        with tensors.with_gradient.keep(2) as resident:
            for result in (resident.fetch(), tensors.with_gradient(2)):
                for tensor in result.values():
                    assert not tensor.requires_grad
                    assert type(tensor) is torch.Tensor
            assert tensors.require_grad(resident.ref) == [[False, False]] * 2

    def test_inference(self, tensors: Tensors) -> None:
        """An inference tensor arrives as an ordinary tensor that can be trained on."""
        with tensors.under_inference_mode.keep(2) as resident:
            assert not resident.fetch().is_inference()
            assert [fact["inference"] for fact in tensors.facts(resident.ref)] == [False, False]
            assert tensors.train_on(resident.ref) == [4.0, 4.0]


class Optimizers(TensorCase):
    """A model and its optimizer that travel together share parameters on arrival."""

    @needs_feature("functions")
    def test_optimizer(self, torch: Any, spawn: Spawn) -> None:
        """A model and its optimizer share parameters after travelling as arguments, results or residents."""
        # On one slot: threads would step the same model at the same time.
        group = spawn({"trainer": colocate.role(Trainer)}, slots=1, name="training")
        trainer, model = group.role("trainer", Trainer), torch.nn.Linear(2, 2)
        parameters = list(model.parameters())
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        adam = torch.optim.Adam(parameters)
        assert changes_weights(model, adam)
        for optimizer in (
            sgd(parameters),
            adam,  # This optimizer has state by now.
            lambda: sgd(parameters),
            functools.partial(sgd, parameters),
        ):
            assert trainer.step_with(model, optimizer)
        assert trainer.step_with_both([model, sgd(parameters)])
        assert group.run(lambda ctx, it: changes_weights(model, it), sgd(parameters)) == [True]
        with _expect_write_error(group):
            assert group.run(lambda ctx, it: changes_weights(model, sgd(it)), parameters) == [True]
        scheduler = torch.optim.lr_scheduler.StepLR(sgd(parameters), 1)
        assert group.run(lambda ctx, *it: changes_weights(it[0], it[1].optimizer), model, scheduler) == [True]
        assert changes_weights(*trainer.make())
        net, listed = trainer.make(listed=True)
        assert changes_weights(net, sgd(listed))
        with trainer.make.keep() as resident:
            assert changes_weights(*resident.fetch())
            assert trainer.step_with_both(resident.ref)


def _expect_write_error(group: ColocatedGroup) -> AbstractContextManager[object]:
    """Expect a write error in strict mode, where the optimizer's step changes the argument."""
    expectation = pytest.raises(RoleError, match="changed its argument 'args' in place")
    return expectation if group._node.services.strict else nullcontext()


class Memory(tensors.Memory):
    """No method may write into its arguments or returned values, and no two ranks share writable memory."""

    def test_write_into_an_argument(self, tensors: Tensors) -> None:
        """Writing into a resident argument raises an error that names the writing method."""
        with tensors.make.keep(2) as resident:
            with pytest.raises(
                RoleError, match=r"tensors\.write_into changed in place a value that tensors\.make"
            ) as caught:
                tensors.write_into(resident.ref)
            assert caught.value.method == "write_into"
            with pytest.raises(RoleError, match="changed in place"):  # The changed resident can't be used again.
                tensors.seen(resident.ref)
        assert tensors.make(1).tolist() == [0.0, 100.0]

    def test_write_into_the_returned(self, tensors: Tensors) -> None:
        """Writing into a returned value raises an error that names the writing method."""
        with tensors.make.keep(2):
            with pytest.raises(RoleError, match=r"write_into_what_it_returned changed in place") as caught:
                tensors.write_into_what_it_returned()
            assert caught.value.method == "write_into_what_it_returned"

    def test_write_later(self, pair: ColocatedGroup, tensors: Tensors) -> None:
        """A write into an earlier call's argument is found at the latest by the next use of the resident."""
        left_view = pair.role("left_tensors", Tensors)
        with tensors.make.options(ranks=[0]).keep(2) as resident:
            left_view.hold_on_to(resident.ref)
            written, used = left_view.write_into_what_was_given.submit(), left_view.seen.submit(resident.ref)
            error = written.exception(PATIENCE_S) or used.exception(PATIENCE_S)
            assert isinstance(error, RoleError)
            assert "changed in place" in str(error)

    def test_arguments_are_the_callers(self, torch: Any, tensors: Tensors) -> None:
        """The caller may write into a result without effect on later results."""
        mine = torch.ones(2)
        call = tensors.seen.submit(mine)
        assert call.result() == [[1.0], [1.0]]
        result = tensors.make(2)
        result.zero_()
        assert tensors.make(2).tolist() == [0.0, 1.0, 100.0, 101.0]

    def test_ranks_share_nothing(self, torch: Any, copying: ColocatedGroup) -> None:
        """A rank's write into its argument changes neither another rank's tensor nor the driver's."""
        tensors = copying.role("tensors", Tensors)
        for size in (4, 100_000):
            mine = torch.ones(size)
            if copying._node.services.strict:  # Strict mode reports the write.
                with pytest.raises(RoleError, match=r"keep_and_write changed its argument '\w+' in place"):
                    tensors.keep_and_write(mine, on_rank=1)
            else:
                first, second = tensors.keep_and_write(mine, on_rank=1)
                assert (sum(first), sum(second)) == (size, 0)
                assert sum(tensors.still_has()[0]) == size
            assert float(mine.sum()) == size

    def test_results_are_writable(self, torch: Any, tensors: Tensors) -> None:
        """A result, small or large, is writable and contiguous."""
        for rows in (2, 200_000):
            result = tensors.make(rows)
            result += 1
            assert result.is_contiguous()


_ROWS = 1 << 16
_BYTES = 4 * _ROWS
_MORE = 4096
"""The most bytes that a value has beyond its tensors' bytes."""


@attrs.define(eq=False)
class _EventLog:
    """An observer that records events."""

    runtime: Runtime
    calls: list[CallRecord] = attrs.field(factory=list)
    fetches: list[FetchRecord] = attrs.field(factory=list)
    moves: list[MoveRecord] = attrs.field(factory=list)

    def colocate_call_finished(self, record: CallRecord) -> None:
        self.calls.append(record)

    def colocate_result_fetched(self, record: FetchRecord) -> None:
        self.fetches.append(record)

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        self.moves.append(record)

    def wait_delivered(self) -> None:
        """Wait until all events are delivered."""
        self.runtime._node.services.flush_observers()

    def last_call(self, method: str) -> CallRecord:
        """Return the last call of a method; a value's maker may be recorded after its user."""
        self.wait_delivered()
        return next(call_record for call_record in reversed(self.calls) if call_record.method == method)

    def transfers_of(self, method: str) -> list[TransferRecord]:
        """Return the transfers of the method's last call, by rank; threads have none."""
        record = self.last_call(method)
        spans = {rank: (start, end) for rank, start, end in record.spans}
        for each in record.transfers:
            start, end = spans[each.rank]
            assert start <= each.start <= each.end <= end
        return sorted(record.transfers, key=lambda each: each.rank)


class Transfers(ExecutorCase):
    """Records of transferred bytes; threads transfer nothing."""

    @pytest.fixture
    def log(self, runtime: Runtime) -> Iterator[_EventLog]:
        """Observe the runtime for the duration of the test."""
        pytest.importorskip("torch")
        log = _EventLog(runtime)
        runtime.observe(log)
        yield log
        runtime._node.services.observers.remove(log)

    @pytest.fixture
    def travels(self, runtime: Runtime) -> bool:
        """Return whether values travel between processes."""
        return not runtime._node.services.executor.in_process

    def test_from_another_worker(self, pair: ColocatedGroup, log: _EventLog, travels: bool) -> None:
        """A value is transferred from its maker to the other rank, and handed over by reference on its own rank."""
        resident = pair.role("left_tensors", Tensors).make.keep(_ROWS)
        pair.role("tensors", Tensors).whole(resident.ref)
        assert [
            (transfer.rank, transfer.role, transfer.method, transfer.source) for transfer in log.transfers_of("whole")
        ] == ([(1, "left_tensors", "make", 0)] if travels else [])
        assert all(_BYTES <= transfer.nbytes <= _BYTES + _MORE for transfer in log.last_call("whole").transfers)
        assert log.last_call("whole").handed_over == {"left_tensors": _BYTES}

    def test_resident_used_in_place_records_no_transfer(self, pair: ColocatedGroup, log: _EventLog) -> None:
        """Using a resident on its own ranks by its own role records no transfer and no handover."""
        tensors = pair.role("tensors", Tensors)
        resident = tensors.make.keep(_ROWS)
        tensors.add.keep(resident.ref).wait()
        assert (log.transfers_of("add"), log.last_call("add").handed_over) == ([], {})
        more = pair.role("left_tensors", Tensors).make.keep(_ROWS)
        pair.role("left_tensors", Tensors).echo([more.ref, more.ref])
        assert (log.transfers_of("echo"), log.last_call("echo").handed_over) == ([], {})

    def test_from_and_to_the_driver(self, pair: ColocatedGroup, log: _EventLog, travels: bool) -> None:
        """A call's record has the bytes of arguments and results of all ranks; a fetch has its own record."""
        import torch

        tensors = pair.role("tensors", Tensors)
        tensors.echo(torch.ones(_ROWS))
        record = log.last_call("echo")
        if travels:
            assert 2 * _BYTES <= record.sent <= 2 * (_BYTES + _MORE)
            assert 2 * _BYTES <= record.received <= 2 * (_BYTES + _MORE)
        else:
            assert (record.sent, record.received) == (0, 0)
        resident = tensors.make.keep(_ROWS)
        resident.wait()
        assert log.last_call("make").received == 0
        assert log.last_call("make").sent < _MORE
        assert log.fetches == []
        resident.fetch()
        log.wait_delivered()
        assert [(item.role, item.method, item.ranks) for item in log.fetches] == (
            [("tensors", "make", (0, 1))] if travels else []
        )
        assert all(2 * _BYTES <= item.nbytes <= 2 * (_BYTES + _MORE) for item in log.fetches)
        assert all(item.start <= item.end for item in log.fetches)

    @needs(OwnProcess)
    def test_sleeps_and_wakes_are_recorded(self, spawn: Spawn, log: _EventLog) -> None:
        """Requested sleeps, and wakes by a call, are recorded with whether the whole role sleeps."""
        group = spawn({"one": role(Dozing, 1)})
        one = group.role("one", Dozing)

        def moves(nbytes: int, why: str = "asked for") -> list[tuple[int, str, bool]]:
            log.wait_delivered()
            new_moves, log.moves = log.moves, []
            assert all(move.role == "one" and move.start <= move.end for move in new_moves)
            assert all(move.why == why for move in new_moves)
            assert sum(move.nbytes for move in new_moves) == nbytes
            return sorted((move.rank, move.kind, move.asleep) for move in new_moves)

        weights = group.sleep("one", ["weights"])
        assert moves(weights) == [(rank, "sleep", False) for rank in (0, 1)]
        rest = group.sleep("one")
        assert moves(rest) == [(rank, "sleep", True) for rank in (0, 1)]
        one.digest()  # This call needs all of the role's memory.
        assert moves(weights + rest, "needed by one.digest") == [(rank, "wake", False) for rank in (0, 1)]
        group.wake("one")
        assert moves(0) == []
