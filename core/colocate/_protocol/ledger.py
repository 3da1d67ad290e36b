"""`Ledger`: what a worker tells of its memory."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class Ledger:
    """A worker's memory in bytes.

    Attributes:
        roles: By role, kind (see `Kind`) and device; residents of functions are those of a role without a name.
        shared: What roles hold that counts with another role, by role.
        partial: Roles that hold more objects than were looked at.
        private: What of the process's memory is its own; None where the process is the driver's.
        empty: What was its own before the first role was constructed.
        gpu: What CUDA knows of the slot's device: "allocated" and "reserved" by torch in this process, "used" by
            anybody, "total"; None of a slot without one.
    """

    roles: Mapping[str, Mapping[tuple[str, str], int]]
    shared: Mapping[str, int]
    partial: tuple[str, ...]
    private: int | None
    empty: int | None
    gpu: Mapping[str, int] | None
