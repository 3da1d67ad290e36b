"""Construction of torch's process groups together with peers, and the stores for the rendezvous."""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from colocate import wire
from colocate._system.jobs import message_of
from colocate._system.limits import GROUPS_CONNECT_WITHIN_S
from colocate.errors import ConfigError
from colocate.features.process_groups.books import forget
from colocate.features.process_groups.meetings import NotMade, all_have
from colocate.gpus import backend_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CONNECT_TIMEOUT = datetime.timedelta(seconds=GROUPS_CONNECT_WITHIN_S)
_splits_lock = threading.Lock()
_unsplit: list[None] = []  # one entry per thread that makes a group
_bound: list[Any] = []  # the default group's device, meanwhile
_sharers_lock = threading.Lock()
_SHARED = "colocate/default"
_sharers: set[int] = set()


@attrs.frozen
class Plan:
    """The parameters of a process group in the making."""

    name: str  # the name in torch, unchanged by renewals
    rendezvous_key: str  # the key of the rendezvous, new each time
    slots: Sequence[int]  # the slots of the ranks, in order; in the default group, a slot's number is the rank
    index: int  # the index of this rank
    is_default: bool  # whether this is torch's default group
    lies_in_default: bool  # whether the group is part of the default group
    device: str  # of the slot
    timeout_s: float  # the timeout of a collective

    def make(self, store: Any) -> ProcessGroup:
        """Make the group together with all other ranks, through a store; return once all ranks have succeeded.

        Raises:
            NotMade: Another rank has failed.
            Exception: This rank has failed: the caller must notify the others, which wait for it.
        """
        group = self._connect(store)
        # A rank that went on and cut the group would break the others' construction, without any end.
        try:
            is_complete = len(self.slots) == 1 or all_have(
                store, self.rendezvous_key, self.index, len(self.slots), self.timeout_s
            )
        except BaseException:
            del group  # the traceback would keep the group
            forget(self.name)
            raise
        if not is_complete:
            del group
            forget(self.name)
            raise NotMade(f"another rank could not make the process group {self.name!r}, or was late")
        return group

    def _connect(self, store: Any) -> ProcessGroup:
        # The public API makes groups only with all ranks of the default one, under numbers as names. These are the
        # steps of init_process_group and new_group. Imported here: only users of groups have torch.
        import torch
        import torch.distributed as dist

        # Import this before the default group exists: default arguments in there would hold the group for good.
        import torch.distributed.nn.functional
        from torch.distributed import distributed_c10d as c10d

        device_backend = backend_for(self.device)
        backend = (
            "gloo" if device_backend is None else f"cpu:gloo,{device_backend}"
        )  # gloo serves tensors on the host in any case
        bound = None if device_backend is None else torch.device(self.device)
        with _no_split(c10d) if self.lies_in_default else contextlib.nullcontext():
            group, _ = c10d._new_process_group_helper(
                len(self.slots),
                self.index,
                list(self.slots) if self.lies_in_default else [],
                dist.Backend(backend),
                dist.PrefixStore(self.rendezvous_key, store),  # type: ignore[attr-defined]
                group_name=c10d.GroupName(self.name),
                timeout=datetime.timedelta(seconds=self.timeout_s),
                device_id=bound,
            )
        to_torch = self.slots if self.is_default or self.lies_in_default else range(len(self.slots))
        c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(to_torch)}
        if self.is_default:
            c10d._update_default_pg(group)  # as in init_process_group
        process_group: ProcessGroup = group
        return process_group


@contextlib.contextmanager
def _no_split(c10d: Any) -> Any:
    """Prevent NCCL communicators by split from the default group in the block: a split needs all ranks there."""
    # No reference to the default group is held during the block, which may outlast the group.
    with _splits_lock:
        if (bound := c10d._get_default_group().bound_device_id) is not None:
            _bound[:] = [bound]
            c10d._get_default_group().bound_device_id = None
        _unsplit.append(None)
    try:
        yield
    finally:
        with _splits_lock:
            _unsplit.pop()
            if not _unsplit and _bound:
                bound = _bound.pop()
                if c10d.is_initialized():
                    c10d._get_default_group().bound_device_id = bound


# -- stores


def serve_store(host: str, ports: tuple[int, int] | None = None) -> tuple[Any, tuple[str, int]]:
    """Serve a store for ranks, at a port reserved by the listener; return the store and the address."""
    import torch.distributed as dist

    listener = wire.listening_within(host, ports, "torch's store of process groups")
    address = listener.getsockname()[:2]
    # libuv, torch's default: the other server doesn't wake waits for keys set by `compare_set`.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # exported without a declaration
        address[0],
        address[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return store, address


def connect_store(address: tuple[str, int], timeout_s: float) -> Any:
    """Return a new client of a store: a waiting client blocks all others on the same connection."""
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        address[0], address[1], is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT
    )
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def hash_store() -> Any:
    """Return a local store for a group of one rank."""
    import torch.distributed as dist

    return dist.HashStore()  # type: ignore[attr-defined]


# -- the default group


def share_default(owner: object) -> None:
    """Create torch's default group for this process alone, or register another user of the group.

    Raises:
        ConfigError: The default group has other processes already.
    """
    import torch.distributed as dist

    with _sharers_lock:
        if not dist.is_initialized():
            Plan(_SHARED, "", [0], 0, True, False, "cpu", 60.0).make(hash_store())
        elif dist.get_world_size() > 1:
            raise ConfigError(
                "torch's default process group has other processes in it already, made by somebody else in this one: "
                "slots that are threads share it; use connect('local', processes=True)"
            )
        _sharers.add(id(owner))


def unshare_default(owner: object) -> list[Any]:
    """Unregister a user of the shared default group; the last one removes the group. See `forget`."""
    with _sharers_lock:
        _sharers.discard(id(owner))
        return [] if _sharers else forget(_SHARED)


def take_up() -> None:
    """Make `init_process_group()` adopt colocate's default group, and `destroy_process_group()` leave that group alone.

    So scripts that call `init_process_group()` unconditionally, and `destroy_process_group()` at the end, run
    unchanged.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    make, destroy = c10d.init_process_group, c10d.destroy_process_group
    if getattr(make, "takes_up", False):
        return
    parameters = inspect.signature(make)

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if _colocate_has_made_it(c10d):
            _check_wanted(dist, **parameters.bind(*args, **kwargs).arguments)
        else:
            make(*args, **kwargs)

    @functools.wraps(destroy)
    def destroy_process_group(group: ProcessGroup | None = None) -> None:
        if group not in (None, c10d.GroupMember.WORLD) or not _colocate_has_made_it(c10d):
            destroy(group)

    init_process_group.takes_up = True  # type: ignore[attr-defined]
    modules: tuple[Any, ...] = dist, c10d
    for module in modules:
        module.init_process_group, module.destroy_process_group = init_process_group, destroy_process_group


def _colocate_has_made_it(c10d: Any) -> bool:
    default = c10d.GroupMember.WORLD
    return default is not None and str(default.group_name).endswith("/default")


def _check_wanted(
    dist: Any, backend: Any = None, world_size: int = -1, rank: int = -1, pg_options: Any = None, **_: object
) -> None:
    """Raise a `ConfigError` unless colocate's default group fits the arguments of `init_process_group()`."""
    current = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    problems = [
        f"{name}={requested} (there it is {current[name]})"
        for name, requested in (("rank", rank), ("world_size", world_size))
        if requested not in (-1, None, current[name])
    ]
    requested = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map() if backend else {}
    backends = {"gloo", *dist.BackendConfig(dist.Backend(dist.get_backend_config())).get_device_backend_map().values()}
    if not backends.issuperset(requested.values()):
        problems.append(f"backend={str(backend)!r} (there: {' and '.join(sorted(backends))})")
    if pg_options is not None:
        problems.append("pg_options")
    if problems:
        raise ConfigError(
            "init_process_group() takes up torch's default process group that colocate has made over the slots of the "
            f"group, and that isn't what was asked for: {', '.join(problems)}. Leave that out; who needs another group "
            "makes it inside that one, by torch.distributed.new_group()"
        )


def hint_for(error: BaseException) -> str | None:
    """Return a hint for the error of a role, or a role's library, that makes the default group; None otherwise."""
    text = message_of(error) if isinstance(error, ValueError) else ""
    if "environment variable RANK expected" in text:
        return (
            'A library reads what torchrun sets: say .on(env="torchrun") of its role, in a config env: torchrun. '
            "Then torch's default process group is there as well, and init_process_group() is left out"
        )
    if "initialize the default process group twice" not in text:
        return None
    from torch.distributed import distributed_c10d as c10d

    if not _colocate_has_made_it(c10d):
        return (
            "A role of this worker has made torch's default process group by init_process_group() already: leave that "
            "out in all of them, and say .on(default_group=True) of these roles, for which colocate makes one over the "
            "slots of the group"
        )
    return (
        "In this worker the default process group is made by colocate already, over the slots of the group, and that "
        "is the one to use: torch.distributed.is_initialized() tells a library so. Leave init_process_group() out; who "
        "needs one of its own makes it inside that, by new_group()"
    )
