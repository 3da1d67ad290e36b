"""Who had how much memory when the job was done, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from colocate.texts import plural, size_text
from colocate_report.tables import ROWS, Cell, Table
from colocate_report.times import Bar, role_label, share_bar

if TYPE_CHECKING:
    from colocate import GroupMemory, SlotMemory

SLOTS = 4  # of a group, that have a bar


@attrs.frozen
class Memory:
    """A group's memory."""

    group: str
    # for each slot what it is called, and its roles' shares of the process or the device
    bars: tuple[tuple[str, Bar], ...]
    hidden: str  # which slots have none, in words
    table: Table  # all of it by role and kind


def memory(found: Sequence[GroupMemory], roles: Mapping[str, int]) -> tuple[Memory, ...]:
    """What is shown of the groups' memory."""
    return tuple(_memory(each, roles) for each in found)


def _memory(group: GroupMemory, roles: Mapping[str, int]) -> Memory:
    hidden = len(group.slots) - SLOTS
    return Memory(
        group.group,
        tuple(_bars(group.slots[:SLOTS], roles)),
        f"and {plural(hidden, 'more slot')}" if hidden > 0 else "",
        _table(group),
    )


def _table(group: GroupMemory) -> Table:
    rows = group.texts()
    columns = list(rows[0]) if rows else []
    cells = [tuple(Cell(row[column], column != "role", None) for column in columns) for row in rows[:ROWS]]
    hidden = len(rows) - ROWS
    return Table(group.group, tuple(columns), tuple(cells), f"and {plural(hidden, 'more row')}" if hidden > 0 else "")


def _bars(slots: Sequence[SlotMemory], roles: Mapping[str, int]) -> Iterator[tuple[str, Bar]]:
    for slot in slots:
        on_device = slot.device != "cpu"
        held = [(role.role, sum(role.device.values()) if on_device else role.total) for role in slot.roles]
        parts = [(roles[name], role_label(name), size) for name, size in held if size]
        # What is empty of a bar is nobody's: of the device, or of the process.
        whole = slot.gpu["used"] if slot.gpu is not None else slot.process
        total = max(whole or 0, sum(size for _, _, size in parts))
        yield f"slot {slot.slot}, {slot.device}: {size_text(total)}", share_bar(parts, total, size_text)
