"""`group.memory()`: who has how much memory, as people and programs read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from colocate import _display as html
from colocate._display import columns, weights_age
from colocate._protocol.ledger import Purpose
from colocate._system.numbers import size_text
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.features.memory.messages import Ledger

KINDS = tuple(purpose.word for purpose in Purpose)
_SOMETIMES = ("asleep", "activations")


@attrs.frozen
class RoleMemory:
    """What one rank of a role holds, in bytes. Memory that several roles hold counts with one of them.

    Attributes:
        role: The role's name; "" for what `group.run` has kept.
        rank: The rank.
        device: On the slot's device, by kind: "parameters", "gradients", "optimizer" (its state), "buffers", "declared"
            (by the role's `device_state()`), "tensors" (others, in attributes), "residents".
        host: Elsewhere, by kind: in the host's memory, where the slot's device isn't the CPU.
        shared: What it holds besides and counts with another role.
        asleep: What it holds that isn't in memory now (`group.sleep`).
        activations: What its methods have allocated on a GPU at most while they ran, beyond what was there when they
            began, by method; None where nobody knows: on the CPU, and where slots are threads.
        complete: Whether all that it leads to was looked at.
        kept_awake: What was to sleep with what is `asleep` and stays in memory, by why, as it was when that was put to
            sleep: "used by role 'critic'", "used by residents", "of another library" ...
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
        """Add up all kinds, without what is shared or sleeps."""
        return sum(self.device.values()) + sum(self.host.values())


@attrs.frozen
class SlotMemory:
    """The memory of one worker, in bytes.

    Attributes:
        slot: Its slot.
        node: Where it is.
        device: The slot's device.
        roles: What its roles hold.
        process: The memory that is the process's own; None for threads, whose process is the driver's.
        empty: What of that was there before the first role.
        pinned: What of it was pinned for memory of the device that sleeps, and is kept for the next time.
        gpu: "allocated" and "reserved" by torch, where its own allocator is used; "used" by all processes, "total";
            "nccl", what process groups have, where torch can tell (2.12, with NCCL 2.29.7 on). None without a GPU.
        shared_with_forks: What of `process` is in memory once for several: a worker that is a fork shares with what it
            was forked from, and its other forks, all that neither has written to.
        children: What the processes that roles have started (`ctx.start`) have for themselves, by role and name, with
            all that these have started; on the host.
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
        """Return what nobody owns, by what it is for.

        "empty worker" (Python and torch), "pinned" (where there is some: for what sleeps, and kept) and "other" of the
        process: objects of Python, what libraries have, what roles have imported since, and what was freed and `malloc`
        keeps; less than 0 where roles hold what isn't in memory, or in files. On a GPU "fragmentation" (reserved, and
        not in use), "nccl" (where torch tells it: what process groups have), "context" (CUDA's and other processes'
        memory, NCCL's where torch doesn't tell it, and all of another allocator's in the place of torch's), and "other,
        device" (of torch: what is computed with just now).
        """
        on_device = sum(sum(role.device.values()) for role in self.roles)
        on_host = sum(sum(role.host.values()) for role in self.roles)
        found: dict[str, int] = {}
        if self.gpu is not None:
            reserved = self.gpu.get("reserved", on_device)
            if "allocated" in self.gpu:
                found["other, device"] = self.gpu["allocated"] - on_device
                found["fragmentation"] = reserved - self.gpu["allocated"]
            of_groups = self.gpu.get("nccl")
            if of_groups is not None:
                found["nccl"] = of_groups
            found["context"] = self.gpu["used"] - reserved - (of_groups or 0)
        if self.process is not None:
            parts = {"empty worker": self.empty or 0}
            if self.pinned:
                parts["pinned"] = self.pinned
            owned = on_device if self.device == "cpu" else on_host
            found |= {**parts, "other": self.process - sum(parts.values()) - owned}
        return found


@attrs.frozen
class GroupMemory:
    """The memory of a group: `print` shows it as a table.

    Attributes:
        group: The group's name.
        slots: One for each worker.
        weights: By role that has got weights from another one (`sync_weights`) their version, and when they came, in
            seconds of time.time(); 0.0 where that isn't known, as they were restored.
        stale: By role why its weights aren't in sync.
    """

    group: str
    slots: tuple[SlotMemory, ...]
    weights: Mapping[str, tuple[int, float]] = attrs.field(factory=dict)
    stale: Mapping[str, str] = attrs.field(factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each role and rank, and each child of one, with numbers: for a table of one's own, or pandas."""
        return [row for slot in self.slots for row in _rows(slot)]

    def data(self) -> dict[str, Any]:
        """Return the whole table as plain data."""
        slots = [attrs.asdict(slot) | {"unowned": slot.unowned} for slot in self.slots]
        return {"group": self.group, "slots": slots, "weights": dict(self.weights), "stale": dict(self.stale)}

    def json(self) -> str:
        """Return the whole table as JSON."""
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
        """As `print` shows it: a row for each role and rank and for what nobody owns, without kinds that nobody has."""
        sizes = (*KINDS, "total", "shared", *_SOMETIMES)
        shown: list[dict[str, Any]] = []
        for slot in self.slots:
            shown += _rows(slot)
            for what, size in slot.unowned.items():
                nobody = {"slot": slot.slot, "role": f"({what})", "rank": ""}
                shown.append({**nobody, **dict.fromkeys(sizes, 0), "total": size})
        unused = {each for each in (*KINDS, *_SOMETIMES) if not any(row[each] for row in shown)}
        return [
            {key: (size_text(value) if value else "") if key in sizes else str(value) for key, value in row.items()}
            for row in ({key: value for key, value in row.items() if key not in unused} for row in shown)
        ]

    def notes(self) -> list[str]:
        """Return what `print` says below the table: what each slot has in all, what of sleeping roles is awake, why."""
        roles = {**self.weights, **self.stale}
        found = [f"role {role!r} has {weights_age(self.weights.get(role), self.stale.get(role))}" for role in roles]
        for slot in self.slots:
            known = []
            if slot.process is not None:
                known.append(f"{size_text(slot.process)} of the host for its process")
                if slot.shared_with_forks:
                    forks = size_text(slot.shared_with_forks)
                    known[0] += f" ({forks} of that shared with workers that are forks as it is)"
            if slot.gpu is not None:
                used, total = size_text(slot.gpu["used"]), size_text(slot.gpu["total"])
                known.append(f"{used} of {total} of {slot.device} for all processes")
            if known:
                found.append(f"slot {slot.slot} in all: {', '.join(known)}")
            for role in slot.roles:
                if role.kept_awake:
                    parts = ", ".join(f"{size_text(size)} {why}" for why, size in role.kept_awake.items())
                    again = f"group.sleep({role.role!r}) again has that go which is free by now"
                    found.append(f"slot {slot.slot}: role {role.role!r} sleeps but for {parts}; {again}")
        return found


def slot_memory(worker_group: WorkerGroup, worker: Worker, ledger: Ledger) -> SlotMemory:
    """Return the memory of one worker, as it has told it."""
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
        if not (name or held or shared or asleep):  # functions, which have left nothing
            continue
        activations = None
        if ledger.peaks is not None:
            of_role = {label.rpartition("."): peak for label, peak in ledger.peaks.items()}
            activations = {method: peak for (role, _, method), peak in of_role.items() if role == name}
        kept, whole = ledger.kept_awake.get(name, {}), name not in ledger.partial
        roles.append(RoleMemory(name, rank, device, host, shared, asleep, activations, whole, kept))
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
