"""`python -m tests.chaos`: play until there is enough of each kind of fault, and print what came of it."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.pretty import pretty_repr
from tests.chaos import deaths, engine, judge, report
from tests.chaos.ledger import ROOT, Ledger
from tests.chaos.programs import KINDS, SLOTS, kind_of, program

EXECUTORS = ("local", "ray", "dask")
LANES = 2
WIDTH = 160  # of the table where nobody says how wide it may be


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    ledger = Ledger.open(None if options.seed else options.ledger)
    executors = [options.executor] if options.executor else list(EXECUTORS)
    if options.seed:
        for name in executors:
            _replay(name, options.seed, ledger, console, options.verbose, options.torch)
    elif not options.show:
        kinds = [options.kind] if options.kind else list(KINDS)
        _play(executors, kinds, ledger, options.count, options.minutes * 60, options.lanes)
    report.show(ledger, console)
    return 1 if ledger.problems else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Random programs, random faults.")
    parser.add_argument("--executor", choices=EXECUTORS, help="only this one")
    parser.add_argument("--kind", choices=KINDS, help="only this kind of fault")
    parser.add_argument("--count", type=int, default=250, help="faults of each kind on each executor (250)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long (60)")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"programs at once on each executor ({LANES})")
    parser.add_argument("--ledger", type=Path, default=ROOT / "docs" / "chaos.json", help="the file to continue")
    parser.add_argument("--seed", type=int, action="append", help="play this one only, and count nothing")
    parser.add_argument("--torch", action="store_true", default=None, help="with --seed: with process groups")
    parser.add_argument("--verbose", action="store_true", help="print the programs")
    parser.add_argument("--show", action="store_true", help="play nothing")
    return parser.parse_args(arguments)


def _replay(
    name: str, seeds: Sequence[int], ledger: Ledger, console: Console, verbose: bool, torch: bool | None
) -> None:
    with engine.running(name, judge.SHARED_SLOTS, SLOTS) as made:
        lane = judge.Lane(made, ledger)
        for seed in seeds:
            if verbose:
                console.print(pretty_repr(program(name, seed, torch)), markup=False)
            if kind_of(seed) == "driver":
                deaths.burst(made, ledger, [seed])
            else:
                lane.play(seed, torch)
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
    except KeyboardInterrupt:  # the programs that are played are played to their ends, and no others
        for plan in plans:
            plan.deadline = 0.0
        raise


if __name__ == "__main__":
    sys.exit(main())
