"""The driver's half: slots, the workers on them, and calls of their roles, whatever classes verl's callers see."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

import colocate
from colocate import Call, ColocatedGroup, Pool, Runtime
from colocate.errors import ConfigError, PlacementError

from . import private
from .roles import Payload, make_role

EXECUTORS = ("ray", "dask", "local")
PROTECTED = ("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of workers that verl reads, and colocate sets."""
_AT_START = ("LD_", "PYTHON", "OMP_", "CUDA_", "TORCH", "PYTORCH_")
"""Variables that are read when a process starts begin so, or when torch is imported."""


class Engine:
    """Where the worker groups of this process run. Its runtime is made for the first of them."""

    def __init__(self) -> None:
        self.executor = ""
        self.options: dict[str, Any] = {}
        self.environment: dict[str, str] = {}  # what workers find the driver's Ray by
        self._runtime: Runtime | None = None
        self._lock = threading.RLock()
        self._ending: list[threading.Thread] = []

    def choose(self, executor: str, options: Mapping[str, Any]) -> None:
        """Say where they are to run.

        Raises:
            ConfigError: There is no such executor, or they run elsewhere already.
        """
        if executor not in EXECUTORS:
            raise ConfigError(
                f"verl's worker groups can be on {', '.join(map(repr, EXECUTORS))}, and not on {executor!r}"
            )
        with self._lock:
            if self._runtime is not None and (executor, dict(options)) != (self.executor, self.options):
                raise ConfigError(
                    f"verl's worker groups of this process are on {self.executor!r} already: say it before"
                )
            self.executor, self.options = executor, dict(options)

    def runtime(self) -> Runtime:
        """Return the runtime, connected when first asked for."""
        with self._lock:
            if self._runtime is None or not self._runtime.alive:
                options = dict(self.options)
                if self.executor == "local":
                    options.setdefault("processes", True)
                if self.executor == "ray":
                    private.start_ray()
                    self.environment = private.cluster()
                    options.setdefault("address", "auto")
                self._runtime = colocate.connect(self.executor, **options)
            return self._runtime

    def listen_on(self, ports: Sequence[int] | None) -> None:
        """Have what is still to be connected listen on such ports only (verl's `master_port_range`)."""
        if ports is not None and self.options.get("ports") != (span := f"{ports[0]}-{ports[1] - 1}"):
            self.choose(self.executor, {**self.options, "ports": span})

    def end(self) -> None:
        """Close everything."""
        with self._lock:
            runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close(force=True)

    def end_later(self, *owned: Any) -> None:
        """Close something on a thread of its own: it is called wherever an object is collected."""

        def close() -> None:
            for each in owned:
                each.close(force=True)

        thread = threading.Thread(target=close, name="colocate_verl: end of a worker group", daemon=True)
        self._ending.append(thread)
        thread.start()

    def settle(self) -> None:
        """Wait until what nobody holds any more is closed. Worker groups hold themselves, by their methods."""
        gc.collect()
        while self._ending:
            self._ending.pop().join()


ENGINE = Engine()


@attrs.define(eq=False, weakref_slot=True)
class _Held:
    """A reserved pool. It ends when neither a resource pool nor workers hold it any more."""

    pool: Pool
    environment: Mapping[str, str]


@attrs.define(eq=False)
class Slots:
    """Slots of one resource pool: reserved when workers are first spawned on them.

    Attributes:
        nodes: How many of them are to lie on each node.
        name: What the pool is called.
        groups: How many groups of workers may share a slot.
        first: The index of the first one in the pool.
        count: How many.
    """

    nodes: Sequence[int]
    name: str
    groups: int
    first: int
    count: int
    _reserved: dict[int, _Held] = attrs.field(factory=dict)  # by the GPUs of a slot

    def part(self, first: int, count: int) -> Slots:
        """Return some of them, counted from the pool's first."""
        return attrs.evolve(self, first=first, count=count)

    def split(self, sizes: Sequence[int]) -> list[Slots]:
        """Return as many parts, one after the other."""
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [self.part(self.first + end - size, size) for end, size in zip(ends, sizes, strict=True)]

    def spawn(
        self,
        roles: Mapping[str, tuple[type, Sequence[Any], Mapping[str, Any]]],
        gpus: int,
        name: str,
        prefix: str,
        environment: Mapping[str, str],
    ) -> Workers:
        """Start workers with some roles: a class of verl's and its arguments each.

        Raises:
            ValueError: A variable is one that colocate sets.
            ColocateError: They can't be started: there is no room, or a constructor raises.
        """
        if taken := set(PROTECTED) & environment.keys():
            raise ValueError(
                f"worker_env sets {', '.join(sorted(taken))}, which colocate sets in each worker: leave it out"
            )
        ENGINE.settle()
        environment = {str(key): str(value) for key, value in environment.items()}
        held = self._pool(gpus, environment)
        own = {**environment, "WG_PREFIX": prefix, "RAY_LOCAL_WORLD_SIZE": str(self.nodes[0])}
        specs = {
            key: colocate.role(make_role(cls), cls, args, kwargs, own, tuple(roles)).on(env="torchrun")
            for key, (cls, args, kwargs) in roles.items()
        }
        running = ENGINE.runtime().groups
        names = (f"{name}-{number}" if number else name for number in itertools.count())
        return Workers(
            held.pool[self.first : self.first + self.count].spawn(
                specs, name=next(each for each in names if each not in running)
            ),
            held,
        )

    def _pool(self, gpus: int, environment: Mapping[str, str]) -> _Held:
        """Return the pool that the slots are of, reserved for its first group of workers."""
        held = self._reserved.get(gpus)
        if held is not None and held.pool.alive:
            late = [each for each in environment if each.startswith(_AT_START)]
            if wrong := [each for each in late if held.environment.get(each) != environment[each]]:
                raise ConfigError(
                    f"worker_env sets {', '.join(wrong)}, which is read when a worker starts, and the resource pool "
                    f"{self.name!r} has been reserved without: make a pool of its own for this worker group"
                )
            return held
        runtime = ENGINE.runtime()  # which is what tells the engine's environment
        env = {"COLOCATE_VERL": ENGINE.executor, "WG_BACKEND": "ray", **ENGINE.environment, **environment}
        pool = runtime.reserve(slots=sum(self.nodes), gpus=gpus, env=env, groups=self.groups)
        self._check_nodes(pool)
        held = self._reserved[gpus] = _Held(pool, environment)
        weakref.finalize(held, ENGINE.end_later, pool).atexit = False
        return held

    def _check_nodes(self, pool: Pool) -> None:
        """Raise unless slots that are to lie on one node do."""
        places, end = [slot.node for slot in pool.slots], 0
        for size in self.nodes:
            end += size
            if len(set(places[end - size : end])) > 1:
                pool.close()
                raise PlacementError(
                    f"the resource pool {self.name!r} wants {size} slots on one node (process_on_nodes="
                    f"{list(self.nodes)}), and those that are free lie on {', '.join(sorted(set(places)))}"
                )


class Workers:
    """The workers of a group. They end when nobody holds it any more."""

    def __init__(self, group: ColocatedGroup, held: _Held) -> None:
        self.group = group
        self._held = held
        self.names: list[str] = []
        self._views = {name: group.role(name) for name in group.roles}
        self._methods = {name: frozenset(dir(view)) for name, view in self._views.items()}
        weakref.finalize(self, ENGINE.end_later, group).atexit = False

    @property
    def world_size(self) -> int:
        """How many there are."""
        return len(next(iter(self.group.roles.values())).slots)

    def has(self, role: str, method: str) -> bool:
        """Return whether a role has a method."""
        return method in self._methods[role]

    def submit(
        self, role: str, method: str, payloads: Sequence[Payload], ranks: Sequence[int] | None = None
    ) -> Call[list[Any]]:
        """Call a method of a role on its ranks, or some of them.

        Args:
            role: The role.
            method: Its method.
            payloads: What each of the ranks gets; the same object where that is the same.
            ranks: The ranks; None for all.
        """
        call: Any = getattr(self._views[role], method)
        if ranks is not None:
            call = call.options(ranks=ranks)
        if not any(any(payload) for payload in payloads):
            payloads = ()
        submitted: Call[list[Any]] = call.submit(*([list(payloads)] if payloads else []))
        return submitted

    @property
    def rendezvous(self) -> tuple[str, str]:
        """Where the workers meet."""
        return self.group.run(_rendezvous)[0]


def _rendezvous(_: colocate.Context) -> tuple[str, str]:
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
