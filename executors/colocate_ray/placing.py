"""Placement groups and the actors in them: slots that are held, all or none. In the envoy's process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import colocate
from colocate.errors import ColocateError, PlacementTimeout
from colocate.executor import Node, Request, Running
from colocate.placement import words
from colocate_ray import listing
from colocate_ray.holder import Holder, end_process
from colocate_ray.nodes import Nodes, natural
from colocate_ray.terms import Cluster, Slot

_ACTORS_START_WITHIN_S = 120.0
_RELEASED_WITHIN_S = 10.0
_DOUBT_AFTER_S = 0.5
# Ray comes to know with a delay what is free: what would fit by its own account is waited for even without patience.
_SETTLES_WITHIN_S = 5.0
_LOOKS_AFTER_NODE_S = 60.0
_STEP_S = 0.02
_WITHDRAWN = "the reservation was withdrawn"


@attrs.define(eq=False)
class Held:
    """What is held, or about to be, for one pool."""

    request: Request
    group: PlacementGroup | None = None
    actors: list[Any] = attrs.field(factory=list)
    watches: list[Any] = attrs.field(factory=list)
    nodes: list[str] = attrs.field(factory=list)  # of the actors, by Ray's ids
    processes: list[tuple[int, float]] = attrs.field(factory=list)  # of the actors, by pid and time of creation
    released: threading.Event = attrs.field(factory=threading.Event)
    _making: threading.Lock = attrs.field(factory=threading.Lock)

    def make_group(self, make: Callable[[], PlacementGroup]) -> None:
        """Have Ray make the placement group.

        Raises:
            ColocateError: It has been withdrawn.
        """
        with self._open():
            self.group = make()

    def make_actor(self, make: Callable[[], Any]) -> None:
        """Have Ray make an actor; see `make_group`."""
        with self._open():
            self.actors.append(make())

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._making:
            if self.released.is_set():
                raise ColocateError(_WITHDRAWN)
            yield

    def stop(self) -> None:
        """Have nothing more made, and wait for what Ray is just making: it is noted here when this returns."""
        self.released.set()
        with self._making:
            pass

    def end(self) -> None:
        """Stop, and tell Ray to take it all back."""
        self.stop()
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        if self.group is not None:
            remove_placement_group(self.group)


class Placing:
    """All that this driver holds. Thread-safe."""

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        """Hold nothing yet.

        Args:
            cluster: What we are in.
            lost: Told when an actor is gone: number of the reservation, index of the bundle, Ray's words.
        """
        self.nodes = Nodes()
        self.cluster = cluster
        self._lost = lost
        self._held: dict[int, Held] = {}
        self._withdrawn: set[int] = set()  # what was given back, perhaps before it was noted here
        self._abandoned = False
        self._lock = threading.Lock()
        self._pause = threading.Event()  # never set: to wait between looks

    def list_nodes(self) -> list[Node]:
        """What the cluster offers."""
        return self.nodes.offers()

    def list_running(self) -> list[Running]:
        """What Ray has for this driver."""
        return listing.of_this_job(self.nodes)

    def list_strays(self) -> list[Running]:
        """What Ray has of drivers that are gone."""
        return listing.of_ended_jobs(self.nodes)

    def reserve(self, number: int, request: Request, key: bytes) -> list[Slot]:
        """Hold slots, with a keeper in each.

        Raises:
            PlacementError: They can never fit.
            PlacementTimeout: They don't fit now.
            ColocateError: The actors can't be started.
        """
        self.nodes.check_possible(request)
        fits = self.nodes.fits_now(request)
        held = Held(request)
        with self._lock:
            if self._abandoned or number in self._withdrawn:
                raise ColocateError(_WITHDRAWN)
            self._held[number] = held
        try:
            bundles, strategy = [_bundle(request)] * request.slots, request.strategy.upper()
            name = f"{listing.PREFIX}{request.id}"
            held.make_group(lambda: placement_group(bundles, strategy, name=name))
            placed = _wait_placed(held, max(request.timeout, _SETTLES_WITHIN_S) if fits else request.timeout)
            slots = self._start(held, key) if placed else []
            self._watch(number, held)
        except Exception:
            withdrawn = held.released.is_set()  # it then failed because of that, in one of several ways
            self.release(number)
            if withdrawn:
                raise ColocateError(_WITHDRAWN) from None
            raise
        if not placed:
            self.release(number)
            text = words(request, f"did not become free within {request.timeout:g} s")
            raise PlacementTimeout(text, nodes=self.nodes.table(request))
        return slots

    def end_slot(self, number: int, index: int) -> None:
        """End the process of a keeper that doesn't answer, by a task on its machine; returns when it is gone."""
        held = self._held.get(number)
        if held is None or index >= len(held.processes):
            return
        there = NodeAffinitySchedulingStrategy(held.nodes[index], soft=False)
        task: Any = ray.remote(end_process)
        try:
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
            ray.get(task.options(**options).remote(*held.processes[index]), timeout=_RELEASED_WITHIN_S)
        except RayError:  # the node is gone, or as stuck as the keeper: Ray will do what it can
            ray.kill(held.actors[index], no_restart=True)

    def release(self, number: int) -> None:
        """Give slots back, also those that are only being waited for. When it returns they can be reserved again.

        Raises:
            ColocateError: Ray doesn't confirm it.
        """
        with self._lock:
            self._withdrawn.add(number)
            held = self._held.pop(number, None)
        if held is None:
            return
        held.end()
        if held.group is not None:
            self._confirm(held, held.group)

    def abandon(self) -> None:
        """The driver is gone: have nothing more made, and wait for what Ray is just making.

        Ray frees it all when this process leaves. An actor that it comes to know after that, it frees a second or two
        later. It isn't told to take things back here: a slot whose actor is just coming up could get lost in Ray.
        """
        with self._lock:
            self._abandoned = True
            everything = list(self._held.values())
            self._held.clear()
        for held in everything:
            held.stop()

    def _confirm(self, held: Held, group: PlacementGroup) -> None:
        """Wait until Ray has everything back from the nodes that there still are."""
        began = time.monotonic()
        while nodes := self._holding(held, group):
            waited = time.monotonic() - began
            if waited > _DOUBT_AFTER_S and nodes <= self.nodes.gone(nodes):
                return
            if waited > _RELEASED_WITHIN_S:
                raise ColocateError(
                    f"Ray was told to take {held.request.owner or 'a pool'}'s slots back, and hasn't confirmed it in "
                    f"{_RELEASED_WITHIN_S:g} s for {', '.join(map(self.nodes.name, sorted(nodes)))}"
                )
            self._pause.wait(_STEP_S)

    def _holding(self, held: Held, group: PlacementGroup) -> set[str]:
        """The nodes on which an actor still lives, or something is still set aside."""
        running = ray.wait(held.watches, num_returns=len(held.watches), timeout=0)[1] if held.watches else []
        return {held.nodes[held.watches.index(watch)] for watch in running} | self.nodes.holding(group.id.hex())

    def _start(self, held: Held, key: bytes) -> list[Slot]:
        request, group = held.request, held.group
        assert group is not None
        remote: Any = ray.remote  # its stubs lack the groups
        actor_class = remote(concurrency_groups={"watch": 1})(Holder)
        options: dict[str, Any] = {
            "num_cpus": request.cpus,  # explicit: one with GPUs would otherwise take a CPU of its own
            "num_gpus": request.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        for index in range(request.slots):
            strategy = PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=False)
            name = f"{listing.PREFIX}{request.id}/{index}"
            held.make_actor(actor_class.options(name=name, **options, scheduling_strategy=strategy).remote)
        opened = [actor.open.remote(colocate.__version__, key, request, self.cluster) for actor in held.actors]
        ray.wait(opened, num_returns=len(opened), timeout=_ACTORS_START_WITHIN_S, fetch_local=False)
        answers = self._answers(group, opened)
        held.nodes = [answer["node"] for answer in answers]
        held.processes = [answer["process"] for answer in answers]
        slots = [self._slot(index, answer) for index, answer in enumerate(answers)]
        return sorted(slots, key=lambda slot: (natural(slot.node), slot.devices, slot.index))

    def _answers(self, group: PlacementGroup, opened: list[Any]) -> list[Mapping[str, Any]]:
        """What the actors said of themselves; an error that names the nodes of those that couldn't."""
        answers, faults = [], []
        for index, ref in enumerate(opened):
            fault: object
            try:
                fault = answer = ray.get(ref, timeout=0)
                if isinstance(answer, Mapping):
                    answers.append(answer)
                    continue
            except GetTimeoutError:
                fault = f"it isn't there after {_ACTORS_START_WITHIN_S:g} s; Ray's logs on that machine may say why"
            except Exception as error:
                fault = _start_words(str(error))
            faults.append(f"on {self._node_of(group, index)}: {fault}")
        if faults:
            text = "\n  ".join(dict.fromkeys(faults))
            raise ColocateError(f"the Ray actors that hold the slots could not be started:\n  {text}")
        return answers

    def _node_of(self, group: PlacementGroup, index: int) -> str:
        found = placement_group_table(group).get("bundles_to_node_id", {}).get(index, "")
        return self.nodes.name(found) if found else "a node"

    def _slot(self, index: int, found: Mapping[str, Any]) -> Slot:
        return Slot(index, self.nodes.name(found["node"]), found["devices"], found["host"], found["address"])

    def _watch(self, number: int, held: Held) -> None:
        held.watches = [actor.watch.remote() for actor in held.actors]
        for index, watch in enumerate(held.watches):
            watch.future().add_done_callback(partial(self._ended, number, index))

    def _ended(self, number: int, index: int, future: Any) -> None:
        """An actor is gone. On a thread of Ray's."""
        held = self._held.get(number)
        if held is None:  # it was released
            return
        self._lost(number, index, _brief(str(future.exception())))
        threading.Thread(target=self._look_after, args=(held,), name="colocate-ray-loss", daemon=True).start()

    def _look_after(self, held: Held) -> None:
        """If it went with its node, withdraw the whole: Ray would reserve a slot elsewhere, for nobody."""
        deadline = time.monotonic() + _LOOKS_AFTER_NODE_S
        while not held.released.wait(0.5) and time.monotonic() < deadline:
            if held.group is not None and _state(held.group) != "CREATED":
                remove_placement_group(held.group)
                return


def _brief(text: str) -> str:
    """Ray's words without the table of ids in them."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines)


def _bundle(request: Request) -> dict[str, float]:
    bundle = {"CPU": request.cpus, "GPU": request.gpus, "memory": request.host_memory_bytes or 0}
    # A bundle has to hold something: a byte.
    return {name: amount for name, amount in bundle.items() if amount} or {"memory": 1}


def _wait_placed(held: Held, patience: float) -> bool:
    """Wait until a placement group has its slots; False when it has none in time."""
    assert held.group is not None
    deadline = time.monotonic() + patience
    while _state(held.group) != "CREATED":
        if held.released.wait(_STEP_S):
            raise ColocateError(_WITHDRAWN)
        if time.monotonic() > deadline:
            return False
    return True


def _state(group: PlacementGroup) -> str:
    return str(placement_group_table(group).get("state", "REMOVED"))


def _start_words(text: str) -> str:
    text = re.sub(r"\x1b\[\d*m", "", text)  # Ray colours its errors
    found = re.search(r"(?:ModuleNotFoundError|ImportError): (.*)", text)
    if found is None:
        return text
    return (
        f"colocate can't be imported there ({found[1]}): install the same version in the Python that Ray runs on every "
        "node, or deliver it: connect('ray', runtime_env={...})"
    )
