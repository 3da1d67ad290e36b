"""Several role classes fused into one process per GPU, behind one API for Ray, Dask and your own machine.

Names are imported when they are first used: a worker needs a part of them only, and starts that much sooner.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate._audit import Audit
    from colocate._batch import register_batch
    from colocate._call import Call, as_completed, wait
    from colocate._collect import Collect, Concat, First, Gather, Reduce
    from colocate._context import Context, context
    from colocate._dispatch import Broadcast, Dispatch, OnRank, PerRank, Scatter
    from colocate._group import ColocatedGroup
    from colocate._launch import launch
    from colocate._mesh import Mesh, Ranks
    from colocate._method import RoleCall, method
    from colocate._needs import needs
    from colocate._plugins import hookimpl
    from colocate._pool import Pool, PoolPart, Slot
    from colocate._records import CallRecord
    from colocate._resident import Resident, ResidentSpec
    from colocate._role import Role, RoleSpec, role
    from colocate._run import Run
    from colocate._run_record import RunRecord
    from colocate._runtime import Runtime, connect
    from colocate._view import Inspection, RoleView, inspect
    from colocate.config import load_config
    from colocate.errors import (
        BorrowedError,
        CallCancelled,
        CallTimeout,
        CapabilityError,
        ClosedError,
        ColocateError,
        ConfigError,
        DispatchError,
        EngineError,
        ForkedError,
        GroupRestarted,
        PipelineError,
        PlacementError,
        PlacementTimeout,
        PluginError,
        RoleError,
        RoleStartError,
        SerializationError,
        WorkerDied,
    )

__version__ = "0.1.0"

_HOMES = {
    "_audit": ("Audit",),
    "_batch": ("register_batch",),
    "_call": (
        "Call",
        "as_completed",
        "wait",
    ),
    "_collect": (
        "Collect",
        "Concat",
        "First",
        "Gather",
        "Reduce",
    ),
    "_context": (
        "Context",
        "context",
    ),
    "_dispatch": (
        "Broadcast",
        "Dispatch",
        "OnRank",
        "PerRank",
        "Scatter",
    ),
    "_group": ("ColocatedGroup",),
    "_launch": ("launch",),
    "_mesh": (
        "Mesh",
        "Ranks",
    ),
    "_method": (
        "RoleCall",
        "method",
    ),
    "_needs": ("needs",),
    "_plugins": ("hookimpl",),
    "_pool": (
        "Pool",
        "PoolPart",
        "Slot",
    ),
    "_records": ("CallRecord",),
    "_resident": (
        "Resident",
        "ResidentSpec",
    ),
    "_role": (
        "Role",
        "RoleSpec",
        "role",
    ),
    "_run": ("Run",),
    "_run_record": ("RunRecord",),
    "_runtime": (
        "Runtime",
        "connect",
    ),
    "_view": (
        "Inspection",
        "RoleView",
        "inspect",
    ),
    "config": ("load_config",),
    "errors": (
        "BorrowedError",
        "CallCancelled",
        "CallTimeout",
        "CapabilityError",
        "ClosedError",
        "ColocateError",
        "ConfigError",
        "DispatchError",
        "EngineError",
        "ForkedError",
        "GroupRestarted",
        "PipelineError",
        "PlacementError",
        "PlacementTimeout",
        "PluginError",
        "RoleError",
        "RoleStartError",
        "SerializationError",
        "WorkerDied",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Audit",
    "BorrowedError",
    "Broadcast",
    "Call",
    "CallCancelled",
    "CallRecord",
    "CallTimeout",
    "CapabilityError",
    "ClosedError",
    "Collect",
    "ColocateError",
    "ColocatedGroup",
    "Concat",
    "ConfigError",
    "Context",
    "Dispatch",
    "DispatchError",
    "EngineError",
    "First",
    "ForkedError",
    "Gather",
    "GroupRestarted",
    "Inspection",
    "Mesh",
    "OnRank",
    "PerRank",
    "PipelineError",
    "PlacementError",
    "PlacementTimeout",
    "PluginError",
    "Pool",
    "PoolPart",
    "Ranks",
    "Reduce",
    "Resident",
    "ResidentSpec",
    "Role",
    "RoleCall",
    "RoleError",
    "RoleSpec",
    "RoleStartError",
    "RoleView",
    "Run",
    "RunRecord",
    "Runtime",
    "Scatter",
    "SerializationError",
    "Slot",
    "WorkerDied",
    "as_completed",
    "connect",
    "context",
    "hookimpl",
    "inspect",
    "launch",
    "load_config",
    "method",
    "needs",
    "register_batch",
    "role",
    "wait",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(import_module(f"colocate.{home}"), name)
    elif name in ("config", "errors", "executor"):
        value = import_module(f"colocate.{name}")
    else:
        raise AttributeError(f"module 'colocate' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
