"""The envoy's functions for detachable pools: start actors that own pools, and send requests to these actors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

import colocate
from colocate.errors import ClusterError, ColocateError
from colocate.executor import Request, Running
from colocate_ray import listing, names
from colocate_ray.holders import kill_actor
from colocate_ray.owner import Owner
from colocate_ray.placing import Placing, describe_start_failure
from colocate_ray.proxy import Failure
from colocate_ray.terms import Cluster, Slot

_OPENS_WITHIN_S = 120.0
_RELEASES_WITHIN_S = 15.0


class OwnedPlacing(Placing):
    """All slots that this driver holds in Ray, directly or through owners.

    An owner is an actor that owns the slots of one detachable pool.
    """

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        super().__init__(cluster, lost)
        self._undialled: dict[str, Any] = {}  # Owners to which the driver hasn't connected yet, by name.

    def open_owner(self, request: Request, key: bytes) -> tuple[str, str]:
        """Start an owner, and return the owner's name with the address of the lead keeper."""
        name = f"{listing.PREFIX}{request.id}{listing.OWNER}{secrets.token_hex(4)}"
        actor_class: Any = ray.remote(Owner)
        actor = actor_class.options(
            name=name,
            namespace=names.NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=8,
            **self.nodes.pin_to_node(self.nodes.choose_answering(stays=self._read_autoscaler() is not None)),
        ).remote()
        self._undialled[name] = actor
        address: Any
        try:
            opening = actor.open.remote(colocate.__version__, key, name, self.cluster, request)
            address = ray.get(opening, timeout=_OPENS_WITHIN_S)
        except RayError as error:
            ray.kill(actor, no_restart=True)
            raise ColocateError(
                f"the Ray actor that is to own the pool could not be started: {describe_start_failure(error)}"
            ) from None
        if isinstance(address, Failure):
            ray.kill(actor, no_restart=True)
            raise address.to_error()
        return name, address

    def reserve_by_owner(self, owner: str, key: bytes, request: Request) -> list[Slot]:
        """Hold slots through an owner, as `Placing.reserve` does without an owner."""
        # The driver has connected to the owner before this call, so the owner ends with the driver.
        self._undialled.pop(owner, None)
        slots: list[Slot] = self._call_owner(owner, "reserve", key, request, within_s=request.timeout + _OPENS_WITHIN_S)
        return slots

    def abandon(self) -> None:
        """Stop all placing, as `Placing.abandon` does, and kill owners to which the driver hasn't connected."""
        super().abandon()
        for actor in list(self._undialled.values()):
            ray.kill(actor, no_restart=True)

    def end_slot_by_owner(self, owner: str, index: int) -> None:
        """Kill the process of the keeper on an owner's slot, as `Placing.end_slot` does for other slots."""
        self._call_owner(owner, "end_slot", index, within_s=_RELEASES_WITHIN_S)

    def release_by_owner(self, owner: str) -> None:
        """Free all slots of an owner, and end the owner."""
        actor = names.find_owner(owner)
        if actor is None:
            return
        try:
            ray.get(actor.release.remote(), timeout=_RELEASES_WITHIN_S)
        except RayActorError:  # The owner has freed the slots and exited by itself.
            pass
        except (GetTimeoutError, RayTaskError) as error:
            raise ColocateError(f"Ray doesn't confirm that a pool's slots are free: {error}") from None
        finally:
            ray.kill(actor, no_restart=True)

    def end_owner(self, owner: str) -> None:
        """Kill an owner that doesn't answer, and wait until the owner's slots can be reserved again."""
        groups, owner_process, actor = listing.list_groups(owner), listing.find_owner(owner), names.find_owner(owner)
        if actor is not None and owner_process is not None:
            node, pid = owner_process
            kill_actor(actor, node, (pid, None))
        names.unpublish(owner)
        for group in groups:
            self._await_returned(group, "a detached pool")

    def address_here(self) -> str:
        """Return the address of this machine for other machines of the cluster."""
        address: Callable[[], str] = ray.util.get_node_ip_address
        return address()

    def _holder_owner(self, request: Request) -> str:
        """Return the runtime's id for the names of new holders, because holders outlive a single reservation."""
        return request.id.rpartition("/")[0]

    def list_running(self, held: Sequence[str] = ()) -> list[Running]:
        """List this driver's entries in Ray, including owners' reservations with ids in `held`."""
        return listing.list_own(self.nodes, held)

    def _call_owner(self, owner: str, method: str, *arguments: Any, within_s: float) -> Any:
        actor = names.find_owner(owner)
        if actor is None:
            raise ClusterError("the Ray actor that owns the pool is gone")
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=within_s)
        except GetTimeoutError:
            raise ClusterError(f"the Ray actor that owns the pool doesn't answer within {within_s:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ColocateError):
                raise cause from None
            raise
        except RayActorError:
            raise ClusterError("the Ray actor that owns the pool has ended") from None
