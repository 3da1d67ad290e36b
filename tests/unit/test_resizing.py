"""Groups that lose slots, grow again, and use spares: on threads, some of which count as lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import attrs
import pytest
from tests.suite.probes.lasting import Drawing, Resizable

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate.errors import ClusterError, ConfigError, GroupRestarted, PlacementError, RoleError, WorkerDied
from colocate.executor import Place, Request, Reservation
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


class Machines:
    """Replaces the executor's answers about slots: each slot is a machine, which can be lost, and others can come."""

    def __init__(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, replaces: bool) -> None:
        self.gone: list[Place] = []
        self.there = 4  # the number of machines
        self.silent = False  # whether the cluster doesn't answer
        self.held: dict[int, int] = {}  # the number of slots, by the reservation's handle
        executor = runtime._node.services.executor
        self._reserve, self._release = executor.reserve, executor.release
        monkeypatch.setattr(executor, "is_lost", lambda place: any(place is each for each in self.gone))
        monkeypatch.setattr(executor, "reserve", self.reserve)
        monkeypatch.setattr(executor, "release", self.release)
        if replaces:
            monkeypatch.setattr(executor, "replace", self.replace)

    def reserve(self, request: Request) -> Reservation:
        if request.slots > self.there - sum(self.held.values()):
            raise PlacementError("there are too few machines")
        found = self._reserve(request)
        self.held[id(found)] = request.slots
        places = tuple(attrs.evolve(each, node=f"n{i}") for i, each in enumerate(found.places))
        return Reservation(places, found)

    def release(self, reservation: Reservation) -> None:
        ours = self.held.pop(id(reservation.handle), 0)
        self._release(reservation.handle if ours else reservation)

    def replace(self, reservation: Reservation, lost: Sequence[Place], request: Request) -> Reservation:
        assert request.slots == len(lost)
        if self.silent:
            raise ClusterError("the cluster doesn't answer")
        if len(reservation.places) > self.there:
            raise PlacementError("there are too few machines")
        new = [attrs.evolve(each, node="new") if any(each is x for x in lost) else each for each in reservation.places]
        return attrs.evolve(reservation, places=tuple(new))

    def lose(self, group: ColocatedGroup, slot: int) -> None:
        """Mark a group's slot as lost."""
        place = group.owner._node.places[slot]
        self.gone.append(place)
        self.there = sum(self.held.values()) - 1
        died(group, place.node)


def died(group: ColocatedGroup, node: str) -> GroupRestarted:
    """Fail a group as by the death of a worker; return the error of its next call."""
    group._node.fail_group(WorkerDied(f"a worker on {node} has died", node=node))
    with pytest.raises(GroupRestarted) as caught:
        group.run(lambda ctx: None)
    return caught.value


def sizes(group: ColocatedGroup) -> list[int]:
    return group.run(lambda ctx: ctx.world_size)


ROLES: dict[str, RoleSpec[Any]] = {
    "count": colocate.role(Resizable),
    "rows": colocate.role(Rows),
    "drawing": colocate.role(Drawing),
    "first": colocate.role(Rows).on(slots=[0]),
}


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with colocate.connect("local") as runtime:
        yield runtime


@pytest.fixture(params=[True, False], ids=["replaces", "reserves anew"])
def machines(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machines:
    return Machines(runtime, monkeypatch, request.param)


def test_loss_and_regrowth_fit_ranks(runtime: Runtime, machines: Machines, tmp_path: Path) -> None:
    """After a loss and a regrowth, views, batches, generators and restored state fit the number of ranks."""
    pytest.importorskip("torch")
    pool = runtime.reserve(slots=(2, 3), regrow_timeout=0.2)
    group = pool.spawn(ROLES, on_failure="restart")
    count, rows, drawing = group.role("count", Resizable), group.role("rows", Rows), group.role("drawing", Drawing)
    seen = rows.seen
    assert len(seen([1, 2, 3])) == 3
    assert count.add() == [1, 1, 1]
    before = drawing.draw()
    group.checkpoint(tmp_path / "one")
    machines.lose(group, 1)
    assert group.wait_ready(PATIENCE_S) == "one"
    assert sizes(group) == [2, 2]
    assert seen([1, 2, 3]) == [([1, 2], 1), ([3], 1)] == rows.seen([1, 2, 3])
    assert group.role("first", Rows).seen([1]) == [([1], 1)]
    assert count.add(0) == [3, 3]
    assert colocate.inspect(rows).ranks == 2
    assert group.resize() == 2  # There are no more machines.
    assert group.generation == 1
    group.checkpoint(tmp_path / "two")
    machines.there = 4
    assert group.resize(PATIENCE_S) == 3
    assert sizes(group) == [3, 3, 3]
    assert count.add(0) == [6, 6, 6]
    assert len(seen([1, 2, 3])) == 3
    now = drawing.draw()
    assert len(set(map(tuple, [*now, *before]))) == 6  # The rank that was missing draws new numbers, too.
    died(group, "n0")
    group.wait_ready(PATIENCE_S)
    assert sizes(group) == [3, 3, 3]


def test_not_fewer_than_the_least(runtime: Runtime, machines: Machines) -> None:
    """A group below its least number of slots fails for good after the timeout."""
    group = runtime.reserve(slots=(2, 3), regrow_timeout=0.2).spawn(ROLES, on_failure="restart", restarts=1)
    machines.gone.append(group.owner._node.places[2])
    machines.lose(group, 1)
    machines.there = 1
    with pytest.raises(WorkerDied) as caught:
        group.wait_ready(PATIENCE_S)
    assert "too few machines" in caught.value.__notes__[0]


def test_unworkable_slot_ranges_are_refused(runtime: Runtime, machines: Machines, tmp_path: Path) -> None:
    """Ranges of slots that can't work are refused, for a pool, roles and checkpoints."""
    for slots in [(3, 2), (0, 2), (1, 2, 3), ("1", 2)]:
        with pytest.raises(ConfigError, match="the least and the most"):
            runtime.reserve(slots=slots)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="groups=2"):
        runtime.reserve(slots=(1, 2), groups=2)
    with pytest.raises(ConfigError, match="spares"):
        runtime.reserve(spares=-1)
    pool = runtime.reserve(slots=(2, 3))
    fixed = {
        "a": colocate.role(Rows).on(slots=[2]),
        "b": colocate.role(Rows).on(mesh={"dp": 3}),
        "c": colocate.role(Rows).on(slots=[0, 1], mesh={"dp": 2}),
    }
    with pytest.raises(ConfigError, match="2 to 3 slots") as caught:
        pool.spawn(fixed, on_failure="restart")
    assert [each.path for each in caught.value.mistakes] == ["roles.a.slots", "roles.b.mesh"]
    with pytest.raises(ConfigError, match="spawn it on all of them"):
        pool[:2].spawn({"rows": colocate.role(Rows)}, on_failure="restart")
    group = pool.spawn(fixed)
    with pytest.raises(ConfigError, match="on_failure='fail'"):
        group.resize()
    group.close()
    group = pool.spawn({"lasting": colocate.role(Lasting)}, on_failure="restart")
    with pytest.raises(RoleError, match="can be restored by 3 ranks alone"):
        group.checkpoint(tmp_path / "one")
    assert not (tmp_path / "one").exists()
    machines.lose(group, 0)
    wait_until(lambda: group._node.restarts._missing is not None, "it waits for slots")
    machines.there = 4
    group.wait_ready(PATIENCE_S)
    assert sizes(group) == [3, 3, 3]


def test_without_a_checkpoint(runtime: Runtime, machines: Machines) -> None:
    """A group without a checkpoint continues with fewer slots, and isn't resized."""
    group = runtime.reserve(slots=(1, 2), regrow_timeout=0).spawn(ROLES, on_failure="restart")
    machines.lose(group, 1)
    assert group.wait_ready(PATIENCE_S) is None
    assert sizes(group) == [1]
    machines.there = 4
    with pytest.raises(ConfigError, match="no checkpoint"):
        group.resize()


def test_spares(runtime: Runtime, machines: Machines) -> None:
    """A spare replaces a lost slot while other groups work, and a new spare is reserved if the executor can."""
    replaces = runtime._node.services.executor.replace == machines.replace
    pool = runtime.reserve(slots=2, spares=1)
    machines.there = 2
    group = pool[:1].spawn({"rows": colocate.role(Rows)}, on_failure="restart")
    other = pool[1:].spawn({"rows": colocate.role(Rows)})
    assert [(each.node, each.state) for each in pool.spares] == [("n2", "spare")]
    machines.lose(group, 0)
    group.wait_ready(PATIENCE_S)
    assert [each.node for each in pool.slots] == ["n2", "n1"]
    assert other.role("rows", Rows).seen([1]) == [([1], 1)]
    assert [(each.node, each.state) for each in pool.spares] == [("n0", "lost")]
    machines.there = 4
    if replaces:
        wait_until(lambda: [(each.node, each.state) for each in pool.spares] == [("new", "spare")], "there is a spare")


def test_a_spare_that_is_lost(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost spare is replaced before any group needs it."""
    machines = Machines(runtime, monkeypatch, replaces=True)
    pool = runtime.reserve(slots=1, spares=1)
    machines.gone.append(pool._node.spares[0])
    wait_until(lambda: [(each.node, each.state) for each in pool.spares] == [("new", "spare")], "there is a spare")


def test_a_pool_is_closed_while_a_spare_is_replaced(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that closes during a replacement releases the new reservation."""
    machines = Machines(runtime, monkeypatch, replaces=True)
    asked, goes_on, replaced, released = Event(), Event(), list[Reservation](), list[Reservation]()
    executor = runtime._node.services.executor

    def replace(*args: Any) -> Reservation:
        asked.set()
        assert goes_on.wait(PATIENCE_S)
        replaced.append(machines.replace(*args))
        return replaced[0]

    def release(reservation: Reservation) -> None:
        released.append(reservation)
        machines.release(reservation)

    monkeypatch.setattr(executor, "replace", replace)
    monkeypatch.setattr(executor, "release", release)
    pool = runtime.reserve(slots=1, spares=1)
    machines.gone.append(pool._node.spares[0])
    assert asked.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(pool.close)
        wait_until(lambda: pool._node._closing.is_set(), "it is being closed")
        goes_on.set()
        closing.result(PATIENCE_S)
    assert [each.places for each in released] == [each.places for each in replaced]


@pytest.mark.parametrize("which", ["slot", "spare"])
def test_an_audit_while_one_is_replaced(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """An audit during a replacement advises to wait for the new slots, not to close the pool."""
    machines, executor = Machines(runtime, monkeypatch, replaces=True), runtime._node.services.executor
    monkeypatch.setattr("colocate.features.looking.audit.AUDIT_SETTLES_S", 0.0)  # don't wait for an end of the doubt
    running = executor.running
    monkeypatch.setattr(executor, "running", lambda: [attrs.evolve(each, doubt="some are lost") for each in running()])
    pool = runtime.reserve(slots=2, spares=int(which == "spare"), regrow_timeout=PATIENCE_S)
    group = pool.spawn({"rows": colocate.role(Rows)}, on_failure="restart")

    def todo() -> list[str]:
        return [each.todo for each in runtime.audit().missing if each.kind == "reservation"]

    assert todo() == ["Close the pool and reserve again"]
    machines.there = 1
    if which == "slot":
        machines.lose(group, 1)
        wait_until(lambda: group._node.restarts._missing is not None, "its slot is waited for")
    else:
        machines.gone.append(pool._node.spares[0])
    assert todo() == ["Others are being reserved in the place of its lost slots: wait for them"]
    machines.there = 4
    wait_until(lambda: todo() == ["Close the pool and reserve again"], "they are there")
    group.wait_ready(PATIENCE_S)


@pytest.mark.long
def test_a_node_on_which_workers_die(runtime: Runtime, machines: Machines) -> None:
    """A node on which workers die twice becomes a spare, and a spare takes its place; the error says so."""
    pool = runtime.reserve(slots=2, spares=1)
    group = pool.spawn({"rows": colocate.role(Rows)}, on_failure="restart", restarts=4)
    told = []
    for node in ("n1", "n1", "n2", "n2"):
        told.append(str(died(group, node)))
        group.wait_ready(PATIENCE_S)
    assert "times" not in told[0] + told[2]
    assert "have died 2 times on node n1, which is avoided: a spare takes its place" in told[1]
    assert "have died 2 times on node n2" in told[3]
    assert [each.node for each in pool.slots] == ["n0", "n2"]  # Workers have died on n1 just as often.


def resizable(job: object) -> dict[str, Any]:
    """Return a config that runs a job on three slots, or on two at least."""
    roles = {"count": "tests.suite.probes.lasting:Resizable"}
    pool = {"slots": 3, "at_least": 2, "regrow_timeout": 0.1}
    groups = {"g": {"pool": "main", "on_failure": "restart", "roles": roles}}
    return {"name": "resized", "pools": {"main": pool}, "groups": groups, "job": job}


def job(run: Any, late: bool = False) -> None:
    """Lose a slot after the first step and find one after the second; log before each checkpoint, or after (`late`)."""
    group, pool = run.groups["g"], run.runtime._node
    count = group.role("count", Resizable)
    begins = 0 if run.resumed is None else int(run.resumed.name.rpartition("-")[2]) + 1
    with Path("seen").open("a") as file:
        print(begins, len(sizes(group)), file=file)
    if not begins:
        pool.machines = Machines(run.runtime, pytest.MonkeyPatch(), replaces=True)
    for step in range(begins, 4):
        count.add()
        slots = len(sizes(group))
        if not late:
            run.log(step, slots=slots)
        with run.checkpoint(step) as folder:
            group.checkpoint(folder / "g")
        if late:
            run.log(step, slots=slots)
        if step == 0:
            pool.machines.lose(group, 1)
        pool.machines.there = 4 if step else -1


@pytest.mark.parametrize(("late", "begins"), [(False, ["0 3", "1 2", "2 3"]), (True, ["0 3", "1 2", "3 3"])])
def test_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, begins: list[str]) -> None:
    """A job starts again from a checkpoint when slots are lost or return, and logs each step once."""
    monkeypatch.chdir(tmp_path)
    config = resizable({"use": "tests.unit.test_resizing:job", "with": {"late": late}})
    with colocate.launch(colocate.load_config(config)) as launched:
        record = launched.run(quiet=True)
    assert (tmp_path / "seen").read_text().split("\n") == [*begins, ""]
    assert [(row["step"], row["slots"]) for row in record.metrics] == [(0, 3), (1, 2), (2, 2 if late else 3), (3, 3)]


def silent_job(run: Any) -> None:
    """Lose a slot after the first step; afterwards the cluster doesn't answer."""
    group = run.groups["g"]
    count, begins = group.role("count", Resizable), 0 if run.resumed is None else 1
    if not begins:
        run.runtime._node.machines = Machines(run.runtime, pytest.MonkeyPatch(), replaces=True)
    for step in range(begins, 3):
        count.add()
        with run.checkpoint(step) as folder:
            group.checkpoint(folder / "g")
        if step == 0:
            run.runtime._node.machines.lose(group, 1)
            continue
        run.runtime._node.machines.silent = True
        run.log(step, slots=len(sizes(group)))


def test_job_outlives_silent_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose cluster doesn't answer continues with its remaining slots."""
    monkeypatch.chdir(tmp_path)
    config = resizable("tests.unit.test_resizing:silent_job")
    with colocate.launch(colocate.load_config(config)) as launched:
        record = launched.run(quiet=True)
    assert [(row["step"], row["slots"]) for row in record.metrics] == [(1, 2), (2, 2)]
