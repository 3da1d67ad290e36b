"""`python -m tests.chaos`: play until each kind has enough faults, and print the results."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.pretty import pretty_repr
from rich.table import Table
from tests.chaos import deaths, engine, judge
from tests.chaos.ledger import ROOT, Ledger, Tally
from tests.chaos.programs import KINDS, SLOTS, kind_of, program

EXECUTORS = ("local", "ray", "dask")
WIDTH = 160  # of the table outside of a terminal
NAMES = {
    "kill": "SIGKILL of a worker",
    "stop": "SIGSTOP of a worker",
    "gil": "hang with the GIL held",
    "drop": "dropped connection",
    "driver": "SIGKILL of the driver",
}


def main() -> int:
    """Play programs, and print the results; return 1 after any problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Random programs, random faults.")
    parser.add_argument("--executor", choices=EXECUTORS, help="only this one")
    parser.add_argument("--kind", choices=KINDS, help="only this kind of fault")
    parser.add_argument("--count", type=int, default=250, help="faults of each kind on each executor (250)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long (60)")
    parser.add_argument("--lanes", type=int, default=2, help="programs at once on each executor (2)")
    table = ROOT / "docs" / "internals" / "chaos.json"
    parser.add_argument("--ledger", type=Path, default=table, help="the file to continue")
    parser.add_argument("--seed", type=int, action="append", help="play this one only, and count nothing")
    parser.add_argument("--verbose", action="store_true", help="print the programs")
    parser.add_argument("--show", action="store_true", help="play nothing")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    ledger = Ledger() if options.seed else Ledger.open(options.ledger, of_any_code=options.show)
    executors = [options.executor] if options.executor else list(EXECUTORS)
    if options.seed:
        for name in executors:
            _replay(name, options.seed, ledger, console, options.verbose)
    elif not options.show:
        kinds = [options.kind] if options.kind else list(KINDS)
        _play(executors, kinds, ledger, options.count, options.minutes * 60, options.lanes)
    _show(ledger, console)
    return 1 if ledger.problems else 0


def _replay(name: str, seeds: Sequence[int], ledger: Ledger, console: Console, verbose: bool) -> None:
    with engine.running(name, judge.SHARED_SLOTS, SLOTS) as made:
        lane = judge.Lane(made, ledger)
        for seed in seeds:
            if verbose:
                console.print(pretty_repr(program(name, seed)), markup=False)
            if kind_of(seed) == "driver":
                deaths.burst(made, ledger, [seed])
            else:
                lane.play(seed)
        lane.rest()
        lane.close()


def _play(
    executors: Sequence[str], kinds: Sequence[str], ledger: Ledger, count: int, seconds: float, lanes: int
) -> None:
    deadline = time.monotonic() + seconds
    plans = [judge.Plan(name, ledger, count, kinds, deadline) for name in executors]

    def run(plan: judge.Plan) -> None:
        if not plan.over(kinds):
            with engine.running(plan.executor, judge.SHARED_SLOTS, SLOTS) as made:
                judge.campaign(made, plan, lanes)

    threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # running programs end, and no others begin
        for plan in plans:
            plan.deadline = 0.0
        raise


def _show(ledger: Ledger, console: Console) -> None:
    table = Table(title=f"chaos, code {ledger.code} ({ledger.commit})")
    for name in ("executor", "fault", "tried", "survived", "hangs", "leftovers", "wrong", "late"):
        table.add_column(name, justify="left" if name in ("executor", "fault") else "right")
    table.add_column("times in ms: p50 / p90 / p99 / max", justify="left")
    tallies = [
        (executor, kind, kinds[kind])
        for executor, kinds in sorted(ledger.tallies.items())
        for kind in KINDS
        if kind in kinds
    ]
    for executor, kind, tally in tallies:
        counts = (tally.tried, tally.survived, tally.hangs, tally.left, tally.wrong, tally.late)
        table.add_row(executor, NAMES[kind], *map(str, counts), _times(tally))
    console.print(table)
    for executor, kind, tally in tallies:
        hit = ", ".join(f"{name} {count}" for name, count in sorted(tally.targets.items()))
        console.print(f"{executor} {kind}: hit: {hit}", style="dim")
    for problem in ledger.problems:
        words = "{executor} seed {seed} ({kind}): {what}: {words}".format(**problem)
        console.print(words, style="red", markup=False)


def _times(tally: Tally) -> str:
    parts = []
    named = (("to error", tally.error_ms), ("close beside grace", tally.over_ms), ("to free", tally.free_ms))
    for name, values in named:
        if ordered := sorted(values):
            picked = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
            parts.append(f"{name} " + " / ".join(f"{value:.0f}" for value in (*picked, ordered[-1])))
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
