"""A stand-in for backends whose groups an abort frees, as NCCL's but unlike gloo's: no GPU is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import colocate
from colocate import Role, RoleError, method
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S


class Waiting(Role):
    """Sum over a group of the stand-in, in which only an abort ends a wait."""

    def __init__(self) -> None:
        import torch.distributed as dist

        heard = self.heard = []

        class StandIn(dist.ProcessGroup):
            def __init__(self, rank: int, size: int) -> None:
                super().__init__(rank, size)
                self.aborted = threading.Event()
                self.begun = 0

            def _get_sequence_number_for_group(self) -> int:
                return self.begun

            def allreduce(self, *_: Any) -> Any:
                self.begun += 1
                if not self.aborted.wait(PATIENCE_S):
                    heard.append("nobody has aborted it")
                raise RuntimeError("aborted")

            def abort(self) -> None:
                heard.append(f"abort on {threading.current_thread().name}")
                self.aborted.set()

            def _group_start(self) -> None:
                heard.append("start")

            def _group_end(self) -> None:
                heard.append("end")

            def getBackendName(self) -> str:
                return "standin"

        dist.Backend.register_backend("standin", lambda _, rank, size, __: StandIn(rank, size), devices=["cpu"])
        self.group = dist.new_group(backend="standin")

    @method
    def total(self, gate: Address) -> None:
        """Block rank 0 in a collective, while the other rank raises."""
        import torch
        import torch.distributed as dist

        if self.ctx.rank == 0:
            pass_gate(gate)
            dist.all_reduce(torch.ones(1), group=self.group)
        pass_gate(gate)
        raise ValueError("not here")

    @method
    def told(self) -> list[str]:
        """Return the events that the backend has recorded."""
        return self.heard

    def renew(self) -> None:
        del self.group


def test_abort_ends_wait_in_backend() -> None:
    """An abort, on a thread of its own between a group's start and end, ends the wait of a rank in the backend."""
    with colocate.connect(processes=True) as runtime:
        spec = colocate.role(Waiting).on(default_group=True)
        group = runtime.reserve(2, cpus=0).spawn({"waiting": spec})
        waiting = group.role("waiting", Waiting)
        with Gate() as gate:
            call = waiting.total.submit(gate.address)
            gate.wait_for(2)
            gate.open()
            with pytest.raises(RoleError, match="not here"):
                call.result(PATIENCE_S)
        found = waiting.told.submit().result(PATIENCE_S)
        each = ["start", "abort on colocate-abort", "end"]
        # The freed rank has failed as well, and aborts once more: an abort is idempotent.
        assert all(heard in (each, [*each, *each]) for heard in found)
        assert group.state == "ready"
