"""The table of features. Each feature is a folder with one service beyond plain calls.

A feature has a half in the driver, one per group (`GroupFeature`), and a half in each worker (`WorkerFeature`), or only
one of them. A half is imported and created on first need: by a call, a message, an option of a role, or a checkpoint
with data of the feature. The kernel names no feature: without its folder and its row here, the rest runs, and requests
for the feature are refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from colocate.errors import CapabilityError


class Feature(NamedTuple):
    """The modules of a feature, and the events that import the feature.

    Attributes:
        group: The driver half, as "module:class" in the feature's folder; "" for none.
        worker: The worker half, in the same form.
        calls: The names of the feature's calls on whole workers.
        messages: The feature's message types, in the module `messages` of the feature's folder.
        options: The options of roles (`RoleSpec`), groups, pools and runtimes that load the feature.
        follows: Modules whose import loads the worker half, whichever code imports them.
        standalone: The class behind the feature's methods (`MethodSpec.feature`) outside workers, as "module:class".
        breakpoints: Whether the feature answers `breakpoint()` in role code of worker processes.
    """

    group: str = ""
    worker: str = ""
    calls: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    standalone: str = ""
    breakpoints: bool = False


FEATURES = {
    "balance": Feature(),
    "weights": Feature(
        "driver:WeightsOfGroup",
        "worker:WeightsOfWorker",
        calls=("the sync of weights", "the digests of weights"),
        options=("weights",),
    ),
    "checkpoints": Feature(
        "driver:CheckpointsOfGroup",
        "worker:CheckpointsOfWorker",
        calls=("the checkpoint", "the restore"),
        messages=("AskState", "SavedState"),
    ),
    "pausing": Feature(
        "driver:PausingOfGroup",
        "worker:PausingOfWorker",
        messages=("Pause", "PauseAfter", "ResumeRole", "PauseBegun", "RoleAtRest"),
    ),
    "memory": Feature(
        "driver:MemoryOfGroup",
        "worker:MemoryOfWorker",
        calls=("the sleep", "the wake"),
        messages=("AskLedger", "LedgerReport", "NeighbourMemory", "RoleHoldings", "MemoryMoved"),
        options=("budgets", "sleep", "spill_dir", "attachment"),
    ),
    "children": Feature("driver:ChildrenOfGroup", "worker:ChildrenOfWorker", messages=("ChildrenReport",)),
    "rows": Feature(
        "driver:RowsOfGroup",
        "worker:RowsOfWorker",
        messages=("Row", "NoMoreRows", "ReadRows", "RowEnded"),
        standalone="standalone:StandaloneRows",
    ),
    "process_groups": Feature(
        "driver:GroupsOfGroup",
        "worker:GroupsOfWorker",
        messages=("LeftGroups", "DropGroups", "JoinDefault", "DefaultStarted", "GroupsDropped"),
        options=("default_group",),
        follows=("torch",),
    ),
    "devices": Feature("driver:DevicesOfGroup", "worker:DevicesOfWorker", messages=("AskDevices", "DeviceReport")),
    "kinds": Feature(),
    "looking": Feature(),
    "pipelines": Feature(),
    "recordings": Feature(
        "driver:RecordingsOfGroup",
        "worker:RecordingsOfWorker",
        calls=("the recording", "the comparison"),
        messages=("RecordingNotice", "ComparedResult"),
        options=("replay", "compare"),
    ),
    "profiling": Feature(
        "driver:ProfilingOfGroup",
        "worker:ProfilingOfWorker",
        calls=("the profile's beginning", "the profile's end"),
        messages=("AskClock", "Clock"),
    ),
    "debugging": Feature(
        "driver:DebuggingOfGroup",
        "worker:DebuggingOfWorker",
        messages=("SessionStarted", "TerminalOutput", "SessionResumed", "TerminalInput", "DetachTerminal"),
        options=("debugging",),
        breakpoints=True,
    ),
    "functions": Feature(worker="worker:FunctionsOfWorker", calls=("a function",)),
    "standalone": Feature(standalone="calls:StandaloneCall"),
}
CALLS = {said: name for name, feature in FEATURES.items() for said in feature.calls}
"""The feature behind each named call on whole workers."""
importing_threads: set[int] = set()
"""The threads that import a feature now. Their imports must not ask the driver for modules: a worker imports features
on its receiving thread and would wait for itself.
"""
_BY_MESSAGE = {kind: name for name, feature in FEATURES.items() for kind in feature.messages}
_BY_OPTION = {option: name for name, feature in FEATURES.items() for option in feature.options}


def group_class(name: str) -> Any:
    """Return the class of a feature's driver half.

    Raises:
        CapabilityError: This build has no such feature.
    """
    return _import_class(name, get_feature(name).group)


def worker_class(name: str) -> Any:
    """Return the class of a feature's worker half.

    Raises:
        CapabilityError: This build has no such feature.
    """
    return _import_class(name, get_feature(name).worker)


def standalone_class(name: str) -> Any:
    """Return the class behind a feature's methods for role objects outside workers.

    Raises:
        CapabilityError: This build has no such feature.
    """
    get_feature("standalone")
    return _import_class(name, get_feature(name).standalone)


def import_messages(kind: str) -> str | None:
    """Return the feature of a message type, or None, and import the feature's messages."""
    name = _BY_MESSAGE.get(kind)
    if name is not None:
        import_module_of(f"{name}.messages")
    return name


def breakpoint_feature() -> str | None:
    """Return the feature that answers `breakpoint()` in role code, or None."""
    return next((name for name, feature in FEATURES.items() if feature.breakpoints), None)


def option_features(options: Any) -> list[str]:
    """Return the features behind the options of a role, a group, a pool or a runtime."""
    return [_BY_OPTION[option] for option in _BY_OPTION if getattr(options, option, None)]


def list_followers() -> list[str]:
    """Return the features with a followed module (`Feature.follows`) that has been imported already."""
    return [name for name, feature in FEATURES.items() if not sys.modules.keys().isdisjoint(feature.follows)]


def get_feature(name: str) -> Feature:
    """Return a feature's row in the table.

    Raises:
        CapabilityError: This build has no such feature.
    """
    if name not in FEATURES:
        raise CapabilityError(f"this colocate was built without its feature {name!r}: install one that has it")
    return FEATURES[name]


def import_module_of(where: str) -> Any:
    """Import a module of a feature, given as "feature.module".

    Raises:
        CapabilityError: This build has no such feature.
    """
    get_feature(where.partition(".")[0])
    thread = threading.get_ident()
    importing_threads.add(thread)
    try:
        return import_module(f"{__name__}.{where}")
    finally:
        importing_threads.discard(thread)


def make_getattr(by: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that imports names from features on first use.

    Args:
        by: The name of that module.
        homes: The module of each name, as a path for `import_module_of`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {by!r} has no attribute {name!r}")
        value = getattr(import_module_of(homes[name]), name)
        setattr(sys.modules[by], name, value)
        return value

    return get


def _import_class(name: str, where: str) -> Any:
    home, _, cls = where.partition(":")
    return getattr(import_module_of(f"{name}.{home}"), cls)
