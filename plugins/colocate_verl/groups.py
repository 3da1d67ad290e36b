"""Replacements for the classes of `verl.single_controller.ray`, on colocate's pools and groups.

`install` imports this after verl.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import attrs
from verl.single_controller.base import ResourcePool, Worker, WorkerGroup  # pyright: ignore[reportMissingImports]
from verl.single_controller.ray.base import RayClassWithInitArgs  # pyright: ignore[reportMissingImports]

from colocate.errors import CapabilityError, ConfigError

from . import (
    data as data,  # Imported only to register `DataProto`.
    private,
)
from .driver import Declared, Slots, Workers
from .results import OnDriver, Result, WorkerHandle, resolve_arguments
from .roles import Payload, find_sibling


@attrs.frozen
class PlacementGroups:
    """A replacement for a resource pool's placement groups. It only refers to the pool's slots."""

    slots: Slots

    def __repr__(self) -> str:
        return f"<the slots of resource pool {self.slots.name!r}, which are colocate's and no placement groups>"

    def _refuse_use(self, *_: Any) -> NoReturn:
        raise CapabilityError(f"{self!r}: what needs Ray's own, as TensorRT-LLM's rollout does, can't be on them")

    __len__ = __iter__ = __getitem__ = _refuse_use


class RayResourcePool(ResourcePool, OnDriver):  # type: ignore[misc]  # verl isn't there when types are checked
    """A resource pool of verl's. The first worker group reserves the pool's slots."""

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        if detached:
            raise CapabilityError("RayResourcePool(detached=True): colocate has pool.detach(name, ttl=...) for that")
        if accelerator_type is not None:
            raise CapabilityError(f"RayResourcePool({accelerator_type=}): colocate reserves GPUs of any type")
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or secrets.token_hex(3)

    def __repr__(self) -> str:
        return f"<resource pool {self.name_prefix!r} on colocate>"

    @functools.cached_property
    def slots(self) -> Slots:
        """The pool's slots. The number of slots is read from `store` at the first access."""
        if min(self.store, default=0) < 1:
            raise ConfigError(f"RayResourcePool(process_on_nodes={self.store}): name at least one process on each node")
        return Slots(tuple(self.store), self.name_prefix, self.max_colocate_count, 0, sum(self.store))

    def get_placement_groups(
        self, strategy: str = "", name: str | None = None, device_name: str = ""
    ) -> PlacementGroups:
        """Return the replacement for the pool's placement groups."""
        return PlacementGroups(self.slots)

    pgs = property(get_placement_groups, doc="A stand-in for placement groups.")


class SubRayResourcePool(RayResourcePool):
    """A part of another pool's slots."""

    def __init__(
        self, placement_groups: PlacementGroups, start_bundle_index: int, subgroup_world_size: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.start_bundle_index = int(start_bundle_index)
        self.subgroup_world_size = subgroup_world_size
        self.slots = placement_groups.slots.take_slots(self.start_bundle_index, subgroup_world_size)

    world_size = property(lambda self: self.subgroup_world_size, doc="The number of slots.")


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> NoReturn:
    """Raise a CapabilityError, because colocate reserves all slots of a pool together."""
    raise CapabilityError("merge_resource_pool: colocate reserves a pool's slots together; make one, and split it")


_INSTEAD = {
    "detached": "colocate has pool.detach(name, ttl=...) for that",
    "worker_names": "only the driver that has made workers on colocate can call them, by their handles",
    "worker_nsight_options": "nsight is a runtime_env of Ray's, and workers are no actors",
    **dict.fromkeys(("master_addr", "master_port"), "colocate finds a port itself"),
    "master_port_range": "say colocate_verl.install(executor, ports='30000-30999') before the first worker group",
}


class RayWorkerGroup(WorkerGroup, OnDriver):  # type: ignore[misc]
    """A worker group of verl's on colocate; `spawn` returns such a group for one role."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: Any = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: list[str] | None = None,
        worker_handles: list[WorkerHandle] | None = None,
        ray_wait_register_center_timeout: int = 300,
        *,
        device_name: str = "cuda",
        use_gpu: bool | None = None,
        profile_steps: Any = None,
        worker_nsight_options: Any = None,
        worker_env: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(resource_pool=resource_pool)
        more["detached"] = detached or None
        more["worker_names"] = None if worker_handles else worker_names
        more["worker_nsight_options"] = worker_nsight_options if profile_steps else None
        for name, value in more.items():
            if value is not None:
                raise CapabilityError(f"RayWorkerGroup({name}={value!r}): {_INSTEAD.get(name, 'verl has no such')}")
        self.ray_cls_with_init = ray_cls_with_init
        self.sub_cls_name = ""
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self.name_prefix = name_prefix or secrets.token_hex(3)
        if resource_pool is not None:
            use_gpu = resource_pool.use_gpu if use_gpu is None else use_gpu
            if use_gpu and not resource_pool.use_gpu:
                raise ValueError("use_gpu is True but resource_pool.use_gpu is False")
            worker_handles = self._spawn_workers(resource_pool, int(use_gpu and device_name != "cpu"), worker_env or {})
        if not worker_handles or any(getattr(item, "of", None) is None for item in worker_handles):
            raise CapabilityError(f"RayWorkerGroup(worker_handles={worker_handles}): they aren't of this driver")
        self._workers = worker_handles
        runs = itertools.groupby(worker_handles, key=lambda handle: handle.of)
        self._runs: list[tuple[Any, list[int]]] = [(half, [item.rank for item in run]) for half, run in runs]
        self._bind_methods()

    def _spawn_workers(
        self, resource_pool: RayResourcePool, gpus: int, worker_env: Mapping[str, Any]
    ) -> list[WorkerHandle]:
        if reserved := set(private.PROTECTED) & worker_env.keys():
            raise ValueError(f"worker_env sets {', '.join(sorted(reserved))}, which colocate sets: leave it out")
        roles, local = find_roles(self.ray_cls_with_init), resource_pool.slots.nodes[0]
        name = f"{self.name_prefix}{'_'.join(roles)}"
        env = {"WG_BACKEND": "ray", "WG_PREFIX": self.name_prefix, "RAY_LOCAL_WORLD_SIZE": local, **worker_env}
        half = resource_pool.slots.spawn(roles, gpus, name, {key: str(value) for key, value in env.items()})
        self.resource_pool = resource_pool
        return [WorkerHandle(half, rank, f"{name}_{rank // local}:{rank % local}") for rank in half.ranks]

    def _bind_methods(self) -> None:
        self._dispatch_info: dict[str, Any] = {}
        self._collect_info: dict[str, Any] = {}
        if self.ray_cls_with_init is not None:
            private.bind_methods(self, private.unwrap_class(self.ray_cls_with_init.cls))

    @classmethod
    def from_detached(cls, name_prefix: str | None = None, **given: Any) -> RayWorkerGroup:
        """Return a new worker group that uses existing workers of this driver."""
        return cls(name_prefix=name_prefix, **given)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Return a worker group for the calls of each named role."""
        return {key: self._select_role(key) for key in prefix_set}

    def _select_role(self, key: str) -> RayWorkerGroup:
        roles = find_roles(self.ray_cls_with_init)
        if key not in roles:
            raise ConfigError(f"spawn(prefix_set): this worker group has {', '.join(map(repr, roles))}, and no {key!r}")
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.sub_cls_name, part.wg_dict = key, None
        part.ray_cls_with_init = RayClassWithInitArgs(roles[key][0])
        part._bind_methods()
        return part

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Add an attribute for each role, with the role's worker group as the value."""
        self.wg_dict = self.wg_dict or self.spawn(prefix_set)
        self.__dict__.update(self.wg_dict)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Result]:
        """Call a method on all workers. Lists with an item for each worker are split, as in verl."""
        count = self.world_size
        if all(isinstance(argument, list) and len(argument) == count for argument in (*args, *kwargs.values())):
            calls = [
                ([argument[i] for argument in args], {key: argument[i] for key, argument in kwargs.items()})
                for i in range(count)
            ]
            payloads = _share_payloads([resolve_arguments(*argument) for argument in calls])
        else:
            payloads = [resolve_arguments(args, kwargs)] * count
        results: list[Result] = []
        for half, ranks in self._runs:
            results += self._call_workers(half, method_name, payloads[len(results) : len(results) + len(ranks)], ranks)
        return results

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Result:
        """Call a method on the first worker."""
        half, ranks = self._runs[0]
        return self._call_workers(half, method_name, [resolve_arguments(args, kwargs)], ranks[:1])[0]

    def _call_workers(self, half: Workers, name: str, payloads: list[Payload], ranks: list[int]) -> list[Result]:
        call = half.submit_call(self.sub_cls_name or half.outer, name, payloads, ranks)
        return [Result(call, index, half) for index in range(len(ranks))]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on all workers, and wait for the results."""
        return [result.wait_value() for result in self.execute_all_async(method_name, *args, **kwargs)]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on the first worker, and wait for the result."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).wait_value()

    execute_all, execute_rank_zero = execute_all_async, execute_rank_zero_async

    world_size = property(lambda self: len(self._workers), doc="The number of workers.")
    workers = property(lambda self: self._workers, doc="The workers' handles.")
    worker_names = property(lambda self: [each.name for each in self._workers], doc="The workers' names.")
    _meet = property(lambda self: self.execute_rank_zero_sync("get_master_addr_port"))
    master_address = property(lambda self: self._meet[0], doc="The address of the workers' rendezvous.")
    master_port = property(lambda self: self._meet[1], doc="The port of the workers' rendezvous.")

    def _is_worker_alive(self, worker: Any) -> bool:
        return bool(worker.of.group.state == "ready")

    def __getattr__(self, name: str) -> Any:
        why = "its class has no such method that @register has marked; those of its roles are with what spawn() gives"
        raise AttributeError(f"RayWorkerGroup.{name}: a worker group on colocate hasn't that, and {why}")

    def __repr__(self) -> str:
        return f"<worker group {self.name_prefix!r} on colocate>"


def _share_payloads(payloads: list[Payload]) -> list[Payload]:
    """Use one payload for all ranks whose payloads hold the same objects, so that it is encoded only once."""
    unique: dict[Any, Payload] = {}
    keys = [(*map(id, args), *((key, id(value)) for key, value in kwargs.items())) for args, kwargs in payloads]
    return [unique.setdefault(key, payload) for key, payload in zip(keys, payloads, strict=True)]


_inner_classes: weakref.WeakKeyDictionary[type, Mapping[str, Any]] = (
    weakref.WeakKeyDictionary()
)  # Maps each combined class to the classes of the roles in the class.


def find_roles(given: Any) -> dict[str, Declared]:
    """Return the roles of a worker class, with each role's class and arguments."""
    if given is None:
        raise ConfigError("RayWorkerGroup(resource_pool, ray_cls_with_init): give it the class that it is made of")
    if refused := private.actor_options(given).keys() - {"runtime_env", "name"}:  # verl itself sets these two.
        raise CapabilityError(f"RayClassWithInitArgs: a worker has what its pool reserves, and no {', '.join(refused)}")
    cls = private.unwrap_class(given.cls)
    base = next((part for part in cls.__mro__ if part in _inner_classes), None)
    inner = _inner_classes[base] if base is not None else {}
    roles = {key: (private.unwrap_class(part.cls), part.args, part.kwargs) for key, part in inner.items()}
    return roles if cls is base else {**roles, cls.__name__: (cls, given.args, given.kwargs)}


def create_colocated_worker_raw_cls(class_dict: Mapping[str, Any]) -> type:
    """Return a worker class with several classes as roles; a property for each role returns the role's worker."""
    members = {name: property(lambda _, name=name: find_sibling(name)) for name in class_dict}  # type: ignore[misc]
    cls = type("_".join(("FusedWorker", *class_dict)), (Worker,), {"is_fused_worker": True, **members})
    _inner_classes[cls] = dict(class_dict)
    return cls


def create_colocated_worker_cls(class_dict: Mapping[str, Any]) -> Any:
    """Combine several classes as roles of one worker."""
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))


def create_colocated_worker_cls_fused(class_dict: Mapping[str, Any]) -> Any:
    """Combine several classes as roles of one worker, marked as fused."""
    cls = create_colocated_worker_cls(class_dict)
    cls.fused_worker_used = True
    return cls


_POOLS = RayResourcePool, SubRayResourcePool, merge_resource_pool
_COLOCATED = create_colocated_worker_cls, create_colocated_worker_cls_fused, create_colocated_worker_raw_cls
REPLACEMENTS: Mapping[str, Any] = {each.__name__: each for each in (*_POOLS, *_COLOCATED, RayWorkerGroup)}
"""Replacements of verl's objects by name, which also pickle by that name."""
for _each in REPLACEMENTS.values():
    _each.__module__ = private.HOME
