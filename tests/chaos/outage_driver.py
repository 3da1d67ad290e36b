"""The driver of a lane of `outages`, on a machine: `python -m tests.chaos.outage_driver ENGINE ADDRESS WHAT TOLD`.

The driver writes a line for each program that it has played. If a program takes too long, the driver prints the stacks
of all threads, and exits.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from tests.chaos.machine import Ballast, digest_after, row
from tests.chaos.outages import CUT_S, Outage, outage
from tests.clusters.machines import ask

import colocate
from colocate import Call, ColocatedGroup, Concat, Gather, Role, Run, Runtime, method
from colocate.errors import ColocateError, GroupRestarted, RoleError, WorkerDied

PROGRAM_S = 240.0  # the bound for a program
SOON_S = 30.0  # the bound for a short operation on a busy machine
ROWS = 6


class CallList(Role):
    """A role whose state is the list of its calls, and the memory that these calls have written.

    Args:
        writes_s: The duration of a checkpoint's write.
    """

    def __init__(self, writes_s: float) -> None:
        self.writes_s = writes_s
        self.notes: list[int] = []
        self.origin = self.ctx.rank  # the first rank that had this memory
        self.ballast = Ballast("a", self.ctx.rank)

    def _note(self, ident: int, work_s: float = 0.0) -> None:
        self.ballast.use(ident)
        self.notes.append(ident)
        time.sleep(work_s)

    @method(collect=Gather())
    def step(self, ident: int, work_s: float) -> tuple[int, list[int], int, str, int]:
        """Return the origin, the calls, the digest of the memory, the machine, and the group's generation."""
        self._note(ident, work_s)
        return self.origin, list(self.notes), self.ballast.digest(), os.uname().nodename, self.ctx.generation

    @method(collect=Concat())
    def make(self, ident: int, size: int) -> list[bytes]:
        self._note(ident)
        return [row(ident, self.ctx.rank, index, size) for index in range(ROWS)]

    @method(collect=Gather())
    def take(self, ident: int, rows: Sequence[bytes]) -> list[int]:
        self._note(ident)
        return [zlib.crc32(each) for each in rows]

    def save(self, directory: str) -> Iterator[None]:
        """Copy the state between calls, and write the copy beside later calls."""
        taken = json.dumps([self.origin, self.notes]), self.ballast.array.tobytes()
        writes_s = self.writes_s
        yield
        time.sleep(writes_s)
        Path(directory, f"{self.ctx.rank}.json").write_text(taken[0])
        Path(directory, f"{self.ctx.rank}.memory").write_bytes(taken[1])

    def restore(self, directory: str, ranks: int) -> None:
        """Restore this rank's state; a new rank restores the state of rank 0."""
        rank = self.ctx.rank if self.ctx.rank < ranks else 0
        self.origin, self.notes = json.loads(Path(directory, f"{rank}.json").read_text())
        self.ballast.restore(Path(directory, f"{rank}.memory"))


@attrs.define(eq=False)
class Playing:
    """A program under way: its calls, its measurements, and the complaints."""

    plan: Outage
    runtime: Runtime
    lane: str
    folder: Path
    wrong: list[str] = attrs.field(factory=list)
    left: list[str] = attrs.field(factory=list)
    error_ms: float | None = None  # from the outage to the first error that reports it
    free_ms: float | None = None  # from the end of the program until all machines can be reserved
    struck: float = 0.0  # in seconds of time.time()
    _healed: float = 0.0
    _idents: int = 0
    _since: list[int] = attrs.field(factory=list)  # calls since the group began, or was restored
    _saved: dict[int, list[int]] = attrs.field(factory=dict)  # the calls in a checkpoint, by tag
    _complete: int | None = None  # the tag of the last complete checkpoint
    _generation: int = 0
    _timers: list[threading.Thread] = attrs.field(factory=list)

    def play(self) -> None:
        plan = self.plan
        slots: int | tuple[int, int] = (2, 3) if plan.kind == "regrow" else 2
        more: dict[str, Any] = {"regrow_timeout": 1.0} if plan.kind == "regrow" else {}
        if plan.kind == "drain":  # a third machine replaces the drained one
            more = {"regrow_timeout": PROGRAM_S}
        pool = self.runtime.reserve(slots, cpus=1, resources={self.lane: 1}, timeout=SOON_S, **more)
        on_failure = "restart" if plan.restart else "fail"
        try:
            group = pool.spawn(
                {"kept": colocate.role(CallList, plan.writes_s)},
                on_failure=on_failure,
                restarts=5,
                timeout=2 * SOON_S,
            )
            self.group, self.kept = group, group.role("kept", CallList)
            for _ in range(plan.steps):
                self.step()
            {"cut": self._cut, "drain": self._drain, "regrow": self._regrow}[plan.kind]()
        finally:
            for each in self._timers:
                each.join()
            began = time.monotonic()
            pool.close(grace=1.0)
            if (took := time.monotonic() - began) > SOON_S:
                self.wrong.append(f"closing took {took:.1f} s")
        self._is_free()

    # -- what is called

    group: ColocatedGroup = attrs.field(init=False)
    kept: CallList = attrs.field(init=False)

    def _next(self) -> int:
        self._idents += 1
        self._since.append(self._idents)
        return self._idents

    def begin(self, work_s: float = 0.0) -> Call[Any]:
        return self.kept.step.submit(self._next(), work_s)

    def step(self) -> list[str]:
        """Make a call, check the value, and return the machines."""
        return self.look(self.begin().result(SOON_S + 2 * CUT_S))

    def look(self, value: Any, idents: Sequence[int] | None = None) -> list[str]:
        wanted = list(self._since if idents is None else idents)
        for rank, (origin, notes, digest, _, generation) in enumerate(value):
            if notes != wanted:
                self.wrong.append(f"rank {rank} has begun {notes}, not {wanted}")
            if digest != digest_after("a", origin, notes):
                self.wrong.append(f"the memory of rank {rank} isn't that of its calls")
            if generation != self._generation:
                self.wrong.append(f"rank {rank} is of generation {generation}, not {self._generation}")
        return [node for _, _, _, node, _ in value]

    def checkpoint(self, folder: Path | None = None) -> Any:
        """Begin a checkpoint in the program's way, with the last call as tag."""
        tag = self._idents
        self._saved[tag] = list(self._since)
        where = self.folder / f"{tag}" if folder is None else folder
        if not self.plan.beside:
            self.group.checkpoint(where, tag=tag)
            self._complete = tag
            return None
        return self.group.checkpoint(where, tag=tag, wait=False)

    def counts(self, saving: Any) -> None:
        """Wait for a checkpoint that is written beside calls."""
        if saving is not None:
            saving.result(SOON_S)
            self._complete = max(self._saved)

    def moment(self) -> list[tuple[Callable[..., Any], list[int]]]:
        """Begin the activity for the outage; return functions for the results, each with the expected calls."""
        begun: list[tuple[Callable[..., Any], list[int]]] = []
        match self.plan.moment:
            case "call":
                call = self.begin(1.0)
                begun.append((call.result, list(self._since)))
            case "queue":
                for _ in range(4):
                    call = self.begin(0.3)
                    begun.append((call.result, list(self._since)))
            case "transfer":
                rows = self.kept.make.keep(self._next(), 1 << 20)
                call = self.kept.take.submit(self._next(), rows.ref)
                begun.append((call.result, []))
            case "checkpoint":
                self.step()
                saving = self.group.checkpoint(self.folder / "struck", tag=self._idents, wait=False)
                self._saved[self._idents] = list(self._since)
                begun.append((saving.result, []))
            case _:
                pass
        time.sleep(self.plan.delay_s)
        return begun

    # -- the kinds

    def _cut(self) -> None:
        plan = self.plan
        self.counts(self.checkpoint())
        nodes = self.step()
        begun = self.moment()
        self.strike("cut", nodes[plan.rank])
        self.later(plan.lasts_s, "heal", nodes[plan.rank])
        errors = self.settle([*begun, self.probe()])
        lost = bool(errors)
        for each in self._timers:
            each.join()
        lasted = self._healed - self.struck  # longer than planned, on a busy machine
        if lasted <= CUT_S - 1.5 and lost:
            self.wrong.append(f"a cut of {lasted:.2f} s, of {CUT_S} s that are borne: {errors[0]!r}")
        if lasted >= CUT_S + 1.5 and not lost:
            self.wrong.append(f"a cut of {lasted:.2f} s, of {CUT_S} s that are borne, and nobody was told")
        if lost:
            self.explained(errors, plan.rank)
        if not lost or plan.restart:
            if lost:
                self.restarted()
            self.step()

    def _drain(self) -> None:
        plan = self.plan
        run: Run
        with colocate.record(self.runtime, self.folder / "run") as run:
            self._save(run)
            nodes = self.step()
            drain(self.runtime, nodes[plan.rank])
            self.struck = time.time()
            deadline = time.monotonic() + SOON_S
            while not run.is_due(self._idents):
                self.step()
                if time.monotonic() > deadline:
                    self.wrong.append(f"{nodes[plan.rank]} was to go, and no checkpoint was due for {SOON_S} s")
                    break
            self._save(run)
            if run.is_due(self._idents):
                self.wrong.append("a checkpoint was due twice of one notice")
            begun = self.moment()
            time.sleep(plan.lasts_s)
            self.strike("kill", nodes[plan.rank])
            errors = self.settle([*begun, self.probe()])
            try:
                run._checkpoints.wait_pending()
                self._complete = run._folder.list_checkpoints()[-1][0]
            except ColocateError as error:
                errors.append(error)
            self.explained(errors, plan.rank)
            if not errors:
                self.wrong.append("a machine is gone, and nobody was told")
                return
            self.restarted()
            if nodes[plan.rank] in self.step():
                self.wrong.append(f"it has restarted on {nodes[plan.rank]}, which is gone")
        self.another(nodes[plan.rank])

    def _save(self, run: Run) -> None:
        """Write a checkpoint of the run, with the group's."""
        if not self._idents:
            self.step()
        step = self._idents
        with run.checkpoint(step) as directory:
            saving = self.checkpoint(directory / "policy")
        self._complete = step if saving is None else self._complete

    def _regrow(self) -> None:
        plan = self.plan
        self.counts(self.checkpoint())
        nodes = self.step()
        if len(nodes) != 3:
            self.wrong.append(f"it began on {nodes}")
        begun = self.moment()
        lost = nodes[plan.rank]
        self.strike("kill", lost)

        def replace() -> None:
            time.sleep(plan.lasts_s)
            self.another(lost)

        thread = threading.Thread(target=replace)
        thread.start()
        self._timers.append(thread)
        errors = self.settle([*begun, self.probe()])
        self.explained(errors, plan.rank)
        if not errors:
            self.wrong.append("a machine is gone, and nobody was told")
            return
        self.restarted()
        nodes = self.step()
        if len(nodes) < 3:
            thread.join()
            nodes = self._whole()
        if sorted(nodes) != sorted({*nodes, lost}) or len(nodes) != 3:
            self.wrong.append(f"in the end it is on {nodes}")

    def _whole(self) -> list[str]:
        """Get all slots back in the plan's way, and return the machines."""
        deadline = time.monotonic() + 2 * SOON_S
        if self.plan.by == "resize":
            self.counts(self.checkpoint(self.folder / "grown"))
            while self.group.resize() < 3:
                if time.monotonic() > deadline:
                    self.wrong.append(f"no third slot within {2 * SOON_S} s of another machine")
                    break
                time.sleep(0.2)
            else:
                self._renewed(self.group.wait_ready(2 * SOON_S))
            return self.step()
        with colocate.record(self.runtime, self.folder / "run") as run:
            while True:
                self._save(run)
                run._checkpoints.wait_pending()
                self._complete = self._idents
                try:
                    run.log(self._idents)
                    nodes = self.step()
                except GroupRestarted:
                    self._renewed(self.group.wait_ready(2 * SOON_S))
                    return self.step()
                if time.monotonic() > deadline:
                    self.wrong.append(f"no third slot within {2 * SOON_S} s of another machine")
                    return nodes
                time.sleep(0.2)

    # -- what comes of it

    def strike(self, verb: str, machine: str) -> None:
        self.struck = ask(verb, machine)

    def later(self, seconds: float, verb: str, machine: str) -> None:
        def act() -> None:
            time.sleep(seconds)
            self._healed = ask(verb, machine)

        thread = threading.Thread(target=act)
        thread.start()
        self._timers.append(thread)

    def another(self, machine: str) -> None:
        ask("boot", machine)
        ask("join", machine)

    def probe(self) -> tuple[Callable[..., Any], list[int]]:
        try:
            call = self.begin()
        except ColocateError as error:
            told = error  # the group's failure is known already

            def fail(timeout: float) -> Any:
                raise told

            return fail, []
        return call.result, list(self._since)

    def settle(self, begun: Sequence[tuple[Callable[..., Any], list[int]]]) -> list[ColocateError]:
        """Wait for the results; return the errors."""
        errors: list[ColocateError] = []
        for result, idents in begun:
            try:
                value = result(SOON_S + 3 * CUT_S)
            except ColocateError as error:
                errors.append(error)
                if self.error_ms is None:
                    self.error_ms = (time.time() - self.struck) * 1000
            else:
                if idents:
                    self.look(value, idents)
        return errors

    def explained(self, errors: Sequence[ColocateError], rank: int) -> None:
        """Check that each error names the rank whose machine is lost."""
        for error in errors:
            if isinstance(error, WorkerDied) and error.rank == rank:
                continue
            if isinstance(error, RoleError) and f"can't be had from worker {rank} " in str(
                error
            ):  # by a request for the lost rank's rows
                continue
            self.wrong.append(f"rank {rank} is lost, and the error is {type(error).__name__}: {error}"[:1000])

    def restarted(self) -> None:
        self._renewed(self.group.wait_ready(PROGRAM_S / 2))

    def _renewed(self, tag: Any) -> None:
        """Check that the group restarts from the last complete checkpoint, or from a later one."""
        self._generation = self.group.generation
        allowed = {each for each in self._saved if self._complete is None or each >= self._complete}
        if tag not in allowed:
            self.wrong.append(f"it goes on from {tag!r}, where {sorted(allowed)} may be")
        self._since = list(self._saved.get(tag, []))
        self._complete = tag

    def _is_free(self) -> None:
        """Check that nothing is left, and that all machines of the lane can be reserved."""
        began = time.monotonic()
        trouble = ""
        while time.monotonic() - began < 2 * SOON_S:
            try:
                self.runtime.reserve(3, cpus=1, resources={self.lane: 1}, timeout=SOON_S, grow=True).close()
                audit = self.runtime.audit()
                if not audit:
                    self.free_ms = (time.monotonic() - began) * 1000
                    return
                trouble = str(audit)
            except ColocateError as error:
                trouble = f"{type(error).__name__}: {error}"
            time.sleep(0.5)
        self.left.append(f"{2 * SOON_S} s after its end: {trouble}"[:2000])


def drain(runtime: Runtime, machine: str) -> None:
    """Announce to the engine that a machine will be removed."""
    address = Path("/etc/hosts").read_text()
    (ip,) = (line.split()[0] for line in address.splitlines() if line.split()[1:] == [machine])
    if sys.argv[1] == "dask":
        import distributed

        def retire(host: str, dask_scheduler: Any) -> None:
            for state in dask_scheduler.workers.values():
                if state.host == host:
                    dask_scheduler.handle_worker_status_change("closing_gracefully", state, "chaos")

        with distributed.Client(sys.argv[2], set_as_default=False) as client:  # type: ignore[no-untyped-call]
            client.run_on_scheduler(retire, host=ip)
        return
    raylet: Any = importlib.import_module("ray._raylet")  # neither has types
    drains: Any = importlib.import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
    reason, deadline = drains.Value("DRAIN_NODE_REASON_PREEMPTION"), int(1000 * (time.time() + 300))
    books: Any = raylet.GcsClient(address=sys.argv[2])
    nodes: list[Any] = list(books.get_all_node_info().values())
    alive = importlib.import_module("ray.core.generated.gcs_pb2").GcsNodeInfo.ALIVE
    (ident,) = (each.node_id.hex() for each in nodes if each.state == alive and each.node_manager_address == ip)
    accepted, why = books.drain_node(ident, reason, "spot", deadline)
    assert accepted, why


def main() -> None:
    """Play the requested seeds, until the time is up."""
    engine, address, what, told = sys.argv[1:]
    asked = json.loads(what)
    until = time.monotonic() + asked["seconds"]
    random.seed(0)
    with (
        open(told, "a") as file,
        colocate.connect(engine, address=address, cut_s=asked["cut_s"]) as runtime,
    ):
        for seed in asked["seeds"]:
            if time.monotonic() > until:
                break
            faulthandler.dump_traceback_later(PROGRAM_S, exit=True)
            print(f"--- {outage(seed)}", flush=True)
            folder = Path(asked["folder"], str(seed))
            playing = Playing(outage(seed), runtime, f"lane{asked['lane']}", folder)
            playing.play()
            faulthandler.cancel_dump_traceback_later()
            kept = {"seed": seed, "wrong": playing.wrong, "left": playing.left}
            file.write(json.dumps({**kept, "error_ms": playing.error_ms, "free_ms": playing.free_ms}) + "\n")
            file.flush()
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
