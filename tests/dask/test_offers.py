"""Which workers a request gets."""

from __future__ import annotations

from typing import Any

import pytest

from colocate_dask.offers import Offer, Wanted, choose, grant, table


def offer(address: str, cpus: float = 1, gpus: int = 0, **more: Any) -> Offer:
    return Offer(f"tcp://{address}", address.partition(":")[0], cpus, gpus, **more)


def wanted(slots: int, **more: Any) -> Wanted:
    return Wanted("id", "client", "pool", slots, **more)


def chosen(offers: list[Offer], request: Wanted) -> list[str] | None:
    found = choose(offers, request)
    return None if found is None else [each.worker.removeprefix("tcp://") for each in found]


CLUSTER = [offer("10.0.0.10:5"), offer("10.0.0.9:11"), offer("10.0.0.9:2"), offer("10.0.0.10:4"), offer("10.0.0.10:3")]


def test_pack() -> None:
    """As few machines as possible: the one with most room first."""
    assert chosen(CLUSTER, wanted(3)) == ["10.0.0.10:3", "10.0.0.10:4", "10.0.0.10:5"]
    assert chosen(CLUSTER, wanted(2)) == ["10.0.0.10:3", "10.0.0.10:4"]


def test_spread() -> None:
    """As many machines as possible; ranks are sorted by machine, numbers by their value."""
    assert chosen(CLUSTER, wanted(2, strategy="spread")) == ["10.0.0.9:2", "10.0.0.10:3"]
    assert chosen(CLUSTER, wanted(3, strategy="spread")) == ["10.0.0.9:2", "10.0.0.9:11", "10.0.0.10:3"]


def test_too_few() -> None:
    """All or none."""
    assert chosen(CLUSTER, wanted(6)) is None
    assert chosen(CLUSTER, wanted(1, cpus=2)) is None
    assert chosen([offer("h:1", unfit="broken")], wanted(1)) is None


def test_smallest_that_suits() -> None:
    """Large workers are left to those who need them."""
    offers = [offer("h:1", 8, 2), offer("h:2", 4), offer("h:3", 2), offer("h:4", 1)]
    assert chosen(offers, wanted(1, cpus=2)) == ["h:3"]
    assert chosen(offers, wanted(2, cpus=2)) == ["h:2", "h:3"]
    assert chosen(offers, wanted(1, gpus=1)) == ["h:1"]


def test_places() -> None:
    """Workers by their names, machines and resources; strictly on one machine, or on one each."""
    big = offer("10.0.0.10:9", name="big", resources={"disk": 2})
    assert chosen([*CLUSTER, big], wanted(1, labels={"name": "big"})) == ["10.0.0.10:9"]
    assert chosen([*CLUSTER, big], wanted(1, resources={"disk": 1.5})) == ["10.0.0.10:9"]
    assert chosen([*CLUSTER, big], wanted(2, resources={"disk": 1})) is None
    assert chosen(CLUSTER, wanted(1, labels={"host": "10.0.0.9"})) == ["10.0.0.9:2"]
    assert chosen(CLUSTER, wanted(2, strategy="strict_spread")) == ["10.0.0.9:2", "10.0.0.10:3"]
    assert chosen(CLUSTER, wanted(3, strategy="strict_spread")) is None
    assert chosen(CLUSTER, wanted(3, strategy="strict_pack")) == ["10.0.0.10:3", "10.0.0.10:4", "10.0.0.10:5"]
    assert chosen(CLUSTER, wanted(4, strategy="strict_pack")) is None
    assert chosen(CLUSTER, wanted(3, together="host")) == ["10.0.0.10:3", "10.0.0.10:4", "10.0.0.10:5"]
    assert chosen(CLUSTER, wanted(1, together="rack")) is None
    rows = table([*CLUSTER, big], wanted(2, labels={"host": "10.0.0.9"}, together="rack", resources={"disk": 1}))
    assert [row["labels"] for row in rows] == ["host=10.0.0.9, no rack", "host=10.0.0.10, no rack"]
    assert rows[0]["wanted"] == "2 workers with 0 CPU, 0 GPU, 2 disk"
    assert rows[1]["free"] == "4 workers: 4 CPU, 0 GPU (1/0 each), 2 disk"


def test_sorted_by_device() -> None:
    """On a machine, ranks go by device, not by address."""
    offers = [offer(f"h:{port}", gpus=1, visible=(gpu,)) for port, gpu in ((1, "10"), (2, "9"), (3, "0"))]
    assert chosen(offers, wanted(3, gpus=1)) == ["h:3", "h:2", "h:1"]


def test_memory() -> None:
    """A worker's limit counts, where it has one."""
    offers = [offer("h:1", memory=10), offer("h:2")]
    assert chosen(offers, wanted(1, memory=20)) == ["h:2"]
    assert chosen(offers, wanted(2, memory=20)) is None


@pytest.mark.parametrize(
    ("visible", "used", "given"),
    [
        (("3", "4"), {}, ("3", "4")),
        (None, {}, ("0", "1")),
        (None, {"h": {"0", "2"}}, ("1", "3")),
        (None, {"other": {"0"}}, ("0", "1")),
        (("GPU-a", "GPU-b"), {}, ("GPU-a", "GPU-b")),
    ],
)
def test_gpus(visible: tuple[str, ...] | None, used: dict[str, set[str]], given: tuple[str, ...]) -> None:
    """A slot gets the GPUs that its worker sees, or else the lowest of the machine that nobody holds."""
    worker = offer("h:1", gpus=2, visible=visible)
    assert grant(worker, wanted(1, gpus=2), used).gpus == given
    assert grant(worker, wanted(1), used).gpus == ()


def test_table() -> None:
    """A row per machine, with what is free and why the rest isn't."""
    offers = [offer("a:1", 2), offer("a:2", 2, taken="held by x"), offer("b:1", 1, unfit="broken")]
    rows = table(offers, wanted(3, cpus=1))
    assert [row["node"] for row in rows] == ["a", "b"]
    assert rows[0]["total"].startswith("2 workers: 4 CPU")
    assert rows[0]["free"].startswith("1 worker: 2 CPU")
    assert [row["why"] for row in rows] == ["1 held by x", "1 broken"]
    limited = [offer("a:1", 2, memory=2**30), offer("a:2", 2)]
    assert table(limited, wanted(1, memory=2**31))[0]["total"] == "2 workers: 4 CPU, 0 GPU (2/0, 2/0/1.0 GiB each)"
    assert "GiB" not in str(table(limited, wanted(1)))
