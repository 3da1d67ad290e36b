"""Offers of Dask workers, and the choice of workers for a request: plain data, without Dask."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence

import attrs

from colocate.keeper import difference
from colocate.placement import matches

_SHOWN = 8  # values shown per label and machine


@attrs.frozen
class Wanted:
    """A driver's request for slots, all or none, as sent to the scheduler."""

    reservation: str  # id of the future reservation
    client: str  # id of the driver's Dask client; the slots are freed when this client goes
    owner: str  # name of the pool
    slots: int  # number of slots
    cpus: float = 0  # threads of each slot
    gpus: int = 0  # GPUs of each slot
    memory: int = 0  # bytes of each slot; 0 for any
    strategy: str = "pack"  # same as in `Request`
    timeout: float = 60.0  # seconds to wait while the slots could fit later
    share: bool = False  # whether workers with other tasks are accepted, and stay open for tasks
    only: tuple[str, ...] | None = None  # addresses of the exact workers to hold, in this order; None to choose
    label: str = ""  # the reservation's name, unique among all drivers (`Request.id`)
    lot: int = 0  # the reservation's number of slots, if these slots replace lost ones; else 0
    # same as in `Request`; labels are `name` and `host` of Dask workers
    labels: Mapping[str, str] = attrs.field(factory=dict)
    resources: Mapping[str, float] = attrs.field(factory=dict)  # Dask's resources of each slot
    together: str = ""  # same as in `Request`
    grow: bool | None = False  # same as in `Request`


@attrs.frozen
class Held:
    """A reservation in the scheduler's table."""

    label: str  # name of the reservation (`Request.id`)
    id: str  # id of the reservation
    client: str  # id of the driver's Dask client; empty for a detached pool
    present: bool  # whether this client is still connected, or none is needed
    slots: int  # number of slots at the time of the reservation
    workers: tuple[str, ...]  # addresses of the remaining Dask workers
    hosts: tuple[str, ...]  # addresses of the remaining workers' machines
    since: float  # time of the reservation, in seconds of time.time()
    stuck: tuple[str, ...] = ()  # addresses of workers that failed to end their slots


@attrs.frozen
class Facts:
    """The facts that a Dask worker reports about the process."""

    python: str  # version of Python, as "3.12"
    colocate: str  # version of colocate
    visible: tuple[str, ...] | None = None  # the GPUs in `CUDA_VISIBLE_DEVICES`; None if unset
    dask_cuda: bool = False  # whether dask-cuda started the worker, which then owns the first visible GPU
    retires: float | None = None  # time of a planned close (`--lifetime`), in seconds of time.time()

    def unlike(self, driver: Facts) -> str | None:
        """Describe a difference in versions from the driver's, and a remedy; None if the versions match."""
        local_versions, remote_versions = (
            {"colocate": facts.colocate, "python": facts.python} for facts in (driver, self)
        )
        return difference(local_versions, remote_versions)


@attrs.frozen
class Offer:
    """One Dask worker: room for one slot."""

    worker: str  # address of the worker
    host: str  # address of the machine
    cpus: float  # number of threads
    gpus: int = 0  # number of GPUs
    # the GPUs' names for `CUDA_VISIBLE_DEVICES`; None if the worker doesn't tell
    visible: tuple[str, ...] | None = None
    memory: int = 0  # memory limit in bytes; 0 for none
    unfit: str = ""  # why the worker can never hold a slot; empty for a usable worker
    taken: str = ""  # why the worker can't hold a slot now; empty for a free worker
    name: str = ""  # name of the worker
    resources: Mapping[str, float] = attrs.field(factory=dict)  # Dask's resources

    @property
    def labels(self) -> dict[str, str]:
        """The labels that requests can select by."""
        return {"name": self.name, "host": self.host}

    def suits(self, wanted: Wanted) -> bool:
        """Return whether a slot would fit if the worker were free."""
        memory = not (wanted.memory and self.memory) or self.memory >= wanted.memory
        further = all(self.resources.get(name, 0) >= amount for name, amount in wanted.resources.items())
        counted = self.cpus >= wanted.cpus and self.gpus >= wanted.gpus and memory and further
        return not self.unfit and counted and matches(self.labels, wanted.labels)

    @property
    def rank_key(self) -> tuple[object, ...]:
        """The sort key of ranks: machine, devices, address."""
        return host_key(self.host), tuple(map(device_key, self.visible or ())), host_key(self.worker)


@attrs.frozen
class Grant:
    """One slot that a driver holds."""

    worker: str  # address of the Dask worker
    host: str  # address of the machine
    gpus: tuple[str, ...] = ()  # names of the GPUs in `CUDA_VISIBLE_DEVICES`
    # a new id per grant: a reservation may lose a worker and get the same worker again
    id: str = attrs.field(factory=lambda: secrets.token_hex(8))


@attrs.frozen
class Refusal:
    """No slot is held: the request can never fit, or didn't fit in time.

    `rows` is the table of nodes; `asked` the last target of an adaptive cluster, in workers, if there is one.
    """

    never: bool
    rows: tuple[dict[str, str], ...]
    asked: int | None = None


def host_key(address: str) -> tuple[object, ...]:
    """Return a key that sorts addresses naturally, with numbers by value."""
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":") if scheme else (rest, "", "")
    try:
        number = int(ipaddress.ip_address(host.strip("[]") or rest))
    except ValueError:
        return 1, 0, host or rest, _number(port)
    return 0, number, "", _number(port)


def device_key(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts GPUs: by index, with UUIDs last."""
    return not name.isdigit(), _number(name), name


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def choose(offers: Sequence[Offer], wanted: Wanted) -> list[Offer] | None:
    """Choose the workers for a request, in the order of the ranks; None if there are too few."""
    alike: dict[str, list[Offer]] = {}
    for offer in offers:
        if (shared := offer.labels.get(wanted.together)) is not None or not wanted.together:
            alike.setdefault(shared or "", []).append(offer)
    choices = (_choose_among(offer_set, wanted) for offer_set in alike.values())
    return next((offer_set for offer_set in choices if offer_set is not None), None)


def _choose_among(offers: Sequence[Offer], wanted: Wanted) -> list[Offer] | None:
    by_host: dict[str, list[Offer]] = {}
    # A slot takes the smallest suitable worker, and so leaves larger workers to larger requests.
    for offer in sorted(offers, key=lambda offer: (offer.gpus, offer.cpus, offer.rank_key)):
        if offer.suits(wanted):
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


def table(offers: Sequence[Offer], wanted: Wanted) -> tuple[dict[str, str], ...]:
    """Return a row per node: the request, the total, the free part, and why the rest isn't free."""
    by_host: dict[str, list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.rank_key):
        by_host.setdefault(offer.host, []).append(offer)
    request_text = f"{_workers(wanted.slots)} with {wanted.cpus:g} CPU, {wanted.gpus} GPU"
    if wanted.memory:
        request_text += f", {wanted.memory / 2**30:.1f} GiB"
    request_text += "".join(f", {amount * wanted.slots:g} {name}" for name, amount in wanted.resources.items())
    looked_at = dict.fromkeys([*wanted.labels, *filter(None, [wanted.together])])
    rows = []
    for host, host_offers in by_host.items():
        free = [offer for offer in host_offers if not offer.unfit and not offer.taken]
        row = {
            "node": host,
            "wanted": request_text,
            "total": _amounts(host_offers, wanted),
            "free": _amounts(free, wanted),
        }
        labels = {"labels": ", ".join(_values(host_offers, name) for name in looked_at)} if looked_at else {}
        rows.append({**row, **labels, "why": _reasons(host_offers)})
    return tuple(rows)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _values(offers: Sequence[Offer], label: str) -> str:
    values = sorted({offer.labels[label] for offer in offers if label in offer.labels})
    shown = "|".join([*values[:_SHOWN], *(["..."] if values[_SHOWN:] else [])])
    return f"{label}={shown}" if values else f"no {label}"


def _amounts(offers: Sequence[Offer], wanted: Wanted) -> str:
    cpus, gpus = sum(offer.cpus for offer in offers), sum(offer.gpus for offer in offers)
    limit = _limit if wanted.memory else lambda offer: ""
    sizes = sorted({f"{offer.cpus:g}/{offer.gpus}{limit(offer)}" for offer in offers})
    detail = f" ({', '.join(sizes)} each)" if sizes else ""
    further = "".join(f", {sum(o.resources.get(name, 0) for o in offers):g} {name}" for name in wanted.resources)
    return f"{_workers(len(offers))}: {cpus:g} CPU, {gpus} GPU{detail}{further}"


def _limit(offer: Offer) -> str:
    return f"/{offer.memory / 2**30:.1f} GiB" if offer.memory else ""


def _reasons(offers: Sequence[Offer]) -> str:
    counts: dict[str, int] = {}
    for offer in offers:
        if reason := offer.unfit or offer.taken:
            counts[reason] = counts.get(reason, 0) + 1
    return "; ".join(f"{count} {reason}" for reason, count in counts.items())


def grant(offer: Offer, wanted: Wanted, used: Mapping[str, set[str]]) -> Grant:
    """Assign GPUs to a slot: the worker's visible GPUs, or else the lowest free indices of the machine."""
    if not wanted.gpus:
        return Grant(offer.worker, offer.host)
    if offer.visible is not None:
        return Grant(offer.worker, offer.host, offer.visible[: wanted.gpus])
    held = used.get(offer.host, set())
    free = (str(index) for index in range(len(held) + wanted.gpus) if str(index) not in held)
    return Grant(offer.worker, offer.host, tuple(name for name, _ in zip(free, range(wanted.gpus), strict=False)))
