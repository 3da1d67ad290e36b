"""Several role classes fused into one process per GPU, behind one API for Ray, Dask and your own machine.

Names are imported on first use, so that a worker imports only the names it needs and starts sooner.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from colocate._version import __version__ as __version__

if TYPE_CHECKING:
    from colocate._api.group import ColocatedGroup
    from colocate._api.pool import Pool, PoolPart, Slot
    from colocate._api.runtime import Runtime
    from colocate._calls.records import CallRecord, CheckpointRecord, FetchRecord, MoveRecord, TransferRecord
    from colocate._calls.view import Inspection, RoleView, inspect
    from colocate._plugins.entry_points import hookimpl
    from colocate._plugins.needs import checks, needs
    from colocate._role.call import Call, Resident, ResidentSpec, as_completed, wait
    from colocate._role.context import Context, Rendezvous, context
    from colocate._role.method import RoleCall, RowCall, method
    from colocate._role.role import Role, RoleSpec, role
    from colocate._system.lines import library
    from colocate._values.collect import Collect, Concat, First, Gather, Reduce
    from colocate._values.dispatch import Broadcast, Dispatch, OnRank, PerRank, Scatter
    from colocate._values.mesh import Mesh, Ranks
    from colocate.connecting import connect, spawn
    from colocate.errors import (
        BorrowedError,
        CallCancelled,
        CallTimeout,
        CapabilityError,
        ChildDied,
        ClosedError,
        ClusterError,
        ColocateError,
        ConfigError,
        DispatchError,
        ForkedError,
        GroupRestarted,
        MemoryBudgetError,
        PipelineError,
        PlacementError,
        PlacementTimeout,
        PluginError,
        RenewalError,
        ReplayError,
        RoleError,
        RoleStartError,
        SerializationError,
        SleepingError,
        StaleWeightsError,
        WeightsDifferError,
        WorkerDied,
    )
    from colocate.features.children.child import Child
    from colocate.features.devices.driver import DeviceSample
    from colocate.features.kinds.registered import register_batch
    from colocate.features.looking.audit import Audit
    from colocate.features.memory.tables import GroupMemory, RoleMemory, SlotMemory
    from colocate.features.profiling.driver import Profile, profile
    from colocate.features.recordings.differences import FirstDifference
    from colocate.features.recordings.driver import ComparedMethod, Recorder, comparison
    from colocate.features.recordings.given import Compare, Replay
    from colocate.features.recordings.reading import (
        RecordedCall,
        RecordedError,
        RecordedRole,
        RecordedRow,
        Recording,
        load_recording,
    )
    from colocate.features.rows.row_stream import RowStream
    from colocate.features.weights.comparing import WeightsTable, compare_weights
    from colocate.features.weights.driver import sync_weights
    from colocate.features.weights.weights import Weights, WeightSync
    from colocate_report.record import Leaving, LogRecord, RunInfo, RunRecord
    from colocate_report.trace import Trace
    from colocate_run.config.load import load_config
    from colocate_run.launch import launch
    from colocate_run.recording import record
    from colocate_run.run import Run

_HOMES = {
    "connecting": "connect spawn",
    "_role.call": "Call Resident ResidentSpec as_completed wait",
    "_values.collect": "Collect Concat First Gather Reduce",
    "_role.context": "Context Rendezvous context",
    "_values.dispatch": "Broadcast Dispatch OnRank PerRank Scatter",
    "_api.group": "ColocatedGroup",
    "_values.mesh": "Mesh Ranks",
    "_role.method": "RoleCall RowCall method",
    "_plugins.needs": "checks needs",
    "_plugins.entry_points": "hookimpl",
    "_api.pool": "Pool PoolPart Slot",
    "_calls.records": "CallRecord CheckpointRecord FetchRecord MoveRecord TransferRecord",
    "_role.role": "Role RoleSpec role",
    "_api.runtime": "Runtime",
    "_system.lines": "library",
    "_calls.view": "Inspection RoleView inspect",
    "features.children.child": "Child",
    "features.memory.tables": "GroupMemory RoleMemory SlotMemory",
    "features.devices.driver": "DeviceSample",
    "features.kinds.registered": "register_batch",
    "features.looking.audit": "Audit",
    "features.recordings.differences": "FirstDifference",
    "features.recordings.driver": "ComparedMethod Recorder comparison",
    "features.recordings.given": "Compare Replay",
    "features.recordings.reading": "RecordedCall RecordedError RecordedRole RecordedRow Recording load_recording",
    "features.profiling.driver": "Profile profile",
    "features.rows.row_stream": "RowStream",
    "features.weights.comparing": "WeightsTable compare_weights",
    "features.weights.driver": "sync_weights",
    "features.weights.weights": "WeightSync Weights",
    "errors": (
        "BorrowedError CallCancelled CallTimeout CapabilityError ChildDied ClosedError ColocateError ConfigError "
        "DispatchError ClusterError ForkedError GroupRestarted MemoryBudgetError PipelineError PlacementError "
        "PlacementTimeout PluginError RenewalError ReplayError RoleError RoleStartError SerializationError "
        "SleepingError StaleWeightsError WeightsDifferError WorkerDied"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Maps names that other packages define to the modules there; these are imported on first use.
_BESIDE = {
    "Leaving": "colocate_report.record",
    "LogRecord": "colocate_report.record",
    "RunInfo": "colocate_report.record",
    "RunRecord": "colocate_report.record",
    "Trace": "colocate_report.trace",
    "Run": "colocate_run.run",
    "launch": "colocate_run.launch",
    "load_config": "colocate_run.config.load",
    "record": "colocate_run.recording",
}

__all__ = [
    "Audit",
    "BorrowedError",
    "Broadcast",
    "Call",
    "CallCancelled",
    "CallRecord",
    "CallTimeout",
    "CapabilityError",
    "CheckpointRecord",
    "Child",
    "ChildDied",
    "ClosedError",
    "ClusterError",
    "Collect",
    "ColocateError",
    "ColocatedGroup",
    "Compare",
    "ComparedMethod",
    "Concat",
    "ConfigError",
    "Context",
    "DeviceSample",
    "Dispatch",
    "DispatchError",
    "FetchRecord",
    "First",
    "FirstDifference",
    "ForkedError",
    "Gather",
    "GroupMemory",
    "GroupRestarted",
    "Inspection",
    "Leaving",
    "LogRecord",
    "MemoryBudgetError",
    "Mesh",
    "MoveRecord",
    "OnRank",
    "PerRank",
    "PipelineError",
    "PlacementError",
    "PlacementTimeout",
    "PluginError",
    "Pool",
    "PoolPart",
    "Profile",
    "Ranks",
    "RecordedCall",
    "RecordedError",
    "RecordedRole",
    "RecordedRow",
    "Recorder",
    "Recording",
    "Reduce",
    "Rendezvous",
    "RenewalError",
    "Replay",
    "ReplayError",
    "Resident",
    "ResidentSpec",
    "Role",
    "RoleCall",
    "RoleError",
    "RoleMemory",
    "RoleSpec",
    "RoleStartError",
    "RoleView",
    "RowCall",
    "RowStream",
    "Run",
    "RunInfo",
    "RunRecord",
    "Runtime",
    "Scatter",
    "SerializationError",
    "SleepingError",
    "Slot",
    "SlotMemory",
    "StaleWeightsError",
    "Trace",
    "TransferRecord",
    "WeightSync",
    "Weights",
    "WeightsDifferError",
    "WeightsTable",
    "WorkerDied",
    "as_completed",
    "checks",
    "compare_weights",
    "comparison",
    "connect",
    "context",
    "hookimpl",
    "inspect",
    "launch",
    "library",
    "load_config",
    "load_recording",
    "method",
    "needs",
    "profile",
    "record",
    "register_batch",
    "role",
    "spawn",
    "sync_weights",
    "wait",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(import_module(f"colocate.{home}"), name)
    elif name in _BESIDE:
        value = getattr(import_module(_BESIDE[name]), name)
    elif name in ("config", "errors", "executor", "torch"):
        value = import_module(f"colocate.{name}")
    else:
        raise AttributeError(f"module 'colocate' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
