"""Several role classes fused into one process per GPU, behind one API for Ray, Dask and your own machine."""

from colocate._batch import register_batch
from colocate._call import Call, as_completed, wait
from colocate._collect import Collect, Concat, First, Gather, Reduce
from colocate._context import Context, context
from colocate._dispatch import Broadcast, Dispatch, OnRank, PerRank, Scatter
from colocate._group import ColocatedGroup
from colocate._launch import launch
from colocate._mesh import Mesh, Ranks
from colocate._method import RoleCall, method
from colocate._plugins import hookimpl
from colocate._pool import Pool, PoolPart, Slot
from colocate._records import CallRecord
from colocate._resident import Resident, ResidentSpec
from colocate._role import Role, RoleSpec, role
from colocate._run import Run, RunRecord
from colocate._runtime import Runtime, connect
from colocate._view import Inspection, RoleView, inspect
from colocate.config import load_config
from colocate.errors import (
    BorrowedError,
    CallTimeout,
    CapabilityError,
    ClosedError,
    ColocateError,
    ConfigError,
    DispatchError,
    ForkedError,
    PlacementError,
    PlacementTimeout,
    PluginError,
    RoleError,
    RoleStartError,
    SerializationError,
    WorkerDied,
)

__version__ = "0.1.0"

__all__ = [
    "BorrowedError",
    "Broadcast",
    "Call",
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
    "First",
    "ForkedError",
    "Gather",
    "Inspection",
    "Mesh",
    "OnRank",
    "PerRank",
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
    "register_batch",
    "role",
    "wait",
]
