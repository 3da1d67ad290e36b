"""What is on a device comes to the host once, however many read it. The device is played."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colocate
from colocate import ColocatedGroup, First, OnRank, Role, method

torch = pytest.importorskip("torch")

from tests.unit.played import Cuda  # noqa: E402

from colocate._devices.device_copies import WORTH_BYTES  # noqa: E402
from colocate._devices.host_copies import HostCopies  # noqa: E402
from colocate._values.leaving import tensors  # noqa: E402
from colocate.wire import pack, unpack  # noqa: E402
from colocate.worker.residents.store import Store  # noqa: E402
from colocate.worker.serving.scope import Scope  # noqa: E402

ROW = WORTH_BYTES // 4  # elements: each row is worth it
BYTES = WORTH_BYTES


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def read(copies: HostCopies, value: Any) -> Any:
    """A value as somebody else gets it."""
    with copies.shared():
        return unpack(pack(value).copy())


def test_one_for_all(cuda: Cuda) -> None:
    """Also for who wants some rows, or one that another one is tied to."""
    x = cuda.ones(8, ROW)
    value = {"x": x, "again": x}
    copies = HostCopies(tensors(value))
    assert torch.equal(read(copies, value)["again"], x)
    assert torch.equal(read(copies, x[3:5]), x[3:5])
    assert torch.equal(read(copies, x[7]), x[7])
    assert torch.equal(read(copies, x.view(torch.int16)), x.view(torch.int16))
    assert cuda.copied == [x.nbytes]
    assert copies.nbytes == x.nbytes


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=8))
def test_ranges(ranges: list[tuple[int, int]]) -> None:
    """Each gets its own; what lies in one that is there isn't copied, and never more than was asked for."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda(patch)
        x = cuda.ones(8, ROW)
        copies, there, wanted = HostCopies([x]), [], []
        for start, stop in ranges:
            assert torch.equal(read(copies, x[start:stop]), x[start:stop])
            if start < stop and not any(low <= start and stop <= high for low, high in there):
                there.append((start, stop))
                wanted.append((stop - start) * BYTES)
        assert cuda.copied == wanted
        assert copies.nbytes == sum(wanted)


def test_at_the_same_time(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while it is copied waits for that."""
    x = cuda.ones(4, ROW)
    copies, begun, go = HostCopies([x]), threading.Event(), threading.Event()
    begin = cuda._begin

    def gated(target: Any, source: Any) -> None:
        begun.set()
        assert go.wait(30)
        begin(target, source)

    monkeypatch.setattr("colocate._devices.device_copies._begin", gated)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(read, copies, x)
        assert begun.wait(30)
        others = [pool.submit(read, copies, x[n % 4 :]) for n in range(5)]
        go.set()
        assert torch.equal(first.result(), x)
        for number, other in enumerate(others):
            assert torch.equal(other.result(), x[number % 4 :])
    assert cuda.copied == [x.nbytes]


def test_a_copy_that_fails(cuda: Cuda) -> None:
    """Nothing is kept of it, and who comes next copies it."""
    x = cuda.ones(2, ROW)
    copies = HostCopies([x])
    cuda.fails_at = 1
    with pytest.raises(RuntimeError, match="on purpose"):
        read(copies, x)
    assert copies.tensors() == []
    assert torch.equal(read(copies, x), x)
    assert cuda.copied == [x.nbytes]


def test_what_is_not_of_the_value(cuda: Cuda) -> None:
    """Rows that had to be gathered have memory of their own, whose name another may have tomorrow."""
    x, other = cuda.ones(2, ROW), cuda.ones(2, ROW)
    copies = HostCopies([x])
    for _ in range(2):
        assert torch.equal(read(copies, other), other)
    assert torch.equal(read(copies, x.t()), x.t())
    assert torch.equal(read(copies, x[0, :8]), x[0, :8])
    assert copies.tensors() == []
    with copies.shared():
        pass
    assert torch.equal(unpack(pack(x).copy()), x)  # outside of such a block nothing is shared
    assert copies.tensors() == []


def store_of(*values: Any) -> Store:
    store = Store(False, Scope(), "cuda:0")
    for key, value in enumerate(values):
        store.expect(key)
        store.put(key, value, f"role{key}.make", None)
    return store


def fetch(store: Store, key: int) -> Any:
    entry = store.wait(key)
    with store.reading(entry):
        return unpack(pack(entry.value).copy())


def test_as_long_as_the_part(cuda: Cuda) -> None:
    """It counts as its maker's, on the host, and goes with the part."""
    x, y = cuda.ones(2, ROW), cuda.ones(3, ROW)
    store = store_of(x, y)
    for _ in range(3):
        assert torch.equal(fetch(store, 0), x)
        assert torch.equal(fetch(store, 1), y)
    assert cuda.copied == [x.nbytes, y.nbytes]
    on_host = [(maker, sum(each.nbytes for each in value)) for maker, value in store.values() if type(value) is list]
    assert on_host == [("role0.make", x.nbytes), ("role1.make", y.nbytes)]
    store.free([0])
    assert [maker for maker, value in store.values()] == ["role1.make", "role1.make"]


def test_too_much(cuda: Cuda) -> None:
    """What was read longest ago goes first, and nothing that somebody reads just then."""
    values = [cuda.ones(2, ROW) for _ in range(3)]
    store = store_of(*values)
    store.copies_bytes = 4 * BYTES
    for key in (0, 1, 0, 2, 0):  # 1 goes for 2
        fetch(store, key)
    assert len(cuda.copied) == 3
    fetch(store, 1)  # for which 2 goes
    assert len(cuda.copied) == 4
    fetch(store, 0)
    assert len(cuda.copied) == 4
    store.copies_bytes = 0
    with store.reading(store.wait(0)):
        fetch(store, 2)
        fetch(store, 2)
        assert len(cuda.copied) == 6
        fetch(store, 0)  # somebody is at it
        assert len(cuda.copied) == 6
    assert len(store.values()) == 3
    fetch(store, 0)
    assert len(cuda.copied) == 7


def test_what_somebody_has_written_into(cuda: Cuda) -> None:
    """Nothing is kept of what can't be used any more."""
    x = cuda.ones(2, ROW)
    store = store_of(x)
    fetch(store, 0)
    x.add_(1)
    assert list(store.written([0])) == [(0, "role0.make", None)]
    assert len(store.values()) == 1


def test_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, and nothing noted."""
    store = store_of(torch.ones(4, ROW))
    store._device = "cpu"
    fetch(store, 0)
    assert store.wait(0).read == 0
    assert store.wait(0).copies is None


class Maker(Role):
    """Has something on the played device."""

    @method(dispatch=OnRank(0))
    def make(self, rows: int) -> torch.Tensor:
        return PLAYED[-1].ones(rows, ROW)

    @method(collect=First())
    def total(self, *xs: torch.Tensor) -> float:
        return float(sum(x.double().sum() for x in xs))


PLAYED: list[Cuda] = []


@pytest.fixture
def group(cuda: Cuda) -> Any:
    PLAYED.append(cuda)
    with colocate.connect("local", strict=True) as runtime:
        yield runtime.reserve(3).spawn({"one": colocate.role(Maker), "two": colocate.role(Maker)}, name="copies")
    PLAYED.pop()


def test_workers_and_the_driver(group: ColocatedGroup, cuda: Cuda) -> None:
    """All of them read the same copy, which the ledger counts as the role's that has made the value."""
    one, two = group.role("one", Maker), group.role("two", Maker)
    kept = one.make.keep(4)
    kept.wait()
    expected = float(torch.arange(4.0 * ROW).double().sum())
    for _ in range(2):
        assert two.total(kept.ref) == expected
        assert torch.equal(kept.fetch(), torch.arange(4.0 * ROW).view(4, ROW))
    assert cuda.copied == [4 * BYTES]
    row = next(each for each in group.memory().slots[0].roles if each.role == "one")
    assert row.device["residents"] == 2 * 4 * BYTES  # the played device is the host's
