"""Process groups that are being made: by all ranks or none, and what a rank that is called back leaves behind."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from colocate._protocol.consequence import Consequence
from colocate._role import torch_groups
from colocate._role.torch_meetings import all_have, all_make, can_not, withdraw
from colocate.errors import ColocateError
from colocate.testing import leaks
from colocate.testing.waiting import PATIENCE_S, becomes_true, wait_until
from colocate.worker.torch_groups import making as group_making
from colocate.worker.torch_groups.making import DefaultGroup, Making, Together

RANKS = 3
SEQ = 3


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    """Clients of a store: two for each rank."""
    pytest.importorskip("torch")
    with leaks.shared():  # a pipe of torch's own, for good
        store, address = torch_groups.serve_store("127.0.0.1")
    made = [[torch_groups.connect_store(address, 60.0) for _ in range(2)] for _ in range(RANKS)]
    yield made
    made.clear()
    del store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * RANKS) as pool:
        yield pool


def test_all_make_it(ranks: list[Any], pool: ThreadPoolExecutor) -> None:
    """Once all are there, who withdraws is told that they have made the group, as soon as they have."""
    waiting = [pool.submit(all_make, store, "all", rank, RANKS) for rank, (store, _) in enumerate(ranks)]
    assert [each.result(PATIENCE_S) for each in waiting] == [True] * RANKS
    leaving = [pool.submit(withdraw, store, "all") for _, store in ranks]
    waiting = [pool.submit(all_have, ranks[rank][0], "all", rank, RANKS, 60.0) for rank in range(RANKS - 1)]
    assert not becomes_true(lambda: any(each.done() for each in (*waiting, *leaving)), 0.1)
    assert all_have(ranks[-1][0], "all", RANKS - 1, RANKS, 60.0)
    assert [each.result(PATIENCE_S) for each in (*waiting, *leaving)] == [True] * (2 * RANKS - 1)


def test_none_makes_it(ranks: list[Any], pool: ThreadPoolExecutor) -> None:
    """One that withdraws frees those that wait, and who comes after that doesn't wait."""
    waiting = [pool.submit(all_make, ranks[rank][0], "none", rank, RANKS) for rank in range(1, RANKS)]
    assert not becomes_true(lambda: any(each.done() for each in waiting), 0.1)
    assert not withdraw(ranks[0][1], "none")
    assert [each.result(PATIENCE_S) for each in waiting] == [False] * (RANKS - 1)
    assert not all_make(ranks[0][0], "none", 0, RANKS)
    assert not withdraw(ranks[1][1], "none")


@pytest.mark.parametrize("late", [False, True])
def test_one_could_not(ranks: list[Any], pool: ThreadPoolExecutor, late: bool) -> None:
    """Then nobody has it: those that have connected are told, who has left, and the one that comes too late."""
    waiting = [pool.submit(all_make, store, "one", rank, RANKS) for rank, (store, _) in enumerate(ranks)]
    assert [each.result(PATIENCE_S) for each in waiting] == [True] * RANKS
    leaving = pool.submit(withdraw, ranks[1][1], "one")
    patience = 0.1 if late else 60.0
    waiting = [pool.submit(all_have, ranks[rank][0], "one", rank, RANKS, patience) for rank in range(1, RANKS)]
    if not late:
        can_not(ranks[0][0], "one")
    assert [each.result(PATIENCE_S) for each in (*waiting, leaving)] == [False] * RANKS
    assert not all_have(ranks[0][0], "one", 0, RANKS, 60.0)
    assert not any(all_make(store, "one", rank, RANKS) for rank, (store, _) in enumerate(ranks))  # who asks again


def test_it_is_the_same_for_all(ranks: list[Any], pool: ThreadPoolExecutor) -> None:
    """Whoever comes, and withdraws, when."""
    seen = set()
    for number in range(200):
        board = f"board {number}"
        turns = [(rank, False) for rank in range(RANKS)]
        turns += [(rank, True) for rank in random.Random(number).sample(range(RANKS), number % RANKS)]
        random.Random(number).shuffle(turns)
        leaving = [pool.submit(withdraw, ranks[rank][1], board) for rank, leaves in turns[:1] if leaves]
        come = [pool.submit(all_make, ranks[rank][0], board, rank, RANKS) for rank, leaves in turns if not leaves]
        leaving += [pool.submit(withdraw, ranks[rank][1], board) for rank, leaves in turns[1:] if leaves]
        (made,) = {each.result(PATIENCE_S) for each in come}
        if made:
            have = [pool.submit(all_have, ranks[rank][0], board, rank, RANKS, 60.0) for rank in range(RANKS)]
            assert all(each.result(PATIENCE_S) for each in have)
        assert all(each.result(PATIENCE_S) == made for each in leaving)
        seen.add(made)
    assert seen == {True, False}


def test_two_groups_at_once_on_a_device() -> None:
    """The default group isn't bound to the device as long as any is made: NCCL would split that one's communicator."""
    group = SimpleNamespace(bound_device_id="cuda:0")
    c10d = SimpleNamespace(_get_default_group=lambda: group, is_initialized=lambda: True)
    with ExitStack() as later:
        with torch_groups._no_split(c10d):
            later.enter_context(torch_groups._no_split(c10d))
        assert group.bound_device_id is None
    assert group.bound_device_id == "cuda:0"


def test_whose_sockets() -> None:
    """Those of a group are told from all others that its process has connected meanwhile, and accepted.

    Also from those of groups that other threads make at the same moment, and of loops that begin while gloo's does.
    """
    pytest.importorskip("torch")
    code = """
        import asyncio, os, socket, threading, datetime
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from colocate._role import gloo_devices, torch_books
        from colocate._role.gloo_devices import on_a_device
        from colocate._role.torch_groups import connect_store, serve_store

        store, address = serve_store("127.0.0.1")
        others, groups, found = [], [], {}
        NAMES, RANKS = ["one", "other"], range(2)
        all_are_there = threading.Barrier(5)

        def connect():
            listener = socket.create_server(("127.0.0.1", 0))
            others.extend([socket.create_connection(listener.getsockname()), listener.accept()[0], listener])
            others.append(dist.TCPStore(*address, is_master=False, wait_for_workers=False))

        def make(name, rank):
            client = dist.PrefixStore(name, connect_store(address, 60.0))
            with on_a_device(c10d) as device:
                before = {inode for _, inode in device.sockets()}
                all_are_there.wait()
                groups.append(c10d.ProcessGroupGloo(client, rank, 2, datetime.timedelta(seconds=60)))
                all_are_there.wait()
                found.setdefault(name, []).extend(torch_books.connections(device, before))

        async def serve():
            server = await asyncio.start_server(lambda *streams: others.extend(streams), "127.0.0.1", 0)
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            others.extend([server, writer, writer.get_extra_info("socket")])

        def making(interfaces):
            gloos = made(interfaces)
            loops.append(asyncio.new_event_loop())
            loops[-1].run_until_complete(serve())
            return gloos

        made, gloo_devices._made, loops = gloo_devices._made, making, []
        threads = [threading.Thread(target=make, args=(name, rank)) for name in NAMES for rank in RANKS]
        connect()
        for each in threads:
            each.start()
        all_are_there.wait()
        connect()
        all_are_there.wait()
        for each in threads:
            each.join()
        for name in NAMES:
            ends = {(each.getsockname(), each.getpeername()) for each in found[name]}
            assert len(found[name]) == 2 and {(b, a) for a, b in ends} == ends, ends  # both ends of one connection
        known = {each.getsockname() for each in others if hasattr(each, "getsockname")}
        assert not known & {each.getsockname() for ours in found.values() for each in ours}

        # The next ones share what the first have had.
        all_are_there = threading.Barrier(3)
        threads = [threading.Thread(target=make, args=("next", rank)) for rank in RANKS]
        for each in threads:
            each.start()
        all_are_there.wait()
        all_are_there.wait()
        for each in threads:
            each.join()
        assert len(gloo_devices._devices) == 4
        assert len(loops) == 4
        assert len(found["next"]) == 2
        print("known")
        os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "known\n", done.stderr


class Asking:
    """A worker whose running call asks for groups."""

    refuses: str | None = None
    seq = SEQ

    def ask(self, *question: Any, **how: Any) -> Any:
        raise AssertionError(question)

    def tell(self, question: Any) -> None:
        """Nobody hears it."""

    def asking(self) -> int | None:
        return self.seq

    def why_not(self) -> str | None:
        return self.refuses


class Group:
    """It is made by all, and at once, unless something else is said."""

    by_board: ClassVar[dict[str, Group]] = {}

    def __init__(
        self,
        make: Callable[[], object] = lambda: None,
        board: str = "board 1",
        join: Callable[[], bool] = lambda: True,
        leave: Callable[[], bool] = lambda: True,
        can_not: Callable[[], object] = lambda: None,
    ) -> None:
        self.join, self.leave, self.can_not = join, leave, can_not
        plan: Any = SimpleNamespace(name="policy/actor/*", board=board, index=0, slots=(0, 1), timeout_s=60.0)
        plan.make = lambda store: make()
        self.together = Together("actor/*", plan, ("127.0.0.1", 1), {})
        self.by_board[board] = self


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store: how a group's ranks meet is what the group says."""
    monkeypatch.setattr(torch_groups, "connect_store", lambda *_: "store")
    monkeypatch.setattr(group_making, "all_make", lambda store, board, *_: Group.by_board[board].join())
    monkeypatch.setattr(group_making, "withdraw", lambda store, board: Group.by_board[board].leave())
    monkeypatch.setattr(group_making, "can_not", lambda store, board: Group.by_board[board].can_not())


class Lane(threading.Thread):
    """It asks for a group, and waits."""

    def __init__(self, making: Making, group: Group) -> None:
        super().__init__(daemon=True)
        self.making, self.group = making, group
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.making.have(self.group.together)
        except Exception as error:
            self.error = error


def back(making: Making) -> threading.Thread:
    thread = threading.Thread(target=making.back, daemon=True)
    thread.start()
    return thread


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize("ends", [False, True], ids=["all are there", "a peer is gone, and the worker ends"])
def test_back_when_it_is_made(ends: bool) -> None:
    """A rank that all have waited for makes the group with them, though it is called back; until then it isn't back."""
    making, begun, end = Making(Asking()), threading.Event(), threading.Event()
    made = []

    def make() -> None:
        begun.set()
        end.wait(PATIENCE_S)
        made.append(making.unfinished())

    lane = Lane(making, Group(make))
    assert begun.wait(PATIENCE_S)
    making.end_waits(SEQ, "a call has failed")
    lane.join(PATIENCE_S)
    assert isinstance(lane.error, Consequence)
    comes_back = back(making)
    assert not becomes_true(lambda: not comes_back.is_alive(), 0.1)
    making.give_up() if ends else end.set()
    comes_back.join(PATIENCE_S)
    assert not comes_back.is_alive()
    end.set()
    wait_until(lambda: made == [{"policy/actor/*"}] and not making.unfinished(), "it is made")


@pytest.mark.usefixtures("meeting")
def test_back_when_it_is_never_made() -> None:
    """What waits for peers that don't come is left to itself, and has nothing to do with what is made next."""
    making, end = Making(Asking()), threading.Event()
    former: list[threading.Thread] = []

    def comes_late() -> bool:
        former.append(threading.current_thread())
        end.wait(PATIENCE_S)
        return False

    lane = Lane(making, Group(leave=lambda: False, join=comes_late))
    wait_until(lambda: former, "it waits")
    making.end_waits(SEQ, "a call has failed")
    lane.join(PATIENCE_S)
    making.back()
    begun, ends = threading.Event(), threading.Event()

    def make() -> None:
        begun.set()
        ends.wait(PATIENCE_S)

    following = Lane(making, Group(make, board="board 2"))
    assert begun.wait(PATIENCE_S)
    end.set()
    former[0].join(PATIENCE_S)
    assert making.unfinished() == {"policy/actor/*"}
    ends.set()
    following.join(PATIENCE_S)
    assert following.error is None
    assert making.failed_in == -1


@pytest.mark.usefixtures("meeting")
def test_it_can_not_be_made() -> None:
    """Who waits is told why, before any other rank is: those fail with it, and have this one called back."""
    making, told = Making(Asking()), threading.Event()

    def make() -> None:
        raise OSError("no sockets any more")

    def can_not() -> None:
        making.end_waits(SEQ, "a call has failed")
        told.set()

    lane = Lane(making, Group(make, can_not=can_not))
    lane.join(PATIENCE_S)
    assert str(lane.error) == "no sockets any more"
    assert told.wait(PATIENCE_S)
    assert making.failed_in == -1  # it is its own failure
    assert not making.unfinished()
    making.back()


@pytest.mark.usefixtures("meeting")
def test_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have no more: whoever asks is told, and a rank that is called back is back."""
    making, end = Making(Asking()), threading.Event()
    group = Group(join=partial(end.wait, PATIENCE_S))
    waiting = Lane(making, group)
    wait_until(lambda: making._waiting, "it waits")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            making.have(Group(board="board 2").together)
        making.end_waits(SEQ, "a call has failed")
    waiting.join(PATIENCE_S)
    assert str(waiting.error) == "a call has failed"
    making.back()
    end.set()


class Refused(Asking):
    """Another slot can't take part in the default group, which is heard late; it can when it is asked again."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.asked: list[Any] = []

    def ask(self, *question: Any, **how: Any) -> Any:
        self.asked.append(question)
        if len(self.asked) == 1:
            assert self.heard.wait(PATIENCE_S)
            raise ColocateError("slot 0 can't take part")
        return "127.0.0.1", 1


def test_a_default_group_begun_for_an_earlier_call(monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    """That another slot couldn't take part in it then is that call's error: a later one, which waits, has it made."""
    pytest.importorskip("torch")
    monkeypatch.setattr(torch_groups, "connect_store", lambda *_: None)
    monkeypatch.setattr(torch_groups.Plan, "make", lambda *_: None)
    worker = Refused()
    making = Making(worker)
    default = DefaultGroup(worker, making, "policy", 1, "127.0.0.1", "cpu")
    default.slots = 2
    earlier = pool.submit(default.have)
    wait_until(lambda: worker.asked and making._waiting, "it waits")
    making.end_waits(SEQ, "a call has failed")
    with pytest.raises(Consequence, match="a call has failed"):
        earlier.result(PATIENCE_S)
    worker.seq = SEQ + 1
    later = pool.submit(default.have)
    wait_until(lambda: making._waiting, "it waits")
    worker.heard.set()
    later.result(PATIENCE_S)
    assert len(worker.asked) == 2


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize("fails", [False, True])
def test_the_same_one_twice(fails: bool) -> None:
    """Threads of a role that ask for the same group make one."""
    making, end = Making(Asking()), threading.Event()
    made = []

    def make() -> None:
        end.wait(PATIENCE_S)
        if fails:
            raise ConnectionError("no sockets any more")
        made.append("a group")

    lanes = [Lane(making, Group(make)) for _ in range(2)]
    wait_until(lambda: len(making._waiting) == 2, "both wait")
    end.set()
    for lane in lanes:
        lane.join(PATIENCE_S)
        assert (str(lane.error) == "no sockets any more") if fails else (lane.error is None)
    assert made == ([] if fails else ["a group"])
