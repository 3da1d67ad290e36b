"""The offers of Dask workers, and the choice of workers for a request. Imports no Dask."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence

import attrs

from colocate.keeper import describe_mismatch
from colocate.placement import matches

_SHOWN = 8  # Error texts show at most this many values of a label per machine.


@attrs.frozen
class SlotRequest:
    """A driver's request to the scheduler for slots. The scheduler grants all of the slots or none."""

    reservation: str  # Id of the future reservation.
    client: str  # Id of the driver's Dask client. The slots are freed when this client disconnects.
    owner: str  # Name of the pool.
    slots: int
    cpus: float = 0  # Number of Dask threads that each slot needs.
    gpus: int = 0  # Number of GPUs that each slot needs.
    memory: int = 0  # Bytes of memory that each slot needs; 0 for any amount.
    strategy: str = "pack"  # Placement strategy (`Request.strategy`).
    timeout: float = 60.0  # Seconds to wait for slots that don't fit now.
    share: bool = False  # Whether slots may use Dask workers with other tasks, and leave these workers open for tasks.
    # Addresses of the exact Dask workers to hold, in this order; None for any workers.
    only: tuple[str, ...] | None = None
    label: str = ""  # The reservation's name, unique among all drivers (`Request.id`).
    lot: int = 0  # Number of slots of the whole reservation, if this request replaces lost slots; else 0.
    # Labels that each slot's Dask worker must have: `name` and `host` are the possible labels.
    labels: Mapping[str, str] = attrs.field(factory=dict)
    # Amounts of Dask's resources that each slot needs, by name.
    resources: Mapping[str, float] = attrs.field(factory=dict)
    together: str = ""  # A label that must have one value on all slots (`Request.together`); empty for none.
    grow: bool | None = False  # Whether to wait for new Dask workers (`Request.grow`).


@attrs.frozen
class ReservationInfo:
    """A reservation in the scheduler's table of reservations."""

    label: str  # Name of the reservation (`Request.id`).
    id: str
    client: str  # Id of the driver's Dask client; empty for a detached pool.
    present: bool  # Whether the client is connected; True for a detached pool.
    slots: int  # Number of slots at the time of the reservation.
    workers: tuple[str, ...]  # Addresses of the Dask workers that the reservation still holds.
    hosts: tuple[str, ...]  # Addresses of the machines of these Dask workers.
    since: float  # Time of the reservation, in seconds of `time.time()`.
    stuck: tuple[str, ...] = ()  # Addresses of Dask workers that failed to end their slots.


@attrs.frozen
class Facts:
    """The facts that a process reports about itself: versions, GPUs, and the planned end."""

    python: str  # The version of Python, as "3.12".
    colocate: str
    visible: tuple[str, ...] | None = None  # The GPUs in `CUDA_VISIBLE_DEVICES`; None if the variable isn't set.
    # Whether dask-cuda started the Dask worker. The first visible GPU then belongs to this worker.
    dask_cuda: bool = False
    # Time of a planned close (`--lifetime`), in seconds of `time.time()`; None if none is planned.
    retires: float | None = None

    def version_difference(self, driver: Facts) -> str | None:
        """Describe how versions differ from the driver's versions, with a remedy. None if the versions match."""
        local_versions, remote_versions = (
            {"colocate": facts.colocate, "python": facts.python} for facts in (driver, self)
        )
        return describe_mismatch(local_versions, remote_versions)


@attrs.frozen
class Offer:
    """A Dask worker that can be used as one slot."""

    worker: str  # Address of the Dask worker.
    host: str  # Address of the worker's machine.
    cpus: float  # Number of Dask threads.
    gpus: int = 0
    # Names of the GPUs for `CUDA_VISIBLE_DEVICES`; None if the Dask worker doesn't report GPUs.
    visible: tuple[str, ...] | None = None
    memory: int = 0  # Memory limit in bytes; 0 for no limit.
    unfit: str = ""  # The reason why the worker can never hold a slot; empty for a usable worker.
    obstacle: str = ""  # The reason why the worker can't hold a slot now; empty for a free worker.
    name: str = ""  # Dask's name of the worker.
    resources: Mapping[str, float] = attrs.field(factory=dict)  # Amounts of Dask's resources, by name.

    @property
    def labels(self) -> dict[str, str]:
        """The Dask worker's labels, by which requests can select workers."""
        return {"name": self.name, "host": self.host}

    def fits(self, wanted: SlotRequest) -> bool:
        """Return whether a requested slot would fit on the Dask worker if the worker were free."""
        memory = not (wanted.memory and self.memory) or self.memory >= wanted.memory
        further = all(self.resources.get(name, 0) >= amount for name, amount in wanted.resources.items())
        counted = self.cpus >= wanted.cpus and self.gpus >= wanted.gpus and memory and further
        return not self.unfit and counted and matches(self.labels, wanted.labels)

    @property
    def rank_key(self) -> tuple[object, ...]:
        """The key that sorts workers into ranks: by machine, then GPUs, then address."""
        return host_key(self.host), tuple(map(device_key, self.visible or ())), host_key(self.worker)


@attrs.frozen
class Grant:
    """A slot that the scheduler has granted to a driver."""

    worker: str  # Address of the Dask worker that holds the slot.
    host: str  # Address of the worker's machine.
    gpus: tuple[str, ...] = ()  # Names of the slot's GPUs, for `CUDA_VISIBLE_DEVICES`.
    # Each grant has a new id, because a reservation may lose a worker and get the same worker again.
    id: str = attrs.field(factory=lambda: secrets.token_hex(8))


@attrs.frozen
class Refusal:
    """A refusal of a whole request: the slots can never fit, or didn't fit in time.

    `rows` is the table of nodes for the error. `requested_slots` is the number of workers last requested from an
    adaptive cluster; None for other clusters.
    """

    never: bool
    rows: tuple[dict[str, str], ...]
    requested_slots: int | None = None


def host_key(address: str) -> tuple[object, ...]:
    """Return a sort key for addresses that compares numbers by value, so that port 9 comes before port 10."""
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":") if scheme else (rest, "", "")
    try:
        number = int(ipaddress.ip_address(host.strip("[]") or rest))
    except ValueError:
        return 1, 0, host or rest, _sort_number(port)
    return 0, number, "", _sort_number(port)


def device_key(name: str) -> tuple[bool, int, str]:
    """Return a sort key for names of GPUs: indices by value, then UUIDs."""
    return not name.isdigit(), _sort_number(name), name


def _sort_number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def choose_workers(offers: Sequence[Offer], wanted: SlotRequest) -> list[Offer] | None:
    """Choose Dask workers for a request and return their offers in the order of ranks; None if there are too few."""
    alike: dict[str, list[Offer]] = {}
    for offer in offers:
        if (shared := offer.labels.get(wanted.together)) is not None or not wanted.together:
            alike.setdefault(shared or "", []).append(offer)
    choices = (_choose_among(offer_set, wanted) for offer_set in alike.values())
    return next((offer_set for offer_set in choices if offer_set is not None), None)


def _choose_among(offers: Sequence[Offer], wanted: SlotRequest) -> list[Offer] | None:
    by_host: dict[str, list[Offer]] = {}
    # A slot takes the smallest suitable worker, so that larger workers stay free for larger requests.
    for offer in sorted(offers, key=lambda offer: (offer.gpus, offer.cpus, offer.rank_key)):
        if offer.fits(wanted):
            by_host.setdefault(offer.host, []).append(offer)
    if wanted.strategy.endswith("pack"):
        hosts = sorted(by_host.values(), key=lambda own: (-len(own), own[0].rank_key))
        chosen = [offer for own in hosts[: 1 if wanted.strategy == "strict_pack" else None] for offer in own]
    else:
        hosts = sorted(by_host.values(), key=lambda own: own[0].rank_key)
        rounds = 1 if wanted.strategy == "strict_spread" else max(map(len, hosts), default=0)
        chosen = [own[turn] for turn in range(rounds) for own in hosts if turn < len(own)]
    if len(chosen) < wanted.slots:
        return None
    return sorted(chosen[: wanted.slots], key=lambda offer: offer.rank_key)


def offer_table(offers: Sequence[Offer], wanted: SlotRequest) -> tuple[dict[str, str], ...]:
    """Return a table row for each machine: request, total, free part, and the reasons why workers aren't free."""
    by_host: dict[str, list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.rank_key):
        by_host.setdefault(offer.host, []).append(offer)
    request_text = f"{_count_workers(wanted.slots)} with {wanted.cpus:g} CPU, {wanted.gpus} GPU"
    if wanted.memory:
        request_text += f", {wanted.memory / 2**30:.1f} GiB"
    request_text += "".join(f", {amount * wanted.slots:g} {name}" for name, amount in wanted.resources.items())
    looked_at = dict.fromkeys([*wanted.labels, *filter(None, [wanted.together])])
    rows = []
    for host, host_offers in by_host.items():
        free = [offer for offer in host_offers if not offer.unfit and not offer.obstacle]
        row = {
            "node": host,
            "wanted": request_text,
            "total": _format_amounts(host_offers, wanted),
            "free": _format_amounts(free, wanted),
        }
        labels = {"labels": ", ".join(_label_values(host_offers, name) for name in looked_at)} if looked_at else {}
        rows.append({**row, **labels, "why": _count_reasons(host_offers)})
    return tuple(rows)


def _count_workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _label_values(offers: Sequence[Offer], label: str) -> str:
    values = sorted({offer.labels[label] for offer in offers if label in offer.labels})
    shown = "|".join([*values[:_SHOWN], *(["..."] if values[_SHOWN:] else [])])
    return f"{label}={shown}" if values else f"no {label}"


def _format_amounts(offers: Sequence[Offer], wanted: SlotRequest) -> str:
    cpus, gpus = sum(offer.cpus for offer in offers), sum(offer.gpus for offer in offers)
    limit = _format_limit if wanted.memory else lambda offer: ""
    sizes = sorted({f"{offer.cpus:g}/{offer.gpus}{limit(offer)}" for offer in offers})
    detail = f" ({', '.join(sizes)} each)" if sizes else ""
    further = "".join(f", {sum(o.resources.get(name, 0) for o in offers):g} {name}" for name in wanted.resources)
    return f"{_count_workers(len(offers))}: {cpus:g} CPU, {gpus} GPU{detail}{further}"


def _format_limit(offer: Offer) -> str:
    return f"/{offer.memory / 2**30:.1f} GiB" if offer.memory else ""


def _count_reasons(offers: Sequence[Offer]) -> str:
    counts: dict[str, int] = {}
    for offer in offers:
        if reason := offer.unfit or offer.obstacle:
            counts[reason] = counts.get(reason, 0) + 1
    return "; ".join(f"{count} {reason}" for reason, count in counts.items())


def make_grant(offer: Offer, wanted: SlotRequest, used: Mapping[str, set[str]]) -> Grant:
    """Assign GPUs to a slot: the worker's visible GPUs, or else the lowest free indices on the machine."""
    if not wanted.gpus:
        return Grant(offer.worker, offer.host)
    if offer.visible is not None:
        return Grant(offer.worker, offer.host, offer.visible[: wanted.gpus])
    held = used.get(offer.host, set())
    free = (str(index) for index in range(len(held) + wanted.gpus) if str(index) not in held)
    return Grant(offer.worker, offer.host, tuple(name for name, _ in zip(free, range(wanted.gpus), strict=False)))
