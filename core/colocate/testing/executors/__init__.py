"""The test suite for executors.

Subclass `Executor` in a test file:

    from colocate.testing.executors import Executor

    class TestMine(Executor):
        executor = "mine"
        options = {"address": "…"}

`Executor` has all tests, and `Smoke` has about twenty of them, to begin with. Each area is a separate class
(`calls.Calls`, `deaths.Deaths` …). A test is skipped if the executor lacks a capability that the test needs, or if the
test needs torch and torch isn't installed.
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
    """All tests of an executor: starting workers, sending messages and values, noticing deaths, and reserving slots."""


class Smoke(Executor):
    """About twenty tests of the suite, to begin with, because most other tests fail if one of these fails."""


for _name in dir(Executor):
    if _name.startswith("test_") and not hasattr(getattr(Executor, _name), "smoke"):
        setattr(Smoke, _name, None)  # pytest doesn't run an attribute that is None.


__all__ = ["Executor", "ExecutorCase", "Smoke", "Spawn", "needs"]
