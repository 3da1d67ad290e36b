"""Calls whose rows end one by one: single rows for idle ranks, and batched methods that yield."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.probes.plain import return_number
from tests.suite.rows.buffers import Buffers
from tests.suite.rows.probes import MANY, PLACES, Playing, StartsAgain, Yielding
from tests.suite.rows.reading import OUT, Reading, RowsCase
from tests.suite.rows.standalone import StandaloneRows

import colocate
from colocate import ColocatedGroup
from colocate.errors import (
    CallTimeout,
    ClosedError,
    ColocateError,
    ConfigError,
    DispatchError,
    GroupRestarted,
    PipelineError,
    RoleError,
    SerializationError,
    WorkerDied,
)
from colocate.executor import OwnProcess
from colocate.features.rows.messages import AHEAD
from colocate.testing.executors._base import Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Log
from colocate.testing.waiting import PATIENCE_S, wait_until


class Streams(RowsCase):
    """`@method(rows=...)`, methods that yield, `view.m.stream`."""

    @mark_executor_part
    def test_all_ways_to_call(self, playing: Playing) -> None:
        """Each row runs once; calls return values in row order, and streams yield pairs of index and value."""
        rows = list(range(20))
        values = playing.play(rows, factor=3)
        assert [value for value, _ in values] == [3 * row for row in rows]
        assert {rank for _, rank in values} == {0, 1}
        assert [value for value, _ in playing.play.submit(rows, 2).result(PATIENCE_S)] == [2 * row for row in rows]
        assert sorted((index, value) for index, (value, _) in playing.play.stream(rows)) == [*enumerate(rows)]
        assert playing.play([]) == []
        assert list(playing.play.stream([])) == []
        assert Counter([row for log in playing.logged() for row in log]) == Counter(rows * 3)

    @mark_executor_part
    def test_async_for(self, playing: Playing, streaming: ColocatedGroup) -> None:
        """Several tasks can read several streams at once by `async for`."""
        yielding = streaming.role("yielding", Yielding)

        async def read(stream: Any) -> list[Any]:
            return [row async for row in stream]

        async def main() -> list[Any]:
            streams = playing.play.stream(list(range(30))), yielding.later.stream(rows)
            return list(await asyncio.gather(*map(read, streams)))

        rows = list(range(200))
        played, yielded = asyncio.run(main())
        assert sorted(index for index, _ in played) == list(range(30))
        assert sorted(yielded) == [(row, 2 * row) for row in rows]

    def test_idle_ranks_take_the_next_row(self, playing: Playing) -> None:
        """While rows occupy all places of one rank, the other rank takes all later rows."""
        with Gate() as gate:
            rows = [True, None, True, None, *[None] * 20]  # the first and the third go to rank 0
            with playing.wait.stream(rows, gate.address) as stream:
                gate.wait_for(2)
                ended = [next(stream) for _ in range(22)]
                assert {rank for _, (_, rank) in ended} == {1}
                gate.open()
                assert sorted(stream) == [(0, (0, 0)), (2, (2, 0))]

    def test_rows_of_one_key_go_to_one_rank(self, playing: Playing) -> None:
        """`sticky` sends rows of one key to one rank, and spreads keys over the ranks."""
        rows = [row for row in range(12) for _ in range(3)]
        homes: dict[int, set[int]] = {}
        for row, rank in playing.play.options(sticky=lambda row: row)(rows):
            homes.setdefault(row, set()).add(rank)
        assert all(len(ranks) == 1 for ranks in homes.values())
        assert {rank for ranks in homes.values() for rank in ranks} == {0, 1}
        with pytest.raises(TypeError, match=r"options\(sticky=...\) has made the key \[1\], which has no hash"):
            playing.play.options(sticky=lambda row: [row])([1])

    def test_ranks_of_rows(self, playing: Playing) -> None:
        """Rows run only on the ranks that a call names."""
        assert {rank for _, rank in playing.play.options(ranks=[1])([1, 2, 3, 4])} == {1}

    def test_unread_stream_runs_a_bounded_number_ahead(self, playing: Playing, streaming: ColocatedGroup) -> None:
        """An unread stream begins twice as many rows as there are places, and a batch yields only so far ahead."""
        rows = list(range(10 * OUT))
        stream = playing.play.stream(rows)
        wait_until(lambda: len(stream._call.ends) == OUT, "as many rows as may have ended")  # type: ignore[attr-defined]
        next(stream)
        wait_until(lambda: len(stream._call.ends) == OUT, "another one has ended")  # type: ignore[attr-defined]
        stream.close()
        assert len([row for log in playing.logged() for row in log]) == OUT + 1
        yielding = streaming.role("yielding", Yielding)
        for method in (yielding.all, yielding.later):
            with method.stream(list(range(2 * 3 * AHEAD))) as yields:
                call = yields._call  # type: ignore[attr-defined]
                wait_until(lambda call=call: len(call.ends) == 2 * AHEAD, "all have yielded")  # type: ignore[misc]
            assert yielding.state() == [(AHEAD, "before")] * 2
            assert len(list(method.stream(list(range(2 * 3 * AHEAD))))) == 2 * 3 * AHEAD
            assert yielding.state() == [(3 * AHEAD, "at its end")] * 2

    @mark_executor_part
    def test_closed(self, playing: Playing) -> None:
        """Closing a stream cancels its running rows, and its other rows never begin."""
        with Gate() as gate:
            with playing.wait.stream([True] * 100, gate.address) as stream:
                gate.wait_for(2 * PLACES)
            logs = playing.logged()
            assert Counter(event for log in logs for event, _ in log) == {"begun": 4, "cancelled": 4}
            with pytest.raises(ClosedError, match=r"the stream of playing.wait was closed"):
                next(stream)
            stream.close()

    def test_closed_while_a_method_works_on(self, streaming: ColocatedGroup) -> None:
        """Closing a stream cancels a generator's await and sets `ctx.cancelled`, between rows or after the last."""
        yielding = streaming.role("yielding", Yielding)
        for method in (yielding.lingers, yielding.awaits):
            for at in (1, 2):
                with Gate() as gate:
                    with method.stream([1, 2, 3, 4], at, gate.address) as stream:
                        for _ in range(2 * at):
                            next(stream)
                        gate.wait_for(2)
                        gate.open()
                    assert [closed for _, closed in yielding.state()] == ["told"] * 2, (method, at)

    def test_rows_of_a_call_that_is_interrupted(self, playing: Playing) -> None:
        """Ctrl-C cancels the rows of the interrupted call, even while its traceback is kept."""
        with Gate() as gate:

            def interrupt() -> None:
                gate.wait_for(2 * PLACES)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt) as caught:
                playing.wait([True] * 100, gate.address)
            logs = playing.logged.submit().result(PATIENCE_S)
            assert Counter(event for log in logs for event, _ in log) == {"begun": 4, "cancelled": 4}
            del caught

    def test_dropped(self, playing: Playing) -> None:
        """A half-read stream without references is closed."""
        with Gate() as gate:
            for _ in playing.wait.stream([None, *[True] * 99], gate.address):
                break
            gc.collect()
            logs = playing.logged()
        assert not {event for log in logs for event, row in log if row not in range(OUT + 1)}

    @needs_feature("memory")
    @needs_feature("checkpoints")
    @needs_feature("functions")
    def test_reader_waiting_behind_own_stream_is_refused(
        self, playing: Playing, streaming: ColocatedGroup, tmp_path: Path
    ) -> None:
        """Waiting behind a stream that the same thread reads raises at once; other threads may wait."""
        words = r"comes after the stream of playing.play that was opened at \S+:\d+, .* it would wait for itself"
        stream = playing.play.stream(list(range(100)))
        next(stream)
        for waits in (
            playing.logged,
            lambda: playing.play([1]),
            lambda: next(playing.play.stream([1])),
            playing.logged.submit().result,
            lambda: playing.logged.keep().fetch(),
            lambda: playing.logged.keep().wait(),
            lambda: colocate.wait([playing.logged.submit()]),
            lambda: list(colocate.as_completed([playing.logged.submit()])),
            lambda: streaming.run(return_number),
            lambda: streaming.checkpoint(tmp_path),
            lambda: streaming.wake("playing"),
        ):
            with pytest.raises(ColocateError, match=words):
                waits()
        logs: list[Any] = []
        other = threading.Thread(target=lambda: logs.append(playing.logged()))
        other.start()
        assert len(list(stream)) == 99
        other.join(PATIENCE_S)
        assert len(logs) == 1
        assert playing.logged() == [[], []]  # The other thread took the log before.

        async def main() -> None:
            async for _ in playing.play.stream(list(range(100))):
                with pytest.raises(ColocateError, match="are read by this task"):
                    await playing.logged.submit()
                break

        asyncio.run(main())
        for index, _ in playing.play.stream([1]):  # The stream is read to its end.
            assert playing.logged() == [[1], []], index

    def test_only_last_reader_cannot_wait_behind_stream(self, playing: Playing) -> None:
        """Only a stream's last reader can't wait behind the stream: its opener and other threads and tasks can."""
        rows = list(range(10 * OUT))

        async def count(stream: Any) -> int:
            return len([row async for row in stream])

        async def main() -> int:
            reads = asyncio.create_task(count(playing.play.stream(rows)))
            await playing.logged.submit()
            return await reads

        assert asyncio.run(main()) == len(rows)

        opened: list[Any] = []
        for _ in range(5):
            opener = threading.Thread(target=lambda: opened.append(playing.play.stream(rows)))
            opener.start()
            opener.join()
            del opener
            behind: list[str] = []

            def wait(behind: list[str] = behind) -> None:
                with pytest.raises(TimeoutError):
                    playing.logged.submit().result(timeout=0)
                behind.append("may wait")

            waiter = threading.Thread(target=wait)
            waiter.start()
            waiter.join()
            opened.pop().close()
            assert behind == ["may wait"]

        def fail() -> None:
            stream = playing.play.stream(rows)
            next(stream)
            try:
                raise KeyError
            except KeyError as error:
                original = error  # The error keeps this frame.
                raise ValueError from original

        gc.disable()
        try:
            with pytest.raises(ValueError):  # noqa: PT011
                fail()
            assert playing.logged() is not None
        finally:
            gc.enable()

    @mark_executor_part
    def test_a_row_that_raises(self, playing: Playing) -> None:
        """A row's error names its row, rank and method, and rows beyond the running ones never begin."""
        with Gate() as gate:
            rows = ["a", "b", "fail", *["c"] * 50]
            stream = playing.fail.stream(rows, gate.address)
            with pytest.raises(RoleError, match=r"playing.fail raised KeyError in row 2, on rank 0 of group") as caught:
                list(stream)
            error = caught.value
            assert (error.row, error.rank, error.role, error.method) == (2, 0, "playing", "fail")
            assert isinstance(error.__cause__, KeyError)
            assert "probes.py" in (error.remote_traceback or "")
            with pytest.raises(RoleError, match="in row 2,"):
                playing.fail(rows, gate.address)
            with pytest.raises(RoleError, match="in row 2,"):
                playing.fail.submit(rows, gate.address).result(PATIENCE_S)
            assert max(len(log) for log in playing.logged()) <= 3 * (PLACES + 1)

    def test_a_submitted_failure_of_rows_is_logged(
        self, streaming: ColocatedGroup, playing: Playing, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A submitted call's unasked failure is logged with the failed row."""
        playing.fail.submit(["fail"])
        wait_until(lambda: "never asked for" in caplog.text, "the failure is logged")
        (record,) = (log_record for log_record in caplog.records if "never asked for" in log_record.getMessage())
        assert record.getMessage().startswith(f"playing.fail of group {streaming.name!r}, submitted at ")
        assert "row 0" in record.getMessage()

    def test_errors_in_the_place_of_values(self, playing: Playing) -> None:
        """With `on_error="return"` a failed row's value is its error, and other rows have their values."""
        rows = ["a", "fail", "b", "fail"]
        for values in (
            playing.fail.options(on_error="return")(rows),
            playing.fail.options(on_error="return").submit(rows).result(PATIENCE_S),
            [
                value
                for _, value in sorted(playing.fail.options(on_error="return").stream(rows), key=lambda row: row[0])
            ],
        ):
            assert [value[0] for value in values if isinstance(value, tuple)] == ["a", "b"]
            assert [value.row for value in values if isinstance(value, RoleError)] == [1, 3]

    @needs(OwnProcess)  # Threads hand values over without rebuilding.
    def test_values_that_cannot_be_rebuilt(self, playing: Playing, streaming: ColocatedGroup) -> None:
        """A value that can't be rebuilt is its row's error, raised or returned, and counts as read."""
        odd = [row for row in range(4 * OUT) if row % 2]
        returning = playing.give.options(on_error="return")
        for values in (
            returning(list(range(4 * OUT))),
            returning.submit(list(range(4 * OUT))).result(PATIENCE_S),
            [value for _, value in sorted(returning.stream(list(range(4 * OUT))), key=lambda row: row[0])],
        ):
            assert [value.row for value in values if isinstance(value, SerializationError)] == odd
            assert values[::2] == list(range(0, 4 * OUT, 2))
        for waits in (
            playing.give,
            lambda rows: playing.give.submit(rows).result(PATIENCE_S),
            lambda rows: list(playing.give.stream(rows)),
        ):
            with pytest.raises(SerializationError, match="can't be rebuilt on the driver: ") as caught:
                waits(list(range(4 * OUT)))
            assert caught.value.row in odd
            assert playing.count() == [[0, 1], [1, 1]]  # The error is still held, and holds up no call.
        yielding = streaming.role("yielding", Yielding)
        rows = list(range(2 * 2 * AHEAD))
        read = dict(yielding.unreadable.options(on_error="return").stream(rows))
        assert {index for index, value in read.items() if isinstance(value, SerializationError)} == set(rows)
        with pytest.raises(SerializationError):
            list(yielding.unreadable.stream(rows))
        assert yielding.one() == 1

    def test_retry(self, playing: Playing) -> None:
        """`retry` runs a failed row on another rank, at most as often as given."""
        assert playing.fail.options(retry=1)(["once"] * 8) == [("once", 1)] * 8
        playing.logged()
        with pytest.raises(RoleError, match="in row 0,"):
            playing.fail.options(retry=2)(["fail"])
        assert sum(len(log) for log in playing.logged()) == 3
        values = playing.fail.options(retry=3, on_error="return")(["fail", "a"])
        assert isinstance(values[0], RoleError)
        assert values[1][0] == "a"  # type: ignore[index]

    @pytest.mark.parametrize("how", ["task group", "swallowed", "itself", "next"])
    def test_a_row_that_role_code_cancels(self, playing: Playing, how: str) -> None:
        """A row that role code cancels fails with a row error, whether its task had begun or not."""
        rows, failing = [how, "a"], int(how == "next")
        cancel = playing.cancel.options(ranks=[0])
        error = cancel.submit(rows).exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        kinds = {"task group": ExceptionGroup, "swallowed": KeyError}
        assert (error.row, type(error.__cause__)) == (failing, kinds.get(how, asyncio.CancelledError))
        values = cancel.options(on_error="return").submit(rows).result(PATIENCE_S)
        assert isinstance(values.pop(failing), RoleError)
        assert values == [rows[1 - failing]]
        error = cancel.options(retry=1).submit(rows).exception(PATIENCE_S)
        assert isinstance(error, RoleError) == (how != "next")

    def test_row_retried_on_own_rank_succeeds(self, playing: Playing) -> None:
        """A row retried on its own rank gets its result, and the event loop reports no error."""
        for _ in range(10):
            call = playing.flaky.options(ranks=[0], retry=5, on_error="return").submit(list(range(100)))
            assert [isinstance(value, RoleError) for value in call.result(PATIENCE_S)] == [
                row % 3 == 0 for row in range(100)
            ]
        assert playing.logged() == [[], []]

    def test_rows_that_block_have_a_thread_each(self, spawn: Spawn) -> None:
        """Rows that block in `asyncio.to_thread` run at once, as many as there are places."""
        playing = spawn({"playing": colocate.role(Playing)}, slots=1).role("playing", Playing)
        with Gate() as gate:
            call = playing.block.submit(list(range(MANY)), gate.address)
            gate.wait_for(MANY)
            gate.open()
            assert call.result(PATIENCE_S) == [*range(MANY)]

    def test_registered_ends_run_before_the_value(self, playing: Playing) -> None:
        """A row's registered ends run before its value arrives, the last first, also after a failure."""
        values = playing.begins.options(ranks=[0], on_error="return")(["a", "fail", "b"])
        assert [values[0], values[2]] == ["a", "b"]
        log = playing.logged()[0]
        assert [entry for entry in log if entry.startswith("fail")] == ["fail ending", "fail ended"]
        assert len(log) == 6

    @mark_executor_part
    @needs_feature("pipelines")
    @needs_feature("balance")
    def test_rows_that_a_method_yields(self, streaming: ColocatedGroup) -> None:
        """Yielded rows have the indices of the driver's rows, also if rows are balanced."""
        yielding, rows = streaming.role("yielding", Yielding), list(range(7))
        expected = [2 * row for row in rows]
        costs = [1, 9, 1, 1, 1, 1, 4]
        for values in (
            yielding.all(rows),
            yielding.all.submit(rows).result(PATIENCE_S),
            yielding.later(rows),
            yielding.later(rows, costs),
            yielding.later.submit(rows, costs).result(PATIENCE_S),
        ):
            assert values == expected
        for stream in (yielding.all.stream(rows), yielding.later.stream(rows), yielding.later.stream(rows, costs)):
            assert sorted(stream) == list(enumerate(expected))
        with streaming.pipeline():  # Kept rows stay on their ranks.
            resident = yielding.all.keep(rows)
            twice = yielding.later.keep(resident.ref, costs)
        assert (resident.fetch(), twice.fetch()) == (expected, [4 * row for row in rows])
        with pytest.raises(DispatchError, match=r"yielding.wrong yields .* has yielded nothing for 1"):
            yielding.wrong.keep([1, 2, 3, 4], [(0, 0)]).wait(PATIENCE_S)

    def test_wrong_yields_fail_the_method(self, streaming: ColocatedGroup) -> None:
        """A method that yields a wrong item, index or number of rows fails, and so does one that raises."""
        yielding = streaming.role("yielding", Yielding)
        words = r"yielding.wrong yields \(index, value\) once for each of the 2 rows that it has got, and has yielded "
        for items, hint in (
            (["a"], r"'a'"),
            ([(2, 0)], "the index 2"),
            ([(0, 0), (0, 1)], "row 0 twice"),
            ([(1, 0)], "nothing for 0"),
        ):
            with pytest.raises(DispatchError, match=words + hint):
                yielding.wrong([1, 2, 3, 4], items)
        stream = yielding.wrong.stream([1, 2, 3, 4], [(0, 5), ValueError("amid")])
        values: list[Any] = []
        with pytest.raises(RoleError, match="raised ValueError"):
            values += stream
        with pytest.raises(RoleError, match="raised ValueError"):
            yielding.wrong([1, 2, 3, 4], [(0, 5), ValueError("amid")])
        assert yielding.one() == 1

    @needs(OwnProcess)
    def test_ranks_that_work_on_the_same_rows(self, spawn: Spawn) -> None:
        """Ranks that share rows report once, and closing the stream leaves no rank alone in a collective."""
        pytest.importorskip("torch")
        group = spawn({"yielding": colocate.role(Yielding).on(mesh={"dp": 1, "tp": 2})})
        yielding = group.role("yielding", Yielding)
        rows = list(range(4 * AHEAD))
        assert yielding.all(rows) == [2 * row for row in rows]
        assert yielding.meets(rows) == [2 * row for row in rows]
        with yielding.meets.stream(rows) as stream:
            assert next(stream) == (0, 0)
        assert yielding.one() == 1

    @needs(OwnProcess)
    @mark_executor_part
    def test_a_worker_that_dies(self, spawn: Spawn, tmp_path: Path) -> None:
        """A dead worker's row returns WorkerDied, and so does the next call."""
        group = spawn({"playing": colocate.role(Playing)})
        playing = group.role("playing", Playing)
        values = playing.die.options(on_error="return")([None, None, None, None, tmp_path / "a"])
        assert isinstance(values[4], WorkerDied)
        assert {type(value) for value in values[:3]} <= {tuple, WorkerDied}
        with pytest.raises(WorkerDied):
            playing.die([None])

    @needs(OwnProcess)
    @mark_executor_part
    def test_rows_go_to_the_workers_of_a_restarted_group(self, spawn: Spawn, tmp_path: Path) -> None:
        """With `retry`, unfinished rows run in the restarted group; calls without `retry` raise GroupRestarted."""
        group = spawn({"playing": colocate.role(Playing)}, on_failure="restart")
        playing = group.role("playing", Playing)
        rows = [None, tmp_path / "a", None, None, None, None]
        with pytest.raises(GroupRestarted):
            playing.die(rows)
        group.wait_ready(PATIENCE_S)
        rows[1] = tmp_path / "b"
        with pytest.raises(ConfigError, match=r"submit\(...\) with options\(retry=... in a group that restarts\)"):
            playing.die.options(retry=1).submit(rows)
        values = playing.die.options(retry=1)(rows)
        assert values[1][0] == 2
        with pytest.raises(GroupRestarted):
            playing.die(rows)
        group.wait_ready(PATIENCE_S)
        rows[1] = tmp_path / "c"

        async def main() -> list[Any]:
            return [row async for row in playing.die.options(retry=1).stream(rows)]

        assert sorted(index for index, _ in asyncio.run(main())) == [0, 1, 2, 3, 4, 5]

    @needs(OwnProcess)
    def test_closed_while_the_group_restarts(self, spawn: Spawn, tmp_path: Path) -> None:
        """A stream closed during a restart begins no more rows, and later calls run."""
        with Gate() as gate:
            group = spawn({"playing": colocate.role(StartsAgain, gate.address)}, on_failure="restart")
            playing = group.role("playing", Playing)
            stream = playing.die.options(retry=1).stream([*[None] * 4 * OUT, tmp_path / "a", *[None] * 4 * OUT])
            ends: list[BaseException] = []

            def read() -> None:
                try:
                    list(stream)
                except BaseException as error:
                    ends.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            gate.wait_for(1)  # The group restarts now.
            stream.close()
            gate.open()
            reader.join(PATIENCE_S)
            group.wait_ready(PATIENCE_S)
            assert playing.logged.submit().result(PATIENCE_S) == [[], []]
            assert [type(error) for error in ends] == [ClosedError]

    @needs(OwnProcess)
    @pytest.mark.parametrize("fails", [False, True])
    def test_given_up_while_the_group_restarts(self, spawn: Spawn, tmp_path: Path, fails: bool) -> None:
        """A stream's new reader gets the retried rows after a restart, or the restart's error."""
        rows = [*[None] * 4 * OUT, tmp_path / "a", *[None] * 4 * OUT]
        with Gate() as gate:
            roles = {"playing": colocate.role(StartsAgain, gate.address, fails)}
            playing = spawn(roles, on_failure="restart", restarts=1).role("playing", Playing)
            stream, indices = playing.die.options(retry=1).stream(rows), list[int]()

            async def read() -> None:
                async for index, _ in stream:
                    indices.append(index)

            async def main() -> None:
                reads = asyncio.create_task(read())
                await asyncio.to_thread(gate.wait_for, 1)  # The group restarts now.
                reads.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reads
                again = asyncio.create_task(read())
                await asyncio.sleep(0)
                gate.open()
                await asyncio.wait_for(again, PATIENCE_S)

            if fails:
                with pytest.raises(WorkerDied, match="once was enough"):
                    asyncio.run(main())
            else:
                asyncio.run(main())
                assert sorted(indices) == [*range(len(rows))]

    def test_behind_a_failed_call(self, playing: Playing, streaming: ColocatedGroup) -> None:
        """After a failed call, a call of rows runs if no rank had begun it, and fails otherwise."""
        log = streaming.role("log", Log)
        with Gate() as gate:
            failing = log.at.submit([None, gate.address], ["raise", "add"])  # type: ignore[arg-type]
            queued = playing.play.submit([1, 2, 3])
            assert isinstance(failing.exception(PATIENCE_S), RoleError)
            gate.open()
            assert [value for value, _ in queued.result(PATIENCE_S)] == [1, 2, 3]
        with Gate() as gate, Gate() as other:
            failing = log.at.submit([gate.address, None], ["raise", "add"])  # type: ignore[arg-type]
            begun = playing.wait.submit([True] * 4, other.address)
            other.wait_for(PLACES)  # The second rank has begun its rows.
            gate.open()
            error = begun.exception(PATIENCE_S)
            assert isinstance(error, RoleError)
            assert error.__cause__ == failing.exception(PATIENCE_S)
        assert [value for value, _ in playing.play([1, 2, 3])] == [1, 2, 3]

    def test_timeout_of_rows(self, playing: Playing) -> None:
        """A timeout's error names the unfinished row, and rows that ended before can be read."""
        with Gate() as gate:
            stream = playing.wait.options(timeout=1.0).stream([None, True], gate.address)
            assert next(stream)[0] == 0
            with pytest.raises(CallTimeout, match=r"awaiting in playing.wait, row 1\n"):
                next(stream)
            assert list(stream) == []
            assert ("cancelled", 1) in playing.logged()[1]
            values = playing.wait.options(timeout=0.1, on_error="return")([None, True], gate.address)
            assert isinstance(values[1], CallTimeout)

    @mark_executor_part
    def test_the_group_is_closed(self, spawn: Spawn) -> None:
        """Closing a group ends its half-read streams with ClosedError, and doesn't hang on unread rows."""
        for name in ("play", "all", "later"):
            group = spawn({"playing": colocate.role(Playing), "yielding": colocate.role(Yielding)})
            role = group.role("playing" if name == "play" else "yielding")
            stream = getattr(role, name).stream(list(range(1000)))
            next(stream)
            group.close(grace=PATIENCE_S)
            with pytest.raises(ClosedError, match=r"was closed by"):
                list(stream)

    @needs_feature("checkpoints")
    def test_draws(self, playing: Playing, spawn: Spawn, tmp_path: Path) -> None:
        """Rows draw the same numbers on any ranks; each row and call, also after a checkpoint, draws new ones."""
        pytest.importorskip("torch")

        def drawn(group: ColocatedGroup, **options: Any) -> list[tuple[float, float]]:
            return group.role("playing", Playing).draw.options(**options)(list(range(8)))

        group = spawn({"playing": colocate.role(Playing)}, slots=1, name="drawing")
        alone, again = drawn(group), drawn(group)
        group.close()
        assert len({number for row in (*alone, *again) for number in row}) == 32
        group = spawn({"playing": colocate.role(Playing)}, slots=2, name="drawing")
        assert drawn(group) == alone
        assert drawn(group, ranks=[1]) == again
        group.checkpoint(tmp_path / "checkpoint")
        group.close()
        group = spawn({"playing": colocate.role(Playing)}, slots=2, name="drawing", restore=tmp_path / "checkpoint")
        assert not set(drawn(group)) & {*alone, *again}
        group.close()

    @needs_feature("checkpoints")
    def test_draws_after_a_restore(self, spawn: Spawn, tmp_path: Path) -> None:
        """After a restore rows repeat their draws, in the same or a new group, whatever calls run between."""
        pytest.importorskip("torch")
        roles = {"playing": colocate.role(Playing), "other": colocate.role(Playing)}

        def drawn(group: ColocatedGroup) -> list[Any]:
            playing, other = group.role("playing", Playing), group.role("other", Playing)
            first = playing.draw([1, 2, 3])
            streamed = sorted(playing.draw.options(ranks=[1]).stream([1, 2]))
            return [first, streamed, other.draw([1, 2]), playing.draw([1]), playing.seeds([1, 2])]

        group = spawn(roles, slots=2, name="drawing")
        drawn(group)
        group.checkpoint(tmp_path / "one")
        expected = drawn(group)
        for count in range(3):
            for _ in range(count):
                group.role("other", Playing).play([1, 2])
                group.role("playing", Playing).logged()
            group.restore(tmp_path / "one")
            for _ in range(count):
                group.role("other", Playing).play([1, 2])
                group.role("playing", Playing).logged()
            assert drawn(group) == expected
        group.checkpoint(tmp_path / "two")
        expected = drawn(group)
        group.close()
        group = spawn(roles, slots=2, name="drawing", restore=tmp_path / "two")
        assert drawn(group) == expected
        group.close()

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    @pytest.mark.parametrize("saved", [False, True])
    def test_draws_after_a_restart(self, spawn: Spawn, tmp_path: Path, saved: bool) -> None:
        """After a restart rows repeat the draws since the checkpoint, or since the roles' construction."""
        pytest.importorskip("torch")
        group = spawn({"playing": colocate.role(Playing)}, slots=2, on_failure="restart")
        playing = group.role("playing", Playing)
        playing.draw([1])
        if saved:
            group.checkpoint(tmp_path / "saved")
        expected = [playing.draw([1, 2, 3]), playing.draw([1, 2, 3])]
        with pytest.raises(GroupRestarted):
            playing.die([None, tmp_path / "mark"])
        group.wait_ready(PATIENCE_S)
        if not saved:
            playing.draw([1])
        assert [playing.draw([1, 2, 3]), playing.draw([1, 2, 3])] == expected

    @needs(OwnProcess)
    def test_draws_of_a_stream_that_outlives_a_restart(self, spawn: Spawn, tmp_path: Path) -> None:
        """A row retried after a restart draws its old number, and a later call draws another number."""
        pytest.importorskip("torch")
        group = spawn({"playing": colocate.role(Playing)}, slots=1, on_failure="restart")
        playing = group.role("playing", Playing)
        before = playing.draw([1])
        playing.draws_and_dies([None])
        (_, drawn), *_ = playing.draws_and_dies.options(retry=1)([tmp_path / "mark"])
        assert (tmp_path / "mark").read_text() == str(drawn)
        with pytest.raises(GroupRestarted):
            playing.draw([1])
        group.wait_ready(PATIENCE_S)
        assert playing.draw([1]) == before
        (_, other), *_ = playing.draws_and_dies([None])
        assert other != drawn

    def test_values_of_rows(self, streaming: ColocatedGroup) -> None:
        """Rows may be items of lists, ranges, tensors and mappings; residents are rows or shared arguments."""
        torch, playing = pytest.importorskip("torch"), streaming["playing"]
        resident = playing.count.options(ranks=[0]).keep()
        rows = {"number": [1, 2, 3], "other": torch.arange(6).reshape(3, 2)}
        assert playing.add(rows, [10]) == [12, 17, 22]
        assert [value for value, _ in playing.play(range(5, 8))] == [5, 6, 7]
        assert playing.add({**rows, "number": torch.tensor([1, 2, 3])}, [10]) == [12, 17, 22]
        counted = playing.count.keep()
        assert playing.play(counted.ref)[0] == ([0, 1], 0)
        assert [value for value, _ in playing.play([1, 2], resident.ref)] == [[[0, 1]], [[0, 1]] * 2]

    @needs_feature("pipelines")
    def test_refused_of_rows(self, playing: Playing, streaming: ColocatedGroup) -> None:
        """Options and calls without meaning for a method of rows raise an error with the remedy."""
        yielding = streaming.role("yielding", Yielding)
        with pytest.raises(DispatchError, match=r"playing.play.keep\(...\): the driver gives out its rows one by one"):
            playing.play.keep([1])
        with pytest.raises(AttributeError, match=r"playing.count has no stream: its value comes at once"):
            playing.count.stream()  # type: ignore[attr-defined]
        with streaming.pipeline():
            for call in (playing.play, playing.play.submit, playing.play.stream):
                with pytest.raises(PipelineError, match=r"playing.play would wait"):
                    call([1])
        with pytest.raises(ConfigError, match=r"options\(on_error='ignore'\): use 'raise' or 'return'"):
            playing.play.options(on_error="ignore")  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=r"options\(retry\) must be a whole number from 0"):
            playing.play.options(retry=-1)
        with pytest.raises(ConfigError, match=r"options\(sticky='key'\): give a function of a row"):
            playing.play.options(sticky="key")  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=r"gets the rows of a rank at once, .* retry= and sticky= are for"):
            yielding.all.options(retry=1)
        with pytest.raises(DispatchError, match=r"row \(int\) has no rows"):
            playing.play(1)
        with pytest.raises(ConfigError, match=r"playing.play.submit\(...\) with options\(timeout=... with on_error="):
            playing.play.options(timeout=1, on_error="return").submit([1])
        with pytest.raises(TypeError, match="missing a required argument"):
            playing.play()  # type: ignore[call-arg]
        with playing.play.stream([1, 2]) as stream:
            with pytest.raises(TypeError, match="lives on the driver and can't be sent; send the values"):
                pickle.dumps(stream)
            with pytest.raises(TypeError, match="lives on the driver and can't be an argument"):
                playing.play.submit([1], stream)  # type: ignore[arg-type]


AREAS = [Streams, Reading, Buffers, StandaloneRows]
