"""What a worker says of itself to whoever looks at its pool, beside its driver, if it has one."""

from __future__ import annotations

import os
import time
from typing import Any

from colocate._protocol.ledger import Ledger
from colocate._protocol.to_worker import Call
from colocate._system.jobs import error_text
from colocate.worker.memory.ledger import LookError, ledger
from colocate.worker.site import Site


def glimpse(site: Site) -> dict[str, Any]:
    """What it runs, what waits, and what its roles hold, as plain data. On any thread; takes as long as a ledger."""
    now, work = time.time(), site.lane.last()
    boot = site.boot
    found: Ledger | None = None
    trouble: str | None = None
    try:
        found = ledger(site, site.sleeper, site.gradients.of)
    except LookError as error:
        trouble = f"what role {error.role!r} holds could not be looked at: {error.trace.strip().splitlines()[-1]}"
    except Exception as error:  # CUDA's, say, which is out of order
        trouble = error_text(error)
    running = [(work.message.role, work.began, now) for work in site.lane.started() if isinstance(work.message, Call)]
    busy = {} if site.recent is None else site.recent.shares(now, running)
    roles = [
        {
            "role": role.name,
            "rank": role.ctx.rank,
            "busy": round(busy.get(role.name, 0.0), 4),
            "bytes": None if found is None else sum(found.roles.get(role.name, {}).values()),
            "asleep": None if found is None else found.asleep.get(role.name, 0),
        }
        for role in list(site.roles.values())
        if role.name is not None
    ]
    told = {
        "group": boot.group,
        "generation": boot.generation,
        "slot": boot.slot,
        "node": boot.node,
        "device": boot.device,
        "pid": os.getpid(),
        "queue": max(0, site.lane.waiting - site.gradients.is_due),  # which is no call
        "call": None if work is None else work.label,
        "age": None if work is None or not work.began else round(now - work.began, 3),
        "roles": roles,
    }
    return told if trouble is None else {**told, "memory": trouble}
