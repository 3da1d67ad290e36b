"""Residents on the driver: what is freed when, what is remembered for how long."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.counted import functions_called

import colocate
from colocate import CallTimeout, ClosedError, ColocatedGroup, Concat, First, Role, RoleError, method
from colocate._protocol.from_worker import Done
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S, wait_until


class Maker(Role):
    @method
    def wait(self, gate: Address) -> None:
        pass_gate(gate)

    @method(collect=Concat())
    def make(self, rows: int) -> list[int]:
        return [self.ctx.rank] * rows

    @method
    def use(self, value: list[int]) -> list[int]:
        return value

    @method
    def fail(self) -> None:
        raise ValueError("on purpose")


@pytest.fixture(params=[False, True], ids=["threads", "processes"])
def group(request: pytest.FixtureRequest) -> Iterator[ColocatedGroup]:
    with colocate.connect("local", processes=request.param) as runtime, runtime.reserve(2) as pool:
        yield pool.spawn({"maker": colocate.role(Maker)})


def test_free_with_queued_use(group: ColocatedGroup) -> None:
    """A call that is queued already still gets a resident that is freed now."""
    maker = group.role("maker", Maker)
    with Gate() as gate:
        waiting = maker.wait.submit(gate.address)
        kept = maker.make.keep(2)
        used = maker.use.submit(kept.ref)
        kept.free()
        after = maker.make.submit(1)  # whose message would have told the workers
        gate.open()
        assert used.result(PATIENCE_S) == [[0, 0, 1, 1]] * 2
        assert after.result(PATIENCE_S) == [0, 1]
        waiting.result(PATIENCE_S)
    with pytest.raises(ClosedError, match=r"freed by free\(\)"):
        maker.use(kept.ref)


def test_use_of_what_was_given_up_when_it_was_made(group: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose resident's call has failed fails of that, though all ranks had the value already."""
    maker, order = group.role("maker", Maker), group._node.order
    done = order.done

    def just_before(slot: int, message: Done, body: Any) -> None:
        call = order.pending.get(message.seq)
        if call is not None and call.method == "make" and call.keep is not None and call.remaining == 1:
            order.break_off(call, CallTimeout("too late"))
        done(slot, message, body)

    monkeypatch.setattr(order, "done", just_before)
    with Gate() as gate:
        waiting = maker.wait.submit(gate.address)
        kept = maker.make.keep(2)
        used = maker.use.submit(kept.ref)
        again = maker.use.keep(kept.ref)
        gate.open()
        for call in (used.result, again.fetch):
            with pytest.raises(CallTimeout, match="too late"):
                call(PATIENCE_S)
        waiting.result(PATIENCE_S)
    assert maker.make(1) == [0, 1]


def test_scope_with_queued_use(group: ColocatedGroup) -> None:
    """Leaving a scope takes nothing from the calls made in it."""
    maker = group.role("maker", Maker)
    with Gate() as gate:
        with group.scope():
            waiting = maker.wait.submit(gate.address)
            used = maker.use.submit(maker.make.keep(1).ref)
        after = maker.make.submit(1)
        gate.open()
        assert used.result(PATIENCE_S) == [[0, 1]] * 2
        assert after.result(PATIENCE_S) == [0, 1]
        waiting.result(PATIENCE_S)


def test_dropped_before_made(group: ColocatedGroup) -> None:
    """Nothing is remembered of a kept call whose handle was dropped before it was done."""
    maker = group.role("maker", Maker)
    with Gate() as gate:
        waiting = maker.wait.submit(gate.address)
        for _ in range(5):
            maker.make.keep(1)
        maker.make.submit(1)
        gate.open()
        waiting.result(PATIENCE_S)
    wait_until(lambda: not group._node.residents.kept, "the dropped residents are forgotten")


def test_failed_after_dropping() -> None:
    """A kept call that fails after its handle was dropped is still told when the group closes."""
    with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"maker": colocate.role(Maker)})
        maker = group.role("maker", Maker)
        with Gate() as gate:
            waiting = maker.wait.submit(gate.address)
            maker.fail.keep()
            maker.make.submit(1)
            gate.open()
            waiting.result(PATIENCE_S)
        assert maker.make(1) == [0]
        with pytest.raises(ExceptionGroup) as caught:
            group.close()
        assert caught.group_contains(RoleError, match="on purpose")


def test_nested_scopes(group: ColocatedGroup) -> None:
    """An inner scope that was empty, as the outer one is, ends itself only."""
    maker = group.role("maker", Maker)
    with group.scope():
        with group.scope():
            pass
        kept = maker.make.keep(1)
        assert kept.fetch() == [0, 1]
    with pytest.raises(ClosedError, match="the end of its scope"):
        kept.fetch()


def test_who_writes_into_what_another_slot_has() -> None:
    """Threads hand it over as it is: the call that wrote is named, by whichever rank it is heard of first."""
    torch = pytest.importorskip("torch")

    class Owner(Role):
        @method(collect=First())
        def make(self) -> Any:
            return torch.zeros(3)

    def write_on(ctx: colocate.Context, ranks: tuple[int, ...], value: Any) -> None:
        if ctx.rank in ranks:
            value.add_(1.0)

    with colocate.connect() as runtime, runtime.reserve(2) as pool:
        group = pool.spawn({"owner": colocate.role(Owner)})
        owner = group.role("owner", Owner)
        for ranks in ((1,), (0,), (0, 1)) * 20:
            with owner.make.options(ranks=[0]).keep() as kept:
                with pytest.raises(RoleError, match=r"function write_on changed in place a value that owner\.make had"):
                    group.run(write_on, ranks, kept.ref)
                with pytest.raises(RoleError, match=r"was changed in place by function write_on; it"):
                    group.run(write_on, (), kept.ref)


def test_dropped_handles_of_unfinished_calls_cost_messages_nothing(group: ColocatedGroup) -> None:
    """They are looked at when they are dropped, and when their calls end."""
    maker = group.role("maker", Maker)
    unfinished = group._node.residents.kept

    def drop(handles: int) -> int:
        for _ in range(handles):
            maker.make.keep(1)
        return functions_called(lambda: maker.make.keep(1))

    with Gate() as gate, ThreadPoolExecutor(1) as thread:  # not the main thread, whose calls are sent by another
        waiting = maker.wait.submit(gate.address)
        few, many = thread.submit(drop, 10).result(), thread.submit(drop, 500).result()
        assert len(unfinished) > 500
        gate.open()
        waiting.result(PATIENCE_S)
        assert maker.make(1) == [0, 1]  # all others are done
        wait_until(lambda: not unfinished, "all are forgotten")
    assert many < few + 50
