"""A scheduler plugin that records which driver holds which Dask worker.

The plugin runs on the scheduler's event loop, so code between two awaits is atomic. A slot is freed when the driver
releases the reservation, when the driver's Dask client disconnects for any reason, or when the slot's worker leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import attrs
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from colocate.executor import Window
from colocate.keeper import Registration
from colocate_dask import far, undocumented
from colocate_dask.far import TOPIC
from colocate_dask.offers import (
    Facts,
    Grant,
    Offer,
    Refusal,
    ReservationInfo,
    SlotRequest,
    choose_workers,
    make_grant,
    offer_table,
)

NAME = "colocate-reservations"

_logger = logging.getLogger("distributed.scheduler")

_ANSWER_S = 8.0
# Each worker is pinged before a grant, because the scheduler notices a lost worker only after minutes.
_DOUBT_S = 3.0
_ASK_AGAIN_S = 1.0
_KILL_S = 3.0
_QUIET_S = 1.0  # A worker that hasn't ended a slot within this time may be on a lost or unresponsive machine.
# A nanny replaces a lost worker within about a second. Until then the worker counts as taken, not as absent.
# If the worker counted as absent, a request that will fit in a moment would be refused for good.
_REPLACED_S = 15.0
# By default an adaptive cluster asks every second for the target number of workers.
# Before this time has passed, the plugin can't know whether the cluster is adaptive.
_LISTENS_S = 2.0
_ADAPTS_S = 60.0  # A cluster that hasn't asked for this long no longer counts as adaptive.


@attrs.define(eq=False)
class _Hold:
    reservation: str
    client: str
    grant: Grant
    paused: bool
    owner: str
    label: str
    slots: int
    since: float
    stuck: bool = False
    ending: asyncio.Task[Any] | None = None
    on_gone: asyncio.Event = attrs.field(factory=asyncio.Event)


class Reservations(SchedulerPlugin):
    """The scheduler's tables of held workers, waiting requests, detached pools, and windows for `colocate top`."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self._held_workers: dict[str, _Hold] = {}
        # Facts by worker, or an error text that explains why a worker reported no facts.
        self._facts: dict[str, Facts | str] = {}
        self._silent: set[str] = set()  # These workers don't answer at present.
        # The nanny's address and the latest offer of each worker, by the worker's address.
        self._offers_by_worker: dict[str, tuple[str, Offer]] = {}
        # Last offers of workers that a nanny is replacing, by the nanny's address.
        self._replaced: dict[str, Offer] = {}
        self._waiting: dict[str, SlotRequest] = {}  # Requests that wait for slots, by reservation id.
        self._adapted = -math.inf  # Time at which an adaptive cluster last asked for a target.
        self._asked_for: int | None = None  # Number of workers that was last requested from an adaptive cluster.
        # The detached pools by name: id of the reservation, Dask worker of the lead keeper, and registration.
        self._registrations: dict[str, tuple[str, str, Registration]] = {}
        self._windows: dict[str, tuple[str, Window]] = {}  # Dask client and `Window` of each job, by the window's id.

    async def start(self, scheduler: Any) -> None:
        """Set up the state that needs the scheduler's event loop. Dask calls this method."""
        self._scheduler = scheduler
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Running tasks that request the facts of a worker, by the worker's address.
        self._questions: dict[str, asyncio.Task[Any]] = {}
        for worker in scheduler.workers:
            self.add_worker(scheduler, worker)
        self._listens_until = time.monotonic() + _LISTENS_S
        undocumented.follow_adaptive(scheduler, self._target_size, self._adaptive_target)
        undocumented.add_handler(scheduler)

    # -- what drivers ask for

    async def reserve_slots(self, wanted: SlotRequest, version: Facts) -> Sequence[Grant] | Refusal:
        """Hold all slots of a request, or return a refusal after the request's timeout."""
        deadline = time.monotonic() + wanted.timeout
        self._waiting[wanted.reservation] = wanted
        heard: set[str] = set()  # These workers have answered since the last wait.
        try:
            while True:
                heard |= await self._ask_new_workers()
                changed = self._changed
                if wanted.reservation not in self._waiting or wanted.client not in self._scheduler.clients:
                    return Refusal(False, ())  # The request was withdrawn, and no driver reads this answer.
                offers = self._make_offers(wanted, version)
                if (chosen := choose_workers([offer for offer in offers if not offer.obstacle], wanted)) is not None:
                    if doubtful := {offer.worker for offer in chosen} - heard:
                        heard |= await self._ask_workers(
                            doubtful, _DOUBT_S if doubtful <= self._facts.keys() else _ANSWER_S
                        )
                        continue
                    return [self._hold_worker(wanted, offer) for offer in chosen]
                never = choose_workers(offers, wanted) is None and not self._may_grow(wanted)
                left_s = (self._listening_deadline(wanted, deadline) if never else deadline) - time.monotonic()
                if left_s <= 0:
                    return Refusal(never, offer_table(offers, wanted), self._asked_for if self._is_adaptive else None)
                heard.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left_s, _ASK_AGAIN_S) if self._silent else left_s)
        finally:
            self._waiting.pop(wanted.reservation, None)

    async def release_slots(self, reservation: str, only: Collection[str] | None = None) -> list[str]:
        """Free the slots of a reservation, or withdraw a request that is waiting for slots.

        Args:
            reservation: The reservation's id.
            only: The Dask workers to free, without waiting; the other workers stay held. None frees all workers.

        Returns:
            The workers that failed to end their slots, and stay held until they leave the cluster.
        """
        if only is not None:
            self._start_task(
                self._end_workers(lambda each: each.reservation == reservation and each.grant.worker in only)
            )
            return []
        self._waiting.pop(reservation, None)
        self._remove_publication(reservation)
        self._notify_waiters()
        await self._end_workers(lambda hold: hold.reservation == reservation)
        return [worker for worker, hold in self._held_workers.items() if hold.reservation == reservation]

    def list_reservations(self) -> list[ReservationInfo]:
        """List the reservations of all drivers."""
        by_reservation: dict[str, list[_Hold]] = {}
        for hold in self._held_workers.values():
            by_reservation.setdefault(hold.reservation, []).append(hold)
        return [
            ReservationInfo(
                holds[0].label,
                holds[0].reservation,
                holds[0].client,
                not holds[0].client or holds[0].client in self._scheduler.clients,
                holds[0].slots,
                tuple(hold.grant.worker for hold in holds),
                tuple(dict.fromkeys(hold.grant.host for hold in holds)),
                holds[0].since,
                tuple(hold.grant.worker for hold in holds if hold.stuck),
            )
            for holds in by_reservation.values()
        ]

    def publish_reservation(self, reservation: str, lead: str, registration: Registration) -> str | None:
        """Detach a reservation under a name. If another reservation has the name, return a text that says which one.

        Afterwards a report of the keepers frees the reservation; a disconnect of the driver's client doesn't.
        """
        other = self._registrations.get(registration.name)
        if other is not None and other[0] != reservation:
            return f"reservation {other[0]}"
        self._remove_publication(reservation)
        self._registrations[registration.name] = reservation, lead, registration
        for hold in self._held_workers.values():
            if hold.reservation == reservation:
                hold.client = ""
        return None

    def unpublish(self, reservation: str, client: str) -> None:
        """Undo `publish_reservation`, so that the reservation belongs to the driver's client again."""
        self._remove_publication(reservation)
        for hold in self._held_workers.values():
            if hold.reservation == reservation:
                hold.client = client

    def list_registrations(self) -> list[Registration]:
        """List the registrations of detached pools."""
        return [registration for _, _, registration in self._registrations.values()]

    def add_window(self, window: Window, client: str) -> None:
        """Register the `Window` (address for `colocate top`) of a client's job, until the client disconnects."""
        self._windows[window.id] = client, window

    def remove_window(self, window: Window) -> None:
        """Remove a registered window."""
        self._windows.pop(window.id, None)

    def list_windows(self) -> list[Window]:
        """List the windows (addresses for `colocate top`) of all connected clients."""
        return [window for client, window in self._windows.values() if client in self._scheduler.clients]

    def _remove_publication(self, reservation: str) -> None:
        self._registrations = {
            name: registration for name, registration in self._registrations.items() if registration[0] != reservation
        }

    async def find_silent(self, workers: Collection[str]) -> list[str]:
        """Return the workers among `workers` that don't answer."""
        return sorted({*workers} & {*self._scheduler.workers} - await self._ask_workers(workers, _DOUBT_S))

    def find_leaving(self) -> dict[str, float | None]:
        """Return the machines of held workers that are closing or will retire, with the time if known."""
        nodes: dict[str, float | None] = {}
        for worker, hold in self._held_workers.items():
            facts, state = self._facts.get(worker), self._scheduler.workers.get(worker)
            if state is not None and state.status is Status.closing_gracefully:
                nodes[hold.grant.host] = None
            elif isinstance(facts, Facts) and facts.retires is not None:
                nodes.setdefault(hold.grant.host, facts.retires)
        return nodes

    async def list_offers(self) -> list[Offer]:
        """Return an offer for each worker of the cluster."""
        await self._ask_new_workers()
        return [self._make_offer(worker) for worker in self._scheduler.workers]

    # -- Dask's hooks

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Register a new Dask worker. Dask calls this hook."""
        nanny = scheduler.workers[worker].nanny or ""
        self._offers_by_worker[worker] = nanny, self._make_offer(worker)
        self._replaced.pop(nanny, None)
        # A worker's first answer needs an import of colocate. Asking on arrival lets workers import in parallel.
        if self._waiting:
            self._start_question(worker)
        self._notify_waiters()

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Free the slot of a lost Dask worker and notify the driver. Dask calls this hook."""
        self._facts.pop(worker, None)
        self._silent.discard(worker)
        nanny, offer = self._offers_by_worker.pop(worker)
        if nanny:
            self._await_replacement(nanny, offer)
        if (hold := self._free_worker(worker)) is not None:
            hold.on_gone.set()
            words = f"Dask worker {worker} has left the cluster: its process ended, or lost its scheduler"
            scheduler.log_event(TOPIC, {"lost": worker, "reservation": hold.reservation, "words": words})
            if any(lead == worker for _, lead, _ in self._registrations.values()):
                self._start_task(self.release_slots(hold.reservation))  # A pool without a lead keeper can't be adopted.
        self._notify_waiters()

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Free the slots of a driver after the disconnect of the driver's client. Dask calls this hook."""
        self._waiting = {key: request for key, request in self._waiting.items() if request.client != client}
        self._windows = {id: (of, window) for id, (of, window) in self._windows.items() if of != client}
        self._notify_waiters()
        self._start_task(self._end_workers(lambda hold: hold.client == client))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Retry waiting requests after a task has ended, because a worker may be idle now. Dask calls this hook."""
        if self._waiting and start in ("processing", "memory"):
            self._notify_waiters()

    def valid_workers_downscaling(self, scheduler: Any, workers: Sequence[Any]) -> list[Any]:
        """Exclude held workers from an adaptive cluster's downscaling. Dask calls this hook."""
        return [worker for worker in workers if worker.address not in self._held_workers]

    def log_event(self, topic: str, msg: Any) -> None:
        """Handle logged events: a worker that runs again, or the end of a detached pool. Dask calls this hook."""
        if undocumented.is_resume_event(msg) and (hold := self._held_workers.get(topic)) is not None and hold.paused:
            # A worker that paused for lack of memory reports the end of the pause by itself.
            # The hold's own pause exists only in the scheduler, so the worker's report would end that pause.
            undocumented.pause(self._scheduler, topic, f"colocate-hold-{hold.reservation}")
        if topic == TOPIC and isinstance(msg, Mapping) and "over" in msg:
            self._start_task(self.release_slots(msg["over"]))
        if self._waiting and isinstance(msg, Mapping) and msg.get("action") == "worker-status-change":
            self._notify_waiters()

    # -- clusters that grow

    def _may_grow(self, wanted: SlotRequest) -> bool:
        """Return whether the cluster may get more workers for a request.

        The request's `grow` decides, if set. Otherwise adaptive and empty clusters may get more workers.
        """
        if wanted.grow is not None:
            return wanted.grow
        return not self._scheduler.workers or self._is_adaptive

    @property
    def _is_adaptive(self) -> bool:
        return time.monotonic() < self._adapted + _ADAPTS_S

    def _listening_deadline(self, wanted: SlotRequest, deadline: float) -> float:
        """Return the time at which the plugin stops waiting for a sign that the cluster is adaptive."""
        return -math.inf if wanted.grow is not None else min(deadline, self._listens_until)

    def _adaptive_target(self, own: int) -> int:
        if not self._is_adaptive:
            self._notify_waiters()
        self._adapted = time.monotonic()
        self._asked_for = self._target_size(own)
        return self._asked_for

    def _target_size(self, own: int) -> int:
        """Return the target number of workers for an adaptive cluster. `own` is the scheduler's target.

        The target counts held workers, requested slots, and busy workers that would suit a request. One more is added
        if all workers are held and tasks wait for a worker.
        """
        waiting = [request for request in self._waiting.values() if self._may_grow(request)]
        free = [worker for worker in self._scheduler.workers if worker not in self._held_workers]
        busy = [
            worker
            for worker in free
            if not undocumented.is_starting(self._scheduler.workers[worker])
            and any(
                (offer := self._make_offer(worker, waiting_request.share)).obstacle and offer.fits(waiting_request)
                for waiting_request in waiting
            )
        ]
        target = len(self._held_workers) + len(busy) + sum(request.slots for request in waiting)
        if self._held_workers and not free and undocumented.has_tasks_to_place(self._scheduler):
            target += 1
        return max(own, target)

    # -- inside

    def _notify_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_task(self, coming: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coming)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _await_replacement(self, nanny: str, offer: Offer) -> None:
        """Count a lost worker as being replaced, until `_REPLACED_S` seconds have passed."""
        lost = attrs.evolve(offer, obstacle="being replaced by its nanny")
        self._replaced[nanny] = lost

        def give_up() -> None:
            if self._replaced.get(nanny) is lost:
                del self._replaced[nanny]
                self._notify_waiters()

        asyncio.get_running_loop().call_later(_REPLACED_S, give_up)

    async def _ask_new_workers(self) -> set[str]:
        """Request the facts of new and silent workers, and return the workers that have answered."""
        unknown = [worker for worker in self._scheduler.workers if not isinstance(self._facts.get(worker), Facts)]
        for worker in self._silent:  # A silent worker is asked in the background, without a wait.
            self._start_question(worker)
        return await self._ask_workers([worker for worker in unknown if worker not in self._silent], _ANSWER_S)

    async def _ask_workers(self, workers: Collection[str], within_s: float) -> set[str]:
        """Request the facts of workers, and return the workers that answered in time.

        Other workers count as silent until an answer arrives.
        """
        tasks = {worker: self._start_question(worker) for worker in workers if worker in self._scheduler.workers}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=within_s)
        self._silent |= {
            worker for worker, task in tasks.items() if not task.done() and worker in self._offers_by_worker
        }
        return {*tasks} - self._silent

    def _start_question(self, worker: str) -> asyncio.Task[None]:
        task = self._questions.get(worker)
        if task is None:
            task = self._questions[worker] = self._start_task(self._ask_worker(worker))
            task.add_done_callback(lambda _: self._questions.pop(worker))
        return task

    async def _ask_worker(self, worker: str) -> None:
        facts: Facts | str | None
        try:
            answer = await undocumented.call_worker(self._scheduler, worker, far.describe, within_s=_ANSWER_S)
            facts = answer if isinstance(answer, Facts) else "with another colocate"
        except OSError:  # The worker didn't answer in time, or couldn't be reached.
            facts = None
        except Exception as error:  # An import of colocate in the worker may raise any error.
            facts = f"where colocate doesn't work ({error})"
        if worker not in self._scheduler.workers:
            return
        if facts is None:
            self._silent.add(worker)
        else:
            self._facts[worker] = facts
            if worker in self._silent:
                self._silent.remove(worker)
                self._notify_waiters()

    def _make_offers(self, wanted: SlotRequest, version: Facts) -> list[Offer]:
        offers = [self._make_offer(worker, wanted.share, version) for worker in self._scheduler.workers]
        if wanted.only is not None:
            return [offer for offer in offers if offer.worker in wanted.only]
        return [*offers, *self._replaced.values()]

    def _make_offer(self, worker: str, share: bool = False, version: Facts | None = None) -> Offer:
        state, facts = self._scheduler.workers[worker], self._facts.get(worker)
        gpus, visible, unfit = int(state.resources.get("GPU", 0)), None, ""
        if not isinstance(facts, Facts):
            unfit = facts or ""
        else:
            visible = facts.visible
            if facts.dask_cuda and not gpus:
                gpus, visible = 1, (visible or ())[:1] or None
            if version is not None and (words := facts.version_difference(version)) is not None:
                unfit = f"whose environment {words}"
            elif visible is not None and gpus > len(visible):
                unfit = f"that declare {gpus} GPU but see {len(visible)}"
        obstacle = self._find_obstacle(worker, state, share)
        memory = state.memory_limit or 0
        resources = {name: amount for name, amount in state.resources.items() if name != "GPU"}
        identity = str(state.name), resources
        offer = Offer(
            worker, state.host, state.nthreads, gpus, visible if gpus else None, memory, unfit, obstacle, *identity
        )
        self._offers_by_worker[worker] = state.nanny or "", offer
        return offer

    def _find_obstacle(self, worker: str, state: Any, share: bool) -> str:
        """Return the reason why a worker can't be used now; empty for a free worker."""
        if (hold := self._held_workers.get(worker)) is not None:
            return self._describe_holder(hold)
        if worker in self._silent:
            return f"that doesn't answer: {worker}"
        if not undocumented.is_running(state):
            return str(state.status.name)
        if share:
            return ""
        if state.processing:
            return "busy with tasks"
        return "with data of others" if state.has_what else ""

    def _describe_holder(self, hold: _Hold) -> str:
        if hold.stuck:
            return "stuck: it didn't end its slot"
        for name, (reservation, _, _) in self._registrations.items():
            if reservation == hold.reservation:
                return f"held by the detached pool {name!r}"
        runtime = hold.label.rpartition("/")[0]
        return f"held by {hold.owner or 'a pool'} of runtime {runtime}" if runtime else f"held by {hold.owner}"

    def _hold_worker(self, wanted: SlotRequest, offer: Offer) -> Grant:
        used: dict[str, set[str]] = {}
        for hold in self._held_workers.values():
            used.setdefault(hold.grant.host, set()).update(hold.grant.gpus)
        granted = make_grant(offer, wanted, used)
        details = wanted.owner, wanted.label, wanted.lot or wanted.slots, time.time()
        hold = _Hold(wanted.reservation, wanted.client, granted, not wanted.share, *details)
        self._held_workers[offer.worker] = hold
        undocumented.count_work(self._scheduler, 1)
        if hold.paused:
            undocumented.pause(self._scheduler, offer.worker, f"colocate-hold-{wanted.reservation}")
        return granted

    def _free_worker(self, worker: str) -> _Hold | None:
        hold = self._held_workers.pop(worker, None)
        if hold is not None:
            undocumented.count_work(self._scheduler, -1)
        return hold

    async def _end_workers(self, doomed: Callable[[_Hold], bool]) -> None:
        endings = []
        for hold in filter(doomed, list(self._held_workers.values())):
            if hold.ending is None:
                hold.ending = self._start_task(self._end_worker(hold))
            endings.append(hold.ending)
        await asyncio.gather(*endings)

    async def _end_worker(self, hold: _Hold) -> None:
        worker = hold.grant.worker
        ending = undocumented.call_worker(self._scheduler, worker, far.end_keeper, hold.grant.id, within_s=_ANSWER_S)
        try:
            if await _await_end(self._start_task(ending), worker):
                # The keeper notices the driver's absence and ends the worker's processes.
                # Until an answer arrives, the worker counts as silent and gets no slot.
                self._silent |= {worker} & self._offers_by_worker.keys()
        except Exception as error:  # The worker is stopped, stuck or gone, so the process must be killed.
            if self._held_workers.get(worker) is hold:
                _logger.warning("colocate: Dask worker %s doesn't end its slot (%r): ending it", worker, error)
                await self._kill_worker(hold)
            return
        if self._held_workers.get(worker) is hold:
            self._free_worker(worker)
            if hold.paused:
                undocumented.resume(self._scheduler, worker, f"colocate-release-{hold.reservation}")
            self._notify_waiters()

    async def _kill_worker(self, hold: _Hold) -> None:
        """Kill a worker's process through the nanny. A process that survives stays held until it leaves the cluster."""
        hold.stuck = True
        worker = hold.grant.worker
        try:
            await undocumented.call_worker(self._scheduler, worker, far.kill_worker, within_s=_KILL_S, nanny=True)
            await asyncio.wait_for(hold.on_gone.wait(), _KILL_S)
        except Exception:  # The worker may have no nanny, or the nanny may be stuck.
            pass


async def _await_end(ending: asyncio.Task[Any], worker: str) -> bool:
    """Wait until a worker has ended a slot. Stop waiting and return True if the machine accepts no connections."""
    await asyncio.wait([ending], timeout=_QUIET_S)
    ended = ending.done() and ending.exception() is None
    if not ended and not await undocumented.accepts_connections(worker, _QUIET_S):
        ending.cancel()
        return True
    await ending
    return False


# -- what a driver runs on the scheduler


async def reserve_slots(wanted: SlotRequest, version: Facts, *, dask_scheduler: Any) -> Sequence[Grant] | Refusal:
    """Run `Reservations.reserve_slots` in the scheduler."""
    return await _get_plugin(dask_scheduler).reserve_slots(wanted, version)


async def release_slots(reservation: str, only: Collection[str] | None = None, *, dask_scheduler: Any) -> list[str]:
    """Run `Reservations.release_slots` in the scheduler."""
    return await _get_plugin(dask_scheduler).release_slots(reservation, only)


async def list_offers(*, dask_scheduler: Any) -> list[Offer]:
    """Run `Reservations.list_offers` in the scheduler."""
    return await _get_plugin(dask_scheduler).list_offers()


def find_leaving(*, dask_scheduler: Any) -> dict[str, float | None]:
    """Run `Reservations.find_leaving` in the scheduler."""
    return _get_plugin(dask_scheduler).find_leaving()


async def find_silent(workers: Collection[str], *, dask_scheduler: Any) -> list[str]:
    """Run `Reservations.find_silent` in the scheduler."""
    return await _get_plugin(dask_scheduler).find_silent(workers)


async def list_reservations(*, dask_scheduler: Any) -> list[ReservationInfo]:
    """Run `Reservations.list_reservations` in the scheduler."""
    return _get_plugin(dask_scheduler).list_reservations()


def publish_reservation(reservation: str, lead: str, registration: Registration, *, dask_scheduler: Any) -> str | None:
    """Run `Reservations.publish_reservation` in the scheduler."""
    return _get_plugin(dask_scheduler).publish_reservation(reservation, lead, registration)


def unpublish(reservation: str, client: str, *, dask_scheduler: Any) -> None:
    """Run `Reservations.unpublish` in the scheduler."""
    _get_plugin(dask_scheduler).unpublish(reservation, client)


def list_registrations(*, dask_scheduler: Any) -> list[Registration]:
    """Run `Reservations.list_registrations` in the scheduler."""
    return _get_plugin(dask_scheduler).list_registrations()


def add_window(window: Window, client: str, *, dask_scheduler: Any) -> None:
    """Run `Reservations.add_window` in the scheduler."""
    _get_plugin(dask_scheduler).add_window(window, client)


def remove_window(window: Window, *, dask_scheduler: Any) -> None:
    """Run `Reservations.remove_window` in the scheduler."""
    _get_plugin(dask_scheduler).remove_window(window)


def list_windows(*, dask_scheduler: Any) -> list[Window]:
    """Run `Reservations.list_windows` in the scheduler."""
    return _get_plugin(dask_scheduler).list_windows()


def _get_plugin(scheduler: Any) -> Reservations:
    plugin = undocumented.find_plugin(scheduler, NAME)
    if not isinstance(plugin, Reservations):
        raise RuntimeError(f"the scheduler's plugin {NAME!r} is {plugin!r}, not colocate's")
    return plugin
