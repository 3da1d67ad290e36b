"""Tensors: how they travel and who is told of it, what staying in the workers means for them, and who may write."""

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
    """Using a resident gives what using its collected value gives."""

    def test_memory_goes(self, tensors: Tensors) -> None:
        """A tensor that was kept, used and freed is gone from its worker without the help of a garbage collector."""
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
        """Sparse tensors can be kept as others, with their bytes; where torch can cut rows they can be scattered."""
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
        """Every way of passing a resident gives what its value gives."""
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
        """Results leave detached from autograd, parameters as ordinary tensors; leaves that are arguments don't."""
        leaf = torch.ones(2, requires_grad=True)
        assert [tensors.facts(x)[0]["requires_grad"] for x in (leaf, leaf * 2, torch.ones(2))] == [True, False, False]
        with tensors.with_gradient.keep(2) as resident:
            for result in (resident.fetch(), tensors.with_gradient(2)):
                for tensor in result.values():
                    assert not tensor.requires_grad
                    assert type(tensor) is torch.Tensor
            assert tensors.require_grad(resident.ref) == [[False, False]] * 2

    def test_inference(self, tensors: Tensors) -> None:
        """An inference tensor leaves as an ordinary one, with which gradients can be computed."""
        with tensors.under_inference_mode.keep(2) as resident:
            assert not resident.fetch().is_inference()
            assert [fact["inference"] for fact in tensors.facts(resident.ref)] == [False, False]
            assert tensors.train_on(resident.ref) == [4.0, 4.0]


class Optimizers(TensorCase):
    """A model and its optimizer that travel together have the same parameters where they arrive."""

    @needs_feature("functions")
    def test_optimizer(self, torch: Any, spawn: Spawn) -> None:
        """For those of a call or a function, for results and residents, in whatever has the parameters."""
        # On one slot: threads would make steps of one model at the same time.
        group = spawn({"trainer": colocate.role(Trainer)}, slots=1, name="training")
        trainer, model = group.role("trainer", Trainer), torch.nn.Linear(2, 2)
        parameters = list(model.parameters())
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        adam = torch.optim.Adam(parameters)
        assert changes_weights(model, adam)
        for optimizer in (
            sgd(parameters),
            adam,  # which has state by now
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
    """In strict mode a step of parameters that are an argument by themselves is told as a write into that."""
    expectation = pytest.raises(RoleError, match="changed its argument 'args' in place")
    return expectation if group._node.services.strict else nullcontext()


class Memory(tensors.Memory):
    """No method writes into its arguments or what it has returned, and no two ranks share writable memory."""

    def test_write_into_an_argument(self, tensors: Tensors) -> None:
        """Writing into a resident that is an argument is an error that names the method that wrote."""
        with tensors.make.keep(2) as resident:
            with pytest.raises(
                RoleError, match=r"tensors\.write_into changed in place a value that tensors\.make"
            ) as caught:
                tensors.write_into(resident.ref)
            assert caught.value.method == "write_into"
            with pytest.raises(RoleError, match="changed in place"):  # it is of no use any more
                tensors.seen(resident.ref)
        assert tensors.make(1).tolist() == [0.0, 100.0]

    def test_write_into_the_returned(self, tensors: Tensors) -> None:
        """So is writing into what was returned before."""
        with tensors.make.keep(2):
            with pytest.raises(RoleError, match=r"write_into_what_it_returned changed in place") as caught:
                tensors.write_into_what_it_returned()
            assert caught.value.method == "write_into_what_it_returned"

    def test_write_later(self, pair: ColocatedGroup, tensors: Tensors) -> None:
        """Writing into an argument of an earlier call is found at the latest when the resident is used next."""
        left_view = pair.role("left_tensors", Tensors)
        with tensors.make.options(ranks=[0]).keep(2) as resident:
            left_view.hold_on_to(resident.ref)
            written, used = left_view.write_into_what_was_given.submit(), left_view.seen.submit(resident.ref)
            error = written.exception(PATIENCE_S) or used.exception(PATIENCE_S)
            assert isinstance(error, RoleError)
            assert "changed in place" in str(error)

    def test_arguments_are_the_callers(self, torch: Any, tensors: Tensors) -> None:
        """The caller's tensor stays the caller's, and a result is the caller's to write into."""
        mine = torch.ones(2)
        call = tensors.seen.submit(mine)
        assert call.result() == [[1.0], [1.0]]
        result = tensors.make(2)
        result.zero_()
        assert tensors.make(2).tolist() == [0.0, 1.0, 100.0, 101.0]

    def test_ranks_share_nothing(self, torch: Any, copying: ColocatedGroup) -> None:
        """A rank gets memory of its own: what it writes there no other rank sees, and nor does the driver."""
        tensors = copying.role("tensors", Tensors)
        for size in (4, 100_000):
            mine = torch.ones(size)
            if copying._node.services.strict:  # it is done, and told
                with pytest.raises(RoleError, match=r"keep_and_write changed its argument '\w+' in place"):
                    tensors.keep_and_write(mine, on_rank=1)
            else:
                first, second = tensors.keep_and_write(mine, on_rank=1)
                assert (sum(first), sum(second)) == (size, 0)
                assert sum(tensors.still_has()[0]) == size
            assert float(mine.sum()) == size

    def test_results_are_writable(self, torch: Any, tensors: Tensors) -> None:
        """What comes out of a worker is ordinary writable memory, small or large."""
        for rows in (2, 200_000):
            result = tensors.make(rows)
            result += 1
            assert result.is_contiguous()


_ROWS = 1 << 16
_BYTES = 4 * _ROWS
_MORE = 4096
"""A value's bytes are those of its tensors, and so many more at most."""


@attrs.define(eq=False)
class _EventLog:
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

    def wait_delivered(self) -> None:
        """Wait until what has ended has been told."""
        self.runtime._node.services.flush_observers()

    def last_call(self, method: str) -> CallRecord:
        """The call of a method that ended last: who has made a value may say so after who has used it."""
        self.wait_delivered()
        return next(call_record for call_record in reversed(self.calls) if call_record.method == method)

    def transfers_of(self, method: str) -> list[TransferRecord]:
        """Return what that call got from other workers, by rank; none between threads."""
        record = self.last_call(method)
        spans = {rank: (start, end) for rank, start, end in record.spans}
        for each in record.transfers:
            start, end = spans[each.rank]
            assert start <= each.start <= each.end <= end
        return sorted(record.transfers, key=lambda each: each.rank)


class Transfers(ExecutorCase):
    """Who is told which bytes. Between threads nothing has to travel, so nothing is told."""

    @pytest.fixture
    def log(self, runtime: Runtime) -> Iterator[_EventLog]:
        """An observer, as long as the test takes."""
        pytest.importorskip("torch")
        log = _EventLog(runtime)
        runtime.observe(log)
        yield log
        runtime._node.services.observers.remove(log)

    @pytest.fixture
    def travels(self, runtime: Runtime) -> bool:
        """Whether values have to."""
        return not runtime._node.services.executor.in_process

    def test_from_another_worker(self, pair: ColocatedGroup, log: _EventLog, travels: bool) -> None:
        """The rank that lacks a value gets it from the worker that made it; the other one has it by reference."""
        resident = pair.role("left_tensors", Tensors).make.keep(_ROWS)
        pair.role("tensors", Tensors).whole(resident.ref)
        assert [
            (transfer.rank, transfer.role, transfer.method, transfer.source) for transfer in log.transfers_of("whole")
        ] == ([(1, "left_tensors", "make", 0)] if travels else [])
        assert all(_BYTES <= transfer.nbytes <= _BYTES + _MORE for transfer in log.last_call("whole").transfers)
        assert log.last_call("whole").handed_over == {"left_tensors": _BYTES}

    def test_where_it_lies(self, pair: ColocatedGroup, log: _EventLog) -> None:
        """Parts that lie where they are used go nowhere; what a role has made itself is nobody else's."""
        tensors = pair.role("tensors", Tensors)
        resident = tensors.make.keep(_ROWS)
        tensors.add.keep(resident.ref).wait()
        assert (log.transfers_of("add"), log.last_call("add").handed_over) == ([], {})
        more = pair.role("left_tensors", Tensors).make.keep(_ROWS)
        pair.role("left_tensors", Tensors).echo([more.ref, more.ref])
        assert (log.transfers_of("echo"), log.last_call("echo").handed_over) == ([], {})

    def test_from_and_to_the_driver(self, pair: ColocatedGroup, log: _EventLog, travels: bool) -> None:
        """The bytes of arguments and results, for all ranks; those of a kept result when it is fetched."""
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
    def test_sleeps_are_told(self, spawn: Spawn, log: _EventLog) -> None:
        """Sleeps that somebody asks for are told, too, and the wakes by a call; and whether it is all of the role."""
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
        one.digest()  # which needs all of it
        assert moves(weights + rest, "needed by one.digest") == [(rank, "wake", False) for rank in (0, 1)]
        group.wake("one")
        assert moves(0) == []
