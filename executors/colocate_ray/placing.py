"""Placement groups for reservations, and the start of keepers in the bundles. Runs in the envoy and `Owner` actors."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import ray
from ray.exceptions import GetTimeoutError, RuntimeEnvSetupError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import colocate
from colocate.errors import CapabilityError, ClusterError, ColocateError, PlacementError, PlacementTimeout
from colocate.executor import Node, Request, Running
from colocate.gpus import indices as numbers
from colocate.placement import describe_request
from colocate_ray import listing
from colocate_ray.growing import Autoscaler, read_autoscaler
from colocate_ray.holder import Gpus, read_gpus
from colocate_ray.holders import HolderActor, Holders
from colocate_ray.joining import ray_message
from colocate_ray.nodes import Nodes, find_head_fault, natural_key
from colocate_ray.silence import exclude_nodes
from colocate_ray.terms import Cluster, Slot

_ACTORS_START_WITHIN_S = 120.0
_RELEASED_WITHIN_S = 10.0
_KEEPERS_END_WITHIN_S = 5.0
_SHOWN_WITHIN_S = 1.0  # Nodes report their resources every tenth of a second.
_DOUBT_AFTER_S = 0.5
# Ray learns of free resources with a delay.
# If Ray reports enough free resources, the wait lasts at least this long, even beyond the request's timeout.
_SETTLES_WITHIN_S = 5.0
_LOOKS_AGAIN_S = 2.0  # While a request waits for slots, silent nodes are checked at this interval.
_STEP_S = 0.02
_REPLACED_STEP_S = 0.1
_WITHDRAWN = "the reservation was withdrawn"


@attrs.define(eq=False)
class Bundles:
    """A reservation in Ray: the placement group and the holders, during and after the placement."""

    request: Request
    group: PlacementGroup | None = None
    nodes_by_index: dict[int, str] = attrs.field(factory=dict)  # Ray's node ids, by index of the bundle.
    holders: dict[int, HolderActor] = attrs.field(
        factory=dict
    )  # Holders (actors with keepers), by index of the bundle.
    opened_indices: set[int] = attrs.field(factory=set)  # Indices of the bundles with live keepers.
    released: threading.Event = attrs.field(factory=threading.Event)
    _making: threading.Lock = attrs.field(factory=threading.Lock)

    @contextmanager
    def lock_creation(self) -> Iterator[None]:
        """Guard a request that creates something in Ray, so that `stop_creating` can wait for the end of the request.

        Raises:
            ColocateError: The reservation was withdrawn.
        """
        with self._making:
            if self.released.is_set():
                raise ColocateError(_WITHDRAWN)
            yield

    def replace_group(self, request: Request | None) -> None:
        """Remove the placement group, which has no slots yet, and create a new one unless `request` is None.

        Raises:
            ColocateError: The reservation was withdrawn.
        """
        with self.lock_creation():
            if self.group is not None:
                remove_placement_group(self.group)
                self.group = None
            if request is not None:
                name = f"{listing.PREFIX}{request.id}"
                self.group = placement_group(
                    [_make_bundle(request)] * request.slots, name=name, **_placement_options(request)
                )

    def stop_creating(self) -> None:
        """Refuse further requests to Ray, and wait until a request in progress has recorded the result."""
        self.released.set()
        with self._making:
            pass


class Placing:
    """All slots that this process holds in Ray. Thread-safe."""

    def __init__(self, cluster: Cluster, lost: Callable[[int, int, str], None]) -> None:
        self.nodes = Nodes()
        self.cluster = cluster
        self._lost = lost
        self._holders = Holders(self._on_holder_ended)
        self._held: dict[int, Bundles] = {}
        # Numbers of released reservations, including reservations that haven't started yet.
        self._withdrawn: set[int] = set()
        self._abandoned = False
        self._lock = threading.Lock()
        self._pause = threading.Event()  # This event is never set, and serves for timed waits between two checks.

    def check_head(self) -> None:
        """Check that the head of the cluster answers within a few seconds.

        Raises:
            ClusterError: The head doesn't answer.
        """
        silent = find_head_fault()
        if silent is None:
            return
        if self.cluster.private:
            raise ClusterError(
                f"the private Ray doesn't answer ({silent}): its control store, gcs_server, has ended or is stopped. "
                "Close the runtime, and connect again"
            )
        address = ray.get_runtime_context().gcs_address
        raise ClusterError(
            f"the head of the Ray cluster at {address} doesn't answer ({silent}): see whether it still runs, and "
            "whether this machine reaches it. Once it answers, slots can be reserved again; if it was started anew, "
            "close the runtime and connect again"
        )

    def list_nodes(self) -> list[Node]:
        """List the nodes of the cluster with their resources."""
        return self.nodes.list_offers()

    def list_leaving(self) -> dict[str, float | None]:
        """List the nodes that the cluster is draining."""
        return self.nodes.find_leaving()

    def list_running(self) -> list[Running]:
        """List this driver's entries in Ray's tables."""
        return listing.list_own(self.nodes)

    def list_strays(self) -> list[Running]:
        """List the entries in Ray's tables of drivers that are gone."""
        return listing.list_strays(self.nodes)

    def reserve(self, number: int, request: Request, key: bytes) -> list[Slot]:
        """Hold slots for a request, and start a keeper in each slot.

        Raises:
            PlacementError: The slots can never fit.
            PlacementTimeout: The slots don't fit now.
            ColocateError: The actors can't be started.
        """
        self._check_possible(request)
        held, deadline = Bundles(request), time.monotonic() + request.timeout
        with self._lock:
            if self._abandoned or number in self._withdrawn:
                raise ColocateError(_WITHDRAWN)
            self._held[number] = held
        try:
            placed = self._place_group(held)
            slots = self._fill_bundles(number, held, key, range(request.slots), deadline) if placed else None
        except Exception:
            # The event is read before the call of `release`, which sets the event in any case.
            withdrawn = held.released.is_set()
            self.release(number)
            if withdrawn:
                raise ColocateError(_WITHDRAWN) from None
            raise
        if slots is None:
            says = self._read_autoscaler()
            self.release(number)
            how = f"did not become free within {request.timeout:g} s" + (f" ({says.describe})" if says else "")
            raise PlacementTimeout(describe_request(request, how), nodes=self.nodes.offer_table(request))
        return slots

    def _check_possible(self, request: Request) -> None:
        try:
            self.nodes.check_possible(request)
        except PlacementError:
            if not self._may_grow(request):
                raise

    def _may_grow(self, request: Request) -> bool:
        return self._read_autoscaler(request.timeout) is not None if request.grow is None else request.grow

    def _read_autoscaler(self, within_s: float = 0.0) -> Autoscaler | None:
        return None if self.cluster.private else read_autoscaler(within_s)

    def _place_group(self, held: Bundles) -> bool:
        """Create a placement group and wait for the slots; return False on a timeout.

        Silent nodes are excluded, because Ray places nothing for anybody while it waits on a silent node, even after
        the node is declared dead.
        """
        request, silent = held.request, None
        deadline = time.monotonic() + request.timeout
        while True:
            if (now := frozenset() if self.cluster.private else self.nodes.find_silent()) != silent:
                silent, narrowed = now, attrs.evolve(request, labels={**exclude_nodes(now), **request.labels})
                if not silent or self.nodes.is_possible(narrowed) or self._may_grow(request):
                    if self.nodes.fits_now(narrowed):
                        deadline = max(deadline, time.monotonic() + _SETTLES_WITHIN_S)
                    held.replace_group(narrowed)
                else:
                    held.replace_group(None)
            if _await_placed(held, min(deadline, time.monotonic() + _LOOKS_AGAIN_S)):
                return True
            if time.monotonic() >= deadline:
                return False

    def replace(self, number: int, indices: Sequence[int], request: Request, key: bytes) -> list[Slot] | None:
        """Hold lost bundles again, after Ray has moved the bundles of lost nodes or holders to other nodes.

        Returns:
            The new slots. None if the placement group was removed.

        Raises:
            PlacementTimeout: The bundles have no place yet, or the actors can't be started there.
            ColocateError: The reservation was released.
        """
        held = self._held.get(number)
        if held is None or held.group is None:
            return None
        deadline = time.monotonic() + request.timeout
        try:
            again = self._await_replaced(held, held.group, indices, deadline)
            slots = self._fill_bundles(number, held, key, indices, deadline) if again else None
        except ColocateError as error:
            if held.released.is_set():
                raise
            # A new node may be leaving already, so a retry may find another node.
            raise PlacementTimeout(str(error)) from error
        if slots is None and _read_state(held.group) != "REMOVED":
            text = describe_request(request, f"did not come within {request.timeout:g} s in the place of lost ones")
            raise PlacementTimeout(text, nodes=self.nodes.offer_table(request))
        return slots

    def _fill_bundles(
        self, number: int, held: Bundles, key: bytes, indices: Sequence[int], deadline: float
    ) -> list[Slot] | None:
        """Start keepers in bundles, and return the slots. Returns None if the bundles get no nodes in time.

        An autoscaler may end an idle node, even if Ray has just placed a bundle there. Ray then places the bundle on
        another node.
        """
        assert held.group is not None
        slots = self._open_keepers(number, held, key, indices)
        while missing := sorted(set(indices) - {slot.index for slot in slots}):
            self._check_possible(held.request)
            if not self._await_replaced(held, held.group, missing, deadline):
                return None
            slots += self._open_keepers(number, held, key, missing)
        return sorted(slots, key=lambda slot: (natural_key(slot.node), slot.devices, slot.index))

    def _await_replaced(self, held: Bundles, group: PlacementGroup, indices: Sequence[int], deadline: float) -> bool:
        """Wait until the nodes of all given bundles answer. Returns False on a timeout, or if the group was removed.

        Ray itself notices a lost node only after many seconds.
        """
        state = _read_group(group)
        while state["state"] != "CREATED" or self.nodes.find_gone({state["placed"][index] for index in indices}):
            if state["state"] == "REMOVED" or time.monotonic() > deadline:
                return False
            if held.released.wait(_REPLACED_STEP_S):
                raise ColocateError(_WITHDRAWN)
            state = _read_group(group)
        held.nodes_by_index = state["placed"]
        return True

    def end_slot(self, number: int, index: int) -> None:
        """Kill the process of an unresponsive keeper, and wait until the process has ended."""
        held = self._held.get(number)
        if held is not None and index in held.holders:
            held.holders[index].kill_process()

    def release(self, number: int) -> None:
        """Release slots, even if the placement is in progress, and wait until the slots can be reserved again.

        Raises:
            ColocateError: Ray doesn't confirm the release.
        """
        with self._lock:
            self._withdrawn.add(number)
            held = self._held.pop(number, None)
        if held is None:
            return
        held.stop_creating()
        self._end_keepers(number, held)
        if held.group is not None:
            self._await_listed(held, held.group)
            remove_placement_group(held.group)
            self._await_returned(held.group.id.hex(), held.request.owner or "a pool")
        if held.holders:
            self._holders.release_user(number, end=self._read_autoscaler() is not None)

    def abandon(self) -> None:
        """Refuse further requests to Ray, and wait for requests in progress, because the driver is gone.

        Ray frees all slots when this process exits. If Ray learns of an actor only afterwards, the slot is freed a
        second or two later. An explicit release here could make Ray lose the slot of an actor that is just starting.
        """
        with self._lock:
            self._abandoned = True
            everything = list(self._held.values())
            self._held.clear()
        for held in everything:
            held.stop_creating()
        self._holders.stop_creating()

    def end_all(self) -> None:
        """End all holders, after the release of all reservations."""
        self._holders.end_all()

    def _end_keepers(self, number: int, held: Bundles) -> None:
        """End the keepers of a reservation.

        A holder that doesn't end its keepers in time is killed.
        """
        ends = {holder.actor.end.remote(number): holder for holder in set(held.holders.values())}
        pending, deadline = list(ends), time.monotonic() + _KEEPERS_END_WITHIN_S
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_DOUBT_AFTER_S, fetch_local=False)
            silent = self.nodes.find_gone({ends[index].node for index in pending}) if pending else set()
            pending = [index for index in pending if ends[index].node not in silent]
            if pending and time.monotonic() > deadline:
                for index in pending:
                    ends[index].kill_process()
                return

    def _await_listed(self, held: Bundles, group: PlacementGroup) -> None:
        """Wait until Ray's resource report shows a new placement group.

        The end of a group is visible in the report only if the group was.
        """
        deadline, nodes = time.monotonic() + _SHOWN_WITHIN_S, set(held.nodes_by_index.values())
        while missing := nodes - self.nodes.find_holding(group.id.hex()):
            if time.monotonic() > deadline or missing <= self.nodes.find_gone(missing):
                return
            self._pause.wait(_STEP_S)

    def _await_returned(self, group: str, whose: str) -> None:
        """Wait until no live node reserves resources for a placement group any more."""
        began = time.monotonic()
        while nodes := self.nodes.find_holding(group):
            waited = time.monotonic() - began
            if waited > _DOUBT_AFTER_S and nodes <= self.nodes.find_gone(nodes):
                return
            if waited > _RELEASED_WITHIN_S:
                raise ColocateError(
                    f"Ray was told to take {whose}'s slots back, and hasn't confirmed it in "
                    f"{_RELEASED_WITHIN_S:g} s for {', '.join(map(self.nodes.name_of, sorted(nodes)))}"
                )
            self._pause.wait(_STEP_S)

    def _open_keepers(self, number: int, held: Bundles, key: bytes, indices: Sequence[int]) -> list[Slot]:
        """Start keepers in bundles, and return their slots. Slots on nodes that are gone by now are left out."""
        request, placed = held.request, {index: held.nodes_by_index[index] for index in indices}
        with held.lock_creation():
            held.opened_indices -= placed.keys()
            holders = {
                node: self._holders.get_or_create(node, self._holder_owner(request), number)
                for node in set(placed.values())
            }
            held.holders.update({index: holders[node] for index, node in placed.items()})
        try:
            gpus = self._read_gpus(held, indices)
        except ColocateError:
            if self.nodes.find_gone(set(holders)):
                return []
            raise
        with held.lock_creation():
            opened = {}
            for node, holder in holders.items():
                slots = {index: gpus[index] for index in placed if placed[index] == node}
                opened[node] = holder.actor.open.remote(colocate.__version__, number, key, request, slots, self.cluster)
        ray.wait(list(opened.values()), num_returns=len(opened), timeout=_ACTORS_START_WITHIN_S, fetch_local=False)
        answers = self._collect_answers(opened)
        for node, answer in answers.items():
            holders[node].process = answer["process"]
        standing = {index: node for index, node in placed.items() if node in answers}
        held.opened_indices |= standing.keys()
        return [
            Slot(
                index,
                self.nodes.name_of(node),
                numbers(gpus[index].names, self.cluster.gpus or ()),
                answers[node]["host"],
                answers[node]["addresses"][index],
            )
            for index, node in standing.items()
        ]

    def _read_gpus(self, held: Bundles, indices: Sequence[int]) -> dict[int, Gpus]:
        """Run a task in each bundle, and return the bundles' GPUs, which Ray reports only to such tasks."""
        request, group = held.request, held.group
        if not request.gpus:
            return dict.fromkeys(indices, Gpus())
        assert group is not None
        task: Any = ray.remote(read_gpus)
        options = {"num_cpus": 0, "num_gpus": request.gpus, "max_retries": 0}
        refs = []
        for index in indices:
            strategy = PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=False)
            refs.append(task.options(**options, scheduling_strategy=strategy).remote(self.cluster))
        try:
            gpus: list[Gpus] = ray.get(refs, timeout=_ACTORS_START_WITHIN_S)
        except Exception as error:
            raise ColocateError(f"Ray doesn't tell the slots' GPUs: {describe_start_failure(error)}") from None
        return dict(zip(indices, gpus, strict=True))

    def _holder_owner(self, request: Request) -> str:
        """Return the reservation's id for the names of new holders."""
        return request.id

    def _collect_answers(self, opened: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Return the holders' answers by node, or raise an error that names the nodes of failed holders.

        Failures on nodes that are gone are ignored.
        """
        answers, faults = {}, {}
        for node, ref in opened.items():
            fault: object
            try:
                fault = answer = ray.get(ref, timeout=0)
                if isinstance(answer, Mapping):
                    answers[node] = answer
                    continue
            except GetTimeoutError:
                fault = f"it isn't there after {_ACTORS_START_WITHIN_S:g} s; Ray's logs on that machine may say why"
            except Exception as error:
                fault = describe_start_failure(error)
            faults[node] = f"on {self.nodes.name_of(node)}: {fault}"
        silent = self.nodes.find_gone(set(faults)) if faults else set()
        if text := "\n  ".join(fault for node, fault in faults.items() if node not in silent):
            raise ColocateError(f"the Ray actors that hold the keepers could not be started:\n  {text}")
        return answers

    def _on_holder_ended(self, holder: HolderActor, words: str) -> None:
        """Report the slots of a lost holder as lost. Runs on one of Ray's threads."""
        for number, held in list(self._held.items()):
            for index, holding in list(held.holders.items()):
                if holding is holder and index in held.opened_indices:
                    self._lost(number, index, words)


def _make_bundle(request: Request) -> dict[str, float]:
    bundle = {"CPU": request.cpus, "GPU": request.gpus, "memory": request.host_memory_bytes or 0}
    bundle |= request.resources
    # A bundle must not be empty, so a request for nothing gets one byte of memory.
    return {name: amount for name, amount in bundle.items() if amount} or {"memory": 1}


def _placement_options(request: Request) -> dict[str, Any]:
    """Return the options by which Ray chooses nodes for the bundles of a request.

    Raises:
        CapabilityError: This version of Ray lacks an option that the request needs.
    """
    strategy = request.strategy.upper()
    options: dict[str, Any] = {"strategy": strategy}
    if request.together:
        if "topology_strategy" not in inspect.signature(placement_group).parameters:
            raise CapabilityError(
                f"Ray {ray.__version__} can't keep slots together by a label (together={request.together!r}): Ray 2.60 "
                "can, on all machines of the cluster",
                capability="Labelled",
                executors=("ray",),
            )
        options = {"topology_strategy": {"ray.io/node-id": strategy, request.together: "STRICT_PACK"}}
    if request.labels:
        options["bundle_label_selector"] = [dict(request.labels)] * request.slots
    return options


def _await_placed(held: Bundles, deadline: float) -> bool:
    """Wait until Ray has placed all bundles of a reservation; return False on a timeout."""
    while held.group is None or _read_state(held.group) != "CREATED":
        if held.released.wait(_STEP_S):
            raise ColocateError(_WITHDRAWN)
        if time.monotonic() > deadline:
            return False
    held.nodes_by_index = dict(sorted(placement_group_table(held.group)["bundles_to_node_id"].items()))
    return True


def _read_group(group: PlacementGroup) -> dict[str, Any]:
    table = placement_group_table(group)
    return {"state": table.get("state", "REMOVED"), "placed": dict(table.get("bundles_to_node_id", {}))}


def _read_state(group: PlacementGroup) -> str:
    return str(placement_group_table(group).get("state", "REMOVED"))


def describe_start_failure(error: Exception) -> str:
    """Return an error text that explains why an actor or a task could not be started."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))  # Ray adds colour codes to error texts.
    environment = "the environment that connect('ray', runtime_env=...) names can't be set up there"
    if isinstance(error, RuntimeEnvSetupError):
        return f"{environment}: {ray_message(error)}"
    hook = re.search(r"the setup hook method, (\S+) .*^(\w[\w.]*: [^\n]*)", text, re.DOTALL | re.MULTILINE)
    if hook is not None:
        return f"{environment}: its worker_process_setup_hook {hook[1]} ended with {hook[2]}"
    match = re.search(r"(?:ModuleNotFoundError|ImportError): (.*)", text)
    if match is None:
        return text
    return (
        f"colocate can't be imported there ({match[1]}): install the same version in the Python that Ray runs on every "
        "node, or deliver it: connect('ray', runtime_env={...})"
    )
