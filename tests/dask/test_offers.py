"""The choice of workers for a request."""

from __future__ import annotations

from typing import Any

from colocate_dask.offers import Offer, SlotRequest, choose_workers


def offer(address: str, cpus: float = 1, gpus: int = 0, **more: Any) -> Offer:
    return Offer(f"tcp://{address}", address.partition(":")[0], cpus, gpus, **more)


def wanted(slots: int, **more: Any) -> SlotRequest:
    return SlotRequest("id", "client", "pool", slots, **more)


def chosen(offers: list[Offer], request: SlotRequest) -> list[str] | None:
    found = choose_workers(offers, request)
    return None if found is None else [each.worker.removeprefix("tcp://") for each in found]


CLUSTER = [offer("10.0.0.10:5"), offer("10.0.0.9:11"), offer("10.0.0.9:2"), offer("10.0.0.10:4"), offer("10.0.0.10:3")]


def test_spread() -> None:
    """`spread` takes as many hosts as possible; ranks are sorted by host, with numbers in addresses by value."""
    assert chosen(CLUSTER, wanted(2, strategy="spread")) == ["10.0.0.9:2", "10.0.0.10:3"]
    assert chosen(CLUSTER, wanted(3, strategy="spread")) == ["10.0.0.9:2", "10.0.0.9:11", "10.0.0.10:3"]


def test_too_few() -> None:
    """A request gets all its slots or none."""
    assert chosen(CLUSTER, wanted(6)) is None
    assert chosen(CLUSTER, wanted(1, cpus=2)) is None
    assert chosen([offer("h:1", unfit="broken")], wanted(1)) is None


def test_smallest_that_suits() -> None:
    """A request gets the smallest workers that suffice."""
    offers = [offer("h:1", 8, 2), offer("h:2", 4), offer("h:3", 2), offer("h:4", 1)]
    assert chosen(offers, wanted(1, cpus=2)) == ["h:3"]
    assert chosen(offers, wanted(2, cpus=2)) == ["h:2", "h:3"]
    assert chosen(offers, wanted(1, gpus=1)) == ["h:1"]


def test_sorted_by_device() -> None:
    """On a host, ranks are sorted by device, not by address."""
    offers = [offer(f"h:{port}", gpus=1, visible=(gpu,)) for port, gpu in ((1, "10"), (2, "9"), (3, "0"))]
    assert chosen(offers, wanted(3, gpus=1)) == ["h:3", "h:2", "h:1"]


def test_memory() -> None:
    """A worker's memory limit counts, if it has one."""
    offers = [offer("h:1", memory=10), offer("h:2")]
    assert chosen(offers, wanted(1, memory=20)) == ["h:2"]
    assert chosen(offers, wanted(2, memory=20)) is None
