"""What it saves that roles share workers, in words: processes with their contexts, and copies."""

from __future__ import annotations

from collections.abc import Iterator

from colocate.texts import plural, size_text
from colocate_report.record import RunRecord


def saved(record: RunRecord) -> str:
    """What a run saved by that; nothing where no roles share anything."""
    return " ".join(_sentences(record))


def _sentences(record: RunRecord) -> Iterator[str]:
    processes = [slot for group in record.memory for slot in group.slots if slot.empty is not None]
    fewer = sum(len([role for role in slot.roles if role.role]) - 1 for slot in processes)
    if fewer > 0:
        # Those of one machine share a part of it, where they are forked from one template.
        empty = f"up to {size_text(max(slot.empty or 0 for slot in processes))}"
        # Other processes' memory counts as context, too: where there is least of that, it is nearest to a context's.
        if contexts := [slot.unowned["context"] for slot in processes if slot.gpu is not None]:
            empty += f", and {size_text(min(contexts))} of its GPU, a context"
        yield (
            f"Fused, they are {plural(len(processes), 'process')}; with one for each rank of each role there would be "
            f"{fewer:,} more, and an empty one has {empty}."
        )
    if record.handed_over:
        whole = size_text(sum(each.nbytes for each in record.handed_over))
        several = len({each.group for each in record.handed_over}) > 1
        pairs = ", ".join(
            f"{f'{each.group}: ' if several else ''}{each.maker or 'functions'} to {each.user or 'functions'} "
            f"{size_text(each.nbytes)}"
            for each in record.handed_over
        )
        used = f"Of kept results, {whole} were used where they lay"
        yield f"{used}; processes of their own would have copied them: {pairs}."
