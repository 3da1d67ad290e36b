"""Keepers: processes that start, watch and end the workers of a slot, on the slot's machine.

An executor for a cluster creates a `Keeper` in a process of the cluster for each reserved slot, and passes the keeper's
address to the driver's `Keepers`. Everything else happens here, in the same way on all clusters. The worker is a
separate process, and its lane connects directly to the driver. The worker's exit code, signal and output are known, and
a kill takes milliseconds, whatever the worker does. The worker dies with the keeper and with the driver.

Names are imported at their first use, because a driver that starts workers needs the template process first.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate._protocol.message import Message, decode_head, message
    from colocate._protocol.requests import Request, Requests
    from colocate._protocol.versions import describe_mismatch
    from colocate._system.ends import keep_exit_codes
    from colocate._system.libc import die_with
    from colocate._system.readable import readable
    from colocate._system.threads import Thread
    from colocate.executor import Lease
    from colocate.keeper import forks
    from colocate.keeper.adoption import (
        AdoptedSlot,
        Adoption,
        DetachableByKeepers,
        PoolKeepers,
        Registration,
        adopt_lead,
        adopt_pool,
        inspect_pool,
        list_pools,
    )
    from colocate.keeper.keeper import Keeper
    from colocate.keeper.process import AFTER_LANE_S, Launcher, ProcessEvents, WorkerProcess
    from colocate.keeper.slots import Keepers, KeptSlot, Patience
    from colocate.worker.birth.processes import get_arguments, list_children, list_leftovers
    from colocate.worker.serving.service import first_message

_HOMES = {
    "colocate._protocol.message": ("Message", "message", "decode_head"),
    "colocate._protocol.requests": ("Request", "Requests"),
    "colocate._protocol.versions": ("describe_mismatch",),
    "colocate._system.ends": ("keep_exit_codes",),
    "colocate._system.libc": ("die_with",),
    "colocate._system.readable": ("readable",),
    "colocate._system.threads": ("Thread",),
    "colocate.executor": ("Lease",),
    "colocate.keeper.adoption": (
        "AdoptedSlot",
        "Adoption",
        "DetachableByKeepers",
        "PoolKeepers",
        "Registration",
        "adopt_lead",
        "adopt_pool",
        "list_pools",
        "inspect_pool",
    ),
    "colocate.keeper.keeper": ("Keeper",),
    "colocate.keeper.process": ("AFTER_LANE_S", "Launcher", "ProcessEvents", "WorkerProcess"),
    "colocate.keeper.slots": ("Keepers", "KeptSlot", "Patience"),
    "colocate.worker.birth.processes": ("get_arguments", "list_children", "list_leftovers"),
    "colocate.worker.serving.service": ("first_message",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AFTER_LANE_S",
    "AdoptedSlot",
    "Adoption",
    "DetachableByKeepers",
    "Keeper",
    "Keepers",
    "KeptSlot",
    "Launcher",
    "Lease",
    "Message",
    "Patience",
    "PoolKeepers",
    "ProcessEvents",
    "Registration",
    "Request",
    "Requests",
    "Thread",
    "WorkerProcess",
    "adopt_lead",
    "adopt_pool",
    "decode_head",
    "describe_mismatch",
    "die_with",
    "first_message",
    "forks",
    "get_arguments",
    "inspect_pool",
    "keep_exit_codes",
    "list_children",
    "list_leftovers",
    "list_pools",
    "message",
    "readable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'colocate.keeper' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value
