"""The suite that an executor passes.

Subclass it in a test file of your own:

    from colocate.testing.executors import Executor

    class TestMine(Executor):
        executor = "mine"
        options = {"address": "…"}

`Smoke` is some twenty of its tests, to begin with; `Executor` is all that an executor does itself. The rest is core's,
and the same on any executor of which these hold; `ExecutorSuite` has it, too. Each area is a class of its own (`Calls`,
`Residents` …). What the executor lacks a capability for is skipped with the capability's name; what needs torch is
skipped where it isn't installed.
"""

from importlib import import_module

from colocate.features import FEATURES
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.executors.attaching import Attaching, Successors, Watching
from colocate.testing.executors.background import Background
from colocate.testing.executors.calls import Calls, Cancelling
from colocate.testing.executors.closing import Closing, Converging
from colocate.testing.executors.context import Contexts, Devices, TorchSettings
from colocate.testing.executors.deaths import Deaths, Vanishing
from colocate.testing.executors.definitions import Definitions, Serialization
from colocate.testing.executors.detaching import Detaching
from colocate.testing.executors.dispatch import Dispatching, Mixing, NamedMeshes
from colocate.testing.executors.drivers import Drivers, Endings, Signals
from colocate.testing.executors.engines import Engines
from colocate.testing.executors.forks import Forks
from colocate.testing.executors.left import LeftInLoops
from colocate.testing.executors.numbers import RandomNumbers
from colocate.testing.executors.order import Failures, Order
from colocate.testing.executors.ownership import Borrows, Ownership
from colocate.testing.executors.placement import Placement, Ports
from colocate.testing.executors.residents import KeptFailures, Residents
from colocate.testing.executors.restarting import Restarting
from colocate.testing.executors.sharing import Sharing, SharingDetached
from colocate.testing.executors.startup import Printing, Startup, Templates
from colocate.testing.executors.tensors import Memory, Optimizers, TensorResidents, Transfers
from colocate.testing.executors.threads import Handlers, Undisturbed
from colocate.testing.executors.unasked import UnaskedFailures

OF_FEATURES = [area for name in FEATURES for area in import_module(f"colocate.testing.features.{name}.suite").AREAS]
"""The areas of features, each of which lies with its own."""


class ExecutorSuite(
    Calls,
    LeftInLoops,
    UnaskedFailures,
    Background,
    Dispatching,
    Contexts,
    Residents,
    KeptFailures,
    Mixing,
    TensorResidents,
    Optimizers,
    Memory,
    Engines,
    Transfers,
    Devices,
    TorchSettings,
    RandomNumbers,
    NamedMeshes,
    Definitions,
    Order,
    Cancelling,
    Failures,
    Serialization,
    Signals,
    Handlers,
    Startup,
    Templates,
    Deaths,
    Restarting,
    Ownership,
    Borrows,
    Forks,
    Closing,
    Converging,
    Placement,
    Sharing,
    SharingDetached,
    Drivers,
    Endings,
    Detaching,
    Attaching,
    Successors,
    Undisturbed,
    Printing,
    Vanishing,
    Watching,
    Ports,
    *OF_FEATURES,  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
):
    """Everything that holds for every executor."""


class Executor(ExecutorSuite):
    """What an executor does itself: starts workers, brings messages and values, sees deaths, gives and keeps slots."""


class Smoke(ExecutorSuite):
    """Some twenty tests of these, to begin with: what fails here fails everywhere in the suite."""


for _name in dir(ExecutorSuite):
    if _name.startswith("test_"):
        _level = getattr(getattr(ExecutorSuite, _name), "level", "core")
        if _level != "smoke":
            setattr(Smoke, _name, None)  # what is None is no test
        if _level == "core":
            setattr(Executor, _name, None)


__all__ = [
    "Attaching",
    "Borrows",
    "Calls",
    "Cancelling",
    "Closing",
    "Contexts",
    "Converging",
    "Deaths",
    "Definitions",
    "Detaching",
    "Devices",
    "Dispatching",
    "Drivers",
    "Endings",
    "Engines",
    "Executor",
    "ExecutorCase",
    "ExecutorSuite",
    "Failures",
    "Forks",
    "Handlers",
    "KeptFailures",
    "LeftInLoops",
    "Memory",
    "Mixing",
    "NamedMeshes",
    "Optimizers",
    "Order",
    "Ownership",
    "Placement",
    "Ports",
    "Printing",
    "RandomNumbers",
    "Residents",
    "Restarting",
    "Serialization",
    "Sharing",
    "SharingDetached",
    "Signals",
    "Smoke",
    "Spawn",
    "Startup",
    "Successors",
    "Templates",
    "TensorResidents",
    "TorchSettings",
    "Transfers",
    "UnaskedFailures",
    "Undisturbed",
    "Vanishing",
    "Watching",
    "needs",
]
