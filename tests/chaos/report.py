"""The numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from tests.chaos.ledger import Ledger, Tally, ranges
from tests.chaos.programs import KINDS

NAMES = {
    "kill": "SIGKILL of a worker",
    "stop": "SIGSTOP of a worker",
    "gil": "hang with the GIL held",
    "drop": "dropped connection",
    "driver": "SIGKILL of the driver",
}
NOT_APPLICABLE = {"local": "keeper, envoy: local has none", "dask": "envoy: Dask has none", "ray": ""}


def show(ledger: Ledger, console: Console) -> None:
    table = Table(title=f"chaos, code {ledger.code} ({ledger.commit})")
    for name in ("executor", "fault", "tried", "survived", "hangs", "leftovers", "wrong", "late"):
        table.add_column(name, justify="left" if name in ("executor", "fault") else "right")
    table.add_column("times in ms: p50 / p90 / p99 / max", justify="left")
    for executor, kinds in sorted(ledger.tallies.items()):
        for kind in KINDS:
            if kind in kinds:
                tally = kinds[kind]
                counts = (tally.tried, tally.survived, tally.hangs, tally.left, tally.wrong, tally.late)
                table.add_row(executor, NAMES[kind], *map(str, counts), times(tally))
    console.print(table)
    for executor, kinds in sorted(ledger.tallies.items()):
        for kind in KINDS:
            if kind in kinds:
                hit = ", ".join(f"{name} {count}" for name, count in sorted(kinds[kind].targets.items()))
                console.print(f"{executor} {kind}: seeds {ranges(kinds[kind].seeds)}; hit: {hit}", style="dim")
        if turns := sum(tally.turns for tally in kinds.values()):
            console.print(f"{executor}: faults where roles take turns: {turns}", style="dim")
        if NOT_APPLICABLE.get(executor):
            console.print(f"{executor}: not applicable: {NOT_APPLICABLE[executor]}", style="dim")
    for problem in ledger.problems:
        console.print(
            f"{problem['executor']} seed {problem['seed']} ({problem['kind']}): {problem['what']}: {problem['words']}",
            style="red",
            markup=False,
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def times(tally: Tally) -> str:
    parts = []
    if tally.error_ms:
        parts.append(f"to error {percentiles(tally.error_ms)}")
    if tally.over_ms:
        parts.append(f"close beside grace {percentiles(tally.over_ms)}")
    if tally.free_ms:
        parts.append(f"to free {percentiles(tally.free_ms)}")
    return "; ".join(parts)


def percentiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    picked = [quantile(ordered, share) for share in (0.5, 0.9, 0.99)]
    return " / ".join(f"{value:.0f}" for value in (*picked, ordered[-1]))
