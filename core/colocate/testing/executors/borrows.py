"""Borrows: what another group's unfinished use of a resident refuses, what breaks it, and who writes into what."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate._values.leaving import Watch
from colocate.errors import BorrowedError, ClosedError, ColocateError, RoleError
from colocate.testing.executors._base import ExecutorCase, Spawn, of_executor
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.probes.writers import WRITES, Writer
from colocate.testing.waiting import PATIENCE_S

USER: dict[str, Any] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


class Borrows(ExecutorCase):
    """A close is refused while another group uses a resident; what is forced breaks the use, with a clear error."""

    def test_borrowed(self, pair: ColocatedGroup, spawn: Spawn) -> None:
        """Another group's unfinished use of a resident refuses a close, naming the borrower, and changes nothing."""
        owner = spawn({"rows": colocate.role(Rows)}, slots=1, name="owner")
        kept = owner.role("rows", Rows).produce.keep(2)
        with Gate() as gate:
            waiting = pair.role("faulty", Faulty).wait.submit(gate.address)
            use = pair.role("echo", Echo).first.submit(kept.ref)
            for close in (owner.close, owner.owner.close):
                with pytest.raises(BorrowedError, match=r"echo\.first") as caught:
                    close()
                (borrower,) = caught.value.borrowers
                assert pair.name in borrower
            assert owner.role("rows", Rows).double([1]) == [2]
        waiting.result(PATIENCE_S)
        assert use.result(PATIENCE_S) == [0, 1]
        kept.free()
        owner.close()

    @of_executor
    def test_broken_borrow(self, pair: ColocatedGroup, spawn: Spawn) -> None:
        """`force=True` breaks borrows: each borrower gets a clear error, and its group goes on."""
        owner = spawn({"rows": colocate.role(Rows)}, slots=1, name="owner")
        kept = owner.role("rows", Rows).produce.keep(2)
        kept.fetch()
        with Gate() as gate:
            waiting = pair.role("faulty", Faulty).wait.submit(gate.address)
            use = pair.role("echo", Echo).first.submit(kept.ref)
            owner.close(force=True)
        waiting.result(PATIENCE_S)
        error = use.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert "owner" in str(error)
        assert pair.role("echo", Echo).first(1) == 1

    def test_leaving_a_block_is_forced(self, runtime: Runtime, pair: ColocatedGroup) -> None:
        """Leaving a with block breaks borrows, of the group or of its pool."""
        for leave_pool in (False, True):
            with Gate() as gate:
                waiting = pair.role("faulty", Faulty).wait.submit(gate.address)
                with runtime.reserve(1, cpus=0) as pool:
                    owner = pool.spawn({"rows": colocate.role(Rows)})
                    kept = owner.role("rows", Rows).produce.keep(2)
                    use = pair.role("echo", Echo).first.submit(kept.ref)
                    if not leave_pool:
                        with owner:
                            pass
                        assert isinstance(use.exception(PATIENCE_S), ClosedError)
                error = use.exception(PATIENCE_S)
                assert isinstance(error, ClosedError)
                assert "leaving its with block" in str(error)
            waiting.result(PATIENCE_S)

    def test_closing_the_owner_is_forced(self) -> None:
        """With the runtime go lender and borrower, so there is nobody to ask; the borrower's call ends."""
        runtime = self.connect()
        lender = runtime.reserve(1, cpus=0).spawn({"rows": colocate.role(Rows)})
        user = runtime.reserve(1, cpus=0).spawn(USER)
        kept = lender.role("rows", Rows).produce.keep(2)
        kept.fetch()
        with Gate() as gate:
            waiting = user.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            use = user.role("echo", Echo).first.submit(kept.ref)
            with contextlib.suppress(ExceptionGroup):  # the role hangs at the gate, where it isn't a process
                runtime.close(grace=0)
            for call in (waiting, use):
                assert isinstance(call.exception(PATIENCE_S), ColocateError)

    def test_writes_are_found(self) -> None:
        """With `strict=True` every write into a resident is found, and the method that wrote is named."""
        pytest.importorskip("torch")
        of_maker = r"changed in place a value that maker\.nested had returned"
        with self.connect(strict=True) as runtime, runtime.reserve(1, cpus=0) as pool:
            group = pool.spawn({"maker": colocate.role(Writer), "user": colocate.role(Writer)})
            maker, user = group.role("maker", Writer), group.role("user", Writer)
            for how in WRITES:
                with maker.nested.keep() as kept:
                    user.hold(kept.ref)  # reading is nobody's fault
                    with pytest.raises(RoleError, match=rf"user\.write {of_maker}"):
                        user.write(kept.ref, how)
                    with pytest.raises(RoleError, match="changed in place"):
                        user.hold(kept.ref)
                with maker.nested.keep() as kept:
                    user.hold(kept.ref)
                    with pytest.raises(RoleError, match=rf"user\.write_held {of_maker}"):
                        user.write_held(how)
                with maker.nested.keep(), pytest.raises(RoleError, match=rf"maker\.write_returned {of_maker}"):
                    maker.write_returned(how)
            assert user.untouched() == [1.0]

    def test_writes_into_plain_arguments_are_found(self) -> None:
        """With `strict=True` every one is, with method and argument; neither the driver's value nor others change."""
        torch = pytest.importorskip("torch")
        numpy = pytest.importorskip("numpy")
        with self.connect(strict=True) as runtime, runtime.reserve(2, cpus=0) as pool, Gate() as gate:
            user = pool.spawn({"user": colocate.role(Writer)}).role("user", Writer)
            value = {
                "x": torch.arange(3.0),
                "pair": (torch.arange(2, 4), numpy.arange(4).reshape(2, 2)),
                "deep": {"name": "as it was", "list": [1, (torch.ones(2),)]},
            }
            driver = Watch(value, contents=True)
            for how in WRITES:
                with pytest.raises(RoleError, match=r"user\.write changed its argument 'value' in place") as caught:
                    user.write(value, how)
                assert (caught.value.role, caught.value.method) == ("user", "write")
            late = user.write_later.submit(value, "operators", [gate.address] * 2)
            gate.open()
            assert "user.write_later changed its argument 'value' in place" in str(late.exception(PATIENCE_S))
            assert user.untouched() == [1.0, 1.0]
            assert not driver.written()

    def test_the_call_that_wrote_is_blamed(self) -> None:
        """Of two async calls of one method with one resident of another slot the one that wrote is told of it."""
        pytest.importorskip("torch")
        with self.connect() as runtime, runtime.reserve(2, cpus=0) as pool, Gate() as first, Gate() as second:
            group = pool.spawn({"maker": colocate.role(Writer).on(slots=[0]), "user": colocate.role(Writer)})
            maker, user = group.role("maker", Writer), group.role("user", Writer)
            with maker.nested.keep() as kept:
                ends = user.write_later.submit(kept.ref, None, [None, first.address])
                writes = user.write_later.submit(kept.ref, "operators", [None, second.address])
                first.wait_for()
                second.wait_for()
                first.open()
                ends.result(PATIENCE_S)
                second.open()
                error = writes.exception(PATIENCE_S)
                if error is None:  # where it got a copy, nothing has happened to the resident
                    assert kept.fetch()["x"].tolist() == [0.0, 1.0, 2.0]
                else:
                    assert "user.write_later changed in place a value that maker.nested had returned" in str(error)
                assert maker.untouched() == [1.0]
