"""What Dask workers offer, and which of them a request gets: plain data, without Dask."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence

import attrs

from colocate.keeper import difference
from colocate.placement import matches

_SHOWN = 8  # values of a label, of the workers of one machine


@attrs.frozen
class Wanted:
    """Slots wanted together, as a driver tells the scheduler."""

    reservation: str  # id of the reservation to be
    client: str  # id of the driver's Dask client; when it goes, the slots are freed
    owner: str  # name of the pool
    slots: int  # how many
    cpus: float = 0  # threads of each
    gpus: int = 0  # GPUs of each
    memory: int = 0  # bytes of each; 0 for any
    strategy: str = "pack"  # as that of `Request`
    timeout: float = 60.0  # seconds to wait while they could fit but don't now
    share: bool = False  # whether workers that serve others will do, and go on serving them
    only: tuple[str, ...] | None = None  # the very workers to hold, in this order; None to choose
    label: str = ""  # the reservation's name among those of all drivers (`Request.id`)
    lot: int = 0  # how many slots the reservation has in all, where these take the place of lost ones
    labels: Mapping[str, str] = attrs.field(factory=dict)  # as that of `Request`, by `name` and `host` of Dask workers
    resources: Mapping[str, float] = attrs.field(factory=dict)  # Dask's, of each
    together: str = ""  # as that of `Request`
    grow: bool | None = False  # as that of `Request`


@attrs.frozen
class Held:
    """A reservation, as the scheduler's table has it."""

    label: str  # its name (`Request.id`)
    id: str  # the reservation's
    client: str  # id of the driver's Dask client; empty when the reservation was given to the cluster
    present: bool  # whether that is still there, or nobody has to be
    slots: int  # how many it was made of
    workers: tuple[str, ...]  # addresses of its Dask workers that are still there
    hosts: tuple[str, ...]  # those of their machines
    since: float  # when it was made, in seconds of time.time()
    stuck: tuple[str, ...] = ()  # addresses of those that didn't end their slots when they were told to


@attrs.frozen
class Facts:
    """What a Dask worker says of its process."""

    python: str  # version of Python, as "3.12"
    colocate: str  # version of colocate
    visible: tuple[str, ...] | None = None  # the GPUs that `CUDA_VISIBLE_DEVICES` names there; None when it isn't set
    dask_cuda: bool = False  # whether dask-cuda started it, so that the first visible GPU is its own
    retires: float | None = None  # when it closes by itself (`--lifetime`), in seconds of time.time()

    def unlike(self, driver: Facts) -> str | None:
        """In which version it differs from the driver, and what to do; None when they can talk."""
        here, there = ({"colocate": each.colocate, "python": each.python} for each in (driver, self))
        return difference(here, there)


@attrs.frozen
class Offer:
    """One Dask worker: room for one slot."""

    worker: str  # its address
    host: str  # the machine's address
    cpus: float  # its threads
    gpus: int = 0  # how many GPUs it has
    # What `CUDA_VISIBLE_DEVICES` would name them; None when that can't be told from the worker
    visible: tuple[str, ...] | None = None
    memory: int = 0  # its memory limit in bytes; 0 when it has none
    unfit: str = ""  # why it can never hold a slot; empty when it can
    taken: str = ""  # why it can't hold one now; empty when it can
    name: str = ""  # what it is called
    resources: Mapping[str, float] = attrs.field(factory=dict)  # Dask's

    @property
    def labels(self) -> dict[str, str]:
        """Return what requests may look at."""
        return {"name": self.name, "host": self.host}

    def suits(self, wanted: Wanted) -> bool:
        """Whether a slot would fit, if it were free."""
        memory = not (wanted.memory and self.memory) or self.memory >= wanted.memory
        further = all(self.resources.get(name, 0) >= amount for name, amount in wanted.resources.items())
        counted = self.cpus >= wanted.cpus and self.gpus >= wanted.gpus and memory and further
        return not self.unfit and counted and matches(self.labels, wanted.labels)

    @property
    def rank_key(self) -> tuple[object, ...]:
        """Ranks go by machine, device and address."""
        return host_key(self.host), tuple(map(device_key, self.visible or ())), host_key(self.worker)


@attrs.frozen
class Grant:
    """One slot that a driver holds."""

    worker: str  # address of its Dask worker
    host: str  # address of its machine
    gpus: tuple[str, ...] = ()  # its GPUs, as `CUDA_VISIBLE_DEVICES` names them
    # its own: a reservation that gives a worker back, as one that has been lost, may be given the same one again
    id: str = attrs.field(factory=lambda: secrets.token_hex(8))


@attrs.frozen
class Refusal:
    """Nothing is held: never possible, or not within the time.

    `rows` is the table of nodes; `asked` how many workers an adaptive cluster was last asked for, if it is one.
    """

    never: bool
    rows: tuple[dict[str, str], ...]
    asked: int | None = None


def host_key(address: str) -> tuple[object, ...]:
    """A key that sorts addresses as people do: numbers by their value."""
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":") if scheme else (rest, "", "")
    try:
        number = int(ipaddress.ip_address(host.strip("[]") or rest))
    except ValueError:
        return 1, 0, host or rest, _number(port)
    return 0, number, "", _number(port)


def device_key(name: str) -> tuple[bool, int, str]:
    """A key that sorts GPUs: by index, then those that go by a UUID."""
    return not name.isdigit(), _number(name), name


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def choose(offers: Sequence[Offer], wanted: Wanted) -> list[Offer] | None:
    """The workers that a request gets, in the order of the ranks; None when there aren't enough."""
    alike: dict[str, list[Offer]] = {}
    for offer in offers:
        if (shared := offer.labels.get(wanted.together)) is not None or not wanted.together:
            alike.setdefault(shared or "", []).append(offer)
    found = (_choose_among(each, wanted) for each in alike.values())
    return next((each for each in found if each is not None), None)


def _choose_among(offers: Sequence[Offer], wanted: Wanted) -> list[Offer] | None:
    by_host: dict[str, list[Offer]] = {}
    # A slot takes the smallest worker that suits it, and leaves the larger ones to those who need them.
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
    """A row per node: what was wanted, what there is, what is free, and why the rest isn't."""
    by_host: dict[str, list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.rank_key):
        by_host.setdefault(offer.host, []).append(offer)
    asked = f"{_workers(wanted.slots)} with {wanted.cpus:g} CPU, {wanted.gpus} GPU"
    if wanted.memory:
        asked += f", {wanted.memory / 2**30:.1f} GiB"
    asked += "".join(f", {amount * wanted.slots:g} {name}" for name, amount in wanted.resources.items())
    looked_at = dict.fromkeys([*wanted.labels, *filter(None, [wanted.together])])
    rows = []
    for host, own in by_host.items():
        free = [offer for offer in own if not offer.unfit and not offer.taken]
        row = {"node": host, "wanted": asked, "total": _amounts(own, wanted), "free": _amounts(free, wanted)}
        labels = {"labels": ", ".join(_values(own, name) for name in looked_at)} if looked_at else {}
        rows.append({**row, **labels, "why": _reasons(own)})
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
    each = sorted({f"{offer.cpus:g}/{offer.gpus}{limit(offer)}" for offer in offers})
    detail = f" ({', '.join(each)} each)" if each else ""
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
    """Give a slot its GPUs: those that its worker names, or else the lowest of the machine that nobody holds."""
    if not wanted.gpus:
        return Grant(offer.worker, offer.host)
    if offer.visible is not None:
        return Grant(offer.worker, offer.host, offer.visible[: wanted.gpus])
    held = used.get(offer.host, set())
    free = (str(index) for index in range(len(held) + wanted.gpus) if str(index) not in held)
    return Grant(offer.worker, offer.host, tuple(name for name, _ in zip(free, range(wanted.gpus), strict=False)))
