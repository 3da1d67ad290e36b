"""Sleep of a device's memory: host memory under another device name stands for it. The suite tests host memory."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")

from tests.unit.played_vmm import GRAIN, Arena, PlayedVmm  # noqa: E402

from colocate._protocol.ledger import TAGS  # noqa: E402
from colocate._role.context import CallState, running_call, standalone_context  # noqa: E402
from colocate._role.role import methods_of  # noqa: E402
from colocate.errors import ColocateError  # noqa: E402
from colocate.executor import Boot  # noqa: E402
from colocate.features.memory import offload  # noqa: E402
from colocate.features.memory.sleep import Outcome, Sleeper  # noqa: E402
from colocate.worker import holdings  # noqa: E402
from colocate.worker.residents.store import Store  # noqa: E402
from colocate.worker.serving.role_instance import RoleInstance  # noqa: E402
from colocate.worker.serving.scope import Scope  # noqa: E402
from colocate.worker.settings import Setting  # noqa: E402

DEVICE = "other:0"
ALL = tuple(TAGS)


class Model:
    """A trained role."""

    def __init__(self, net: Any = None) -> None:
        self.net = torch.nn.Linear(50, 50) if net is None else net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.cache = torch.ones(5000)
        self.net(torch.ones(1, 50)).sum().backward()
        self.optimizer.step()

    @property
    def tensors(self) -> list[Any]:
        """The role's tensors, gradients and cache first."""
        parameters = list(self.net.parameters())
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [*(each.grad for each in parameters), self.cache, *parameters, *state]

    def contents(self) -> list[Any]:
        return [each.detach().clone() for each in self.tensors]


class Worker:
    """The worker of a group of one, with `other:0` as its device."""

    in_process = False
    process = None
    parts: dict[str, Any] = {}
    lane: Any = types.SimpleNamespace(last_resumed=0, tasks=None)

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.setting = Setting("cpu", in_process=False)
        self.store = Store(False, Scope())
        self.roles: dict[Any, RoleInstance] = {}
        self.refusal: str | None = None
        self.device: Any = None

    def add(self, name: str, instance: Any) -> Any:
        methods = methods_of(type(instance))
        self.roles[name] = RoleInstance(name, instance, methods, standalone_context(name), self.setting)
        return instance

    def ask_driver(self, question: Any) -> None:
        """Raise if a rank refuses."""
        if reason := question.refusal or self.refusal:
            raise ColocateError(reason)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (holdings, offload):
        monkeypatch.setattr(module, "get_device_name", lambda device: DEVICE)
    running_call.set(CallState(1))
    return Worker(Boot("worker", "group", 0, "node", DEVICE))


def test_a_host_without_room(worker: Any) -> None:
    """A sleep is refused if the host lacks room for pinned memory."""
    worker.add("model", Model())
    sleeper = Sleeper(worker)
    sleeper.read_free_memory = lambda: 1 << 20  # a pinned region has 2 MiB at least
    refused = sleeper.sleep_on_all("model", ALL, (), 1)
    assert re.search("2 MiB of the host's memory are needed, to be pinned: 1 MiB are free", refused.refusal or "")
    sleeper.read_free_memory = lambda: 2 << 20
    assert sleeper.sleep_on_all("model", ALL, (), 1).refusal is None


def test_backward_pass_on_discarded_memory_raises(worker: Any) -> None:
    """A backward pass that needs discarded memory raises an error."""
    role = worker.add("model", types.SimpleNamespace(cache=torch.ones(1000)))
    role.weights = torch.ones(1000, requires_grad=True)
    loss = (role.weights * role.cache).sum()
    sleeper = Sleeper(worker)
    sleeper.sleep_on_all("model", ALL, ("cache",), 1)
    sleeper.wake_on_all("model", ALL, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_unknown_holdings_refuse_sleep(worker: Any) -> None:
    """A sleep is refused, with the error, if another role can't say what it holds."""

    def device_state() -> None:
        raise KeyError("table")

    worker.add("model", Model())
    worker.add("other", Model())
    worker.roles["other"].instance.device_state = device_state
    outcome = Sleeper(worker).sleep_on_all("model", ALL, (), 1)
    node = worker.roles["model"].ctx.node
    said = f"rank 0 (node {node}): device_state() of role 'other' has raised KeyError: 'table'"
    assert attrs.evolve(outcome, trace=None) == Outcome(said, refused_here=True)
    assert "in device_state\n" in (outcome.trace or "")
    assert "features/memory" not in (outcome.trace or "")


def test_more_than_can_be_looked_at(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep is refused if there are more objects than were looked at."""
    worker.add("model", Model())
    monkeypatch.setattr(holdings, "_LOOKS", 2)
    assert "holds more objects than were looked at" in (Sleeper(worker).sleep_on_all("model", ALL, (), 1).refusal or "")


class TestKeptAddresses:
    """Roles whose memory from construction keeps its addresses, with some in it that no role holds."""

    @pytest.fixture
    def arena(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
        gpu = PlayedVmm(tmp_path)
        yield Arena(gpu, monkeypatch)
        gpu.end()

    def graphed(self, arena: Arena) -> Any:
        """Make a role: weights of 7 and a cache of 5 at kept addresses, a later tensor elsewhere."""
        weights, cache, _ = arena.segment(3 * GRAIN, GRAIN, GRAIN // 2, states={2: "active_allocated"})
        net = torch.nn.Linear(1, 1, bias=False)
        net.weight = torch.nn.Parameter(weights.view(torch.float32).view(1, -1).fill_(7))
        return types.SimpleNamespace(net=net, cache=cache.fill_(5), later=torch.ones(1000))

    def test_graph_memory_stays_awake(self, arena: Arena, worker: Any) -> None:
        """A CUDA graph's own memory stays awake if a role of the worker keeps addresses: the graph is replayed."""
        role, other = (worker.add(name, self.graphed(arena)) for name in ("role", "other"))
        private = {role.later.data_ptr(), role.cache.data_ptr(), other.later.data_ptr()}
        worker.device = types.SimpleNamespace(is_private=private.__contains__)
        sleeper = Sleeper(worker)
        worker.roles["role"].parts["memory"] = True
        for name in ("role", "other"):
            assert sleeper.sleep_on_all(name, ALL, (), 1) == Outcome(nbytes=4 * GRAIN)
            assert sleeper.asleep.awake_bytes(name) == {"of a CUDA graph, which writes there": role.later.nbytes}
