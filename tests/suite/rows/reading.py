"""Readers of a stream: several at once, some interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.suite.rows.probes import PLACES, Playing, RingingRow, Yielding

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate._signals.deferred import wait_until_done
from colocate.errors import CallTimeout, ClosedError, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Shared, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.plain import Log
from colocate.testing.waiting import PATIENCE_S, wait_until

READERS = 3
OUT = 2 * PLACES * 2
"""The most rows of two ranks that are begun and not read."""


class RowsCase(ExecutorCase):
    """The base class of tests of rows."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_playing(cls, runtime: Runtime) -> Shared:
        """Share two slots with a role of each kind."""
        roles: dict[str, RoleSpec[Any]] = {
            "playing": colocate.role(Playing),
            "yielding": colocate.role(Yielding),
            "log": colocate.role(Log),
        }

        def warm_up(group: ColocatedGroup) -> None:
            group.role("playing", Playing).play([1, 2, 3])

        return Shared(runtime, roles, 2, "playing", warm_up=warm_up)

    @pytest.fixture
    def streaming(self, no_leaks: None, shared_playing: Shared) -> ColocatedGroup:
        """Return the group that all tests share."""
        return shared_playing.get()

    @pytest.fixture
    def playing(self, streaming: ColocatedGroup) -> Playing:
        """Return the view of the playing role, with an empty log."""
        view = streaming.role("playing", Playing)
        view.logged()
        return view


class Alarm(Exception):
    """The error that a user's signal handler raises."""


@contextlib.contextmanager
def raise_on_alarm() -> Iterator[None]:
    """Make SIGUSR1 raise Alarm inside the block."""

    def ring(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        yield
    finally:
        RingingRow.rings.clear()
        signal.signal(signal.SIGUSR1, before)


def read_by_threads(stream: Any, meanwhile: Callable[[], object] = lambda: None) -> list[tuple[list[int], type | None]]:
    """Return each reader thread's rows of a stream, and its error."""
    results: list[tuple[list[int], type | None]] = []

    def read() -> None:
        rows: list[int] = []
        try:
            rows.extend(index for index, _ in stream)
            results.append((rows, None))
        except Exception as error:
            results.append((rows, type(error)))

    readers = [threading.Thread(target=read, daemon=True) for _ in range(READERS)]
    for thread in readers:
        thread.start()
    meanwhile()
    for thread in readers:
        thread.join(PATIENCE_S)
    return results


def read_by_tasks(stream: Any, meanwhile: Callable[[], object] = lambda: None) -> list[tuple[list[int], type | None]]:
    """Return each reader task's rows of a stream, and its error."""

    async def read() -> tuple[list[int], type | None]:
        rows: list[int] = []
        try:
            async for index, _ in stream:
                rows.append(index)
        except Exception as error:
            return rows, type(error)
        return rows, None

    async def main() -> list[tuple[list[int], type | None]]:
        tasks = [asyncio.create_task(read()) for _ in range(READERS)]
        await asyncio.to_thread(meanwhile)
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)

    return asyncio.run(main())


class Reading(RowsCase):
    """Several readers of one stream, and interruptions."""

    @pytest.mark.parametrize("by", [read_by_threads, read_by_tasks])
    def test_several_read_one_stream(self, playing: Playing, by: Callable[..., Any]) -> None:
        """Each row goes to one reader, and every reader gets the stream's end, timeout or close."""
        results = by(playing.play.stream(list(range(10 * OUT))))
        assert sorted(row for rows, _ in results for row in rows) == [*range(10 * OUT)]
        assert [error_type for _, error_type in results] == [None] * READERS
        with Gate() as gate:
            stream = playing.wait.options(timeout=0.5).stream([True] * 4, gate.address)
            assert by(stream) == [([], CallTimeout)] * READERS
            returning = playing.wait.options(timeout=0.5, on_error="return").stream([True] * 4, gate.address)
            assert sorted(row for rows, _ in by(returning) for row in rows) == [0, 1, 2, 3]
            stream = playing.wait.stream([True] * 4, gate.address)

            def close() -> None:
                gate.wait_for(2 * PLACES)
                wait_until(lambda: len(stream._arrivals._waiting) == READERS, "all wait")  # type: ignore[attr-defined]
                stream.close()

            assert by(stream, close) == [([], ClosedError)] * READERS

    @needs(OwnProcess)  # Threads hand values over without rebuilding.
    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
    def test_interrupted_while_a_value_is_rebuilt(self, playing: Playing, number: signal.Signals) -> None:
        """A signal during the rebuild of a value loses no value: the next read of the stream or call returns it."""
        rows, got = list(range(3 * OUT)), list[int]()

        def interrupted(asks: Callable[[], Any]) -> Any:
            RingingRow.rings.append(number)
            with pytest.raises((Alarm, KeyboardInterrupt)):
                asks()
            return asks()

        with raise_on_alarm():
            stream = playing.ring.stream(rows)
            while len(got) < len(rows):
                got.append(interrupted(lambda: next(stream))[0])
            assert sorted(got) == rows
            with pytest.raises(StopIteration):
                next(stream)
            call = playing.ring.submit(rows)
            assert [value.row for value in interrupted(lambda: call.result(PATIENCE_S))] == rows

            async def first() -> Any:
                return await anext(later)

            later, got = playing.ring.stream(rows), []
            while len(got) < len(rows) and number == signal.SIGUSR1:  # asyncio.run has its own handler for SIGINT.
                got.append(interrupted(lambda: asyncio.run(first()))[0])
            assert sorted([*got, *(index for index, _ in later)]) == rows

    def test_cancelled_waiter_takes_no_row(self, playing: Playing) -> None:
        """A task that is cancelled while waiting for a row takes no row."""
        rows, got = list(range(10 * OUT)), list[int]()

        async def main() -> None:
            stream = playing.play.stream(rows)
            within = 1e-5
            while True:
                try:
                    got.append((await asyncio.wait_for(anext(stream), within))[0])
                except TimeoutError:
                    within *= 2
                except StopAsyncIteration:
                    return
                else:
                    within = 1e-5

        asyncio.run(main())
        assert sorted(got) == rows

    def test_main_thread_reads_start_no_threads(self, playing: Playing) -> None:
        """Reading rows on the main thread while the call is locked starts no thread per row."""
        stream = playing.play.stream(list(range(3 * OUT)))
        call = stream._call  # type: ignore[attr-defined]
        wait_until(lambda: len(call.ends) == OUT, "as many rows as may have ended")
        held, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            with call._lock:
                held.set()
                goes_on.wait(PATIENCE_S)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(PATIENCE_S)
        try:
            got = [next(stream)[0] for _ in range(OUT)]
            assert wait_until_done(0.0)  # Otherwise each row has a thread waiting for the lock.
        finally:
            goes_on.set()
            holder.join(PATIENCE_S)
        assert sorted([*got, *(index for index, _ in stream)]) == [*range(3 * OUT)]

    @pytest.mark.parametrize("how", ["closed", "failed", "yields"])
    def test_swallowed_cancellation_fails_the_group(self, spawn: Spawn, how: str) -> None:
        """A method that swallows its cancellation fails the group after the grace, with its name and row."""
        group = spawn({"playing": colocate.role(Playing), "yielding": colocate.role(Yielding)}, slots=1)
        group._node.grace = 0.2
        role: Any = group["yielding" if how == "yields" else "playing"]
        with Gate() as gate:
            if how == "failed":
                role.swallow.submit(["a", "fail"], gate.address)
            else:
                stream = role.swallow.stream(["a"], gate.address)
                gate.wait_for(1)
                stream.close()
            error = group.role("yielding", Yielding).one.submit().exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        where = "row 0" if how != "yields" else "swallow"
        assert re.search(r"swallow did not end on slot 0 .* within 0.2 s after nobody waited for its rows", str(error))
        assert where in str(error)
        assert (error.method, error.rank) == ("swallow", 0)

    def test_closed_unstarted_stream_fails_nothing(self, spawn: Spawn) -> None:
        """A stream closed behind a long earlier call fails nothing, even past the grace."""
        group = spawn({"playing": colocate.role(Playing)}, slots=1)
        playing, order = group.role("playing", Playing), group._node.order
        with Gate() as gate:
            earlier = playing.wait.submit([True], gate.address)
            gate.wait_for(1)
            group._node.grace = 0.01
            playing.play.stream([1]).close()
            wait_until(lambda: order.stacks.ran, "it was looked for")
            order_before, order.stacks.ran = order.stacks.ran, {}
            wait_until(lambda: order.stacks.ran, "and again")
            assert order_before == order.stacks.ran
            gate.open()
            assert earlier.result(PATIENCE_S) == [(0, 0)]
        assert playing.count() == [[0, 1]]
