"""`python -m tests.chaos.outages`: programs on machines that are cut off, drained, or lost and replaced.

Each seed is a program: an outage hits a group whose slots are on machines of their own, and the result is judged. A
lane has three machines out of namespaces, and one driver that plays program after program (`outage_driver`). The
requirements are those of `tests.clusters`; without these nothing is played.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from tests.chaos.ledger import ROOT, Ledger
from tests.clusters.engines import OnMachines, dask_on, ray_on
from tests.clusters.machines import Machine, Machines, lacks

KINDS = ("cut", "drain", "regrow")
"""A machine's link is cut for a while; a machine is drained, and then killed; a machine is killed, and replaced."""
ENGINES = ("ray", "dask")
OF_LANE = 3  # machines of a lane
CUT_S = 3.0  # the `cut_s` of drivers
BELOW = (0.2, 0.5, 1.0, 1.5)
"""Cuts that a group survives, well below `CUT_S`: by probes each second, the silence may seem a second longer."""
ABOVE = (CUT_S + 1.5, CUT_S + 3.0, CUT_S + 6.0)
NEITHER = (CUT_S - 1.0, CUT_S - 0.5, CUT_S, CUT_S + 0.5)
MOMENTS = ("idle", "call", "queue", "transfer", "checkpoint")
_LOOKS_S = 1.0
_SAID = 3000  # characters of a driver's log, at most


@attrs.frozen
class Outage:
    """The program of one seed."""

    seed: int
    kind: str
    moment: str  # the activity under way at the outage
    rank: int  # the rank whose machine is hit
    delay_s: float  # after the moment's begin
    lasts_s: float  # until a cut heals, a lost machine is replaced, or a drained one is killed
    restart: bool  # whether the group is restarted, or fails
    beside: bool  # whether checkpoints are written beside calls
    writes_s: float  # the duration of a rank's checkpoint
    steps: int  # calls before the outage
    by: str  # the way to get all slots back: "resize", or "run" (after a run's checkpoint)


def outage(seed: int) -> Outage:
    draw = random.Random(f"outage {seed}")
    kind = KINDS[seed % len(KINDS)]
    lasts = {
        "cut": draw.choice((BELOW, ABOVE, ABOVE, NEITHER)),
        "drain": (0.0, 0.1, 0.5, 2.0),
        "regrow": (0.0, 1.0, 4.0, 8.0),
    }[kind]
    return Outage(
        seed,
        kind,
        draw.choice(MOMENTS),
        draw.randrange(2),
        draw.choice((0.0, 0.01, 0.05, 0.2)),
        draw.choice(lasts),
        kind != "cut" or draw.random() < 0.6,
        draw.random() < 0.6,
        draw.choice((0.0, 0.05, 0.3)),
        draw.randint(0, 3),
        draw.choice(("resize", "run")),
    )


def main() -> int:
    """Play outages, and print the counts; return 1 after any problem."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.outages", description="Random programs, lost machines."
    )
    parser.add_argument("--engine", choices=ENGINES, help="only this one")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--count", type=int, default=50, help="outages of each kind on each engine (50)")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so long on each engine (10)")
    parser.add_argument("--lanes", type=int, default=2, help="drivers at once, with three machines each (2)")
    table = ROOT / "docs" / "internals" / "chaos.json"
    parser.add_argument("--ledger", type=Path, default=table, help="the file to continue")
    parser.add_argument("--seed", type=int, action="append", help="play this one only, and count nothing")
    options = parser.parse_args()
    if (missing := lacks()) is not None:
        print(missing)
        return 0
    ledger = Ledger(part="outages") if options.seed else Ledger.open(options.ledger, part="outages")
    kinds = [options.kind] if options.kind else list(KINDS)
    for engine in [options.engine] if options.engine else ENGINES:
        play(engine, ledger, options.seed or _seeds(engine, ledger, kinds, options.count), options)
    for engine, tallies in sorted(ledger.tallies.items()):
        for kind, tally in sorted(tallies.items()):
            hit = ", ".join(f"{name} {count}" for name, count in sorted(tally.targets.items()))
            counts = f"{tally.survived} of {tally.tried} survived, {tally.hangs} hangs, {tally.left} left"
            print(f"{engine} {kind}: {counts}, {tally.wrong} wrong: {hit}")
    return 1 if ledger.problems else 0


def _seeds(engine: str, ledger: Ledger, kinds: Sequence[str], count: int) -> list[int]:
    """Return the next seeds of each kind, until `count` outages of each kind are played."""
    found: list[int] = []
    for kind in kinds:
        tally, first = ledger.tally(engine, kind), KINDS.index(kind)
        after = first if tally.last is None else tally.last + len(KINDS)
        found += [after + len(KINDS) * number for number in range(max(0, count - tally.tried))]
    random.Random(0).shuffle(found)  # each lane gets some of each kind
    return found


def play(engine: str, ledger: Ledger, seeds: Sequence[int], options: Any) -> None:
    """Play programs on an engine, in parallel lanes, until the time is up."""
    if not seeds:
        return
    lanes = max(1, min(options.lanes, len(seeds)))
    starts: dict[str, Callable[..., OnMachines]] = {"ray": ray_on, "dask": dask_on}
    with Machines(1 + OF_LANE * lanes) as machines:
        cluster = starts[engine](machines, own=lambda machine: _own(engine, machine))
        machines.verbs["join"] = cluster.join
        if engine == "ray":
            cluster.wait_for(len(machines))
        until = time.monotonic() + options.minutes * 60
        made = [_Lane(cluster, ledger, number, [*seeds[number::lanes]], until) for number in range(lanes)]
        threads = [threading.Thread(target=each.play) for each in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def lane_of(machine: Machine) -> int:
    return (int(machine.name[1:]) - 1) // OF_LANE


def _own(engine: str, machine: Machine) -> list[str]:
    """Return the options that give a machine one unit of its lane's resource."""
    name = f"lane{lane_of(machine)}"
    return [f"--resources={json.dumps({name: 1})}"] if engine == "ray" else ["--resources", f"{name}=1"]


@attrs.define(eq=False)
class _Lane:
    """Three machines, and a driver that is replaced after a hang or an exit."""

    cluster: OnMachines
    ledger: Ledger
    number: int
    seeds: list[int]
    until: float  # in monotonic time
    _drivers: int = 0

    def play(self) -> None:
        while self.seeds and time.monotonic() < self.until:
            self._drive()

    def _drive(self) -> None:
        self._drivers += 1
        shared, name = self.cluster.machines.shared, f"lane{self.number}-{self._drivers}"
        told, log = shared / f"{name}.jsonl", shared / f"{name}.log"
        left = max(1.0, self.until - time.monotonic())
        what = {"lane": self.number, "seeds": self.seeds, "seconds": left, "cut_s": CUT_S, "folder": str(shared / name)}
        arguments = ["-m", "tests.chaos.outage_driver", self.cluster.engine, self.cluster.address, json.dumps(what)]
        process = self.cluster.machines[0].start_driver("python", *arguments, str(told), log=log)
        lines = 0
        while True:
            ended = process.poll() is not None
            found = told.read_text().splitlines(keepends=True) if told.exists() else []
            for line in found[lines:]:
                if line.endswith("\n"):
                    lines += 1
                    self._note(json.loads(line))
            if ended:
                break
            time.sleep(_LOOKS_S)
        if process.returncode and self.seeds:
            words = log.read_text(errors="replace")[-_SAID:]
            what_kind = "hangs" if "Timeout (" in words else "wrong"
            self._problem(self.seeds.pop(0), what_kind, f"its driver ended with {process.returncode}:\n{words}")
            self._mend()

    def _mend(self) -> None:
        """Reboot all machines of the lane, and join each to the cluster."""
        for machine in self.cluster.machines:
            if machine is not self.cluster.machines[0] and lane_of(machine) == self.number:
                machine.boot_again()
                self.cluster.join(machine)

    def _note(self, told: dict[str, Any]) -> None:
        played = outage(told["seed"])
        self.seeds.remove(played.seed)
        with self.ledger.lock:
            tally = self.ledger.tally(self.cluster.engine, played.kind)
            tally.played(played.seed)
            tally.tried += 1
            tally.survived += not (told["wrong"] or told["left"])
            tally.count(played.moment)
            for name in ("error_ms", "free_ms"):
                getattr(tally, name).extend([] if told[name] is None else [round(told[name], 1)])
        for what in ("wrong", "left"):
            for words in told[what]:
                self._problem(played.seed, what, words)
        self.ledger.save()

    def _problem(self, seed: int, what: str, words: str) -> None:
        self.ledger.problem(self.cluster.engine, outage(seed).kind, seed, what, words)
        self.ledger.save()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
