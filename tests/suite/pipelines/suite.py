"""Pipelines: the calls of a block as one message per worker."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.traffic import Traffic

import colocate
from colocate import Call, ColocatedGroup, Resident
from colocate.errors import ClosedError, PipelineError, RoleError
from colocate.testing.executors._base import ExecutorCase, needs_feature
from colocate.testing.executors.calls import clear_log
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Axes, Rows
from colocate.testing.probes.tensors import Tensors
from colocate.testing.waiting import PATIENCE_S, wait_until


class Pipelines(ExecutorCase):
    """Calls, residents and refusals of `group.pipeline()`."""

    @mark_executor_part
    def test_pipeline_as_without(self, pair: ColocatedGroup) -> None:
        """A pipeline's calls and residents give the usual results, and its residents can be used at once."""
        rows, echo = pair.role("rows", Rows), pair.role("echo", Echo)
        with pair.pipeline():
            first = rows.double.keep([1, 2, 3])
            second = pair.role("right", Rows).double.keep(first.ref)
            seen_call = rows.seen.submit(first.ref)
            whole = echo.first.submit({"deep": [second.ref]})
            one = rows.on_one.submit("x")
        assert seen_call.result(PATIENCE_S) == [([2, 4], 1), ([6], 1)]
        assert whole.result(PATIENCE_S) == {"deep": [[4, 8, 12]]}
        assert one.result(PATIENCE_S) == (1, "x")
        assert second.fetch() == [4, 8, 12]
        assert rows.total(first.ref) == {"sum": 12, "count": 3}

    def test_pipeline_one_message(self, pair: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each worker with calls gets one message; an idle worker gets none, and an empty block sends none."""
        rows, left_rows = pair.role("rows", Rows), pair.role("left", Rows)
        traffic = Traffic(pair, monkeypatch)
        with pair.pipeline():
            pass
        assert traffic.calls_sent() == []
        with pair.pipeline():
            calls = [left_rows.total.submit([1]), rows.total.submit([1, 2]), left_rows.total.submit([3])]
            assert traffic.calls_sent() == []
        assert traffic.calls_sent() == [3, 1]
        assert [call.result(PATIENCE_S)["sum"] for call in calls] == [1, 3, 3]
        with pair.pipeline():
            left_rows.double.keep([1])
        assert traffic.calls_sent() == [3, 1, 1]

    def test_pipeline_order(self, pair: ColocatedGroup) -> None:
        """A pipeline's calls take their place together when the block ends; another thread's call is sent at once."""
        log = clear_log(pair)
        with pair.pipeline():
            for entry in "abc":
                log.add.submit(entry)
            run_in_thread(lambda: log.add("another thread's"))
            log.async_add.submit("d")
        assert log.read() == [["another thread's", "a", "b", "c", "begin d", "end d"]] * 2

    @needs_feature("functions")
    def test_pipeline_blocking_call_is_refused(self, pair: ColocatedGroup) -> None:
        """A call that needs an answer inside the block is refused with advice, and the rest of the block is sent."""
        echo, rows = pair.role("echo", Echo), pair.role("rows", Rows)
        with pair.pipeline():
            call, resident = echo.first.submit(1), rows.double.keep([1, 2])
            refused: dict[str, Callable[[], object]] = {
                r"echo\.noop would wait.*\.submit": echo.noop,
                r"echo\.noop would wait.*before or after the block": echo.noop.options(timeout=1),
                r"function worker_id would wait": lambda: pair.run(worker_id),
                r"echo\.first is sent when the block .* at .*suite\.py:\d+ ends": call.result,
                r"echo\.first is sent": call.exception,
                r"echo\.first is sent when": lambda: colocate.wait([call]),
                r"echo\.first is sent when the": lambda: next(colocate.as_completed([call])),
                r"rows\.double is sent": resident.fetch,
                r"rows\.double is sent when": lambda: resident.spec,
            }
            for words, ask in refused.items():
                with pytest.raises(PipelineError, match=words):
                    ask()
        assert call.result(PATIENCE_S) == 1
        assert resident.fetch() == [2, 4]

    def test_pipeline_exception(self, pair: ColocatedGroup) -> None:
        """A block that raises sends nothing, and its calls and residents fail with the reason."""
        log, rows = clear_log(pair), pair.role("rows", Rows)
        sent: list[tuple[Call[Any], Resident[Any], Call[Any]]] = []

        def block() -> None:
            with pair.scope(), pair.pipeline():
                resident = rows.double.keep([1, 2])
                sent.append((log.add.submit("never"), resident, rows.seen.submit(resident.ref)))
                raise LookupError("the reason")

        with pytest.raises(LookupError, match="the reason"):
            block()
        (call, resident, use) = sent.pop()
        for ask in (call.result, use.result, lambda: rows.double(resident.ref)):
            with pytest.raises((PipelineError, ClosedError)):
                ask()
        message = str(call.exception())
        assert "log.add of group 'pair' was never sent" in message
        assert "ended with LookupError: the reason" in message
        assert log.read() == [[], []]

    def test_pipeline_failure_of_one(self, pair: ColocatedGroup) -> None:
        """A failed call of a pipeline fails only the calls that use its result."""
        faulty, echo = pair.role("faulty", Faulty), pair.role("echo", Echo)
        for ranks in ((0,), (1,), None):
            with pair.pipeline():
                before = echo.echo.submit("before")
                failed = faulty.fail.submit(ranks=ranks)
                poisoned = faulty.fail.keep("two", ranks=ranks)
                use = echo.echo.submit(poisoned.ref)
                after = echo.echo.submit("after")
            assert before.result(PATIENCE_S) == ["before"] * 2
            assert after.result(PATIENCE_S) == ["after"] * 2
            assert isinstance(failed.exception(PATIENCE_S), RoleError)
            with pytest.raises(RoleError):
                use.result(PATIENCE_S)
            with pytest.raises(RoleError, match="TwoArguments"):
                poisoned.fetch()

    def test_pipeline_release(self, pair: ColocatedGroup) -> None:
        """A resident freed or dropped in the block serves the block's calls, and is released afterwards."""
        echo, rows = pair.role("echo", Echo), pair.role("rows", Rows)

        def gone() -> bool:
            gc.collect()
            return echo.is_alive() == [False, False]

        with pair.pipeline():
            resident, freed = rows.double.keep([1, 2]), rows.double.keep([3, 4])
            uses = [rows.double.submit(resident.ref), rows.double.submit(freed.ref)]
            freed.free()
            del resident
            gc.collect()
            run_in_thread(lambda: echo.noop())  # Carries the releases that are due by now.
            echo.tracked.keep().free()
            echo.tracked.keep()
        assert [use.result(PATIENCE_S) for use in uses] == [[4, 8], [12, 16]]
        with pytest.raises(ClosedError, match="freed by free"):
            freed.fetch()
        wait_until(gone, "what was kept and dropped in the block is gone")

    def test_pipeline_nested(self, pair: ColocatedGroup) -> None:
        """An inner block is sent with the outer one; an inner block that fails alone isn't sent."""
        log = clear_log(pair)

        def inner(fails: bool) -> Call[Any]:
            with pair.pipeline():
                call = log.add.submit(f"inner, fails={fails}")
                if fails:
                    raise LookupError
            return call

        with pair.pipeline():
            log.add.submit("outer")
            with pytest.raises(LookupError):
                inner(fails=True)
            call = inner(fails=False)
            with pytest.raises(PipelineError):
                call.result()
        assert log.read() == [["outer", "inner, fails=False"]] * 2

    def test_pipeline_several_groups(self, pair: ColocatedGroup, square: ColocatedGroup) -> None:
        """Pipelines of several groups are sent together, and each may use the other's residents."""
        rows, axes = pair.role("rows", Rows), square.role("axes", Axes)
        with pair.pipeline(), square.pipeline():
            first = rows.double.keep([1, 2, 3])
            second = axes.doubled.keep(first.ref)
            third = rows.double.submit(second.ref)
            seen_call = axes.seen.submit(second.ref)
        assert third.result(PATIENCE_S) == [8, 16, 24]
        assert seen_call.result(PATIENCE_S) == axes.seen(second.fetch())

    def test_pipeline_other_groups(self, pair: ColocatedGroup, square: ColocatedGroup) -> None:
        """Calls of other groups are sent at once, but may not use a resident that isn't sent yet."""
        rows, axes = pair.role("rows", Rows), square.role("axes", Axes)
        with axes.doubled.keep([1, 2]) as theirs, pair.pipeline():
            assert axes.first_rank([1, 2]) == 0
            ours, use = rows.double.keep([1, 2]), rows.double.submit(theirs.ref)
            with pytest.raises(PipelineError, match=r"axes\.doubled would be sent before rows\.double"):
                axes.doubled.submit(ours.ref)
            refused = run_in_thread(lambda: rows.double.submit(ours.ref).exception())
            assert isinstance(refused, PipelineError)
        assert use.result(PATIENCE_S) == [4, 8]
        assert axes.doubled(ours.ref) == [4, 8]

    def test_pipeline_arguments_keep_call_time_values(self, copying: ColocatedGroup) -> None:
        """An argument arrives as it was when the call was made, not as it is when the block ends."""
        pytest.importorskip("torch")
        import torch

        tensors, echo = copying.role("tensors", Tensors), copying.role("echo", Echo)
        tensor, plain = torch.zeros(5000), [1]
        with copying.pipeline():
            calls = [tensors.total.submit(tensor), echo.first.submit(plain)]
            tensor += 1
            plain.append(2)
            calls += [tensors.total.submit(tensor), echo.first.submit(plain)]
        assert [call.result(PATIENCE_S) for call in calls] == [[0.0, 0.0], [1], [5000.0, 5000.0], [1, 2]]

    def test_pipeline_shared_values(self, copying: ColocatedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        """A value passed to several calls of the block is sent once."""
        pytest.importorskip("torch")
        import torch

        tensors = copying.role("tensors", Tensors)
        traffic = Traffic(copying, monkeypatch)
        tensor = torch.ones(50_000)
        with copying.pipeline():
            calls = [tensors.total.submit(tensor) for _ in range(5)]
            rows = [tensors.add.submit(tensor, float(index)) for index in range(3)]
        assert [call.result(PATIENCE_S) for call in calls] == [[50_000.0] * 2] * 5
        assert [torch.equal(call.result(PATIENCE_S), tensor + index) for index, call in enumerate(rows)] == [True] * 3
        assert max(traffic.sent_bytes) < 2 * tensor.nbytes


def worker_id(ctx: colocate.Context) -> int:
    return ctx.rank


def run_in_thread(do: Callable[[], object]) -> object:
    """Run a function in another thread, and return its result or its exception."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(do())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


AREAS = [Pipelines]
