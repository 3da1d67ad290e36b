"""The result of `group.memory()`: a table with the memory of all roles, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from colocate import _display as html
from colocate._display import columns, weights_age
from colocate._protocol.ledger import Purpose
from colocate._system.numbers import format_size
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.features.memory.messages import Ledger

KINDS = tuple(purpose.word for purpose in Purpose)
_SOMETIMES = ("asleep", "activations")


@attrs.frozen
class RoleMemory:
    """The memory of one rank of a role, in bytes. Memory that several roles share counts for one role only.

    Attributes:
        role: The role's name; "" for results kept by `group.run`.
        rank: The rank.
        device: Bytes on the slot's device, by kind: "parameters", "gradients", "optimizer" (its state), "buffers",
            "declared" (by the role's `device_state()`), "tensors" (other attributes), "residents".
        host: Bytes elsewhere, by kind: in the host's memory, if the slot's device isn't the CPU.
        shared: Bytes that the role holds besides and that count with another role.
        asleep: Bytes that sleep now (`group.sleep`).
        activations: The most that each method has allocated on a GPU while running, beyond the memory in use at the
            start, by method; None if unknown: on the CPU, and where slots are threads.
        complete: Whether the search visited all objects of the role.
        kept_awake: Bytes that were to sleep and stayed in memory, by reason, as of the last sleep: "used by role
            'critic'", "used by residents", "of another library" ...
    """

    role: str
    rank: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    shared: int
    asleep: int
    activations: Mapping[str, int] | None
    complete: bool
    kept_awake: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def total(self) -> int:
        """The sum of all kinds in bytes, without shared and sleeping memory."""
        return sum(self.device.values()) + sum(self.host.values())


@attrs.frozen
class SlotMemory:
    """The memory of one worker, in bytes.

    Attributes:
        slot: The worker's slot.
        node: The slot's node.
        device: The slot's device.
        roles: The memory of the worker's roles.
        process: The process's own memory; None for threads, which share the driver's process.
        empty: The part of `process` that existed before the first role.
        pinned: The part of `process` that is pinned for sleeping memory of the device, and reused.
        gpu: "allocated" and "reserved" by torch, if its own allocator is in use; "used" by all processes, "total";
            "nccl", the memory of process groups, if torch reports it (2.12, with NCCL 2.29.7 on). None without a GPU.
        shared_with_forks: The part of `process` that exists once for several: a forked worker shares all pages with its
            template and other forks until one of them writes.
        children: Bytes of the processes that roles have started (`ctx.start`), with descendants, by role and name; on
            the host.
    """

    slot: int
    node: str
    device: str
    roles: tuple[RoleMemory, ...]
    process: int | None
    empty: int | None
    pinned: int | None
    gpu: Mapping[str, int] | None
    shared_with_forks: int = 0
    children: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)

    @property
    def unowned(self) -> dict[str, int]:
        """The bytes that belong to no role, by purpose.

        "empty worker" (Python and torch), "pinned" (if any: reused for sleeping memory) and "other" of the process:
        Python objects, memory of libraries, imports of roles, and freed memory that `malloc` keeps; less than 0 if
        roles hold memory that isn't resident, or lies in files. On a GPU "fragmentation" (reserved, and not in use),
        "nccl" (process groups, if torch reports it), "context" (CUDA's and other processes' memory, NCCL's if torch
        doesn't report it, and all of another allocator that replaces torch's), and "other, device" (torch's tensors of
        running computations).
        """
        on_device = sum(sum(role.device.values()) for role in self.roles)
        on_host = sum(sum(role.host.values()) for role in self.roles)
        sizes: dict[str, int] = {}
        if self.gpu is not None:
            reserved = self.gpu.get("reserved", on_device)
            if "allocated" in self.gpu:
                sizes["other, device"] = self.gpu["allocated"] - on_device
                sizes["fragmentation"] = reserved - self.gpu["allocated"]
            of_groups = self.gpu.get("nccl")
            if of_groups is not None:
                sizes["nccl"] = of_groups
            sizes["context"] = self.gpu["used"] - reserved - (of_groups or 0)
        if self.process is not None:
            parts = {"empty worker": self.empty or 0}
            if self.pinned:
                parts["pinned"] = self.pinned
            owned = on_device if self.device == "cpu" else on_host
            sizes |= {**parts, "other": self.process - sum(parts.values()) - owned}
        return sizes


@attrs.frozen
class GroupMemory:
    """The memory of a group's workers. `print` shows a table.

    Attributes:
        group: The group's name.
        slots: The memory of each worker.
        weights: By role with synced weights (`sync_weights`): the version, and the time of the sync in seconds of
            time.time(); 0.0 if unknown, as after a restore.
        stale: The reason why a role's weights aren't in sync, by role.
    """

    group: str
    slots: tuple[SlotMemory, ...]
    weights: Mapping[str, tuple[int, float]] = attrs.field(factory=dict)
    stale: Mapping[str, str] = attrs.field(factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each rank of a role and each child process, for example for pandas."""
        return [row for slot in self.slots for row in _rows(slot)]

    def data(self) -> dict[str, Any]:
        """Return the table as plain data, ready for JSON."""
        slots = [attrs.asdict(slot) | {"unowned": slot.unowned} for slot in self.slots]
        return {"group": self.group, "slots": slots, "weights": dict(self.weights), "stale": dict(self.stale)}

    def json(self) -> str:
        """Return the table as JSON."""
        return json.dumps(self.data(), indent=2)

    def __str__(self) -> str:
        rows = self.texts()
        title = f"memory of group {self.group!r}"
        if not rows:
            return title
        names = list(rows[0])
        lines = columns([names, *(list(row.values()) for row in rows)], [name != "role" for name in names])
        return "\n".join([title, *lines, *self.notes()])

    def _repr_html_(self) -> str:
        return html.page(
            html.heading("memory of", self.group, ""), html.table(self.texts()), *map(html.reason, self.notes())
        )

    def texts(self) -> list[dict[str, str]]:
        """Return the rows of the printed table as texts, without the columns that are empty in all rows."""
        sizes = (*KINDS, "total", "shared", *_SOMETIMES)
        shown: list[dict[str, Any]] = []
        for slot in self.slots:
            shown += _rows(slot)
            for purpose, size in slot.unowned.items():
                nobody = {"slot": slot.slot, "role": f"({purpose})", "rank": ""}
                shown.append({**nobody, **dict.fromkeys(sizes, 0), "total": size})
        unused = {kind for kind in (*KINDS, *_SOMETIMES) if not any(row[kind] for row in shown)}
        return [
            {key: (format_size(value) if value else "") if key in sizes else str(value) for key, value in row.items()}
            for row in ({key: value for key, value in row.items() if key not in unused} for row in shown)
        ]

    def notes(self) -> list[str]:
        """Return the lines below the printed table, for example each slot's total memory."""
        roles = {**self.weights, **self.stale}
        lines = [f"role {role!r} has {weights_age(self.weights.get(role), self.stale.get(role))}" for role in roles]
        for slot in self.slots:
            totals = []
            if slot.process is not None:
                totals.append(f"{format_size(slot.process)} of the host for its process")
                if slot.shared_with_forks:
                    forks = format_size(slot.shared_with_forks)
                    totals[0] += f" ({forks} of that shared with workers that are forks as it is)"
            if slot.gpu is not None:
                used, total = format_size(slot.gpu["used"]), format_size(slot.gpu["total"])
                totals.append(f"{used} of {total} of {slot.device} for all processes")
            if totals:
                lines.append(f"slot {slot.slot} in all: {', '.join(totals)}")
            for role in slot.roles:
                if role.kept_awake:
                    parts = ", ".join(f"{format_size(size)} {why}" for why, size in role.kept_awake.items())
                    again = f"call group.sleep({role.role!r}) again to move memory that is no longer in use"
                    lines.append(f"slot {slot.slot}: role {role.role!r} sleeps but for {parts}; {again}")
        return lines


def slot_memory(worker_group: WorkerGroup, worker: Worker, ledger: Ledger) -> SlotMemory:
    """Convert a worker's ledger to a `SlotMemory`."""
    slot, boot = worker.slot, worker.boot
    roles = []
    for name, held in ledger.roles.items():
        rank = worker_group.roles[name].slots.index(slot) if name in worker_group.roles else slot
        device: dict[str, int] = {}
        host: dict[str, int] = {}
        for (kind, where), size in held.items():
            place = device if where == boot.device else host
            place[kind] = place.get(kind, 0) + size
        shared = ledger.shared.get(name, 0)
        asleep = ledger.asleep.get(name, 0)
        if not (name or held or shared or asleep):  # Functions without stored results get no row.
            continue
        activations = None
        if ledger.peaks is not None:
            of_role = {label.rpartition("."): peak for label, peak in ledger.peaks.items()}
            activations = {method: peak for (role, _, method), peak in of_role.items() if role == name}
        awake, whole = ledger.kept_awake.get(name, {}), name not in ledger.partial
        roles.append(RoleMemory(name, rank, device, host, shared, asleep, activations, whole, awake))
    parts = ledger.process or {}
    return SlotMemory(
        slot,
        boot.node,
        boot.device,
        tuple(roles),
        parts.get("private"),
        parts.get("empty"),
        parts.get("pinned"),
        ledger.gpu,
        parts.get("shared", 0),
        ledger.children,
    )


def _rows(slot: SlotMemory) -> Iterator[dict[str, Any]]:
    for role in slot.roles:
        counts = {kind: role.device.get(kind, 0) + role.host.get(kind, 0) for kind in KINDS}
        name = role.role or "(functions)"
        yield {
            "slot": slot.slot,
            "role": name if role.complete else f"{name} (in part)",
            "rank": role.rank,
            **counts,
            "total": role.total,
            "shared": role.shared,
            "asleep": role.asleep,
            "activations": None if role.activations is None else max(role.activations.values(), default=0),
        }
        nothing = {**dict.fromkeys((*KINDS, "shared", "asleep"), 0), "activations": None}
        for child, size in slot.children.get(role.role, {}).items():
            yield {"slot": slot.slot, "role": f"{name}/{child}", "rank": role.rank, **nothing, "total": size}
