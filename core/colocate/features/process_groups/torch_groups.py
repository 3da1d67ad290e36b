"""Constructs torch's process groups together with other ranks, and serves the stores where ranks meet."""

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
from colocate._system.jobs import get_message
from colocate._system.limits import GROUPS_CONNECT_WITHIN_S
from colocate.errors import ConfigError
from colocate.features.process_groups.books import forget_group
from colocate.features.process_groups.meetings import GroupNotMade, wait_all_made
from colocate.gpus import backend_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CONNECT_TIMEOUT = datetime.timedelta(seconds=GROUPS_CONNECT_WITHIN_S)
_splits_lock = threading.Lock()
_unsplit: list[None] = []  # Each thread that makes a group has one entry here.
_bound: list[Any] = []  # The default group's device is stored here while threads make groups.
_sharers_lock = threading.Lock()
_SHARED = "colocate/default"
_sharers: set[int] = set()


@attrs.frozen
class ProcessGroupPlan:
    """The parameters for making a process group."""

    name: str  # The name in torch, which renewals don't change.
    rendezvous_key: str  # The key of the rendezvous, which is new for each attempt.
    slots: Sequence[int]  # The slots of the ranks, in order. A slot's number is its rank in the default group.
    index: int  # The index of this rank among the ranks.
    is_default: bool
    lies_in_default: bool  # Whether the group is part of the default group.
    device: str
    timeout_s: float  # The timeout of a collective, in seconds.

    def make_group(self, store: Any) -> ProcessGroup:
        """Make the group together with all other ranks through a store, and return when all ranks have succeeded.

        Raises:
            GroupNotMade: Another rank has failed.
            Exception: This rank has failed. The caller must notify the other ranks, which wait for this rank.
        """
        group = self._connect(store)
        # Wait for all ranks, because a rank that cuts the group too early would block the construction on peers.
        try:
            is_complete = len(self.slots) == 1 or wait_all_made(
                store, self.rendezvous_key, self.index, len(self.slots), self.timeout_s
            )
        except BaseException:
            del group  # Otherwise the traceback would keep a reference to the group.
            forget_group(self.name)
            raise
        if not is_complete:
            del group
            forget_group(self.name)
            raise GroupNotMade(f"another rank could not make the process group {self.name!r}, or was late")
        return group

    def _connect(self, store: Any) -> ProcessGroup:
        # Do the steps of `init_process_group` and `new_group` here.
        # The public functions need all ranks of the default group, and use numbers as names.
        import torch
        import torch.distributed as dist

        # Import this before the default group exists, because its functions' default arguments would keep the group.
        import torch.distributed.nn.functional
        from torch.distributed import distributed_c10d as c10d

        device_backend = backend_for(self.device)
        # Gloo is always needed, for tensors on the host.
        backend = "gloo" if device_backend is None else f"cpu:gloo,{device_backend}"
        bound = None if device_backend is None else torch.device(self.device)
        with _prevent_split(c10d) if self.lies_in_default else contextlib.nullcontext():
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
            c10d._update_default_pg(group)  # `init_process_group` does the same.
        process_group: ProcessGroup = group
        return process_group


@contextlib.contextmanager
def _prevent_split(c10d: Any) -> Any:
    """A context manager in which NCCL doesn't split the default group's communicator, which would need all ranks."""
    # Don't hold a reference to the default group, because the block may outlast the group.
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
    """Serve a store for ranks at a port that the listener has reserved, and return the store and the address."""
    import torch.distributed as dist

    listener = wire.listen_in_range(host, ports, "torch's store of process groups")
    address = listener.getsockname()[:2]
    # Use libuv, because torch's other server doesn't wake clients that wait for keys set by `compare_set`.
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
    """Return a new client of a store. Each waiting thread needs one, because a wait blocks the connection."""
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        address[0], address[1], is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT
    )
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def create_hash_store() -> Any:
    """Return a store in this process's memory, for a group of one rank."""
    import torch.distributed as dist

    return dist.HashStore()  # type: ignore[attr-defined]


# -- the default group


def share_default(owner: object) -> None:
    """Register a user of the default group that only this process has, and create the group for the first user.

    Raises:
        ConfigError: The default group has other processes already.
    """
    import torch.distributed as dist

    with _sharers_lock:
        if not dist.is_initialized():
            ProcessGroupPlan(_SHARED, "", [0], 0, True, False, "cpu", 60.0).make_group(create_hash_store())
        elif dist.get_world_size() > 1:
            raise ConfigError(
                "torch's default process group has other processes in it already, made by somebody else in this one: "
                "slots that are threads share it; use connect('local', processes=True)"
            )
        _sharers.add(id(owner))


def unshare_default(owner: object) -> list[Any]:
    """Unregister a user of the shared default group, and remove the group after the last user.

    `forget_group` describes the returned list.
    """
    with _sharers_lock:
        _sharers.discard(id(owner))
        return [] if _sharers else forget_group(_SHARED)


def adopt_default() -> None:
    """Replace torch's `init_process_group()` and `destroy_process_group()`, so that both keep colocate's default group.

    Scripts that always call `init_process_group()`, and `destroy_process_group()` at the end, then run unchanged.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    make, destroy = c10d.init_process_group, c10d.destroy_process_group
    if getattr(make, "takes_up", False):
        return
    parameters = inspect.signature(make)

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if _is_colocates(c10d):
            _check_matches(dist, **parameters.bind(*args, **kwargs).arguments)
        else:
            make(*args, **kwargs)

    @functools.wraps(destroy)
    def destroy_process_group(group: ProcessGroup | None = None) -> None:
        if group not in (None, c10d.GroupMember.WORLD) or not _is_colocates(c10d):
            destroy(group)

    init_process_group.takes_up = True  # type: ignore[attr-defined]
    modules: tuple[Any, ...] = dist, c10d
    for module in modules:
        module.init_process_group, module.destroy_process_group = init_process_group, destroy_process_group


def _is_colocates(c10d: Any) -> bool:
    default = c10d.GroupMember.WORLD
    return default is not None and str(default.group_name).endswith("/default")


def _check_matches(
    dist: Any, backend: Any = None, world_size: int = -1, rank: int = -1, pg_options: Any = None, **_: object
) -> None:
    """Raise a `ConfigError` if colocate's default group doesn't fit the arguments of `init_process_group()`."""
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
            "init_process_group() uses torch's default process group that colocate has made over the slots of the "
            f"group, and that group doesn't match: {', '.join(problems)}. Leave these arguments out; for a different "
            "group call torch.distributed.new_group()"
        )


def default_group_hint(error: BaseException) -> str | None:
    """Return a hint if an error shows that role code tried to make the default process group, otherwise None."""
    text = get_message(error) if isinstance(error, ValueError) else ""
    if "environment variable RANK expected" in text:
        return (
            'A library reads what torchrun sets: say .on(env="torchrun") of its role, in a config env: torchrun. '
            "Then torch's default process group is there as well, and init_process_group() is left out"
        )
    if "initialize the default process group twice" not in text:
        return None
    from torch.distributed import distributed_c10d as c10d

    if not _is_colocates(c10d):
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
