"""The scheduler plugin that knows which Dask worker is held by which driver.

It runs in the scheduler, on its event loop, so what it does between two awaits is atomic. A slot is freed when its
driver gives it back, when its driver's Dask client goes away in whatever manner, and when its worker goes.
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
from colocate_dask.offers import Facts, Grant, Held, Offer, Refusal, Wanted, choose, grant, table

NAME = "colocate-reservations"

_logger = logging.getLogger("distributed.scheduler")

_ANSWER_S = 8.0
# A worker that is about to be held is asked whether it is there: the scheduler itself misses one after minutes only.
_DOUBT_S = 3.0
_ASK_AGAIN_S = 1.0
_KILL_S = 3.0
_QUIET_S = 1.0  # a worker that hasn't ended its slot by then may lie on a machine that is gone, or silent
# A nanny replaces a worker within a second or so. Until then the worker counts as one that isn't free, lest a request
# be refused for ever that can be met in a moment.
_REPLACED_S = 15.0
# An adaptive cluster asks by itself how many workers it is to have, every second if nobody says otherwise. Until it has
# had the time to, nobody knows whether it is one; and it is one no more when it hasn't asked for long.
_LISTENS_S = 2.0
_ADAPTS_S = 60.0


@attrs.define(eq=False)
class _Hold:
    """One held worker."""

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
    gone: asyncio.Event = attrs.field(factory=asyncio.Event)


class Reservations(SchedulerPlugin):
    """Who holds which worker."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        """Make an empty one, to be registered with the scheduler."""
        self._holds: dict[str, _Hold] = {}
        self._facts: dict[str, Facts | str] = {}  # a text is why there are none
        self._silent: set[str] = set()  # workers that were asked what they are, and don't answer
        self._seen: dict[str, tuple[str, Offer]] = {}  # by worker: its nanny, and what it offered when last looked at
        self._replaced: dict[str, Offer] = {}  # by nanny: what the worker offered that it is replacing
        self._waiting: dict[str, Wanted] = {}  # reservations to be
        self._adapted = -math.inf  # when an adaptive cluster has asked last
        self._asked_for: int | None = None  # how many workers it was told to have
        self._registrations: dict[
            str, tuple[str, str, Registration]
        ] = {}  # detached: by name the reservation, its lead, and the rest
        self._windows: dict[str, tuple[str, Window]] = {}  # of jobs: by id, with their clients

    async def start(self, scheduler: Any) -> None:
        """Called by Dask, in the scheduler."""
        self._scheduler = scheduler
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: dict[str, asyncio.Task[Any]] = {}  # by worker
        for worker in scheduler.workers:
            self.add_worker(scheduler, worker)
        self._listens_until = time.monotonic() + _LISTENS_S
        undocumented.follow_adaptive(scheduler, self._target, self._tell_adaptive)
        undocumented.answers(scheduler)

    # -- what drivers ask for

    async def reserve(self, wanted: Wanted, version: Facts) -> Sequence[Grant] | Refusal:
        """Hold all slots, or none."""
        deadline = time.monotonic() + wanted.timeout
        self._waiting[wanted.reservation] = wanted
        heard: set[str] = set()  # workers that have just answered
        try:
            while True:
                heard |= await self._learn()
                changed = self._changed
                if wanted.reservation not in self._waiting or wanted.client not in self._scheduler.clients:
                    return Refusal(False, ())  # it was withdrawn; nobody hears this
                offers = self._offers(wanted, version)
                if (chosen := choose([offer for offer in offers if not offer.taken], wanted)) is not None:
                    if doubtful := {offer.worker for offer in chosen} - heard:
                        heard |= await self._ask(doubtful, _DOUBT_S if doubtful <= self._facts.keys() else _ANSWER_S)
                        continue
                    return [self._hold(wanted, offer) for offer in chosen]
                never = choose(offers, wanted) is None and not self._grows(wanted)
                left = (self._known_at(wanted, deadline) if never else deadline) - time.monotonic()
                if left <= 0:
                    return Refusal(never, table(offers, wanted), self._asked_for if self._is_adaptive else None)
                heard.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left, _ASK_AGAIN_S) if self._silent else left)
        finally:
            self._waiting.pop(wanted.reservation, None)

    async def release(self, reservation: str, only: Collection[str] | None = None) -> list[str]:
        """Free the slots of a reservation, or withdraw it; return the stuck workers, which stay held until they go.

        Args:
            reservation: Its id.
            only: Those of its workers that are freed, which isn't waited for; the others stay held.
        """
        if only is not None:
            self._background(self._end_all(lambda each: each.reservation == reservation and each.grant.worker in only))
            return []
        self._waiting.pop(reservation, None)
        self._forget(reservation)
        self._news()
        await self._end_all(lambda hold: hold.reservation == reservation)
        return [worker for worker, hold in self._holds.items() if hold.reservation == reservation]

    def held(self) -> list[Held]:
        """Every reservation, of whatever driver."""
        by_reservation: dict[str, list[_Hold]] = {}
        for hold in self._holds.values():
            by_reservation.setdefault(hold.reservation, []).append(hold)
        return [
            Held(
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

    def publish(self, reservation: str, lead: str, registration: Registration) -> str | None:
        """Give a reservation to the cluster by a name; who has that name, if somebody else has it.

        From now on it isn't freed when its driver's client goes, but when its keepers say that it is over.
        """
        other = self._registrations.get(registration.name)
        if other is not None and other[0] != reservation:
            return f"reservation {other[0]}"
        self._forget(reservation)
        self._registrations[registration.name] = reservation, lead, registration
        for hold in self._holds.values():
            if hold.reservation == reservation:
                hold.client = ""
        return None

    def withdraw(self, reservation: str, client: str) -> None:
        """Take a publication back: the reservation is the driver's again."""
        self._forget(reservation)
        for hold in self._holds.values():
            if hold.reservation == reservation:
                hold.client = client

    def registrations(self) -> list[Registration]:
        """Return what is detached."""
        return [registration for _, _, registration in self._registrations.values()]

    def announce(self, window: Window, client: str) -> None:
        """Have a job of a client's be found, until that client goes."""
        self._windows[window.id] = client, window

    def retract(self, window: Window) -> None:
        """Have it found no longer."""
        self._windows.pop(window.id, None)

    def windows(self) -> list[Window]:
        """The jobs of all clients that there are."""
        return [window for client, window in self._windows.values() if client in self._scheduler.clients]

    def _forget(self, reservation: str) -> None:
        self._registrations = {
            name: registration for name, registration in self._registrations.items() if registration[0] != reservation
        }

    async def silent(self, workers: Collection[str]) -> list[str]:
        """Return those of some workers that don't answer."""
        return sorted({*workers} & {*self._scheduler.workers} - await self._ask(workers, _DOUBT_S))

    def leaving(self) -> dict[str, float | None]:
        """Machines with held workers that are about to close, or that are told to; until when, if that is known."""
        found: dict[str, float | None] = {}
        for worker, hold in self._holds.items():
            facts, state = self._facts.get(worker), self._scheduler.workers.get(worker)
            if state is not None and state.status is Status.closing_gracefully:
                found[hold.grant.host] = None
            elif isinstance(facts, Facts) and facts.retires is not None:
                found.setdefault(hold.grant.host, facts.retires)
        return found

    async def offers(self) -> list[Offer]:
        """Every worker, as it is now."""
        await self._learn()
        return [self._offer(worker) for worker in self._scheduler.workers]

    # -- Dask's hooks

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """A worker has come."""
        nanny = scheduler.workers[worker].nanny or ""
        self._seen[worker] = nanny, self._offer(worker)
        self._replaced.pop(nanny, None)
        if self._waiting:  # its first answer takes an import: those that come together go through that together
            self._ask_one(worker)
        self._news()

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """A worker is gone, and what was in it."""
        self._facts.pop(worker, None)
        self._silent.discard(worker)
        nanny, offer = self._seen.pop(worker)
        if nanny:
            self._expect(nanny, offer)
        if (hold := self._unhold(worker)) is not None:
            hold.gone.set()
            words = f"Dask worker {worker} has left the cluster: its process ended, or lost its scheduler"
            scheduler.log_event(TOPIC, {"lost": worker, "reservation": hold.reservation, "words": words})
            if any(lead == worker for _, lead, _ in self._registrations.values()):
                self._background(self.release(hold.reservation))  # nobody can have it without its lead
        self._news()

    def remove_client(self, scheduler: Any, client: str) -> None:
        """A driver is gone: its slots are freed."""
        self._waiting = {key: wanted for key, wanted in self._waiting.items() if wanted.client != client}
        self._windows = {id: (of, window) for id, (of, window) in self._windows.items() if of != client}
        self._news()
        self._background(self._end_all(lambda hold: hold.client == client))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A task has moved on: perhaps a worker has nothing to do any more."""
        if self._waiting and start in ("processing", "memory"):
            self._news()

    def valid_workers_downscaling(self, scheduler: Any, workers: Sequence[Any]) -> list[Any]:
        """An adaptive cluster looks for workers that do nothing: those that are held do something."""
        return [worker for worker in workers if worker.address not in self._holds]

    def log_event(self, topic: str, msg: Any) -> None:
        """Something was logged: perhaps that a worker runs again, or that a detached pool is over."""
        if undocumented.runs_again(msg) and (hold := self._holds.get(topic)) is not None and hold.paused:
            # It says so when it has paused by itself, for want of memory, and has that again. It hears of nothing else.
            undocumented.pause(self._scheduler, topic, f"colocate-hold-{hold.reservation}")
        if topic == TOPIC and isinstance(msg, Mapping) and "over" in msg:
            self._background(self.release(msg["over"]))
        if self._waiting and isinstance(msg, Mapping) and msg.get("action") == "worker-status-change":
            self._news()

    # -- clusters that grow

    def _grows(self, wanted: Wanted) -> bool:
        """Whether workers may come for a request: it says so, the cluster is adaptive, or has none so far."""
        if wanted.grow is not None:
            return wanted.grow
        return not self._scheduler.workers or self._is_adaptive

    @property
    def _is_adaptive(self) -> bool:
        return time.monotonic() < self._adapted + _ADAPTS_S

    def _known_at(self, wanted: Wanted, deadline: float) -> float:
        """When it is known that none will."""
        return -math.inf if wanted.grow is not None else min(deadline, self._listens_until)

    def _tell_adaptive(self, own: int) -> int:
        """See `_target`; an adaptive cluster asks."""
        if not self._is_adaptive:
            self._news()
        self._adapted = time.monotonic()
        self._asked_for = self._target(own)
        return self._asked_for

    def _target(self, own: int) -> int:
        """How many workers an adaptive cluster is to have, where the scheduler itself would have so many.

        Those that are held, those that are waited for, and those that would do for these but have tasks or data; and
        one more when tasks have no worker because all are held.
        """
        waiting = [wanted for wanted in self._waiting.values() if self._grows(wanted)]
        free = [worker for worker in self._scheduler.workers if worker not in self._holds]
        busy = [
            worker
            for worker in free
            if not undocumented.is_starting(self._scheduler.workers[worker])
            and any((offer := self._offer(worker, each.share)).taken and offer.suits(each) for each in waiting)
        ]
        target = len(self._holds) + len(busy) + sum(wanted.slots for wanted in waiting)
        if self._holds and not free and undocumented.has_tasks_to_place(self._scheduler):
            target += 1
        return max(own, target)

    # -- inside

    def _news(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _background(self, coming: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coming)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _expect(self, nanny: str, offer: Offer) -> None:
        """Count a worker that its nanny will replace, for a while."""
        lost = attrs.evolve(offer, taken="being replaced by its nanny")
        self._replaced[nanny] = lost

        def give_up() -> None:
            if self._replaced.get(nanny) is lost:
                del self._replaced[nanny]
                self._news()

        asyncio.get_running_loop().call_later(_REPLACED_S, give_up)

    async def _learn(self) -> set[str]:
        """Ask workers that have come what they are, again those that don't answer; return those that have answered."""
        unknown = [worker for worker in self._scheduler.workers if not isinstance(self._facts.get(worker), Facts)]
        for worker in self._silent:  # nobody waits for those
            self._ask_one(worker)
        return await self._ask([worker for worker in unknown if worker not in self._silent], _ANSWER_S)

    async def _ask(self, workers: Collection[str], within_s: float) -> set[str]:
        """Ask workers what they are; those that have answered in time. The others are silent until they do."""
        asked = {worker: self._ask_one(worker) for worker in workers if worker in self._scheduler.workers}
        if asked:
            await asyncio.wait(asked.values(), timeout=within_s)
        self._silent |= {worker for worker, task in asked.items() if not task.done() and worker in self._seen}
        return {*asked} - self._silent

    def _ask_one(self, worker: str) -> asyncio.Task[None]:
        task = self._asked.get(worker)
        if task is None:
            task = self._asked[worker] = self._background(self._hear(worker))
            task.add_done_callback(lambda _: self._asked.pop(worker))
        return task

    async def _hear(self, worker: str) -> None:
        facts: Facts | str | None
        try:
            answer = await undocumented.call(self._scheduler, worker, far.describe, within_s=_ANSWER_S)
            facts = answer if isinstance(answer, Facts) else "with another colocate"
        except OSError:  # in time, or at all
            facts = None
        except Exception as error:  # whatever keeps it from importing colocate
            facts = f"where colocate doesn't work ({error})"
        if worker not in self._scheduler.workers:
            return
        if facts is None:
            self._silent.add(worker)
        else:
            self._facts[worker] = facts
            if worker in self._silent:
                self._silent.remove(worker)
                self._news()

    def _offers(self, wanted: Wanted, version: Facts) -> list[Offer]:
        """Every worker that comes into question, and whether it may be had."""
        offers = [self._offer(worker, wanted.share, version) for worker in self._scheduler.workers]
        if wanted.only is not None:
            return [offer for offer in offers if offer.worker in wanted.only]
        return [*offers, *self._replaced.values()]

    def _offer(self, worker: str, share: bool = False, version: Facts | None = None) -> Offer:
        state, facts = self._scheduler.workers[worker], self._facts.get(worker)
        gpus, visible, unfit = int(state.resources.get("GPU", 0)), None, ""
        if not isinstance(facts, Facts):
            unfit = facts or ""
        else:
            visible = facts.visible
            if facts.dask_cuda and not gpus:
                gpus, visible = 1, (visible or ())[:1] or None
            if version is not None and (words := facts.unlike(version)) is not None:
                unfit = f"whose environment {words}"
            elif visible is not None and gpus > len(visible):
                unfit = f"that declare {gpus} GPU but see {len(visible)}"
        taken = self._taken(worker, state, share)
        memory = state.memory_limit or 0
        resources = {name: amount for name, amount in state.resources.items() if name != "GPU"}
        own = str(state.name), resources
        offer = Offer(worker, state.host, state.nthreads, gpus, visible if gpus else None, memory, unfit, taken, *own)
        self._seen[worker] = state.nanny or "", offer
        return offer

    def _taken(self, worker: str, state: Any, share: bool) -> str:
        """Why a worker can't be had now."""
        if (hold := self._holds.get(worker)) is not None:
            return self._held_by(hold)
        if worker in self._silent:
            return f"that doesn't answer: {worker}"
        if not undocumented.is_running(state):
            return str(state.status.name)
        if share:
            return ""
        if state.processing:
            return "busy with tasks"
        return "with data of others" if state.has_what else ""

    def _held_by(self, hold: _Hold) -> str:
        if hold.stuck:
            return "stuck: it didn't end its slot"
        for name, (reservation, _, _) in self._registrations.items():
            if reservation == hold.reservation:
                return f"held by the detached pool {name!r}"
        runtime = hold.label.rpartition("/")[0]
        return f"held by {hold.owner or 'a pool'} of runtime {runtime}" if runtime else f"held by {hold.owner}"

    def _hold(self, wanted: Wanted, offer: Offer) -> Grant:
        used: dict[str, set[str]] = {}
        for hold in self._holds.values():
            used.setdefault(hold.grant.host, set()).update(hold.grant.gpus)
        given = grant(offer, wanted, used)
        told = wanted.owner, wanted.label, wanted.lot or wanted.slots, time.time()
        hold = _Hold(wanted.reservation, wanted.client, given, not wanted.share, *told)
        self._holds[offer.worker] = hold
        undocumented.keep_busy(self._scheduler, 1)
        if hold.paused:
            undocumented.pause(self._scheduler, offer.worker, f"colocate-hold-{wanted.reservation}")
        return given

    def _unhold(self, worker: str) -> _Hold | None:
        hold = self._holds.pop(worker, None)
        if hold is not None:
            undocumented.keep_busy(self._scheduler, -1)
        return hold

    async def _end_all(self, doomed: Callable[[_Hold], bool]) -> None:
        endings = []
        for hold in filter(doomed, list(self._holds.values())):
            if hold.ending is None:
                hold.ending = self._background(self._end(hold))
            endings.append(hold.ending)
        await asyncio.gather(*endings)

    async def _end(self, hold: _Hold) -> None:
        """Free one worker, after what ran there has gone."""
        worker = hold.grant.worker
        ending = undocumented.call(self._scheduler, worker, far.end, hold.grant.id, within_s=_ANSWER_S)
        try:
            if await _ends_or_is_away(self._background(ending), worker):
                # Its keeper takes its driver for gone, and ends what runs there; nobody gets it until it answers.
                self._silent |= {worker} & self._seen.keys()
        except Exception as error:  # it is stopped, stuck or gone: its process has to end
            if self._holds.get(worker) is hold:
                _logger.warning("colocate: Dask worker %s doesn't end its slot (%r): ending it", worker, error)
                await self._kill(hold)
            return
        if self._holds.get(worker) is hold:
            self._unhold(worker)
            if hold.paused:
                undocumented.resume(self._scheduler, worker, f"colocate-release-{hold.reservation}")
            self._news()

    async def _kill(self, hold: _Hold) -> None:
        """Have the nanny end a worker's process. What can't be ended stays held, until it goes."""
        hold.stuck = True
        worker = hold.grant.worker
        try:
            await undocumented.call(self._scheduler, worker, far.kill, within_s=_KILL_S, nanny=True)
            await asyncio.wait_for(hold.gone.wait(), _KILL_S)
        except Exception:  # there is no nanny, or it is stuck as well
            pass


async def _ends_or_is_away(ending: asyncio.Task[Any], worker: str) -> bool:
    """Wait for what a worker was asked for; True where its machine takes no connection, and that isn't waited for."""
    await asyncio.wait([ending], timeout=_QUIET_S)
    ended = ending.done() and ending.exception() is None
    if not ended and not await undocumented.takes_connections(worker, _QUIET_S):
        ending.cancel()
        return True
    await ending
    return False


# -- what a driver runs on the scheduler


async def reserve(wanted: Wanted, version: Facts, *, dask_scheduler: Any) -> Sequence[Grant] | Refusal:
    """See `Reservations.reserve`."""
    return await _table(dask_scheduler).reserve(wanted, version)


async def release(reservation: str, only: Collection[str] | None = None, *, dask_scheduler: Any) -> list[str]:
    """See `Reservations.release`."""
    return await _table(dask_scheduler).release(reservation, only)


async def offers(*, dask_scheduler: Any) -> list[Offer]:
    """See `Reservations.offers`."""
    return await _table(dask_scheduler).offers()


def leaving(*, dask_scheduler: Any) -> dict[str, float | None]:
    """See `Reservations.leaving`."""
    return _table(dask_scheduler).leaving()


async def silent(workers: Collection[str], *, dask_scheduler: Any) -> list[str]:
    """See `Reservations.silent`."""
    return await _table(dask_scheduler).silent(workers)


async def held(*, dask_scheduler: Any) -> list[Held]:
    """See `Reservations.held`."""
    return _table(dask_scheduler).held()


def publish(reservation: str, lead: str, registration: Registration, *, dask_scheduler: Any) -> str | None:
    """See `Reservations.publish`."""
    return _table(dask_scheduler).publish(reservation, lead, registration)


def withdraw(reservation: str, client: str, *, dask_scheduler: Any) -> None:
    """See `Reservations.withdraw`."""
    _table(dask_scheduler).withdraw(reservation, client)


def registrations(*, dask_scheduler: Any) -> list[Registration]:
    """See `Reservations.registrations`."""
    return _table(dask_scheduler).registrations()


def announce(window: Window, client: str, *, dask_scheduler: Any) -> None:
    """See `Reservations.announce`."""
    _table(dask_scheduler).announce(window, client)


def retract(window: Window, *, dask_scheduler: Any) -> None:
    """See `Reservations.retract`."""
    _table(dask_scheduler).retract(window)


def windows(*, dask_scheduler: Any) -> list[Window]:
    """See `Reservations.windows`."""
    return _table(dask_scheduler).windows()


def _table(scheduler: Any) -> Reservations:
    plugin = undocumented.plugin_of(scheduler, NAME)
    if not isinstance(plugin, Reservations):
        raise RuntimeError(f"the scheduler's plugin {NAME!r} is {plugin!r}, not colocate's")
    return plugin
