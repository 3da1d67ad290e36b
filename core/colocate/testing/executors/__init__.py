"""The suite that an executor passes.

Subclass it in a test file of your own:

    from colocate.testing.executors import Executor

    class TestMine(Executor):
        executor = "mine"
        options = {"address": "…"}

`Executor` is all that an executor does itself; `Smoke` is some twenty of its tests, to begin with. Each area is a class
of its own (`calls.Calls`, `deaths.Deaths` …). What the executor lacks a capability for is skipped with the capability's
name; what needs torch is skipped where it isn't installed.
"""

from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.executors.attaching import Attaching, Successors, Watching
from colocate.testing.executors.audits import Auditing
from colocate.testing.executors.calls import Calls, Cancelling
from colocate.testing.executors.closing import Closing, Converging
from colocate.testing.executors.collectives import CutProcessGroups, ProcessGroups
from colocate.testing.executors.context import Contexts
from colocate.testing.executors.deaths import Deaths, Vanishing
from colocate.testing.executors.definitions import Definitions, Serialization
from colocate.testing.executors.detaching import Detaching
from colocate.testing.executors.dispatch import Dispatching, NamedMeshes
from colocate.testing.executors.drivers import Drivers, Signals
from colocate.testing.executors.left import LeftInLoops
from colocate.testing.executors.numbers import RandomNumbers
from colocate.testing.executors.order import Failures, Order
from colocate.testing.executors.ownership import Borrows
from colocate.testing.executors.placement import Placement, Ports
from colocate.testing.executors.residents import Residents
from colocate.testing.executors.sharing import Sharing, SharingDetached
from colocate.testing.executors.startup import Startup, Templates
from colocate.testing.executors.tensors import Memory, TensorResidents
from colocate.testing.executors.unasked import UnaskedFailures


class Executor(
    Calls,
    LeftInLoops,
    UnaskedFailures,
    Dispatching,
    Contexts,
    Residents,
    TensorResidents,
    Memory,
    RandomNumbers,
    NamedMeshes,
    Definitions,
    Order,
    Cancelling,
    Failures,
    Serialization,
    Signals,
    Startup,
    Templates,
    Deaths,
    Borrows,
    Closing,
    Converging,
    Placement,
    Ports,
    ProcessGroups,
    CutProcessGroups,
    Sharing,
    SharingDetached,
    Drivers,
    Detaching,
    Attaching,
    Successors,
    Vanishing,
    Watching,
    Auditing,
):
    """What an executor does itself: starts workers, brings messages and values, sees deaths, gives and keeps slots."""


class Smoke(Executor):
    """Some twenty tests of these, to begin with: what fails here fails everywhere in the suite."""


for _name in dir(Executor):
    if _name.startswith("test_") and not hasattr(getattr(Executor, _name), "smoke"):
        setattr(Smoke, _name, None)  # what is None is no test


__all__ = ["Executor", "ExecutorCase", "Smoke", "Spawn", "needs"]
