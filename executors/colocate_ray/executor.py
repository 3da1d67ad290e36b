"""The Ray executor. Slots are bundles of placement groups, with actors that hold keepers.

Imports no Ray: only the envoy does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from colocate import wire
from colocate.errors import ClusterError, ColocateError, ConfigError, PlacementTimeout
from colocate.executor import (
    Adopted,
    Boot,
    Executor,
    Growing,
    Host,
    HostEvents,
    Labelled,
    Lease,
    MultiNode,
    Node,
    OwnProcess,
    Place,
    Reach,
    Request,
    Reservation,
    Running,
    SharedSlots,
    Watchable,
    Window,
)
from colocate.gpus import count_gpus, list_visible_gpus, names, torch_device
from colocate.keeper import (
    Adoption,
    DetachableByKeepers,
    Keepers,
    KeptSlot,
    PoolKeepers,
    Registration,
    adopt_pool,
)
from colocate.placement import describe_request
from colocate_ray.envoy import Envoy
from colocate_ray.proxy import Question
from colocate_ray.terms import Cluster, Slot, tls_of_environment

if importlib.util.find_spec("ray") is None:
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

RELEASED_WITHIN_S = 11.0  # This is a little longer than the envoy waits for Ray to free slots.
LISTED_WITHIN_S = 10.0

_Key = tuple[int, int]  # The key of a slot: the number of the reservation, and the index of the bundle.


class RayExecutor(Executor, OwnProcess, MultiNode, SharedSlots, Labelled):
    """The executor for a private Ray on this machine, and the base for joined clusters."""

    name = "ray"

    @classmethod
    def connect(  # type: ignore[override]  # the signature shows users the options
        cls,
        *,
        address: str | None = None,
        cpus: float | None = None,
        gpus: int | None = None,
        token_file: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> Executor:
        """Start a private Ray, or join an existing cluster.

        Args:
            address: "host:port" of the cluster's head, or "auto" for the cluster that this machine is in (from
                `RAY_ADDRESS`, or the driver's own `ray.init()`). None starts a private Ray, which ends with the
                runtime.
            cpus: CPUs that a private Ray offers; None for all CPUs of this machine.
            gpus: GPUs that a private Ray offers; None for all GPUs that this process sees.
            token_file: The file with the token of the cluster to join; None for Ray's own search in the environment.
            runtime_env: Ray's runtime environment of the actors beside which the workers run.
        """
        if address is not None:
            _check_joining(address, cpus, gpus)
        elif token_file is not None:
            raise ConfigError("connect('ray', token_file=...) is for joining a cluster: a private Ray makes its own")
        devices = _choose_gpus(gpus) if address is None else None
        cluster = Cluster(_resolve_address(address), cpus, devices, token_file, runtime_env)
        if cluster.private:
            return cls(cluster)
        return JoinedRayExecutor(cluster)

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """Return the executor class for these options: a class for joined clusters, or one for a private Ray."""
        return RayExecutor if options.get("address") is None else JoinedRayExecutor

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Refuse options by which a config would run code or choose the cluster to join."""
        if option in ("cpus", "gpus") or (option == "address" and value in (None, "auto")):
            return None
        if option == "runtime_env":
            return (
                "Ray installs, imports and runs what a runtime environment names (pip, working_dir, py_modules, "
                "env_vars, worker_process_setup_hook), and this config may name plugins only"
            )
        return (
            "this config may not say which cluster to join: a cluster can run code in whoever joins it. Say it "
            f"yourself (--set executor.with.{option}=...), if you trust it"
        )

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._slots: dict[_Key, KeptSlot] = {}
        self._pending_requests: dict[str, int] = {}  # Numbers of requests in progress, by request id.
        self._withdrawn: set[str] = set()
        self._lost: dict[_Key, str] = {}
        self._pending_ends: dict[_Key, Question] = {}  # Pending kills of unresponsive keepers, by slot.
        # The certificates are read before the envoy starts, so that an error leaves no process behind.
        tls = None if cluster.private else tls_of_environment()
        self._keepers = Keepers("ray", tls)
        try:
            self._envoy = Envoy(cluster, self._on_actor_ended)
        except BaseException:
            self._keepers.close()
            raise

    def nodes(self) -> Sequence[Node]:
        """List the nodes of the cluster with their resources."""
        nodes: list[Node] = self._envoy.call("list_nodes")
        return nodes

    def reserve(self, request: Request) -> Reservation:
        """Hold slots in a new placement group, and start a keeper in each slot."""
        number = self._pending_requests[request.id] = next(self._numbers)
        try:
            # `withdraw` adds the id before reading `_pending_requests`, so no concurrent withdrawal is missed.
            if request.id in self._withdrawn:
                raise PlacementTimeout(describe_request(request, "was withdrawn before it was asked for"))
            reserve = partial(self._envoy.call, "reserve")
            slots: list[Slot] = reserve(number, request, self._keepers.key)
            return Reservation(tuple(self._make_place(number, slot) for slot in slots), number)
        except ClusterError:  # Without the release, Ray would finish the reservation once the head answers again.
            self._envoy.call_soon("release", number)
            raise
        finally:
            self._pending_requests.pop(request.id, None)

    def set_cut_timeout(self, cut_s: float) -> None:
        """Set the seconds of silence after which the connections to keepers count as cut."""
        self._keepers.set_cut_limit(cut_s)

    def withdraw(self, request: Request) -> None:
        """Withdraw a request that is waiting for slots."""
        self._withdrawn.add(request.id)
        number = self._pending_requests.get(request.id)
        if number is not None:
            self._envoy.call_soon("release", number)

    def _make_place(self, number: int, slot: Slot) -> Place:
        key = number, slot.index
        kept_slot = self._keepers.open_slot(
            slot.address, on_stuck=partial(self._end_slot, key), gone=gone_message(slot)
        )
        with self._lock:
            self._slots[key] = kept_slot
            words = self._lost.pop(key, None)
        if words is not None:  # The actor ended before the slot was registered here.
            kept_slot.on_process_gone(words)
        return make_place(slot, key)

    def _end_slot(self, key: _Key) -> None:
        self._pending_ends.setdefault(key, self._envoy.call_soon("end_slot", *key))

    def _on_actor_ended(self, number: int, index: int, words: str) -> None:
        with self._lock:
            slot = self._slots.get((number, index))
            if slot is None:
                self._lost[number, index] = words
        if slot is not None:
            slot.on_process_gone(words)

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker in a slot through the slot's keeper."""
        return self._slots[place.handle].launch(boot, events)

    def is_lost(self, place: Place) -> bool:
        """Return whether the Ray actor of a slot is gone."""
        slot = self._slots.get(place.handle)
        return slot is None or slot.is_lost

    def replace(self, reservation: Reservation, lost: Sequence[Place], request: Request) -> Reservation | None:
        """Start new keepers for lost slots, after Ray has moved the bundles of these slots to other nodes."""
        number, lost_keys = reservation.handle, [place.handle for place in lost]
        indices = [index for _, index in lost_keys]
        replace = partial(self._envoy.call, "replace")
        slots: list[Slot] | None = replace(number, indices, request, self._keepers.key)
        if slots is None:
            return None
        for key in lost_keys:
            self._slots[key].close()
            self._pending_ends.pop(key, None)
        new = {place.handle: place for place in (self._make_place(number, slot) for slot in slots)}
        return attrs.evolve(
            reservation, places=tuple(new.get(old_place.handle, old_place) for old_place in reservation.places)
        )

    def release(self, reservation: Reservation) -> None:
        """End the keepers of a reservation, and remove the placement group."""
        for place in reservation.places:
            self._slots[place.handle].close()
        try:
            ends = [end for key, end in list(self._pending_ends.items()) if key[0] == reservation.handle]
            self._envoy.wait_for(ends, RELEASED_WITHIN_S)
            self._envoy.call("release", reservation.handle, within_s=RELEASED_WITHIN_S)
        except ClusterError:  # Ray itself frees the slots of a driver that is gone.
            pass
        finally:
            self._drop_slots(reservation)

    def _drop_slots(self, reservation: Reservation) -> None:
        with self._lock:
            for place in reservation.places:
                self._slots.pop(place.handle, None)
                self._pending_ends.pop(place.handle, None)

    def running(self) -> Sequence[Running]:
        """List this driver's entries in Ray's tables, and the workers that the keepers report."""
        return [*self._keepers.running(), *self._envoy.call("list_running", within_s=LISTED_WITHIN_S)]

    def strays(self) -> Sequence[Running]:
        """List placement groups and Ray actors of colocate that belong to ended jobs."""
        strays: list[Running] = self._envoy.call("list_strays", within_s=LISTED_WITHIN_S)
        return strays

    def close(self) -> None:
        """Disconnect from a joined cluster, or end a private Ray."""
        self._keepers.close()
        self._envoy.close()


@attrs.define(eq=False)
class _OwnedReservation:
    """A reservation that belongs to an owner, which is a Ray actor with the slots of one pool."""

    name: str
    request: str  # Id of the request for slots (`Request.id`).
    keepers: PoolKeepers


class JoinedRayExecutor(RayExecutor, DetachableByKeepers, Watchable, Growing):
    """The executor for a shared Ray cluster.

    Ray's store has the names of detached pools. For a detachable pool an actor, the owner, owns the slots and holds the
    lead keeper.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._owned: dict[int, _OwnedReservation] = {}

    def reserve(self, request: Request) -> Reservation:
        """Hold slots: through an owner (a Ray actor) if the pool is detachable, else directly."""
        if not request.detachable:
            return super().reserve(request)
        number, key = next(self._numbers), wire.new_key()
        name, address = self._envoy.call("open_owner", request, key)
        lead = self._keepers.open_slot(address, key=key)
        try:
            if (lost := lead.wait_connected()) is not None:
                raise ClusterError(f"the Ray actor that owns pool {request.owner!r} can't be reached: {lost}")
            slots: list[Slot] = self._envoy.call("reserve_by_owner", name, key, request)
            for slot in slots:
                ends = partial(self._end_by_owner, name, slot.index)
                self._slots[number, slot.index] = self._keepers.open_slot(
                    slot.address, on_stuck=ends, key=key, gone=gone_message(slot)
                )
        except BaseException:  # This clause also handles Ctrl-C.
            self._envoy.call_soon("release_by_owner", name)
            lead.close()
            raise
        places = tuple(make_place(slot, (number, slot.index)) for slot in slots)
        kept_slots = [self._slots[place.handle] for place in places]
        self._owned[number] = _OwnedReservation(name, request.id, PoolKeepers(key, lead, kept_slots))
        return Reservation(places, number)

    def replace(self, reservation: Reservation, lost: Sequence[Place], request: Request) -> Reservation | None:
        """Replace lost slots. Returns None for a reservation of an owner, whose slots can't be replaced."""
        return None if reservation.handle in self._owned else super().replace(reservation, lost, request)

    def release(self, reservation: Reservation) -> None:
        """Release the slots of a reservation, through the owner if the reservation has one."""
        owned = self._owned.pop(reservation.handle, None)
        if owned is None:
            super().release(reservation)
            return
        try:
            self._envoy.call("release_by_owner", owned.name, within_s=RELEASED_WITHIN_S)
        except ClusterError:  # The owner notices the driver's end by itself.
            pass
        finally:
            for slot in (*owned.keepers.slots, owned.keepers.lead):
                slot.close()
            self._drop_slots(reservation)

    def running(self) -> Sequence[Running]:
        """List this driver's entries in Ray's tables, including owners' reservations, and the keepers' workers."""
        held = [owned.request for owned in self._owned.values()]
        return [*self._keepers.running(), *self._envoy.call("list_running", held, within_s=LISTED_WITHIN_S)]

    def leaving(self) -> Mapping[str, float | None]:
        """List the nodes that Ray is draining."""
        nodes: dict[str, float | None] = self._envoy.call("list_leaving", within_s=LISTED_WITHIN_S)
        return nodes

    def publish(self, reservation: Reservation, lease: Lease) -> None:
        """Register the pool's name, then notify the keepers that the pool outlives the driver."""
        owned = self._owned[reservation.handle]
        rows = [
            (self._slots[place.handle].address, place.handle[1], attrs.evolve(place, handle=None))
            for place in reservation.places
        ]
        owned.keepers.publish(
            lease,
            (owned.name, owned.request, rows),
            partial(self._envoy.call, "publish"),
            partial(self._envoy.call, "unpublish", owned.name),
            self.list_pools,
        )

    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Adopt the lead keeper of a detached pool, then the other keepers with the lead's permission."""
        registration = self.find_registration(name)
        owner, request, rows = registration.facts
        number = next(self._numbers)
        slots = [(address, partial(self._end_by_owner, owner, index)) for address, index, _ in rows]
        lead, pool = adopt_pool(self._keepers, registration, Adoption(who, own, fenced), slots)
        self._owned[number] = _OwnedReservation(owner, request, pool)
        self._slots.update({(number, index): slot for (_, index, _), slot in zip(rows, pool.slots, strict=True)})
        places = tuple(attrs.evolve(place, handle=(number, index)) for _, index, place in rows)
        return Adopted(Reservation(places, number), lead.epoch, lead.record)

    def end_pool(self, name: str) -> None:
        """End the owner of a detached pool, so that Ray frees the slots."""
        owner, *_ = self.find_registration(name).facts
        # The time covers two steps: the end of the owner, and the return of the slots.
        self._envoy.call("end_owner", owner, within_s=2 * RELEASED_WITHIN_S)

    def detach(self, reservation: Reservation) -> None:
        """Notify a pool's keepers that this driver leaves, and close the connections to the keepers."""
        owned = self._owned.pop(reservation.handle, None)
        if owned is not None:
            owned.keepers.leave_pool()
            self._drop_slots(reservation)

    def reach(self) -> Reach:
        """Return this machine's address in the Ray cluster, and the certificates of the keepers."""
        return Reach(self._envoy.call("address_here"), self._keepers.tls)

    def announce(self, window: Window) -> None:
        """Register a job's `Window`, the address for `colocate top`, in Ray's store."""
        self._envoy.call("announce", window, within_s=LISTED_WITHIN_S)

    def retract(self, window: Window) -> None:
        """Remove a job's `Window`, the address for `colocate top`, from Ray's store."""
        with contextlib.suppress(ColocateError):  # The cluster may be gone, or this driver may have left.
            self._envoy.call("retract", window, within_s=LISTED_WITHIN_S)

    def windows(self) -> Sequence[Window]:
        """List the windows (addresses for `colocate top`) of all live drivers, from Ray's store."""
        windows: list[Window] = self._envoy.call("windows", within_s=LISTED_WITHIN_S)
        return windows

    def list_registrations(self) -> Sequence[Registration]:
        """List the registrations of detached pools with live owners, from Ray's store."""
        registrations: list[Registration] = self._envoy.call("registrations", within_s=LISTED_WITHIN_S)
        return registrations

    def get_pool(self, reservation: Reservation) -> PoolKeepers | None:
        """Return the keepers of a reservation that an owner holds; None for other reservations."""
        owned = self._owned.get(reservation.handle)
        return None if owned is None else owned.keepers

    def get_slot(self, place: Place) -> KeptSlot:
        """Return the driver's connection to the slot of a place."""
        return self._slots[place.handle]

    def _end_by_owner(self, owner: str, index: int) -> None:
        with contextlib.suppress(ColocateError):  # The slot is gone if the owner or the connection to Ray is gone.
            self._envoy.call("end_slot_by_owner", owner, index, within_s=RELEASED_WITHIN_S)


def make_place(slot: Slot, key: _Key) -> Place:
    """Return a slot as a `Place`, the form that colocate's core uses. `key` identifies the slot in this driver."""
    # Ray shows an actor only the devices of one slot, numbered from 0.
    device = torch_device(0 if slot.devices else None)
    return Place(slot.node, slot.devices, device, slot.host, key)


def gone_message(slot: Slot) -> str:
    """Return the error text for a slot with an unreachable keeper, used until Ray reports the cause."""
    return f"Ray node {slot.node} ({slot.host}) is gone, or this driver's Ray actor there"


def _check_joining(address: str, cpus: float | None, gpus: int | None) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"connect('ray', address={address!r}): Ray Client can't hold workers. Run the driver in the cluster, as a "
            "job (`ray job submit --address http://HEAD:8265 -- python driver.py`), with address='auto'. That needs "
            "pip install 'ray[default]', here and in the cluster"
        )
    if address == "local":  # "local" is Ray's own word for a new, private Ray.
        raise ConfigError(
            "connect('ray', address='local'): leave address out for a private Ray; 'auto' joins a cluster"
        )
    if cpus is not None or gpus is not None:
        raise ConfigError(
            "connect('ray', address=...): cpus= and gpus= are what a private Ray offers; a cluster has its own"
        )


def _choose_gpus(gpus: int | None) -> tuple[str, ...] | None:
    """Return the GPUs for a private Ray to offer. None lets Ray detect GPUs, including GPUs of other makers."""
    devices = names(count_gpus() if gpus is None else gpus)
    return devices if devices or gpus is not None or list_visible_gpus() is not None else None


def _resolve_address(address: str | None) -> str | None:
    """Return the cluster's address. "auto" becomes the address of the driver's own `ray.init()`, if it was called."""
    ray = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return address
