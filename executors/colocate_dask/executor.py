"""The Dask executor. Each slot is a Dask worker that is held for a driver and runs a keeper."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import distributed
import psutil

from colocate import wire
from colocate.errors import ClusterError, ConfigError, PlacementError, PlacementTimeout
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
from colocate.gpus import VARIABLE, count_gpus, indices, names, torch_device
from colocate.keeper import (
    Adoption,
    DetachableByKeepers,
    Keepers,
    KeptSlot,
    PoolKeepers,
    Registration,
    adopt_pool,
)
from colocate.placement import Ledger, describe_request
from colocate_dask import far, reservations
from colocate_dask.connection import Connection, make_security
from colocate_dask.loop import LoopThread
from colocate_dask.offers import Grant, Refusal, ReservationInfo, SlotRequest, host_key
from colocate_dask.private import PrivateCluster

_START_S = 60.0  # The first keeper in a Dask worker takes long, because the start imports colocate.
ANSWER_S = 30.0
_LISTED_S = 2.5
_RELEASE_PONG_S = 1.0
# A scheduler that was silent just now gets the release request, but the driver hardly waits for the answer.
_STILL_SILENT_S = 0.2
_KILL_S = 5.0


@attrs.define(eq=False)
class HeldPool:
    """The slots of one reservation by Dask worker, with the resources that belong to the reservation."""

    id: str
    label: str = ""
    slots: dict[str, KeptSlot] = attrs.field(factory=dict)
    workers: tuple[str, ...] = ()
    reservation: Reservation | None = None
    keepers: PoolKeepers | None = None


class DaskExecutor(Executor, OwnProcess, MultiNode, SharedSlots):
    """The executor for a private Dask cluster. Roles run in processes beside the Dask workers."""

    name = "dask"

    @classmethod
    def connect(  # type: ignore[override]  # the signature shows users the options
        cls,
        *,
        address: str | None = None,
        security: Any = None,
        client: Any = None,
        cpus: float | None = None,
        gpus: int | None = None,
        share: bool = False,
        timeout: float = 10.0,
    ) -> DaskExecutor:
        """Join a Dask cluster, or start a private one.

        Args:
            address: Address of the scheduler, "tcp://…" or "tls://…"; None for a private cluster on this machine.
            security: A `distributed.Security` or its options, for "tls://…".
            client: A `distributed.Client` whose address and security are used instead.
            cpus: CPUs of a private cluster; None for all CPUs of this machine.
            gpus: GPUs of a private cluster; None for all GPUs that this process sees.
            share: Whether to use workers with other tasks or data too, and leave these workers open for tasks.
            timeout: Timeout of the connection, in seconds.

        Raises:
            ConfigError: The options contradict each other.
            ClusterError: The scheduler can't be reached, refuses us, or has other versions.
        """
        if client is not None:
            if address is not None or security is not None:
                raise ConfigError("connect('dask', ...): give client=, or address= and security=, not both")
            if not isinstance(client, distributed.Client):
                raise ConfigError(f"connect('dask', client=...) takes a distributed.Client, not {client!r}")
            if client.scheduler is None or client.status != "running":
                raise ClusterError(f"the Dask client given is not connected: it is {client.status}")
            address, security = client.scheduler.address, client.security
        if address is not None and (cpus is not None or gpus is not None):
            raise ConfigError("connect('dask', ...): cpus= and gpus= are of a private cluster; address= joins another")
        if address is None:
            count = count_gpus() if gpus is None else gpus
            memory = psutil.virtual_memory().total
            node = Node(platform.node(), len(os.sched_getaffinity(0)) if cpus is None else cpus, count, memory)
            return cls(None, None, node, share, timeout)
        return JoinedDaskExecutor(address, make_security(security), None, share, timeout)

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Executor]:
        """Return the executor class for these options: a class for joined clusters, or one for private clusters."""
        joins = options.get("address") is not None or options.get("client") is not None
        return JoinedDaskExecutor if joins else DaskExecutor

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """Refuse options by which a config from another author would choose the cluster to join."""
        if option in ("cpus", "gpus", "share", "timeout") or value is None:
            return None
        return (
            "this config may not say which cluster to join: a cluster can run code in whoever joins it. Say it "
            f"yourself (--set executor.with.{option}=...), if you trust it"
        )

    def __init__(self, address: str | None, security: Any, own: Node | None, share: bool, timeout: float) -> None:
        self._share = share
        self._held: dict[str, HeldPool] = {}
        self._withdrawn: set[str] = set()
        self._unreleased: set[str] = set()  # Ids of released reservations, until the scheduler confirms the release.
        self._own_node = own
        self._ledger = Ledger([own], _device_name) if own is not None else None
        self._gpus = names(own.gpus) if own is not None else ()  # Names of the GPUs of the private cluster.
        self._private: PrivateCluster | None = None
        with contextlib.ExitStack() as undo:
            loop = LoopThread()
            undo.callback(loop.close)
            target: Any = address
            if own is not None:
                self._private = PrivateCluster(loop)
                undo.callback(self._private.close)
                target = self._private.cluster
            self._connection = Connection(loop, target, security, timeout)
            undo.callback(self._connection.close)
            self._connection.subscribe(self._on_worker_lost)
            self._keepers = Keepers("dask", self._connection.tls)
            undo.callback(self._keepers.close)
            self._closing = undo.pop_all()

    def nodes(self) -> Sequence[Node]:
        """List the machines of the cluster with their resources."""
        if self._own_node is not None:
            return [self._own_node]
        by_host: dict[str, Node] = {}
        for offer in self._connection.run_on_scheduler(reservations.list_offers, within_s=ANSWER_S):
            old = by_host.get(offer.host, Node(offer.host, 0.0, 0, 0, {"host": offer.host}))
            memory = (old.host_memory_bytes or 0) + offer.memory
            further = {name: old.resources.get(name, 0) + amount for name, amount in offer.resources.items()}
            by_host[offer.host] = attrs.evolve(
                old,
                cpus=(old.cpus or 0) + offer.cpus,
                gpus=old.gpus + offer.gpus,
                host_memory_bytes=memory,
                resources={**old.resources, **further},
            )
        nodes = sorted(by_host.values(), key=lambda node: host_key(node.name))
        return [attrs.evolve(node, host_memory_bytes=node.host_memory_bytes or None) for node in nodes]

    def reserve(self, request: Request) -> Reservation:
        """Hold a Dask worker for each slot, and start a keeper in each of these workers."""
        held = HeldPool(secrets.token_hex(8), request.id)
        self._held[held.id] = held
        try:
            # `withdraw` adds the id before reading `_held`, so no concurrent withdrawal is missed.
            if request.id in self._withdrawn:
                raise PlacementTimeout(describe_request(request, "was withdrawn before it was asked for"))
            if self._ledger is not None:
                held.reservation = self._ledger.reserve(request)
            else:
                self._connection.reconnect()
                for earlier in list(self._unreleased):
                    self._free_reservation(earlier)
            places = self._make_place(held, request)
        except BaseException as error:  # After an error no reservation may stay pending.
            self._free_slots(held, _STILL_SILENT_S if _is_timeout(error) else ANSWER_S)
            raise
        return Reservation(places, held)

    def set_cut_timeout(self, cut_s: float) -> None:
        """Set the seconds of silence after which the connections to keepers count as cut."""
        self._keepers.set_cut_limit(cut_s)

    def withdraw(self, request: Request) -> None:
        """Withdraw a request that is waiting for slots."""
        self._withdrawn.add(request.id)
        if self._ledger is not None:
            self._ledger.withdraw(request)
        for held in list(self._held.values()):
            if held.label == request.id and not held.slots:
                self._connection.run_on_scheduler(reservations.release_slots, held.id, within_s=ANSWER_S)

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Start a worker in a slot through the slot's keeper."""
        slot: KeptSlot = place.handle
        return slot.launch(boot, events)

    def is_lost(self, place: Place) -> bool:
        """Return whether the Dask worker of a slot is gone from the cluster."""
        slot: KeptSlot = place.handle
        return slot.is_lost

    def replace(self, reservation: Reservation, lost: Sequence[Place], request: Request) -> Reservation | None:
        """Hold other Dask workers in place of lost ones, within the same reservation."""
        held: HeldPool = reservation.handle
        # Slots of private clusters and of detachable pools can't be replaced.
        if held.reservation is not None or held.keepers is not None:
            return None
        # For these requests the scheduler would have to place new slots relative to the remaining slots.
        if request.together or request.strategy.startswith("strict"):
            return None
        self._connection.reconnect()
        lost_slots = {id(place.handle) for place in lost}
        workers = [worker for worker, slot in held.slots.items() if id(slot) in lost_slots]
        self._connection.run_on_scheduler(reservations.release_slots, held.id, workers, within_s=ANSWER_S)
        for worker in workers:
            held.slots.pop(worker).close()
        new = iter(self._make_place(held, request, len(reservation.places)))
        places = tuple(
            next(new) if id(old_place.handle) in lost_slots else old_place for old_place in reservation.places
        )
        return attrs.evolve(reservation, places=places)

    def release(self, reservation: Reservation) -> None:
        """Release the Dask workers of a reservation, so that other users of the cluster get these workers."""
        self._free_slots(reservation.handle)

    def running(self) -> Sequence[Running]:
        """List this driver's reservations in the scheduler, and the workers that the keepers report."""
        ours = [
            held for held in self._list_reservations() if held.client == self._connection.id or held.id in self._held
        ]
        return [*map(_to_running, ours), *self._keepers.running()]

    def strays(self) -> Sequence[Running]:
        """List Dask workers that are still held for drivers that no longer exist."""
        return [_to_running(held) for held in self._list_reservations() if not held.present]

    def _list_reservations(self) -> list[ReservationInfo]:
        reservation_list: list[ReservationInfo] = self._connection.run_on_scheduler(
            reservations.list_reservations, within_s=_LISTED_S
        )
        return reservation_list

    def close(self) -> None:
        """Disconnect from a joined cluster, or end a private cluster."""
        self._closing.close()

    # -- reserving

    def _make_place(self, held: HeldPool, request: Request, lot: int = 0) -> tuple[Place, ...]:
        grants = (
            self._make_own_grants(held, request)
            if held.reservation is not None
            else self._request_grants(held, request, lot)
        )
        # A detachable pool gets a separate key, because other drivers will get the key.
        key = wire.new_key() if request.detachable else None
        try:
            addresses = self._start_keepers(held, grants, request, key)
        except BaseException:
            if lot:  # Only the new workers are released, because the remaining slots stay held.
                only = [grant.worker for grant in grants]
                self._connection.run_on_scheduler(reservations.release_slots, held.id, only, within_s=ANSWER_S)
            raise
        places = []
        for grant in grants:
            kill = partial(self._kill_worker, held, grant.worker)
            slot = held.slots[grant.worker] = self._keepers.open_slot(
                addresses[grant.worker], on_stuck=kill, key=key, gone=f"Dask worker {grant.worker} is gone"
            )
            devices = indices(grant.gpus, self._gpus)
            places.append(Place(self._make_node(grant), devices, _device_name(devices), _reachable_host(grant), slot))
        if key is not None:
            slots = list(held.slots.values())
            held.keepers = PoolKeepers(key, slots[0], slots)
        return tuple(places)

    def _make_node(self, grant: Grant) -> str:
        return grant.host if self._own_node is None else self._own_node.name

    def _request_grants(self, held: HeldPool, request: Request, lot: int = 0) -> Sequence[Grant]:
        slot_request = SlotRequest(
            held.id,
            self._connection.id,
            request.owner,
            request.slots,
            request.cpus,
            request.gpus,
            request.host_memory_bytes or 0,
            request.strategy,
            request.timeout,
            self._share,
            label=request.id,
            lot=lot,
            labels=request.labels,
            resources=request.resources,
            together=request.together,
            grow=request.grow,
        )
        return self._reserve_grants(slot_request, request)

    def _make_own_grants(self, held: HeldPool, request: Request) -> Sequence[Grant]:
        """Start new Dask workers in the private cluster, and hold these workers as the slots."""
        assert self._private is not None
        assert held.reservation is not None
        try:
            held.workers = tuple(self._private.start_workers(request.slots, request.cpus, request.gpus))
        except TimeoutError as error:
            raise ClusterError("the private Dask cluster was closed, or its workers didn't start in time") from error
        ids = held.id, self._connection.id
        slot_request = SlotRequest(*ids, request.owner, request.slots, only=held.workers, label=request.id)
        grants = self._reserve_grants(slot_request, request)
        gpus = [tuple(self._gpus[index] for index in place.devices) for place in held.reservation.places]
        return [attrs.evolve(grant, gpus=devices) for grant, devices in zip(grants, gpus, strict=True)]

    def _reserve_grants(self, wanted: SlotRequest, request: Request) -> Sequence[Grant]:
        # The scheduler enforces the request's timeout. This longer timeout is for a hung scheduler.
        patience = request.timeout + _START_S
        version = self._connection.version
        answer = self._connection.run_on_scheduler(reservations.reserve_slots, wanted, version, within_s=patience)
        if not isinstance(answer, Refusal):
            return tuple(answer)
        rule = "a slot takes a whole Dask worker"
        how = "can never fit" if answer.never else f"did not become free within {request.timeout:g} s"
        if not answer.never and answer.requested_slots is not None:
            rule += (
                f"; the adaptive cluster was asked for {answer.requested_slots} workers, and has a maximum of its own"
            )
        text = describe_request(request, f"{how} ({rule})")
        if not answer.rows:
            text = f"{text} the Dask cluster at {self._connection.address} has no workers"
        raise (PlacementError if answer.never else PlacementTimeout)(text, nodes=answer.rows)

    def _start_keepers(
        self, held: HeldPool, grants: Sequence[Grant], request: Request, key: bytes | None
    ) -> Mapping[str, str]:
        plans = {grant.worker: self._make_plan(held, grant, request, key) for grant in grants}
        try:
            answers = self._connection.run_on_workers(far.start_keeper, plans, workers=list(plans), within_s=_START_S)
        except ClusterError as error:
            if _is_timeout(error):
                self._describe_silent(plans)
            raise
        for worker in plans:
            answer = answers.get(worker)
            if not isinstance(answer, str):
                words = str(answer) if isinstance(answer, OSError) else repr(answer)
                raise PlacementError(f"no worker can be started at the Dask worker {worker}: {words}")
        return dict(answers)

    def _describe_silent(self, workers: Mapping[str, object]) -> None:
        """Raise an error that names unresponsive Dask workers, if the scheduler itself responds."""
        if silent := self._connection.run_on_scheduler(reservations.find_silent, list(workers), within_s=ANSWER_S):
            raise PlacementError(f"these Dask workers don't answer, and start no worker: {', '.join(silent)}")

    def _make_plan(self, held: HeldPool, grant: Grant, request: Request, key: bytes | None) -> far.Plan:
        visible = {VARIABLE: ",".join(grant.gpus)} if grant.gpus else {}
        host = None if _is_loopback(grant) else grant.host
        tls = self._connection.tls is not None
        env = {**visible, **request.env}
        secret, detachable = key or self._keepers.key, key is not None
        return far.Plan(held.id, grant.id, secret, host, env, tls, request.id, detachable, request.ports, request.cut_s)

    # -- freeing

    def _free_slots(self, held: HeldPool, within_s: float = ANSWER_S) -> None:
        self._held.pop(held.id, None)
        for slot in held.slots.values():
            slot.close()
        try:
            self._release_slots(held, within_s)
        finally:
            if self._private is not None and self._ledger is not None:
                self._private.stop_workers(held.workers)
                if held.reservation is not None:
                    self._ledger.release(held.reservation)

    def _release_slots(self, held: HeldPool, within_s: float) -> None:
        try:
            stuck = self._free_reservation(held.id, within_s)
        except ClusterError as error:
            if _is_timeout(error):
                self._unreleased.add(held.id)
            return  # Without a scheduler nothing is held. A silent scheduler gets the release request again later.
        if stuck:
            raise ClusterError(f"these Dask workers are stuck, and stay held until they are gone: {', '.join(stuck)}")

    def _free_reservation(self, reservation: str, within_s: float = ANSWER_S) -> list[str]:
        """Release a reservation, and return the workers that failed to end their slots."""
        scheduler = self._connection.run_on_scheduler
        stuck: list[str] = scheduler(reservations.release_slots, reservation, within_s=within_s, pong_s=_RELEASE_PONG_S)
        self._unreleased.discard(reservation)
        return stuck

    def _kill_worker(self, held: HeldPool, worker: str) -> None:
        """Kill the process of a Dask worker with a stuck keeper. Runs on a thread of its own."""
        if held.id not in self._held:  # The slot is being released, so the scheduler itself kills a stuck worker.
            return
        # The worker may be gone or have no nanny. The scheduler ends a stuck worker on release.
        with contextlib.suppress(Exception):
            self._connection.run_on_workers(far.kill_worker, workers=[worker], nanny=True, within_s=_KILL_S)

    def _on_worker_lost(self, event: Mapping[str, Any]) -> None:
        """Mark the slot of a lost Dask worker as lost. Runs on the event loop of the Dask client."""
        held = self._held.get(event.get("reservation", ""))
        slot = held.slots.get(event.get("lost", "")) if held is not None else None
        if slot is not None:
            slot.on_process_gone(event["words"])


class JoinedDaskExecutor(DaskExecutor, DetachableByKeepers, Watchable, Labelled, Growing):
    """The executor for a shared Dask cluster.

    The scheduler's plugin stores the names of detached pools. The keeper of a pool's first slot is the lead.
    """

    def leaving(self) -> Mapping[str, float | None]:
        """List the machines with Dask workers that will retire soon."""
        nodes: dict[str, float | None] = self._connection.run_on_scheduler(reservations.find_leaving, within_s=ANSWER_S)
        return nodes

    def publish(self, reservation: Reservation, lease: Lease) -> None:
        """Register the pool's name, then notify the keepers that the pool outlives the driver."""
        held: HeldPool = reservation.handle
        assert held.keepers is not None
        rows = [
            (worker, slot.address, attrs.evolve(place, handle=None))
            for (worker, slot), place in zip(held.slots.items(), reservation.places, strict=True)
        ]
        scheduler, lead = self._connection.run_on_scheduler, rows[0][0]

        def register(registration: Registration) -> bool:
            other = scheduler(reservations.publish_reservation, held.id, lead, registration, within_s=ANSWER_S)
            return other is None

        def withdraw() -> None:
            scheduler(reservations.unpublish, held.id, self._connection.id, within_s=ANSWER_S)

        held.keepers.publish(lease, (held.id, rows), register, withdraw, self.list_pools)

    def adopt(self, name: str, who: str, own: bool, fenced: Callable[[str], None]) -> Adopted:
        """Adopt the lead keeper of a detached pool, then the other keepers with the lead's permission."""
        registration = self.find_registration(name)
        id, rows = registration.facts
        held = HeldPool(id)
        slots = [(address, partial(self._kill_worker, held, worker)) for worker, address, _ in rows]
        lead, held.keepers = adopt_pool(self._keepers, registration, Adoption(who, own, fenced), slots)
        self._held[id] = held
        held.slots = {worker: slot for (worker, *_), slot in zip(rows, held.keepers.slots, strict=True)}
        places = tuple(attrs.evolve(place, handle=held.slots[worker]) for worker, _, place in rows)
        return Adopted(Reservation(places, held), lead.epoch, lead.record)

    def end_pool(self, name: str) -> None:
        """Release the slots of a detached pool through the scheduler."""
        id, _ = self.find_registration(name).facts
        self._connection.run_on_scheduler(reservations.release_slots, id, within_s=ANSWER_S)

    def detach(self, reservation: Reservation) -> None:
        """Notify a pool's keepers that this driver leaves, and close the connections to the keepers."""
        held: HeldPool = reservation.handle
        if self._held.get(held.id) is held:
            del self._held[held.id]
        if held.keepers is not None:
            held.keepers.leave_pool()

    def reach(self) -> Reach:
        """Return this machine's address on the connection to the scheduler, and the certificates of keepers."""
        return Reach(self._connection.host, self._keepers.tls)

    def announce(self, window: Window) -> None:
        """Register a job's `Window`, the address for `colocate top`, in the scheduler's plugin."""
        self._connection.run_on_scheduler(reservations.add_window, window, self._connection.id, within_s=ANSWER_S)

    def retract(self, window: Window) -> None:
        """Remove a job's `Window`, the address for `colocate top`, from the scheduler's plugin."""
        with contextlib.suppress(ClusterError):  # The scheduler may be gone, or this driver may have disconnected.
            self._connection.run_on_scheduler(reservations.remove_window, window, within_s=ANSWER_S)

    def windows(self) -> Sequence[Window]:
        """List the windows (addresses for `colocate top`) in the scheduler's plugin."""
        windows: list[Window] = self._connection.run_on_scheduler(reservations.list_windows, within_s=ANSWER_S)
        return windows

    def list_registrations(self) -> Sequence[Registration]:
        """List the registrations of detached pools in the scheduler's plugin."""
        registrations: list[Registration] = self._connection.run_on_scheduler(
            reservations.list_registrations, within_s=ANSWER_S
        )
        return registrations

    def get_pool(self, reservation: Reservation) -> PoolKeepers | None:
        """Return the keepers of a detachable pool's reservation; None for other reservations."""
        held: HeldPool = reservation.handle
        return held.keepers

    def get_slot(self, place: Place) -> KeptSlot:
        """Return the driver's connection to the slot of a place."""
        slot: KeptSlot = place.handle
        return slot


def _to_running(held: ReservationInfo) -> Running:
    detail = f"{len(held.workers)} Dask workers held for client {held.client}: {', '.join(held.workers)}"
    if held.stuck:
        detail += f"; {', '.join(held.stuck)} didn't end their slots"
    lost = held.slots - len(held.workers)
    doubt = f"{lost} of its {held.slots} Dask workers have left the cluster" if lost else ""
    return Running("reservation", held.label, node=", ".join(held.hosts), since=held.since, detail=detail, doubt=doubt)


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, ClusterError) and isinstance(error.__cause__, TimeoutError)


def _device_name(devices: tuple[int, ...]) -> str:
    return torch_device(0 if devices else None)  # A worker sees only the devices of one slot, numbered from 0.


def _is_loopback(grant: Grant) -> bool:
    return grant.host.startswith("127.") or grant.worker.startswith("inproc://")


def _reachable_host(grant: Grant) -> str:
    return "127.0.0.1" if _is_loopback(grant) else grant.host
