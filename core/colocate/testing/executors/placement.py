"""Tests of placement, which reserves all slots of a pool together, and of ports in a given range."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import psutil
import pytest

import colocate
from colocate import Pool, Runtime, gpus
from colocate._plugins.plugins import about_executor
from colocate.errors import CapabilityError, ConfigError, PlacementError, PlacementTimeout
from colocate.executor import Detachable, Growing, Labelled, MultiNode, OwnProcess, Watchable
from colocate.testing.executors._base import ExecutorCase, needs, needs_feature, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.runtimes import warm_up_runtime
from colocate.testing.waiting import PATIENCE_S, find_starter, wait_until
from colocate_report.window import open_window


@contextlib.contextmanager
def _set_visible_gpus(patch: pytest.MonkeyPatch, visible: str | None) -> Iterator[None]:
    """A context manager that hides the machine's GPUs, and sets or removes the environment variable of visible GPUs."""
    patch.setattr(gpus, "machine_gpus", lambda: ())
    if visible is None:
        patch.delenv(gpus.VARIABLE, raising=False)
    else:
        patch.setenv(gpus.VARIABLE, visible)
    yield


_WAITS_S = 0.5  # Seconds until the test interrupts a request, which then waits for slots.


class Placement(ExecutorCase):
    """Tests of reservations on a cluster with 2 CPUs or 2 GPUs."""

    @pytest.fixture(scope="class")
    @classmethod
    def two_cpus(cls, runtime: Runtime) -> Iterator[Runtime]:
        """A runtime on a cluster with 2 CPUs."""
        with cls().connect_privately(cpus=2) as two:
            yield warm_up_runtime(two)

    @pytest.fixture(scope="class")
    @classmethod
    def two_gpus(cls, runtime: Runtime) -> Iterator[Runtime]:
        """A runtime on a cluster that has, or pretends to have, 2 GPUs."""
        with (
            pytest.MonkeyPatch.context() as patch,
            _set_visible_gpus(patch, None),
            cls().connect_privately(gpus=2) as two,
        ):
            yield warm_up_runtime(two)

    @smoke
    def test_slots_of_a_pool(self, runtime: Runtime) -> None:
        """A pool lists the index, node, devices and state of each slot."""
        with runtime.reserve(3, cpus=0) as pool:
            assert len(pool) == 3
            assert [slot.index for slot in pool.slots] == [0, 1, 2]
            assert {slot.state for slot in pool.slots} == {"free"}
            nodes = {node.name for node in runtime._node.services.executor.nodes()}
            assert {slot.node for slot in pool.slots} <= nodes
            assert {slot.devices for slot in pool.slots} == {()}

    @smoke
    def test_never_fits(self, two_cpus: Runtime) -> None:
        """A request that can never fit fails at once, with a table of all nodes in the error."""
        runtime = two_cpus
        with pytest.raises(PlacementError) as caught:
            runtime.reserve(slots=3, cpus=1, timeout=1e6)
        error = caught.value
        assert not isinstance(error, PlacementTimeout)
        assert "can never fit" in str(error)
        assert [set(row) >= {"node", "wanted", "total", "free"} for row in error.nodes] == [True] * len(error.nodes)
        assert error.nodes[0]["node"] in str(error)
        for word in ("wanted", "total", "free"):
            assert word in str(error)
        assert pickle.loads(pickle.dumps(error)).nodes == error.nodes
        assert not runtime._node.children
        with runtime.reserve(slots=2, cpus=1, timeout=0):
            pass

    @needs_feature("looking")
    def test_interrupted_reserve(self, two_cpus: Runtime) -> None:
        """Ctrl-C while a request waits for slots withdraws the request at once."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            with two_cpus.reserve(slots=2, cpus=1):
                main = threading.main_thread().ident
                assert main is not None
                timer = threading.Timer(_WAITS_S, signal.pthread_kill, (main, signal.SIGUSR1))
                timer.start()
                began = time.monotonic()
                with pytest.raises(KeyboardInterrupt):
                    two_cpus.reserve(slots=1, cpus=1, timeout=1000)
                assert time.monotonic() - began < PATIENCE_S
                timer.join()
                assert len(two_cpus._node.children) == 1
        finally:
            signal.signal(signal.SIGUSR1, before)
        with two_cpus.reserve(slots=2, cpus=1, timeout=0):
            assert not two_cpus.audit()

    @smoke
    def test_does_not_fit_now(self, two_cpus: Runtime) -> None:
        """A request that doesn't fit in time fails with an error that says what is free, and reserves nothing."""
        with two_cpus.reserve(slots=1, cpus=1, name="holder"):
            with pytest.raises(PlacementTimeout, match="did not become free within 0 s") as caught:
                two_cpus.reserve(slots=2, cpus=1, timeout=0)
            assert isinstance(caught.value, TimeoutError)
            assert f"pool 'holder' has 1 (reserved at {__file__}:" in str(caught.value)
            assert "1 CPU" in str(caught.value.nodes[0]["free"])
            with two_cpus.reserve(slots=1, cpus=1, timeout=0):
                pass

    @smoke
    def test_waits(self, two_cpus: Runtime) -> None:
        """A reservation waits until enough resources are free."""
        runtime = two_cpus
        first = runtime.reserve(slots=2, cpus=1, name="first")
        pools: list[Pool] = []
        waiter = threading.Thread(target=lambda: pools.append(runtime.reserve(slots=2, cpus=1, name="second")))
        waiter.start()
        wait_until(lambda: any(child.name == "second" for child in list(runtime._node.children.values())), "it waits")
        assert pools == []
        first.close()
        waiter.join()
        assert [slot.state for slot in pools[0].slots] == ["free", "free"]
        pools[0].close()

    @smoke
    def test_close_frees_slots(self, two_cpus: Runtime) -> None:
        """When `close` has returned, the slots can be reserved again."""
        runtime = two_cpus
        for _ in range(2):
            with runtime.reserve(slots=2, cpus=1, timeout=0) as pool:
                assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None, None]

    @needs(OwnProcess)
    def test_close_frees_slots_after_failures(self, two_cpus: Runtime) -> None:
        """After a close with a hung rank or a dead rank, the slots can be reserved again."""
        for how in (Faulty.wait, Faulty.kill):
            pool = two_cpus.reserve(slots=2, cpus=1, timeout=0)
            faulty = pool.spawn({"faulty": colocate.role(Faulty)}).role("faulty", Faulty)
            with Gate() as gate:
                if how is Faulty.wait:
                    faulty.wait.submit(gate.address)
                    gate.wait_for()
                else:
                    faulty.kill.submit().exception(PATIENCE_S)
                with contextlib.suppress(BaseExceptionGroup):  # Another test checks these errors.
                    pool.close(grace=0)
        with two_cpus.reserve(slots=2, cpus=1, timeout=0) as pool:
            assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None, None]

    def test_a_slot_larger_than_a_node(self, two_cpus: Runtime) -> None:
        """A slot that is larger than every node can't be reserved."""
        with pytest.raises(PlacementError):
            two_cpus.reserve(slots=1, cpus=3, timeout=0)

    @needs_feature("looking")
    def test_strict_strategies(self, runtime: Runtime) -> None:
        """Strict strategies put all slots on one node, or each slot on a different node, or refuse the request."""
        nodes = runtime._node.services.executor.nodes()
        with runtime.reserve(2, cpus=0, strategy="strict_pack") as pool:
            assert len({slot.node for slot in pool.slots}) == 1
            assert f"pool {pool.name} (ready, all on one node, " in runtime.graph.render()
        with runtime.reserve(len(nodes), cpus=0, strategy="strict_spread") as pool:
            assert {slot.node for slot in pool.slots} == {node.name for node in nodes}
        with pytest.raises(PlacementError, match="each on a node of its own, can never fit"):
            runtime.reserve(len(nodes) + 1, cpus=0, strategy="strict_spread")

    @needs(Labelled)
    def test_labels(self, runtime: Runtime) -> None:
        """Slots are placed on nodes with the requested labels. If there are none, the error shows the nodes' labels."""
        nodes = runtime._node.services.executor.nodes()
        label, value = next(iter(nodes[0].labels.items()))
        having = {node.name for node in nodes if node.labels.get(label) == value}
        for expression in (value, f"in({value},no-such-value)", "!no-such-value"):
            with runtime.reserve(1, cpus=0, labels={label: expression}, together=label) as pool:
                assert expression.startswith("!") or pool.slots[0].node in having
        for never in ({label: "no-such-value"}, {"no-such-label": value}):
            with pytest.raises(PlacementError, match=r"on nodes with .*no-such-.*can never fit") as caught:
                runtime.reserve(1, cpus=0, labels=never)
            assert f"{label}={value}" in str(caught.value) or "no no-such-label" in str(caught.value)
        with pytest.raises(PlacementError, match="all of one no-such-label, can never fit"):
            runtime.reserve(1, cpus=0, together="no-such-label")

    @needs(Labelled)
    def test_further_resources(self, runtime: Runtime) -> None:
        """Further resources of nodes are counted like CPUs. A request for a resource that no node has can never fit."""
        with pytest.raises(PlacementError, match=r"1 no-such-thing each can never fit") as caught:
            runtime.reserve(1, cpus=0, resources={"no-such-thing": 1})
        assert "0 no-such-thing" in str(caught.value.nodes[0]["total"])
        for node in runtime._node.services.executor.nodes():
            for name, amount in node.resources.items():
                with runtime.reserve(1, cpus=0, resources={name: min(amount, 1) / 2}) as pool:
                    assert [slot.node for slot in pool.slots] == [node.name]
                    with pytest.raises(PlacementTimeout, match=name):
                        runtime.reserve(1, cpus=0, resources={name: amount}, timeout=0)

    def test_places_that_an_executor_lacks(self, runtime: Runtime) -> None:
        """An executor without the capability `Labelled` refuses `labels=`, `resources=` and `together=`."""
        if isinstance(runtime._node.services.executor, Labelled):
            pytest.skip(f"executor {runtime.name!r} is Labelled")
        options: list[dict[str, Any]] = [{"labels": {"a": "b"}}, {"resources": {"a": 1}}, {"together": "a"}]
        for option in options:
            with pytest.raises(
                CapabilityError, match=r"\(labels=, resources=, together=\): it lacks Labelled"
            ) as caught:
                runtime.reserve(1, cpus=0, **option)
            assert caught.value.capability == "Labelled"

    @needs_feature("looking")
    def test_nodes_that_are_to_come(self, runtime: Runtime) -> None:
        """With `grow=True`, a request that can't fit waits for new nodes, if the executor has growing clusters."""
        if not isinstance(runtime._node.services.executor, Growing):
            with pytest.raises(CapabilityError, match=r"\(grow=\): it lacks Growing"):
                runtime.reserve(1, cpus=0, grow=True)
            return
        for grow, kind in ((True, PlacementTimeout), (False, PlacementError)):
            with pytest.raises(PlacementError) as caught:
                runtime.reserve(1, cpus=100_000, grow=grow, timeout=0.2)
            assert type(caught.value) is kind
        assert not runtime.audit()

    def test_gpus(self, two_gpus: Runtime) -> None:
        """Each slot has its own whole GPUs, in ascending order."""
        runtime = two_gpus
        with runtime.reserve(slots=2, gpus=1, cpus=0, timeout=0) as pool:
            assert [slot.devices for slot in pool.slots] == [(0,), (1,)]
            with pytest.raises(PlacementTimeout):
                runtime.reserve(slots=1, gpus=1, cpus=0, timeout=0)
        with runtime.reserve(slots=1, gpus=2, cpus=0, timeout=0) as pool:
            assert [slot.devices for slot in pool.slots] == [(0, 1)]
        with pytest.raises(PlacementError, match="2 GPU"):
            runtime.reserve(slots=3, gpus=1, cpus=0)

    @needs(OwnProcess)
    def test_visible_gpus(self, two_gpus: Runtime) -> None:
        """A worker process sees only the GPUs of its slot."""
        with two_gpus.reserve(slots=2, gpus=1, cpus=0) as pool:
            group = pool.spawn({"echo": colocate.role(Echo)})
            assert group.role("echo", Echo).env("CUDA_VISIBLE_DEVICES") == ["0", "1"]

    @needs(OwnProcess)
    @pytest.mark.parametrize("visible", ["7,5, 3,9,1", "GPU-5eed, GPU-beef,GPU-5eed0,GPU-0,GPU-1"])
    def test_gpus_of_the_job(self, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
        """A job that may use only some of a machine's GPUs assigns these to its slots, in the given order."""
        with _set_visible_gpus(monkeypatch, visible), self.connect_privately(gpus=4) as runtime:
            for count in (1, 2):
                with runtime.reserve(slots=4 // count, gpus=count, cpus=0) as pool:
                    assert [index for slot in pool.slots for index in slot.devices] == [0, 1, 2, 3]
                    values: Any = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).env(gpus.VARIABLE)
                assert ",".join(values) == visible.replace(" ", "").rpartition(",")[0]

    def test_more_gpus_than_the_job_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A private cluster can't offer GPUs that the environment hides."""
        with (
            _set_visible_gpus(monkeypatch, "3"),
            pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='3' shows this process 1 GPU"),
        ):
            self.connect_privately(gpus=2).close()

    def test_parts_of_a_gpu(self, runtime: Runtime) -> None:
        """A fraction of a GPU is refused with the reason, before anything is reserved."""
        for amount, why in ((0.5, "a slot has whole GPUs"), (1.0, "must be a whole number")):
            with pytest.raises(ConfigError, match=why) as caught:
                runtime.reserve(1, amount)  # type: ignore[arg-type]
            assert [mistake.path for mistake in caught.value.mistakes] == ["gpus"]

    def test_senseless_requests(self, runtime: Runtime) -> None:
        """A request with several mistakes fails with one error that lists all mistakes."""
        with pytest.raises(ConfigError) as caught:
            runtime.reserve(slots=0, gpus=-1, cpus=-1, strategy="stack", detachable="yes", name=3)  # type: ignore[arg-type]
        paths = ["slots", "gpus", "cpus", "detachable", "name", "strategy"]
        assert [mistake.path for mistake in caught.value.mistakes] == paths
        where: dict[str, Any] = {"labels": {"a": "in()"}, "resources": {"CPU": 1}, "together": 3}
        with pytest.raises(ConfigError, match=r"has 'CPU', which cpus is for") as caught:
            runtime.reserve(1, **where)
        assert [mistake.path for mistake in caught.value.mistakes] == [*where]
        with pytest.raises(ConfigError, match=r"env: must be a mapping from variables to values, not \['A'\]"):
            runtime.reserve(1, env=["A"])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="host_memory"):
            runtime.reserve(1, host_memory="much")
        with pytest.raises(ConfigError) as caught:
            runtime.reserve(1, env={"A=B": "1", "": "2", "NUL": "\0", 4: "4", "FINE": "="})  # type: ignore[dict-item]
        assert [mistake.path for mistake in caught.value.mistakes] == ["env.'A=B'", "env.''", "env.'NUL'", "env.4"]
        with pytest.raises(ConfigError, match="on_failure"), runtime.reserve(1, cpus=0) as pool:
            pool.spawn({"echo": colocate.role(Echo)}, on_failure="shrug")
        with pytest.raises(ConfigError, match="must be text, not 3"), runtime.reserve(1, cpus=0) as pool:
            pool.spawn({"echo": colocate.role(Echo)}, name=3)  # type: ignore[arg-type]

    def test_detachable(self, runtime: Runtime) -> None:
        """Only an executor with the capability `Detachable` accepts `detachable=True`."""
        if isinstance(runtime._node.services.executor, Detachable):
            runtime.reserve(1, cpus=0, detachable=True).close()
            return
        with pytest.raises(CapabilityError) as caught:
            runtime.reserve(1, cpus=0, detachable=True)
        assert caught.value.capability == "Detachable"

    def test_plugin_declares_executor_capabilities(self, runtime: Runtime) -> None:
        """The capabilities that the executor's plugin declares (`About`) include all that the executor has."""
        about = about_executor(self.executor)
        if about is None:
            pytest.skip(f"executor {self.executor!r} says nothing of itself: its plugin has no hook colocate_about()")
        executor = runtime._node.services.executor
        can = {
            capability.__name__
            for capability in (OwnProcess, MultiNode, Labelled, Detachable, Watchable)
            if isinstance(executor, capability)
        }
        assert can <= about.capabilities.keys()

    def test_unknown_option(self) -> None:
        """An unknown option of the executor is refused with an error that names the option."""
        with pytest.raises(ConfigError, match="cpuss"):
            self.connect(cpuss=2)


_MANY = 40
_EVERYWHERE = ("0.0.0.0", "::")  # Only clusters' own sockets listen on all addresses.


class Ports(ExecutorCase):
    """Tests of `connect(ports=...)`."""

    @needs(OwnProcess)
    def test_ports_of_a_range(self, no_leaks: None) -> None:
        """All sockets that listen for other processes use the given ports, except for one port of gloo per worker."""
        pytest.importorskip("torch")
        first, before = find_free_ports(_MANY), _find_listening(None)
        within = range(first, first + _MANY)
        with self.connect(ports=f"{within[0]}-{within[-1]}") as runtime, open_window(runtime, "ports"):
            executor = runtime._node.services.executor
            detachable = isinstance(executor, Detachable)
            pool = runtime.reserve(2, cpus=0, strategy=self.strategy, detachable=detachable)
            halves = {name: colocate.role(Echo).on(slots=[slot]) for slot, name in enumerate(("left", "right"))}
            group = pool.spawn({**halves, "all": colocate.role(Collective)})
            left_echo, right = (group.role(name, Echo) for name in halves)
            workers = [pid for pid, *_ in left_echo.place() + right.place()]
            assert right.first(left_echo.echo.keep("x").ref) == ["x"]
            starters = {os.getpid(), *map(find_starter, workers)}
            assert _find_listening(starters) - before <= {*within}
            assert group.role("all", Collective).sum(1.0) == [2.0, 2.0]
            assert any(_find_listening(workers) & {*within})
            for worker in workers:
                assert len(_find_listening([worker]) - {*within}) <= 1


def find_free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports, below the range from which the system assigns ports."""
    while True:
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.create_server(("", port)))
            return first


def _find_listening(pids: Collection[int] | None) -> set[int]:
    """Return the ports at which given processes listen (None: all processes), except on wildcard addresses."""
    connections: list[Any] = [*psutil.net_connections("tcp")] if pids is None else []
    for pid in pids or ():
        connections += psutil.Process(pid).net_connections("tcp")
    return {
        connection.laddr.port
        for connection in connections
        if connection.status == "LISTEN" and connection.laddr.ip not in _EVERYWHERE
    }
