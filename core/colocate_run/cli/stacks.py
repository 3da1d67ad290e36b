"""`colocate stacks`: print the stacks of all workers of a running job, each stack once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from colocate.errors import ConfigError
from colocate.texts import format_count
from colocate_report.window import STACKS, inspect_job
from colocate_run.cli.output import print_json, report_errors
from colocate_run.cli.top import find_job
from colocate_run.screen import console


@report_errors
def show_stacks(name: str | None, *, json: bool) -> int:
    """Print the stacks of a job's workers."""
    job = find_job(name)
    answer = inspect_job(job, STACKS)
    if answer is None:
        raise ConfigError(f"job {job.name} ({job.id}) has just ended, or is another user's")
    if json:
        print_json(answer)
        return 0
    for workers, stack in group_stacks(answer["stacks"]):
        console().print(Text(workers, "bold"))
        console().print(Text(f"{stack.rstrip()}\n"), soft_wrap=True)
    return 0


def group_stacks(stacks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each stack of a group once, with a list of workers; the most frequent stack comes first."""
    slots_by_stack: dict[tuple[str, str], list[int]] = defaultdict(list)
    for worker in stacks:
        slots_by_stack[worker["group"], worker["stack"]].append(worker["slot"])
    for (group, stack), slots in sorted(slots_by_stack.items(), key=lambda item: (item[0][0], -len(item[1]), item[1])):
        yield f"{group}: {format_count(len(slots), 'worker')} ({_format_slots(sorted(slots))})", stack


def _format_slots(slots: Sequence[int]) -> str:
    """Format sorted numbers as ranges, for example "0-3, 5"."""
    spans: list[list[int]] = []
    for slot in slots:
        if spans and slot == spans[-1][1] + 1:
            spans[-1][1] = slot
        else:
            spans.append([slot, slot])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
