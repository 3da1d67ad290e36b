"""`group.run`: plain functions on every worker."""

from __future__ import annotations

import functools

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.probes.meshes import sum_ranks, worker_facts

from colocate import ColocatedGroup, Context
from colocate.errors import RoleError
from colocate.executor import OwnProcess
from colocate.testing import leaks
from colocate.testing.executors._base import ExecutorCase, needs
from colocate.testing.probes.faulty import raise_deep_inside


class Functions(ExecutorCase):
    """Context, results and failures of `group.run`."""

    @mark_executor_part
    def test_run_context(self, pair: ColocatedGroup) -> None:
        """A function gets the worker's context, in which every slot is a rank, and its arguments."""
        nodes = [slot.node for slot in pair.owner.slots]
        assert pair.run(worker_facts, 1, b=[2]) == [
            {
                "rank": rank,
                "world_size": 2,
                "slot": rank,
                "node": nodes[rank],
                "role": None,
                "group": pair.name,
                "generation": 0,
                "mesh": {"dp": 2},
                "same": True,
                "args": (1,),
                "kwargs": {"b": [2]},
            }
            for rank in range(2)
        ]

    def test_run_any_function(self, pair: ColocatedGroup) -> None:
        """A function that a worker can't import is sent by value: local functions, lambdas, partials, callables."""
        offset = 10

        def local(ctx: Context) -> int:
            return ctx.rank + offset

        class TimedCall:
            def __call__(self, ctx: Context) -> int:
                return ctx.rank + 20

        assert pair.run(local) == [10, 11]
        assert pair.run(lambda ctx: ctx.slot) == [0, 1]
        assert [fact["args"] for fact in pair.run(functools.partial(worker_facts, b=1), 2)] == [(2,)] * 2
        assert pair.run(TimedCall()) == [20, 21]
        with pytest.raises(TypeError, match=r"runs a function .*, not 3"):
            pair.run(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]

    def test_run_failure(self, pair: ColocatedGroup) -> None:
        """An error in a function is a RoleError with the function's name, and the group stays usable."""

        def fail(ctx: Context, ranks: tuple[int, ...]) -> int:
            if ctx.rank in ranks:
                raise_deep_inside("value")
            return ctx.rank

        for ranks in ((0,), (1,), (0, 1)):
            with pytest.raises(RoleError, match=r"function fail raised ValueError on rank \d of group") as caught:
                pair.run(fail, ranks)
            error = caught.value
            assert (error.role, error.method, error.group) == (None, "fail", pair.name)
            assert error.rank in ranks
            assert isinstance(error.__cause__, ValueError)
            assert error.remote_traceback is not None
            assert "features/functions/worker.py" not in error.remote_traceback
            assert pair.run(fail, ()) == [0, 1]

    @needs(OwnProcess)
    def test_run_process_group(self, pair: ColocatedGroup) -> None:
        """`ctx.process_group()` has all workers of the group, also after a rank has failed in a collective."""
        pytest.importorskip("torch")
        with leaks.share_between_tests():
            assert pair.run(sum_ranks) == [1.0, 1.0]
        with pytest.raises(RoleError, match="rank 1 left") as caught:
            pair.run(sum_ranks, failing=1)
        assert caught.value.rank == 1
        assert pair.run(sum_ranks) == [1.0, 1.0]


AREAS = [Functions]
