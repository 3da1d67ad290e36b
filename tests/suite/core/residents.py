"""Residents: keeping, using, fetching and freeing results in the workers, and their failures."""

from __future__ import annotations

import asyncio
import gc
import logging
import operator
import threading
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Resident
from colocate._system.lines import find_caller
from colocate.errors import ClosedError, ColocateError, RoleError
from colocate.testing.executors import residents
from colocate.testing.executors._base import ExecutorCase, Spawn, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


class Residents(residents.Residents):
    """Keeping, using, fetching and freeing plain values; `TensorResidents` covers tensors."""

    def test_keep_and_fetch(self, pair: ColocatedGroup) -> None:
        """`fetch` of a kept result returns the plain call's value, every time."""
        rows = pair.role("rows", Rows)
        with rows.double.keep([1, 2, 3]) as resident:
            assert isinstance(resident, Resident)
            assert resident.fetch() == resident.fetch() == rows.double([1, 2, 3])

    def test_waited_for(self, pair: ColocatedGroup) -> None:
        """`wait` returns when the value is there, and raises TimeoutError or the call's error."""
        faulty = pair.role("faulty", Faulty)
        with Gate() as gate:
            resident = faulty.wait.keep(gate.address)
            with pytest.raises(TimeoutError):
                resident.wait(0.05)
        resident.wait(PATIENCE_S)
        assert resident.fetch() == [0, 1]
        failed = faulty.fail.keep()
        with pytest.raises(RoleError):
            failed.wait(PATIENCE_S)

    def test_every_collect(self, pair: ColocatedGroup) -> None:
        """For every collect, fetching a resident and passing its ref give the plain call's result."""
        rows, echo = pair.role("rows", Rows), pair.role("echo", Echo)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (echo.echo, ("gathered",)),
            (echo.first, ("first",)),
            (rows.mean, ([1.0, 2.0, 6.0],)),
            (rows.mean, ([4.0],)),
            (rows.total, ([1, 2, 3],)),
            (rows.on_one, ("one",)),
            (rows.padded, ([1, 2, 3],)),
            (rows.keep_rows, ([7],)),
            (pair.role("own").swapped, ()),
        ]
        for call, args in calls:
            with call.keep(*args) as resident:
                assert resident.fetch() == echo.first(resident.ref) == call(*args), call

    def test_own_partition(self, pair: ColocatedGroup) -> None:
        """Scatter keeps a resident's own uneven partition if the ranks match."""
        rows = pair.role("rows", Rows)
        with rows.produce_each.keep([1, 4]) as resident:  # type: ignore[arg-type]
            assert rows.seen(resident.ref) == [([0], 1), ([100, 101, 102, 103], 1)]
            assert rows.zipped(resident.ref, resident.ref) == [(row, row) for row in resident.fetch()]
            assert rows.zipped([1, 2, 3, 4, 5], resident.ref) == list(
                zip([1, 2, 3, 4, 5], resident.fetch(), strict=True)
            )

    def test_inside_containers(self, pair: ColocatedGroup) -> None:
        """A ref may be inside lists, tuples and dicts of an argument; a resident itself may be an argument."""
        echo, rows = pair.role("echo", Echo), pair.role("rows", Rows)
        with rows.produce.keep(1) as resident, echo.first.keep("text") as text:
            assert echo.first({"a": [resident.ref, 1], "b": (text.ref,)}) == {"a": [[0, 100], 1], "b": ("text",)}
            assert rows.seen({"x": resident.ref, "y": [1, 2]}) == [
                ({"x": [0], "y": [1]}, 1),
                ({"x": [100], "y": [2]}, 1),
            ]
            assert rows.double(resident) == [0, 200]  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def test_chain(self, pair: ColocatedGroup) -> None:
        """A resident can be made from other residents, which the driver may free before the last fetch."""
        rows, right = pair.role("rows", Rows), pair.role("right", Rows)
        first = rows.double.keep([1, 2, 3])
        second = right.double.keep(first.ref)
        third = rows.double.keep(second.ref)
        first.free()
        second.free()
        assert third.fetch() == [8, 16, 24]
        third.free()

    def test_between_runtimes(self, pair: ColocatedGroup) -> None:
        """A resident of another runtime is refused."""
        with (
            self.connect() as runtime,
            runtime.reserve(1, cpus=0) as pool,
            pool.spawn({"rows": colocate.role(Rows)}) as other,
            other.role("rows", Rows).produce.keep(1) as resident,
            pytest.raises(ColocateError, match="belongs to another runtime"),
        ):
            pair.role("rows", Rows).double(resident.ref)

    def test_spec(self, pair: ColocatedGroup) -> None:
        """`.spec` has the structure, rows and bytes of a resident."""
        with pair.role("rows", Rows).double.keep([1, 2, 3]) as resident:
            assert resident.spec.structure == ["int", "int"]
            assert resident.spec.rows_per_rank == (2, 1)
            assert resident.spec.bytes_per_rank == (0, 0)

    def test_ref_is_no_value(self, pair: ColocatedGroup) -> None:
        """Using or comparing a ref as its value on the driver raises an error with the remedy."""
        rows = pair.role("rows", Rows)
        with rows.double.keep([1, 2]) as resident:
            with pytest.raises(AttributeError, match=r"stands for the value of rows\.double.*fetch"):
                resident.ref.append(1)
            for compare in (operator.eq, operator.ne):
                for operands in ((resident.ref, [2, 4]), ([2, 4], resident.ref)):
                    with pytest.raises(TypeError, match=r"lives in the workers.*\.fetch\(\)"):
                        compare(*operands)
            ref: Any = resident.ref
            assert {ref: "its own name"}[ref]
            assert rows.double([ref, ref][0]) == [4, 8]

    def test_free(self, pair: ColocatedGroup) -> None:
        """A freed resident raises ClosedError, except in calls sent before; freeing twice is allowed."""
        rows, faulty = pair.role("rows", Rows), pair.role("faulty", Faulty)
        resident = rows.double.keep([1, 2])
        with Gate() as gate:
            faulty.wait.submit(gate.address)
            call = rows.double.submit(resident.ref)
            resident.free()
            resident.free()
        assert call.result(PATIENCE_S) == [4, 8]
        for use in (resident.fetch, lambda: resident.spec, lambda: rows.double(resident.ref)):
            with pytest.raises(ClosedError, match=r"rows\.double was freed by free\(\)"):
                use()

    def test_released_in_the_workers(self, pair: ColocatedGroup) -> None:
        """A value is released in every worker when its resident is freed, is dropped or leaves its scope."""
        echo = pair.role("echo", Echo)

        def gone() -> bool:
            gc.collect()  # Workers that are threads have their garbage in this process.
            return echo.is_alive() == [False, False]

        resident = echo.tracked.keep()
        assert echo.is_alive() == [True, True]
        resident.free()
        wait_until(gone, "what was freed is gone")
        resident = echo.tracked.keep()
        del resident
        wait_until(gone, "what was dropped is gone")
        with pair.scope():
            echo.tracked.keep()
        wait_until(gone, "what was kept in a scope is gone")

    def test_released_in_quiet(self, pair: ColocatedGroup) -> None:
        """A release that no call carries is sent by itself after a while."""
        with Gate() as gate:
            pair.role("echo", Echo).tracked.keep(gate.address).free()
            gate.wait_for(2)

    def test_scope(self, pair: ColocatedGroup) -> None:
        """`group.scope()` frees the residents that its own thread keeps inside."""
        rows = pair.role("rows", Rows)
        elsewhere: list[Resident[list[int]]] = []
        with pair.scope():
            inside = rows.double.keep([1, 2])
            with pair.scope():
                deeper = rows.double.keep([3, 4])
            thread = threading.Thread(target=lambda: elsewhere.append(rows.double.keep([5, 6])))
            thread.start()
            thread.join()
            with pytest.raises(ClosedError, match="the end of its scope"):
                deeper.fetch()
            assert inside.fetch() == [2, 4]
        with pytest.raises(ClosedError, match="the end of its scope"):
            inside.fetch()
        assert elsewhere.pop().fetch() == [10, 12]

    def test_scope_of_a_task(self, pair: ColocatedGroup) -> None:
        """The scope of an asyncio task frees residents of this task, not of parallel or child tasks."""
        rows = pair.role("rows", Rows)
        residents: dict[str, Resident[list[int]]] = {}

        async def main() -> None:
            entered, is_kept = asyncio.Event(), asyncio.Event()

            async def keep(name: str) -> None:
                residents[name] = rows.double.keep([1, 2])

            async def scoped() -> None:
                with pair.scope():
                    entered.set()
                    await is_kept.wait()
                    await keep("inside")
                    await asyncio.create_task(keep("below"))

            async def beside() -> None:
                await entered.wait()
                await keep("beside")
                is_kept.set()

            await asyncio.gather(scoped(), beside())

        asyncio.run(main())
        assert residents.pop("below").fetch() == residents.pop("beside").fetch() == [2, 4]
        with pytest.raises(ClosedError, match="the end of its scope"):
            residents.pop("inside").fetch()


class KeptFailures(ExecutorCase):
    """Failures of kept calls: raised by a use of the resident, or else at the end of a scope or group."""

    def test_poisoned(self, pair: ColocatedGroup) -> None:
        """A kept call that fails poisons its resident: every use raises the same error."""
        faulty, echo = pair.role("faulty", Faulty), pair.role("echo", Echo)
        resident = faulty.fail.keep(ranks=(1,))
        with pytest.raises(RoleError, match="a plain one") as caught:
            resident.fetch()
        for use in (resident.fetch, lambda: resident.spec, lambda: echo.echo(resident.ref)):
            with pytest.raises(RoleError) as again:
                use()
            assert str(again.value) == str(caught.value)
            assert again.value.remote_traceback == caught.value.remote_traceback
            assert again.value.__cause__ is caught.value.__cause__
        assert echo.first(1) == 1

    def test_poison_spreads(self, pair: ColocatedGroup) -> None:
        """A queued call with a resident fails with the error of the resident's call, submitted or kept."""
        faulty, echo = pair.role("faulty", Faulty), pair.role("echo", Echo)
        with Gate() as gate:
            resident = faulty.fail_after.keep([gate.address, None], failing=0)  # type: ignore[arg-type]
            use, kept_use = echo.echo.submit(resident.ref), echo.echo.keep(resident.ref)
            gate.wait_for()
        error = use.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert "rank 0 was told to raise" in str(error) + str(error.__cause__)
        with pytest.raises(RoleError, match="rank 0 was told to raise"):
            kept_use.fetch()
        with pytest.raises(RoleError, match="rank 0 was told to raise"):
            resident.fetch()
        assert echo.first(1) == 1

    def test_unused_poison(self, pair: ColocatedGroup) -> None:
        """A kept call's unused failure is raised at the end of its own scope, and of no other scope before."""
        errors: list[str] = []

        def have_a_scope() -> None:
            with pair.scope():
                pair.role("echo", Echo).noop()
            errors.append("nothing was raised")

        def keep() -> None:
            with pair.scope():
                pair.role("faulty", Faulty).fail.keep()
                pair.role("echo", Echo).noop()
                thread = threading.Thread(target=have_a_scope)
                thread.start()
                thread.join()
                assert errors

        with pytest.raises(RoleError, match="a plain one"):
            keep()

    def test_a_failure_that_was_dropped_is_logged_at_once(self, spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
        """A dropped resident's failure is logged with the line of its `keep`, and raised once."""
        group = spawn({"faulty": colocate.role(Faulty)}, slots=1)
        faulty = group.role("faulty", Faulty)
        with Gate() as gate:
            _, location = faulty.wait.submit(gate.address), find_caller()
            faulty.fail.keep()
            gate.wait_for()
        wait_until(lambda: "a plain one" in caplog.text, "the failure is logged")
        (record,) = (log_record for log_record in caplog.records if log_record.name == "colocate")
        assert record.levelno == logging.ERROR
        assert (
            f"faulty.fail of group {group.name!r}, kept at {location[0]}:{location[1] + 1}, has failed"
            in record.getMessage()
        )
        assert "dropping its handle" in record.getMessage()
        with pytest.raises(RoleError, match="a plain one"), group.scope():
            faulty.fine()
        with group.scope():
            faulty.fine()  # The failure was raised before.
        resident = faulty.fail.keep()
        faulty.fine()
        with group.scope():  # The holder of the handle may still use the resident.
            faulty.fine()
        caplog.clear()
        resident.free()
        wait_until(lambda: "freed by free()" in caplog.text, "the failure is logged")
        with pytest.raises(ExceptionGroup) as caught:
            group.close()
        assert [type(error) for error in caught.value.exceptions] == [RoleError]

    @needs_feature("checkpoints")
    def test_a_failure_that_was_dropped_voids_a_checkpoint(self, spawn: Spawn, tmp_path: Path) -> None:
        """A dropped resident's failure voids the next checkpoint, also if the call fails just before the saving."""
        group = spawn({"faulty": colocate.role(Faulty), "lasting": colocate.role(Lasting)}, slots=1)
        faulty = group.role("faulty", Faulty)
        for wait in (True, False):
            faulty.fail.keep()
            if wait:
                faulty.fine()
            with pytest.raises(RoleError, match="a plain one"):
                group.checkpoint(tmp_path / "one")
            assert not list(tmp_path.iterdir())
        group.checkpoint(tmp_path / "one")
