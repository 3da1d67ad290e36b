"""Process groups: refused default groups, failed and interrupted rendezvous, and errors of backward passes."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch

import colocate
from colocate import ColocatedGroup, Role, RoleError, method, needs
from colocate._protocol.consequence import Consequence
from colocate.executor import Boot
from colocate.features.process_groups import books
from colocate.features.process_groups.groups import ProcessGroups
from colocate.features.process_groups.making import GroupMaker
from colocate.features.process_groups.worker import is_in_backward
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.waiting import PATIENCE_S, wait_until

SEQ = 3


class Asking:
    """A stand-in for a worker whose running call makes groups, with all ranks present."""

    boot = Boot("policy/0", "policy", 0, "here")
    in_process = False
    lane = SimpleNamespace(last_hold=0)
    slots, collective_timeout = 1, 60.0

    def ask(self, *question: Any, **how: Any) -> Any:
        return "127.0.0.1", 1

    def tell(self, question: Any) -> None:
        """Drop the notification."""

    def asking(self) -> int | None:
        return SEQ

    def why_not(self) -> str | None:
        return None


def test_returning_rank_reports_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that enters a hold reports every group that was cut, even if its call ends during the cut."""
    monkeypatch.setattr(books, "count_operations", lambda: {"policy/actor/*": (1, 2)})
    monkeypatch.setattr(books, "cut_groups", lambda names: None)
    groups = ProcessGroups(Asking())  # type: ignore[arg-type]
    told: list[Any] = []
    lane = threading.Thread(target=lambda: told.append(groups.enter_hold(1)), daemon=True)

    def waits() -> bool:
        lane.start()  # The call ends after this question.
        wait_until(lambda: groups._usable.epoch == 1, "the lane is about to tell that it is back")
        assert not told
        return True

    groups.cut_all(waits)
    lane.join(PATIENCE_S)
    assert told == [({"policy/actor/*": (1, 2)}, ["policy/actor/*"])]
    groups.on_renewed()
    groups.cut_all(lambda: False)
    assert groups.enter_hold(2)[1] == []


def codes_of(thread: threading.Thread) -> list[CodeType]:
    """Return the code objects on a thread's stack."""
    return [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames().get(thread.ident or 0))]


class Threads(Role):
    """Makes a group on a thread of its own."""

    @method
    def meet(self, failing: int | None, gates: list[Address] | None = None) -> str:
        if self.ctx.rank == failing:
            assert gates is not None
            pass_gate(gates[1])
            raise ValueError(f"rank {failing} doesn't come")
        told: list[str] = []

        def ask() -> None:
            try:
                told.append(f"{self.ctx.process_group().size()} ranks")
            except Consequence:
                told.append("called back")

        thread = threading.Thread(target=ask)
        thread.start()
        if gates is not None:
            wait_until(lambda: GroupMaker.wait_until_over.__code__ in codes_of(thread), "it waits for its peer")
            pass_gate(gates[0])
        thread.join()
        return told[0]


class Unlucky(Role):
    """A role with one rank that can't make a group."""

    @method
    def sum(self, value: float, failing: int | None = None) -> float:
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        if self.ctx.rank == failing:
            make = c10d._new_process_group_helper

            def fail(*_: Any, **__: Any) -> Any:
                c10d._new_process_group_helper = make
                raise OSError("no descriptors any more")

            c10d._new_process_group_helper = fail
        found = torch.tensor([value])
        dist.all_reduce(found, group=self.ctx.process_group())
        return float(found)


@needs("process_group")
class Several(Role):
    """Uses its context's group, and makes others with torch."""

    @method
    def share(self) -> bool:
        """Return whether all groups share one gloo device, which is a thread."""
        import torch
        import torch.distributed as dist

        groups: list[Any] = [self.ctx.process_group(), dist.group.WORLD, dist.new_group([0, 1, 2])]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        devices = [each for group in groups for each in group._get_backend(torch.device("cpu")).options._devices]
        return len(devices) == len(groups) and all(each is devices[0] for each in devices)


@pytest.fixture(scope="module")
def group() -> Iterator[ColocatedGroup]:
    with colocate.connect(processes=True) as runtime:
        unlucky = colocate.role(Unlucky).on(default_group=True)
        others: dict[str, Any] = {"threads": colocate.role(Threads), "several": colocate.role(Several)}
        yield runtime.reserve(3, cpus=0).spawn({"unlucky": unlucky, **others})


def test_gloo_groups_of_a_process_share_a_thread(group: ColocatedGroup) -> None:
    """All gloo groups of a process share one thread. (This test runs before the ones with failures.)"""
    assert group.role("several", Several).share() == [True] * 3


def test_a_rank_that_can_not(group: ColocatedGroup) -> None:
    """A rank that can't make a group fails the call of its waiting peers, and the next call makes a group."""
    unlucky = group.role("unlucky", Unlucky)
    for failing in (0, 2):
        with pytest.raises(RoleError, match=r"raised OSError on rank .*no descriptors any more"):
            unlucky.sum(1.0, failing)
        assert group.state == "ready"
    assert unlucky.sum(1.0) == [3.0] * 3


def test_a_thread_that_a_role_starts(group: ColocatedGroup) -> None:
    """A thread that waits for peers in a role's call is freed when the call has failed on another rank."""
    threads = group.role("threads", Threads)
    with Gate() as waiting, Gate() as failing:
        call = threads.meet.submit(1, [waiting.address, failing.address])
        waiting.wait_for(2)
        waiting.open()
        failing.open()
        with pytest.raises(RoleError, match="rank 1 doesn't come"):
            call.result(PATIENCE_S)
    assert group.state == "ready"
    assert threads.meet.submit(None).result(PATIENCE_S) == ["3 ranks"] * 3


def test_groups_that_meet_at_the_same_time() -> None:
    """Two groups that start at the same time never join each other's rendezvous."""
    with colocate.connect(processes=True, cpus=4) as runtime, runtime.reserve(4) as pool, ThreadPoolExecutor(2) as two:
        groups = list(two.map(lambda part: part.spawn({"ring": colocate.role(Collective)}), (pool[:2], pool[2:])))
        calls: list[Any] = [group.role("ring").sum.submit(float(number)) for number, group in enumerate(groups, 1)]
        assert [call.result(PATIENCE_S) for call in calls] == [[2.0, 2.0], [4.0, 4.0]]


class Own(Role):
    """Makes torch's default group itself."""

    @method
    def make(self) -> int:
        import torch.distributed as dist

        store = dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return self.ctx.process_group().size()


def test_foreign_default_group_is_refused() -> None:
    """`ctx.process_group()` is refused if role code has made torch's default group."""
    with colocate.connect(processes=True) as runtime:
        group = runtime.reserve(1).spawn({"own": colocate.role(Own)})
        with pytest.raises(RoleError, match="default one in this process already: leave init_process_group"):
            group.role("own", Own).make()


def test_backward_pass_errors_are_recognized() -> None:
    """An error raised in a backward pass is recognized, also as the cause of another error."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("no gradient")

    value: Any = torch.ones(1, requires_grad=True)
    value.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient") as caught:
        (value * 2).backward()
    assert is_in_backward(caught.value)
    again = RuntimeError("the step failed")
    assert not is_in_backward(again)
    again.__cause__ = caught.value
    assert is_in_backward(again)
