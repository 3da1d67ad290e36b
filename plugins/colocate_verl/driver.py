"""Manage slots, workers, and calls of the workers' roles on the driver, independently of verl's classes.

An interface to verl needs only `Slots.take_slots`, `Slots.spawn` and `Workers.submit_call`. `groups` and `results` are
the interface for `verl.single_controller.ray`. Another interface of verl's could use this module in the same way.
"""

from __future__ import annotations

import gc
import itertools
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

OPTIONS: Mapping[str, Mapping[str, Any]] = {"ray": {"address": "auto"}, "dask": {}, "local": {"processes": True}}
"""The executors, with default options for `colocate.connect`."""
Declared = tuple[type, Sequence[Any], Mapping[str, Any]]  # A class of verl, and arguments of the constructor.


class ProcessEngine:
    """The executor and the runtime for this process's worker groups. The first worker group connects the runtime."""

    def __init__(self) -> None:
        self.executor = ""
        self.options: Mapping[str, Any] = {}
        self.environment: Mapping[str, str] = {}  # Variables by which workers join the driver's Ray.
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()
        self._ending: list[threading.Thread] = []

    def choose_executor(self, executor: str, options: Mapping[str, Any]) -> None:
        """Choose the executor and options of worker groups."""
        if executor not in OPTIONS:
            raise ConfigError(f"verl's worker groups are on {', '.join(map(repr, OPTIONS))}, and not on {executor!r}")
        choice = executor, {**OPTIONS[executor], **options}
        with self._lock:
            if self._runtime is not None and choice != (self.executor, self.options):
                on = f"{self.executor!r} with {self.options} already: say before the first one"
                raise ConfigError(f"worker groups of this process are on {on} that it is {executor!r} with {choice[1]}")
            self.executor, self.options = choice

    def connect_runtime(self) -> Runtime:
        """Return the runtime, and connect if there is no open runtime."""
        with self._lock:
            if self._runtime is None or not self._runtime.alive:
                self.environment = private.cluster_environment() if self.executor == "ray" else {}
                self._runtime = colocate.connect(self.executor, **self.options)
            return self._runtime

    def close_all(self) -> None:
        """Close the runtime, with all pools and groups."""
        with self._lock:
            runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close(force=True)

    def close_with(self, holder: object, owned: Pool | ColocatedGroup) -> None:
        """Close a pool or a group as soon as `holder` has no references left."""

        # Close on a new thread, because garbage collection may run on any thread, at any point.
        def close() -> None:
            self._ending.append(threading.Thread(target=owned.close, kwargs={"force": True}, daemon=True))
            self._ending[-1].start()

        weakref.finalize(holder, close).atexit = False

    def wait_closed(self) -> None:
        """Wait until pools and groups without references are closed.

        Collects garbage first, because worker groups refer to themselves.
        """
        gc.collect()
        while self._ending:
            self._ending.pop().join()


ENGINE = ProcessEngine()


class _Pools(dict[int, Pool]):
    """The pools of one resource pool, by GPUs per slot. They are closed when this mapping has no references left."""


@attrs.define(eq=False)
class Slots:
    """Slots of a resource pool: all slots, or a part. The first call of `spawn` reserves the pool."""

    nodes: Sequence[int]  # The number of the pool's slots on each node.
    name: str
    groups: int  # The number of groups that may share a slot.
    first: int
    count: int
    _pools: _Pools = attrs.field(factory=_Pools)

    def take_slots(self, first: int, count: int) -> Slots:
        """Return `count` slots, beginning with slot number `first` of the pool."""
        return attrs.evolve(self, first=first, count=count)

    def spawn(self, roles: Mapping[str, Declared], gpus: int, name: str, environment: Mapping[str, str]) -> Workers:
        """Start a group of workers with the given name and roles, and with `gpus` GPUs for each worker."""
        ENGINE.wait_closed()
        pool = self._reserve_pool(gpus)
        specs = {
            key: colocate.role(make_role(cls), cls, args, kwargs, tuple(roles)).on(env="torchrun")
            for key, (cls, args, kwargs) in roles.items()
        }
        env = {"COLOCATE_VERL": ENGINE.executor, **ENGINE.environment, **environment}
        part = pool[self.first : self.first + self.count]
        return Workers(part.spawn(specs, name=name, env=env), self._pools)

    def _reserve_pool(self, gpus: int) -> Pool:
        pool = self._pools.get(gpus)
        if pool is None or not pool.alive:
            pool = ENGINE.connect_runtime().reserve(slots=sum(self.nodes), gpus=gpus, groups=self.groups)
            self._pools[gpus] = pool
            ENGINE.close_with(self._pools, pool)
            self._check_nodes(pool)
        return pool

    def _check_nodes(self, pool: Pool) -> None:
        places = iter([slot.node for slot in pool.slots])
        for size in self.nodes:
            if len(nodes := set(itertools.islice(places, size))) > 1:
                pool.close()
                raise PlacementError(
                    f"the resource pool {self.name!r} wants {size} slots on one node (process_on_nodes="
                    f"{list(self.nodes)}), and those that are free lie on {', '.join(sorted(nodes))}"
                )


class Workers:
    """The workers of a group, which is closed as soon as this object has no references left."""

    def __init__(self, group: ColocatedGroup, keeps: object) -> None:
        self.group = group
        self._keeps = keeps  # This reference keeps the pools of the slots open.
        self._views = {name: group.role(name) for name in group.roles}
        self.outer = next(reversed(self._views))  # verl wraps the last role around all other roles.
        self.ranks = list(range(len(group.roles[self.outer].slots)))
        ENGINE.close_with(self, group)

    def submit_call(self, role: str, method: str, payloads: Sequence[Payload], ranks: Sequence[int]) -> Call[list[Any]]:
        """Call a role's method on the given ranks, with one payload for each rank."""
        call: Any = getattr(self._views[role], method)
        if ranks != self.ranks:
            call = call.options(ranks=ranks)
        submitted: Call[list[Any]] = call.submit(*([payloads] if any(map(any, payloads)) else []))
        return submitted
