"""The whole suite: tests of the executor itself, of core and of each feature."""

from importlib import import_module

from tests.suite.core.background import Background
from tests.suite.core.calls import Calls, Cancelling
from tests.suite.core.closing import Closing, Converging
from tests.suite.core.context import Contexts, Devices, TorchSettings
from tests.suite.core.definitions import Definitions, Serialization
from tests.suite.core.dispatch import Dispatching, Mixing, NamedMeshes
from tests.suite.core.drivers import Drivers, Endings
from tests.suite.core.engines import Engines
from tests.suite.core.forks import Forks
from tests.suite.core.left import LeftInLoops
from tests.suite.core.numbers import RandomNumbers
from tests.suite.core.order import Failures, Order
from tests.suite.core.ownership import Borrows, Ownership
from tests.suite.core.placement import Ports
from tests.suite.core.residents import KeptFailures, Residents
from tests.suite.core.restarting import Restarting
from tests.suite.core.sharing import Sharing
from tests.suite.core.startup import Printing, Startup, Templates
from tests.suite.core.tensors import Memory, Optimizers, TensorResidents, Transfers
from tests.suite.core.threads import Handlers, Undisturbed
from tests.suite.core.unasked import UnaskedFailures

from colocate.features import FEATURES
from colocate.testing import executors

OF_FEATURES = [area for name in FEATURES for area in import_module(f"tests.suite.{name}.suite").AREAS]
"""Test classes of features; each feature's folder has its own."""


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
    Handlers,
    Startup,
    Templates,
    Restarting,
    Ownership,
    Borrows,
    Forks,
    Closing,
    Converging,
    Sharing,
    Drivers,
    Endings,
    Undisturbed,
    Printing,
    Ports,
    *OF_FEATURES,  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    executors.Executor,
):
    """All tests that every executor passes."""


class Executor(ExecutorSuite):
    """Tests of the executor itself, and of its part in features."""


for _name in dir(ExecutorSuite):
    if _name.startswith("test_"):
        _test = getattr(ExecutorSuite, _name)
        if _test.__module__.startswith("tests.") and not hasattr(_test, "level"):
            setattr(Executor, _name, None)  # Pytest collects no attribute that is None.
