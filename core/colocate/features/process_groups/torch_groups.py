"""Process groups in torch as they are made: together with their peers, and the stores through which those meet."""

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
_unsplit: list[None] = []  # threads that make groups
_bound: list[Any] = []  # the default group's device, meanwhile
_sharers_lock = threading.Lock()
_SHARED = "colocate/default"
_sharers: set[int] = set()


@attrs.frozen
class Plan:
    """What a group is made from, and how."""

    name: str  # what torch calls it: the same after it was renewed
    rendezvous_key: str  # what its ranks meet under: another one each time
    slots: Sequence[int]  # those of its ranks, in order; in the default group, to torch a slot's number is the rank
    index: int  # which of them this is
    is_default: bool  # whether it is torch's default group
    lies_in_default: bool  # whether it is one of the default group's
    device: str  # of the slot
    timeout_s: float  # how long a collective may take

    def make(self, store: Any) -> ProcessGroup:
        """Make it, together with all its ranks, which meet through a store, and have it when all of them have.

        Raises:
            NotMade: Another rank could not.
            Exception: This one can not: once that is known here, the others, which wait for it, are to be told.
        """
        group = self._connect(store)
        # Who went on, and cut it, would end the making of others, and those wait for each other without end.
        try:
            made = len(self.slots) == 1 or all_have(
                store, self.rendezvous_key, self.index, len(self.slots), self.timeout_s
            )
        except BaseException:
            del group  # the traceback would keep it
            forget(self.name)
            raise
        if not made:
            del group
            forget(self.name)
            raise NotMade(f"another rank could not make the process group {self.name!r}, or was late")
        return group

    def _connect(self, store: Any) -> ProcessGroup:
        # The public API makes groups only of all ranks of the default one together, and names them by counting. This is
        # what init_process_group and new_group do themselves. Imported here: only who asks for a group has torch.
        import torch
        import torch.distributed as dist

        # DDP, say, imports it: its default arguments are the default group that there is just then, for good.
        import torch.distributed.nn.functional
        from torch.distributed import distributed_c10d as c10d

        own = backend_for(self.device)
        backend = "gloo" if own is None else f"cpu:gloo,{own}"  # tensors of the host go by gloo in any case
        bound = None if own is None else torch.device(self.device)
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
            c10d._update_default_pg(group)  # as init_process_group does
        made: ProcessGroup = group
        return made


@contextlib.contextmanager
def _no_split(c10d: Any) -> Any:
    """Have a group's NCCL communicator be made by its own ranks: one split off needs all ranks of the default group."""
    # Nothing here refers to the default group while the other is made, which may take until after it was dropped.
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
    """A store that ranks tell each other their addresses through, at a port that nobody else can have; and where."""
    import torch.distributed as dist

    listener = wire.listening_within(host, ports, "torch's store of process groups")
    address = listener.getsockname()[:2]
    # On libuv, as is torch's default: its other server doesn't wake up who waits for what is set by `compare_set`.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch has it here without saying so
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
    """Of one's own: a client that waits keeps all others from it that share its connection."""
    import torch.distributed as dist

    found = dist.TCPStore(  # type: ignore[attr-defined]
        address[0], address[1], is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT
    )
    found.set_timeout(datetime.timedelta(seconds=timeout_s))
    return found


def hash_store() -> Any:
    """Return what a single rank needs in place of a store that others reach."""
    import torch.distributed as dist

    return dist.HashStore()  # type: ignore[attr-defined]


# -- the default group


def share_default(owner: object) -> None:
    """See to it that torch's default group has this process alone, for one more who needs it.

    Raises:
        ConfigError: It has others already.
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
    """One less needs it: who is the last has it forgotten, if it was made for this. See `forget`."""
    with _sharers_lock:
        _sharers.discard(id(owner))
        return [] if _sharers else forget(_SHARED)


def take_up() -> None:
    """From now on, who makes torch's default group where colocate's is there takes up that one, and leaves it there.

    So scripts that call `init_process_group()` without asking, and `destroy_process_group()` at their end, run as they
    are.
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
    """Raise a `ConfigError` unless the default group that is there is what somebody wants to make."""
    there = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    problems = [
        f"{name}={wanted} (there it is {there[name]})"
        for name, wanted in (("rank", rank), ("world_size", world_size))
        if wanted not in (-1, None, there[name])
    ]
    wanted = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map() if backend else {}
    backends = {"gloo", *dist.BackendConfig(dist.Backend(dist.get_backend_config())).get_device_backend_map().values()}
    if not backends.issuperset(wanted.values()):
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
    """Return what to do where a role, or a library of its, wants to make the default group itself."""
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
