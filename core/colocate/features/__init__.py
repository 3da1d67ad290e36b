"""The table of features: what colocate can do beside calls in one order, a folder for each.

A feature has two halves, one of a group (`OfGroup`, in the driver) and one of a worker (`OfWorker`), or none, where the
kernel asks it nothing. Each is imported and made when it is first needed: by a call, a message, an option of a role or
a checkpoint that has something of it.
The kernel names none of them. Without its folder and its row here the rest runs, and what asks for it is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from colocate.errors import CapabilityError


class Feature(NamedTuple):
    """What brings a feature in.

    Attributes:
        group: Its half of a group, as "module:class" in its folder; "" where it has none.
        worker: Its half of a worker, likewise.
        calls: What its calls on whole workers say that they are.
        messages: The messages of its own, which are in the module `messages` of its folder.
        options: The options of roles (`RoleSpec`), groups, pools and runtimes that it is behind.
        follows: Modules on whose import a worker's half of it is made, whoever imports them.
        alone: What answers for its methods (`MethodSpec.feature`) where an object isn't in a worker, likewise.
        breakpoints: Whether it answers `breakpoint()` in role code of worker processes.
    """

    group: str = ""
    worker: str = ""
    calls: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    alone: str = ""
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
        messages=("AskSaved", "Saved"),
    ),
    "pausing": Feature(
        "driver:PausingOfGroup",
        "worker:PausingOfWorker",
        messages=("Pause", "PauseAfter", "GoOn", "Pausing", "Paused"),
    ),
    "memory": Feature(
        "driver:MemoryOfGroup",
        "worker:MemoryOfWorker",
        calls=("the sleep", "the wake"),
        messages=("AskLedger", "LedgerTold", "Beside", "Holds", "Moved"),
        options=("budgets", "sleep", "spill_dir", "attachment"),
    ),
    "children": Feature("driver:ChildrenOfGroup", "worker:ChildrenOfWorker", messages=("HasChildren",)),
    "rows": Feature(
        "driver:RowsOfGroup",
        "worker:RowsOfWorker",
        messages=("Row", "NoMoreRows", "ReadRows", "RowEnded"),
        alone="standalone:StandaloneRows",
    ),
    "process_groups": Feature(
        "driver:GroupsOfGroup",
        "worker:GroupsOfWorker",
        messages=("Left", "DropGroups", "Join", "Joining", "GroupsDropped"),
        options=("default_group",),
        follows=("torch",),
    ),
    "devices": Feature("driver:DevicesOfGroup", "worker:DevicesOfWorker", messages=("AskDevices", "DevicesTold")),
    "kinds": Feature(),
    "looking": Feature(),
    "pipelines": Feature(),
    "recordings": Feature(
        "driver:RecordingsOfGroup",
        "worker:RecordingsOfWorker",
        calls=("the recording", "the comparison"),
        messages=("Noticed", "Gave"),
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
        messages=("Stopped", "Printed", "WentOn", "Typed", "LetGo"),
        options=("debugging",),
        breakpoints=True,
    ),
    "functions": Feature(worker="worker:FunctionsOfWorker", calls=("a function",)),
    "standalone": Feature(alone="calls:StandaloneCall"),
}
CALLS = {said: name for name, feature in FEATURES.items() for said in feature.calls}
"""The features behind calls on whole workers, by what these say."""
importing: set[int] = set()
"""The threads that import a feature now. What that needs is installed with colocate: nobody asks the driver for it, as
a worker imports a feature where it receives, and would wait for itself."""
_BY_MESSAGE = {kind: name for name, feature in FEATURES.items() for kind in feature.messages}
_BY_OPTION = {option: name for name, feature in FEATURES.items() for option in feature.options}


def of_group(name: str) -> Any:
    """Return the class of a feature's half of a group.

    Raises:
        CapabilityError: There is no such feature here.
    """
    return _half(name, needed(name).group)


def of_worker(name: str) -> Any:
    """Return the class of a feature's half of a worker.

    Raises:
        CapabilityError: There is no such feature here.
    """
    return _half(name, needed(name).worker)


def of_object(name: str) -> Any:
    """Return the class of what answers for a feature's methods where an object isn't in a worker. Errors as above."""
    needed("standalone")
    return _half(name, needed(name).alone)


def of_message(kind: str) -> str | None:
    """Import the messages of the feature that has one of this kind, and return its name; None where none has."""
    name = _BY_MESSAGE.get(kind)
    if name is not None:
        module(f"{name}.messages")
    return name


def of_breakpoints() -> str | None:
    """Return the feature that answers `breakpoint()` in role code; None where none does."""
    return next((name for name, feature in FEATURES.items() if feature.breakpoints), None)


def of_options(options: Any) -> list[str]:
    """Return the features behind the options that a role, a group, its pool or its runtime has."""
    return [_BY_OPTION[option] for option in _BY_OPTION if getattr(options, option, None)]


def followers() -> list[str]:
    """Return the features that follow modules which are there."""
    return [name for name, feature in FEATURES.items() if not sys.modules.keys().isdisjoint(feature.follows)]


def needed(name: str) -> Feature:
    """Return the row of a feature that something needs.

    Raises:
        CapabilityError: It has none: there is no such feature here.
    """
    if name not in FEATURES:
        raise CapabilityError(f"this colocate was built without its feature {name!r}: install one that has it")
    return FEATURES[name]


def module(where: str) -> Any:
    """Return a module of a feature, as "feature.module".

    Raises:
        CapabilityError: There is no such feature here.
    """
    needed(where.partition(".")[0])
    thread = threading.get_ident()
    importing.add(thread)
    try:
        return import_module(f"{__name__}.{where}")
    finally:
        importing.discard(thread)


def offered(by: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return what a module has as `__getattr__` to offer names of features on first use.

    Args:
        by: The module's name.
        homes: Where each name is, as `module` has it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {by!r} has no attribute {name!r}")
        value = getattr(module(homes[name]), name)
        setattr(sys.modules[by], name, value)
        return value

    return get


def _half(name: str, where: str) -> Any:
    home, _, cls = where.partition(":")
    return getattr(module(f"{name}.{home}"), cls)
