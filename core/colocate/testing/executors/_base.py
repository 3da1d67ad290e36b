"""What every area of the executor suite stands on: the connection, shared groups, capabilities."""

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
from colocate.testing.runtimes import make_first_worker
from colocate.testing.waiting import send, starter_of

F = TypeVar("F", bound=Callable[..., Any])

MESHES = {"train": {"pp": 2, "dp": 2}, "infer": {"dp": 2, "tp": 2}}


def needs(capability: type) -> Callable[[F], F]:
    """Mark a test, or all tests of an area, that an executor without a capability can't pass.

    They are skipped with the capability's name.
    """

    def mark(test: F) -> F:
        of_area = [test_function for name, test_function in vars(test).items() if name.startswith("test_")]
        for test_function in of_area or [test]:
            test_function.__dict__["capability"] = capability
        return test

    return mark


def needs_feature(name: str) -> Callable[[F], F]:
    """Mark a test of something else that uses a feature: where that isn't there, it is skipped with its name."""

    def mark(test: F) -> F:
        test.__dict__["features"] = (*test.__dict__.get("features", ()), name)
        return test

    return mark


def smoke(test: F) -> F:
    """Mark one of the tests to begin with: what fails there fails everywhere in the suite."""
    test.__dict__["smoke"] = True
    return test


class Spawn(Protocol):
    """What the fixture `spawn` gives."""

    def __call__(self, roles: Mapping[str, RoleSpec[Any]], *, slots: int = 2, **options: Any) -> ColocatedGroup:
        """A group of the test's own, on a pool of its own; both are closed when the test is over."""
        ...


@attrs.define(eq=False)
class Shared:
    """A group that many tests use. One that a test has broken is replaced, so that each test fails for itself."""

    runtime: Runtime
    roles: Mapping[str, RoleSpec[Any]]
    slots: int
    name: str
    mesh: Mapping[str, Any] | None = None
    warm_up: Callable[[ColocatedGroup], object] = lambda group: None
    _pool: Pool | None = None
    _group: ColocatedGroup | None = None

    def get(self) -> ColocatedGroup:
        """The group, made now if there is none that works."""
        if self._group is None or self._group._node.failure is not None or not self._group.alive:
            with leaks.shared():
                if self._pool is not None:
                    with contextlib.suppress(BaseExceptionGroup):  # what broke it was told to the test that broke it
                        self._pool.close(grace=0, force=True)
                self._pool = self.runtime.reserve(self.slots, cpus=0)
                self._group = self._pool.spawn(self.roles, self.name, self.mesh)
                if "memory" in FEATURES:
                    self._group.memory()  # starts a thread that counts, as looks at all groups do
                self.warm_up(self._group)
        return self._group


def _warm_up(group: ColocatedGroup) -> None:
    """Have everything made that is made when it is first needed, so that no test seems to leak it."""
    group.role("log", Log).async_add.submit("warm").result()
    group.role("log", Log).clear()
    group.role("left", Rows).seen([1])
    group.role("rows", Rows).produce.keep(1).fetch()


def _warm_up_square(group: ColocatedGroup) -> None:
    group.role("axes", Axes).seen.keep([1, 2]).fetch()


class ExecutorCase:
    """Base of the areas. A subclass says how to connect; the suite does the rest.

    Attributes:
        executor: The name to connect to.
        options: The options to connect with.
        private: The options for a cluster of the test's own, where `options` join one that is shared; None: the same.
        device: What torch calls the device of a slot without `gpus=` here.
        address: Of the test's machine, under which workers reach it; where slots lie on other machines.
        strategy: How the slots of pools are placed; "spread" puts them on as many machines as there are.
        start_s: How long the start of a worker took here, for tests with a time limit in which some have to start.
        last_words: A part of what the cluster says of a slot that has vanished (`KeptSlot.lost`); empty when it says
            nothing.
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
        """Connect to the executor with its options and some more (such as `seed=`)."""
        return colocate.connect(self.executor, **{**self.options, **more})

    def connect_privately(self, **more: Any) -> Runtime:
        """Connect to a cluster of the test's own, with what it offers (such as `cpus=`)."""
        return colocate.connect(self.executor, **{**(self.options if self.private is None else self.private), **more})

    def vanish(self, place: Place) -> None:
        """End what keeps a slot, as the end of its machine would, without telling the executor.

        Here that is the process that has started the slot's worker, on this machine. Override it where more goes with
        that, or where it is on another machine.
        """
        os.kill(self._starter(place), signal.SIGKILL)

    def freeze(self, place: Place) -> None:
        """Stop what keeps a slot, so that it answers nothing any more; override it as `vanish`."""
        send(self._starter(place), signal.SIGSTOP)

    def _starter(self, place: Place) -> int:
        starter = starter_of(self._workers[id(place)])
        if starter == os.getpid():
            pytest.skip(f"executor {self.executor!r} keeps its slots in the driver's own process, which can't vanish")
        return starter

    def places_of(self, group: ColocatedGroup) -> Sequence[Place]:
        """Where a group's slots lie, for `vanish` and `freeze`. On each it has its role "echo"."""
        places: Sequence[Place] = group.owner._node.places
        ranks = group.role("echo", Echo).place()
        self._workers = {id(place): pid for place, (pid, *_) in zip(places, ranks, strict=True)}
        return places

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, no_leaks_of_class: None) -> Iterator[Runtime]:
        """A runtime for all tests of the class."""
        with cls().connect() as runtime:
            began = time.monotonic()
            make_first_worker(runtime)
            cls.start_s = time.monotonic() - began
            yield runtime

    @pytest.fixture(autouse=True)
    def _machines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gates are where workers reach them, and pools lie as the case says, unless a test says otherwise itself."""
        monkeypatch.setattr(Gate, "host", self.address)
        defaults = tuple(self.strategy if value == "pack" else value for value in Runtime.reserve.__defaults__ or ())
        monkeypatch.setattr(Runtime.reserve, "__defaults__", defaults)  # no wrapper: messages name who has called

    @pytest.fixture(autouse=True)
    def _capabilities(self, request: pytest.FixtureRequest, runtime: Runtime) -> None:
        capability = getattr(request.function, "capability", None)
        if capability is not None and not isinstance(runtime._node.services.executor, capability):
            pytest.skip(f"executor {runtime.name!r} lacks {capability.__name__}")
        for feature in getattr(request.function, "features", ()):
            if feature not in FEATURES:
                pytest.skip(f"feature {feature!r} isn't here")

    @pytest.fixture(scope="class")
    @classmethod
    def shared_pair(cls, runtime: Runtime) -> Shared:
        """Two slots with one of each kind of role."""
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
        return Shared(runtime, roles, 2, name="pair", warm_up=_warm_up)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_square(cls, runtime: Runtime) -> Shared:
        """Four slots as a mesh of two by two, some roles on some of them."""
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
        """A group of two slots that the test leaves as it was."""
        return shared_pair.get()

    @pytest.fixture
    def square(self, no_leaks: None, shared_square: Shared) -> ColocatedGroup:
        """A group of four slots, dp=2 by tp=2, that the test leaves as it was."""
        return shared_square.get()

    @pytest.fixture
    def ring(self, square: ColocatedGroup) -> ColocatedGroup:
        """As `square`, for collectives; torch is needed."""
        pytest.importorskip("torch")
        with leaks.shared():  # in workers that share the driver's process these groups are the driver's descriptors
            for axis in (None, "tp"):
                square.role("solo", Collective).facts(axis)
            square.role("solo", Collective).mesh()
        return square

    @pytest.fixture(scope="class")
    @classmethod
    def shared_copying(cls, runtime: Runtime, shared_pair: Shared) -> Iterator[Shared]:
        """As `shared_pair`, where values travel by value: with `strict=True` if they otherwise don't."""
        if runtime._node.services.executor.codec.name != "reference":
            yield shared_pair
            return
        with cls().connect(strict=True) as strict:
            yield attrs.evolve(shared_pair, runtime=strict, pool=None, group=None)

    @pytest.fixture
    def copying(self, no_leaks: None, shared_copying: Shared) -> ColocatedGroup:
        """As `pair`, where values travel by value."""
        return shared_copying.get()

    @pytest.fixture
    def spawn(self, no_leaks: None, runtime: Runtime) -> Iterator[Spawn]:
        """Makes groups that the test may break."""
        pools: list[Pool] = []

        def make(roles: Mapping[str, RoleSpec[Any]], *, slots: int = 2, **options: Any) -> ColocatedGroup:
            pools.append(runtime.reserve(slots, cpus=0))
            return pools[-1].spawn(roles, **options)

        yield make
        for pool in reversed(pools):
            with contextlib.suppress(BaseExceptionGroup):  # a test that cares for it closes its group itself
                pool.close(grace=1, force=True)
