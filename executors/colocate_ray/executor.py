"""The Ray executor: placement groups whose actors hold keepers. Imports no Ray: the envoy does."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from colocate.errors import ConfigError, EngineError, PlacementTimeout
from colocate.executor import (
    Boot,
    Executor,
    Host,
    HostEvents,
    MultiNode,
    Node,
    OwnProcess,
    Place,
    Request,
    Reservation,
    Running,
)
from colocate.gpus import count_gpus, listed, names, torch_device
from colocate.keeper import Asked, Keepers, KeptSlot
from colocate.placement import words
from colocate_ray.certificates import tls_of_environment
from colocate_ray.envoy import Envoy
from colocate_ray.terms import Cluster, Slot

if importlib.util.find_spec("ray") is None:
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

RELEASED_WITHIN_S = 11.0  # a little more than Ray is given
LISTED_WITHIN_S = 10.0

_Key = tuple[int, int]  # a slot: number of its reservation, index of its bundle


class RayExecutor(Executor, OwnProcess, MultiNode):
    """Workers on the machines of a Ray cluster, or of a private Ray on this one."""

    name = "ray"

    @classmethod
    def connect(  # type: ignore[override]  # its options are the user's to see
        cls,
        *,
        address: str | None = None,
        cpus: float | None = None,
        gpus: int | None = None,
        token_file: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> Executor:
        """Start a private Ray, or join a cluster.

        Args:
            address: "host:port" of the cluster's head, or "auto" for the cluster that this machine is in (that of
                `RAY_ADDRESS`, or of the driver's own `ray.init()`). None starts a private Ray, which ends with the
                runtime.
            cpus: CPUs that a private Ray offers; None for this machine's.
            gpus: GPUs that a private Ray offers; None for those that this process sees.
            token_file: The file with the token of the cluster to join; None for what Ray finds in the environment.
            runtime_env: Ray's runtime environment of the actors beside which the workers run.
        """
        if address is not None:
            _check_joining(address, cpus, gpus)
        elif token_file is not None:
            raise ConfigError("connect('ray', token_file=...) is for joining a cluster: a private Ray makes its own")
        own = _own_gpus(gpus) if address is None else None
        cluster = Cluster(_of_this_process(address), cpus, own, token_file, runtime_env)
        if cluster.private:
            return cls(cluster)
        from colocate_ray.joined import JoinedRayExecutor

        return JoinedRayExecutor(cluster)

    @classmethod
    def objection(cls, option: str, value: Any) -> str | None:
        """What is installed and run, and which cluster is believed."""
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
        """Use `connect`."""
        self._cluster = cluster
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._slots: dict[_Key, KeptSlot] = {}
        self._asked: dict[str, int] = {}  # what is being reserved: the numbers of requests
        self._withdrawn: set[str] = set()
        self._lost: dict[_Key, str] = {}
        self._ends: dict[_Key, Asked] = {}  # of keepers that didn't answer
        tls = None if cluster.private else tls_of_environment()  # before there is anything that an error would leave
        self._keepers = Keepers("ray", tls)
        try:
            self._envoy = Envoy(cluster, self._actor_ended)
        except BaseException:
            self._keepers.close()
            raise

    def nodes(self) -> Sequence[Node]:
        """The nodes of the cluster."""
        found: list[Node] = self._envoy.call("list_nodes")
        return found

    def reserve(self, request: Request) -> Reservation:
        """Hold slots in a placement group, with a keeper in each."""
        number = self._asked[request.id] = next(self._numbers)
        try:
            if request.id in self._withdrawn:  # who withdraws looks the other way round: one of the two sees it
                raise PlacementTimeout(words(request, "was withdrawn before it was asked for"))
            reserve = partial(self._envoy.call, "reserve", patience_s=request.timeout)
            slots: list[Slot] = reserve(number, request, self._keepers.key)
            return Reservation(tuple(self._place(number, slot) for slot in slots), number)
        except EngineError:  # a head that answers again would go on with it
            self._envoy.post("release", number)
            raise
        finally:
            self._asked.pop(request.id, None)

    def withdraw(self, request: Request) -> None:
        """Nobody waits for them any more."""
        self._withdrawn.add(request.id)
        number = self._asked.get(request.id)
        if number is not None:
            self._envoy.post("release", number)

    def _place(self, number: int, slot: Slot) -> Place:
        key = number, slot.index
        kept = self._keepers.slot(slot.address, on_stuck=partial(self._end_slot, key), gone=is_gone(slot))
        with self._lock:
            self._slots[key] = kept
            words = self._lost.pop(key, None)
        if words is not None:  # it went before we had it
            kept.lost(words)
        return place_of(slot, key)

    def _end_slot(self, key: _Key) -> None:
        self._ends.setdefault(key, self._envoy.post("end_slot", *key))

    def _actor_ended(self, number: int, index: int, words: str) -> None:
        with self._lock:
            slot = self._slots.get((number, index))
            if slot is None:
                self._lost[number, index] = words
        if slot is not None:
            slot.lost(words)

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        """Have the slot's keeper start a worker."""
        return self._slots[place.handle].launch(boot, events)

    def lost(self, place: Place) -> bool:
        """Whether the actor of a slot is gone."""
        slot = self._slots.get(place.handle)
        return slot is None or slot.is_lost

    def release(self, reservation: Reservation) -> None:
        """End the actors, and give the placement group back."""
        for place in reservation.places:
            self._slots[place.handle].close()
        try:
            ends = [end for key, end in list(self._ends.items()) if key[0] == reservation.handle]
            self._envoy.wait(ends, RELEASED_WITHIN_S)
            self._envoy.call("release", reservation.handle, within_s=RELEASED_WITHIN_S)
        except EngineError:  # Ray takes back what a driver has held that is gone
            pass
        finally:
            self._forget(reservation)

    def _forget(self, reservation: Reservation) -> None:
        with self._lock:
            for place in reservation.places:
                self._slots.pop(place.handle, None)
                self._ends.pop(place.handle, None)

    def running(self) -> Sequence[Running]:
        """What Ray's tables have for this driver, and the workers as their keepers find them."""
        return [*self._keepers.running(), *self._envoy.call("list_running", within_s=LISTED_WITHIN_S)]

    def strays(self) -> Sequence[Running]:
        """Placement groups and Ray actors of ours whose jobs have ended."""
        found: list[Running] = self._envoy.call("list_strays", within_s=LISTED_WITHIN_S)
        return found

    def close(self) -> None:
        """Leave the cluster, or end the private one."""
        self._keepers.close()
        self._envoy.close()


def place_of(slot: Slot, key: _Key) -> Place:
    """Where a slot lies, by which key this driver finds it again."""
    device = torch_device(0 if slot.devices else None)  # Ray shows an actor its own devices only
    return Place(slot.node, slot.devices, device, slot.host, key)


def is_gone(slot: Slot) -> str:
    """What is said of a slot whose keeper can't be reached, as long as Ray says nothing."""
    return f"Ray node {slot.node} ({slot.host}) is gone, or this driver's Ray actor there"


def _check_joining(address: str, cpus: float | None, gpus: int | None) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"connect('ray', address={address!r}): Ray Client can't hold workers. Run the driver in the cluster, as a "
            "job (`ray job submit --address http://HEAD:8265 -- python driver.py`), with address='auto'"
        )
    if address == "local":  # Ray's own word for a new one
        raise ConfigError(
            "connect('ray', address='local'): leave address out for a private Ray; 'auto' joins a cluster"
        )
    if cpus is not None or gpus is not None:
        raise ConfigError(
            "connect('ray', address=...): cpus= and gpus= are what a private Ray offers; a cluster has its own"
        )


def _own_gpus(gpus: int | None) -> tuple[str, ...] | None:
    """The GPUs that a private Ray is to offer; None has it look, for those of other makers too."""
    found = names(count_gpus() if gpus is None else gpus)
    return found if found or gpus is not None or listed() is not None else None


def _of_this_process(address: str | None) -> str | None:
    """For "auto" the cluster that the driver itself is in, if it has called `ray.init()`."""
    ray = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return address
