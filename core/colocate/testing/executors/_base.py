"""The base of all areas of the executor suite: connections, shared groups and capabilities."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import attrs
import pytest

import colocate
from colocate import ColocatedGroup, Pool, RoleSpec, Runtime
from colocate.executor import Place
from colocate.features import FEATURES
from colocate.testing import leaks
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.meshes import Meshes
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.probes.rows import Axes, Own, Rows
from colocate.testing.probes.tensors import Tensors
from colocate.testing.runtimes import warm_up_runtime
from colocate.testing.waiting import find_starter, send_signal

F = TypeVar("F", bound=Callable[..., Any])

MESHES = {"train": {"pp": 2, "dp": 2}, "infer": {"dp": 2, "tp": 2}}


def needs(capability: type) -> Callable[[F], F]:
    """Mark a test, or all tests of an area, that an executor without a capability can't pass.

    The marked tests are skipped if the executor lacks the capability.
    """

    def mark(test: F) -> F:
        of_area = [test_function for name, test_function in vars(test).items() if name.startswith("test_")]
        for test_function in of_area or [test]:
            test_function.__dict__["capability"] = capability
        return test

    return mark


def needs_feature(name: str) -> Callable[[F], F]:
    """Mark a test that uses a feature, so that the test is skipped if the feature isn't installed."""

    def mark(test: F) -> F:
        test.__dict__["features"] = (*test.__dict__.get("features", ()), name)
        return test

    return mark


def smoke(test: F) -> F:
    """Mark a test as a part of `Smoke`, the tests to begin with."""
    test.__dict__["smoke"] = True
    return test


class Spawn(Protocol):
    """The type of the function that the fixture `spawn` returns."""

    def __call__(self, roles: Mapping[str, RoleSpec[Any]], *, slots: int = 2, **options: Any) -> ColocatedGroup:
        """Return a group for one test, on a separate pool. Both are closed when the test is over."""
        ...


@attrs.define(eq=False)
class Shared:
    """A group that many tests use. If a test breaks the group, the next test gets a new one."""

    runtime: Runtime
    roles: Mapping[str, RoleSpec[Any]]
    slots: int
    name: str
    mesh: Mapping[str, Any] | None = None
    warm_up: Callable[[ColocatedGroup], object] = lambda group: None
    _pool: Pool | None = None
    _group: ColocatedGroup | None = None

    def get(self) -> ColocatedGroup:
        """Return the shared group, and create a new group if there is none that works."""
        if self._group is None or self._group._node.failure is not None or not self._group.alive:
            with leaks.share_between_tests():
                if self._pool is not None:
                    with contextlib.suppress(BaseExceptionGroup):  # The test that broke the group has seen the error.
                        self._pool.close(grace=0, force=True)
                self._pool = self.runtime.reserve(self.slots, cpus=0)
                self._group = self._pool.spawn(self.roles, self.name, self.mesh)
                if "memory" in FEATURES:
                    self._group.memory()  # This starts a thread, which would look like a test's leak.
                self.warm_up(self._group)
        return self._group


def _warm_up_pair(group: ColocatedGroup) -> None:
    """Use a group once, so that resources which are created at the first use don't look like a test's leaks."""
    group.role("log", Log).async_add.submit("warm").result()
    group.role("log", Log).clear()
    group.role("left", Rows).seen([1])
    group.role("rows", Rows).produce.keep(1).fetch()


def _warm_up_square(group: ColocatedGroup) -> None:
    group.role("axes", Axes).seen.keep([1, 2]).fetch()


class ExecutorCase:
    """The base class of all areas. A subclass says how to connect to the executor.

    Attributes:
        executor: The name to connect to.
        options: The options to connect with.
        private: The options for a private cluster, if `options` join a shared cluster; None to use `options`.
        device: Torch's name for the device of a slot without `gpus=`.
        address: The address at which workers reach the test's machine, if slots are on other machines.
        strategy: How the slots of pools are placed; "spread" puts them on as many machines as there are.
        start_s: The seconds that the start of a worker has taken, for tests in which workers start within a time limit.
        last_words: A part of the cluster's message about a slot that has vanished (`KeptSlot.on_process_gone`); empty
            if there is no message.
    """

    executor: ClassVar[str] = "local"
    options: ClassVar[Mapping[str, Any]] = {}
    private: ClassVar[Mapping[str, Any] | None] = None
    device: ClassVar[str] = "cpu"
    address: ClassVar[str] = Gate.host
    strategy: ClassVar[str] = "pack"
    start_s: ClassVar[float] = 0.0
    last_words: ClassVar[str] = ""
    _workers: Mapping[int, int]

    def connect(self, **more: Any) -> Runtime:
        """Connect to the executor with `options` and with further options (such as `seed=`)."""
        return colocate.connect(self.executor, **{**self.options, **more})

    def connect_privately(self, **more: Any) -> Runtime:
        """Connect to a private cluster with the given resources (such as `cpus=`)."""
        return colocate.connect(self.executor, **{**(self.options if self.private is None else self.private), **more})

    def vanish(self, place: Place) -> None:
        """Kill the process that keeps a slot, without notifying the executor, as if the machine had failed.

        This is the process that has started the slot's worker on this machine. Override this method if more processes
        must end, or if the process is on another machine.
        """
        os.kill(self._starter_process(place), signal.SIGKILL)

    def freeze(self, place: Place) -> None:
        """Stop the process that keeps a slot, so that it no longer answers. Override this together with `vanish`."""
        send_signal(self._starter_process(place), signal.SIGSTOP)

    def _starter_process(self, place: Place) -> int:
        starter = find_starter(self._workers[id(place)])
        if starter == os.getpid():
            pytest.skip(f"executor {self.executor!r} keeps its slots in the driver's own process, which can't vanish")
        return starter

    def places_of(self, group: ColocatedGroup) -> Sequence[Place]:
        """Return the `Place` of each slot of a group, for `vanish` and `freeze`. Every slot needs the role "echo"."""
        places: Sequence[Place] = group.owner._node.places
        ranks = group.role("echo", Echo).place()
        self._workers = {id(place): pid for place, (pid, *_) in zip(places, ranks, strict=True)}
        return places

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, no_leaks_of_class: None) -> Iterator[Runtime]:
        """A runtime that all tests of a class share."""
        with cls().connect() as runtime:
            began = time.monotonic()
            warm_up_runtime(runtime)
            cls.start_s = time.monotonic() - began
            yield runtime

    @pytest.fixture(autouse=True)
    def _use_case_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Gate, "host", self.address)
        defaults = tuple(self.strategy if value == "pack" else value for value in Runtime.reserve.__defaults__ or ())
        # A wrapper isn't possible, because messages name the line of the caller.
        monkeypatch.setattr(Runtime.reserve, "__defaults__", defaults)

    @pytest.fixture(autouse=True)
    def _skip_unsupported(self, request: pytest.FixtureRequest, runtime: Runtime) -> None:
        capability = getattr(request.function, "capability", None)
        if capability is not None and not isinstance(runtime._node.services.executor, capability):
            pytest.skip(f"executor {runtime.name!r} lacks {capability.__name__}")
        for feature in getattr(request.function, "features", ()):
            if feature not in FEATURES:
                pytest.skip(f"feature {feature!r} isn't here")

    @pytest.fixture(scope="class")
    @classmethod
    def shared_pair(cls, runtime: Runtime) -> Shared:
        """A shared group of two slots, with one role of each kind."""
        roles: dict[str, RoleSpec[Any]] = {
            "echo": colocate.role(Echo, "the tag", extra={"a": 1}),
            "other": colocate.role(Echo, "another"),
            "rows": colocate.role(Rows),
            "log": colocate.role(Log),
            "own": colocate.role(Own),
            "faulty": colocate.role(Faulty),
            "tensors": colocate.role(Tensors),
            "left": colocate.role(Rows).on(slots=[0]),
            "right": colocate.role(Rows).on(slots=[1]),
            "left_tensors": colocate.role(Tensors).on(slots=[0]),
            "right_tensors": colocate.role(Tensors).on(slots=[1]),
        }
        return Shared(runtime, roles, 2, name="pair", warm_up=_warm_up_pair)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_square(cls, runtime: Runtime) -> Shared:
        """A shared group of four slots in a mesh of two by two, with some roles on only a part of the slots."""
        roles: dict[str, RoleSpec[Any]] = {
            "axes": colocate.role(Axes),
            "meshes": colocate.role(Meshes).on(mesh=MESHES),
            "named": colocate.role(Collective).on(mesh=MESHES),
            "all": colocate.role(Collective),
            "pair": colocate.role(Collective).on(slots=[1, 2]),
            "solo": colocate.role(Collective).on(slots=[3]),
        }
        return Shared(runtime, roles, 4, "square", {"dp": 2, "tp": 2}, _warm_up_square)

    @pytest.fixture
    def pair(self, no_leaks: None, shared_pair: Shared) -> ColocatedGroup:
        """The shared group of two slots, which the test must leave unchanged."""
        return shared_pair.get()

    @pytest.fixture
    def square(self, no_leaks: None, shared_square: Shared) -> ColocatedGroup:
        """The shared group of four slots (dp=2, tp=2), which the test must leave unchanged."""
        return shared_square.get()

    @pytest.fixture
    def ring(self, square: ColocatedGroup) -> ColocatedGroup:
        """The group of `square`, for tests of collectives, which need torch."""
        pytest.importorskip("torch")
        with leaks.share_between_tests():  # If workers are threads, process groups open descriptors in the driver.
            for axis in (None, "tp"):
                square.role("solo", Collective).facts(axis)
            square.role("solo", Collective).mesh()
        return square

    @pytest.fixture(scope="class")
    @classmethod
    def shared_copying(cls, runtime: Runtime, shared_pair: Shared) -> Iterator[Shared]:
        """A shared group of two slots that copies values, with `strict=True` if the executor would pass references."""
        if runtime._node.services.executor.codec.name != "reference":
            yield shared_pair
            return
        with cls().connect(strict=True) as strict:
            yield attrs.evolve(shared_pair, runtime=strict, pool=None, group=None)

    @pytest.fixture
    def copying(self, no_leaks: None, shared_copying: Shared) -> ColocatedGroup:
        """The shared group of two slots in which values are copied."""
        return shared_copying.get()

    @pytest.fixture
    def spawn(self, no_leaks: None, runtime: Runtime) -> Iterator[Spawn]:
        """A function that creates groups that the test may break."""
        pools: list[Pool] = []

        def make(roles: Mapping[str, RoleSpec[Any]], *, slots: int = 2, **options: Any) -> ColocatedGroup:
            pools.append(runtime.reserve(slots, cpus=0))
            return pools[-1].spawn(roles, **options)

        yield make
        for pool in reversed(pools):
            with contextlib.suppress(BaseExceptionGroup):  # A test that checks these errors closes its group itself.
                pool.close(grace=1, force=True)
