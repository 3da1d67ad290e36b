"""verl's worker groups, on groups of colocate's: what a driver calls, and what it hands on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from verl.protocol import DataProtoFuture  # pyright: ignore[reportMissingImports]
from verl.single_controller.base import Worker, WorkerGroup  # pyright: ignore[reportMissingImports]

from colocate import Call
from colocate.errors import CapabilityError, ConfigError

from . import data as data  # which colocate is to know in each process that has worker groups
from . import private
from .driver import ENGINE, Workers
from .pools import RayResourcePool, ResourcePoolManager, SubRayResourcePool, merge_resource_pool
from .results import OnDriver, Result, WorkerName, get, is_result
from .roles import CALL, Payload, Siblings, sibling

_by_name: weakref.WeakValueDictionary[str, Workers] = weakref.WeakValueDictionary()


class RayClassWithInitArgs(private.home().RayClassWithInitArgs):  # type: ignore[misc]
    """verl's: a class and its arguments, and for several in one worker these by name."""

    colocated: Mapping[str, Any] | None = None

    def set_additional_resource(self, additional_resource: Any) -> NoReturn:
        """Refuse: slots have CPUs and GPUs."""
        raise CapabilityError(
            "RayClassWithInitArgs.set_additional_resource: slots of colocate's have CPUs and GPUs only"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: workers are made by a worker group."""
        raise CapabilityError(
            "RayClassWithInitArgs(...)(...): workers are made together, by RayWorkerGroup(resource_pool, ...)"
        )


class WorkerHandle(OnDriver):
    """One worker: `handle.method.remote(...)`. Sent to a Ray actor it is a name that can be counted."""

    def __init__(self, workers: Workers, rank: int, name: str) -> None:
        self._workers = workers
        self._rank = rank
        self._name = name

    def __getattr__(self, name: str) -> _RemoteMethod:
        if name.startswith("_") and name != "__ray_call__":
            raise AttributeError(f"{self!r} has no {name}")
        return _RemoteMethod(self._workers, self._rank, CALL if name == "__ray_call__" else name)

    def __repr__(self) -> str:
        return f"<worker {self._name} of a worker group on colocate>"

    def __reduce__(self) -> Any:
        return WorkerName, (self._name,)


class _RemoteMethod:
    def __init__(self, workers: Workers, rank: int, method: str) -> None:
        self._workers = workers
        self._rank = rank
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Result:
        """Call it."""
        role, method = _place(self._workers, "", self._method)
        call = self._workers.submit(role, method, [_values(args, kwargs)], [self._rank])
        return Result(call, 0, self._workers)


class RayWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """A worker group, or what `spawn` makes of one for each of its roles."""

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
        worker_env: Mapping[str, str] | None = None,
        master_addr: str | None = None,
        master_port: str | None = None,
        master_port_range: Sequence[int] | None = None,
    ) -> None:
        super().__init__(resource_pool=resource_pool)
        _refuse(detached, profile_steps, worker_nsight_options, master_addr, master_port)
        self.ray_cls_with_init = ray_cls_with_init
        self.device_name = device_name
        self.profile_steps = profile_steps
        self.worker_nsight_options = worker_nsight_options
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.sub_cls_name = ""
        self.method_names: list[str] = []
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self.name_prefix = private.home().get_random_string(length=6) if name_prefix is None else name_prefix
        if resource_pool is None:
            self._half = _found(worker_names, worker_handles)
        else:
            self.use_gpu = resource_pool.use_gpu if use_gpu is None else use_gpu
            if self.use_gpu and not resource_pool.use_gpu:
                raise ValueError("use_gpu is True but resource_pool.use_gpu is False")
            ENGINE.listen_on(master_port_range)
            self.resource_pool = resource_pool
            roles = roles_of(ray_cls_with_init)
            name = "_".join(roles)
            self._half = resource_pool.slots.spawn(
                {key: (cls, args, kwargs) for key, (cls, args, kwargs) in roles.items()},
                int(self.use_gpu and device_name != "cpu"),
                f"{self.name_prefix}{name}",
                self.name_prefix,
                worker_env or {},
            )
            local = resource_pool.store[0]
            self._half.names = [
                f"{self.name_prefix}{name}_{rank // local}:{rank % local}" for rank in range(self.world_size)
            ]
            _by_name.update(dict.fromkeys(self._half.names, self._half))
        self._bind()

    def _bind(self) -> None:
        self._worker_names = self._half.names
        self._workers = [WorkerHandle(self._half, rank, name) for rank, name in enumerate(self._worker_names)]
        self._dispatch_info: dict[str, Any] = {}
        self._collect_info: dict[str, Any] = {}
        if self.ray_cls_with_init is None:
            return
        generator = private.home().func_generator
        self.method_names = self._bind_worker_method(private.unwrapped(self.ray_cls_with_init.cls), generator)
        for key in self.ray_cls_with_init.colocated or ():
            part = self._part(key)
            for name in part.method_names:
                setattr(self, f"{key}_{name}", getattr(part, name))

    def _part(self, key: str) -> RayWorkerGroup:
        """Return what one of the roles is called by."""
        roles = roles_of(self.ray_cls_with_init)
        if key not in roles:
            raise ConfigError(f"spawn(prefix_set): this worker group has {', '.join(map(repr, roles))}, and no {key!r}")
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.sub_cls_name, part.wg_dict = key, None
        part.ray_cls_with_init = RayClassWithInitArgs(roles[key][0])
        part._bind()
        return part

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: list[str] | None = None,
        worker_handles: list[WorkerHandle] | None = None,
        ray_cls_with_init: Any = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Return another worker group on workers of this driver."""
        return cls(None, ray_cls_with_init, True, name_prefix, False, worker_names, worker_handles, **kwargs)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Return what each of the roles is called by."""
        return {key: self._part(key) for key in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Have each of the roles as an attribute."""
        if self.wg_dict is None:
            self.wg_dict = self.spawn(prefix_set)
        for key, part in self.wg_dict.items():
            setattr(self, key, part)

    # -- calls

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Result]:
        """Call a method on all workers; lists of as many items as there are workers are for one each, as in verl."""
        count = self.world_size
        given = (*args, *kwargs.values())
        if all(isinstance(each, list) and len(each) == count for each in given):
            payloads = [
                _values([each[rank] for each in args], {key: each[rank] for key, each in kwargs.items()})
                for rank in range(count)
            ]
        else:
            payloads = [_values(args, kwargs)] * count
        return self._submit(method_name, _shared(payloads), None)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Result:
        """Call a method on the first worker."""
        return self._submit(method_name, [_values(args, kwargs)], [0])[0]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all workers, and wait."""
        values: list[Any] = get(self.execute_all_async(method_name, *args, **kwargs), None, None)
        return values

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on the first worker, and wait."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).value()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _submit(self, name: str, payloads: Sequence[Payload], ranks: Sequence[int] | None) -> list[Result]:
        role, method = _place(self._half, self.sub_cls_name, name)
        call: Call[list[Any]] = self._half.submit(role, method, payloads, ranks)
        return [Result(call, index, self._half) for index in range(len(payloads))]

    def _is_worker_alive(self, worker: WorkerHandle) -> bool:
        return self._half.group.state == "ready"

    # -- what it says of itself

    @property
    def world_size(self) -> int:
        """How many workers it has."""
        return self._half.world_size

    @property
    def workers(self) -> list[WorkerHandle]:
        """Its workers."""
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        """Their names."""
        return self._worker_names

    @property
    def master_address(self) -> str:
        """Where the workers meet."""
        return self._half.rendezvous[0]

    @property
    def master_port(self) -> str:
        """The port at which they meet."""
        return self._half.rendezvous[1]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"RayWorkerGroup.{name}: a worker group on colocate hasn't that, and its class has no such method that "
            "@register has marked"
        )

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"the worker group {self.name_prefix!r} lives with its driver and can't be sent to a Ray actor "
            "(verl's experimental.fully_async_policy does so)"
        )


def _refuse(detached: bool, profile_steps: Any, nsight: Any, address: Any, port: Any) -> None:
    if detached:
        raise CapabilityError(
            "RayWorkerGroup(detached=True): not by verl's name; colocate has pool.detach(name, ttl=...)"
        )
    if profile_steps and nsight is not None:
        raise CapabilityError(
            "RayWorkerGroup(worker_nsight_options=...): nsight is a runtime_env of Ray's, and workers are no actors"
        )
    if address is not None or port is not None:
        raise CapabilityError(
            "RayWorkerGroup(master_addr=, master_port=): colocate finds a port itself; master_port_range says of which"
        )


def _found(names: Sequence[str] | None, handles: Sequence[WorkerHandle] | None) -> Workers:
    """Return the workers of this driver by handles or names."""
    if handles and isinstance(handles[0], WorkerHandle):
        return handles[0]._workers
    found = _by_name.get(names[0]) if names else None
    if found is None:
        raise CapabilityError(
            f"RayWorkerGroup(worker_names={names}, worker_handles={handles}): such workers aren't of this driver, and "
            "only the driver that has made a worker group on colocate can call it"
        )
    return found


def _place(workers: Workers, role: str, name: str) -> tuple[str, str]:
    """Return role and method that a name means: of the role, or `role_method`, or what one role alone has."""
    roles = [role] if role else [*workers.group.roles]
    found = [(each, name) for each in roles if workers.has(each, name)]
    found += [
        (each, rest) for each in roles if (rest := name.removeprefix(f"{each}_")) != name and workers.has(each, rest)
    ]
    if not found:
        raise AttributeError(f"{' and '.join(roles)} of group {workers.group.name!r} have no method {name!r}")
    return found[-1 if len(roles) > 1 else 0]


def _values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
    """Return the arguments of one rank with the values of results, as Ray gives an actor."""
    return tuple(map(_value, args)), {key: _value(each) for key, each in kwargs.items()}


def _value(given: Any) -> Any:
    if is_result(given):
        return given.value()
    if isinstance(given, DataProtoFuture):
        return given.get()
    if private.of_ray(given):
        import ray

        return ray.get(given)
    return given


def _shared(payloads: list[Payload]) -> list[Payload]:
    """Return the payloads, where those of the same objects are one, which is encoded once."""
    made: dict[Any, Payload] = {}
    keys = [(*map(id, args), *((key, id(each)) for key, each in kwargs.items())) for args, kwargs in payloads]
    return [made.setdefault(key, payload) for key, payload in zip(keys, payloads, strict=True)]


# -- several classes in one worker

_fused: weakref.WeakKeyDictionary[type, Mapping[str, Any]] = weakref.WeakKeyDictionary()


def roles_of(given: Any) -> dict[str, tuple[type, Sequence[Any], Mapping[str, Any]]]:
    """Return the roles that a class with its arguments means."""
    if given is None:
        raise ConfigError(
            "RayWorkerGroup(resource_pool, ray_cls_with_init): it is made of a class: give the second one"
        )
    if given.colocated is not None:
        return {key: (private.unwrapped(each.cls), each.args, each.kwargs) for key, each in given.colocated.items()}
    cls = private.unwrapped(given.cls)
    inner = next((_fused[base] for base in cls.__mro__ if base in _fused), {})
    roles = {key: (private.unwrapped(each.cls), each.args, each.kwargs) for key, each in inner.items()}
    return {**roles, cls.__name__: (cls, given.args, given.kwargs)}


def create_colocated_worker_cls(class_dict: Mapping[str, Any]) -> RayClassWithInitArgs:
    """Return several classes as roles of one worker."""
    found = RayClassWithInitArgs(type("WorkerDict", (Worker,), {}))
    found.colocated = dict(class_dict)
    return found


def create_colocated_worker_cls_fused(class_dict: Mapping[str, Any]) -> RayClassWithInitArgs:
    """Return several classes as roles of one worker."""
    found = create_colocated_worker_cls(class_dict)
    found.fused_worker_used = True
    return found


def _finds(name: str) -> Callable[[Any], Any]:
    return lambda _: sibling(name)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, Any]) -> type:
    """Return a class to inherit from: its workers have those of several classes beside them, by name."""
    names = tuple(class_dict)

    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        Worker.__init__(self, *args, **kwargs)
        self.fused_worker_dict = Siblings(names)

    members: dict[str, Any] = {name: property(_finds(name)) for name in names}
    found = type(
        "_".join(("FusedWorker", *names)), (Worker,), {"is_fused_worker": True, "__init__": constructor, **members}
    )
    _fused[found] = dict(class_dict)
    return found


REPLACED: Mapping[str, Any] = {
    each.__name__: each
    for each in (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        ResourcePoolManager,
        SubRayResourcePool,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        create_colocated_worker_raw_cls,
        merge_resource_pool,
    )
}
"""What stands in the place of verl's own, by its name there."""
for _each in REPLACED.values():
    _each.__module__ = __name__  # a process that unpickles one imports this module first, and by it verl and the others
if ENGINE.executor:
    private.replace(REPLACED)
