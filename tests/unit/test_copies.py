"""Copies between the host and a device, which is played: what is begun on it is done when it is waited for."""

from __future__ import annotations

import random
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

from colocate._devices import copies as device_copies  # noqa: E402
from colocate._devices.copies import WORTH_BYTES, Copies, HostCopies, Ring  # noqa: E402
from colocate.wire import pack, unpack  # noqa: E402
from colocate.worker.residents.store import Store  # noqa: E402
from colocate.worker.serving.scope import Scope  # noqa: E402

LARGE = WORTH_BYTES // 4 * 3
CHUNK = 1000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def numbers(count: int, seed: int = 0) -> Any:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)), dtype=torch.uint8)


def through(cuda: Cuda, ring: Ring, source: Any, device: str) -> Any:
    """A copy of bytes, complete."""
    target = cuda._empty(source.shape, torch.uint8, device, False)
    if device == "cpu":
        ring.download(source, target)
    else:
        ring.upload(source, target)
        ring.wait()
    return target


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5 * CHUNK), st.sampled_from(["cuda:0", "cpu"])), max_size=6),
    st.integers(1, 4),
    st.data(),
)
def test_one_after_the_other(copies: list[tuple[int, str]], chunks: int, data: Any) -> None:
    """What is there is what was sent, whatever came before it, on as few buffers as ever; nothing else is pinned."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda(patch)
        ring = Ring("cuda:0", CHUNK, chunks)
        made = []
        for number, (size, device) in enumerate(copies):
            source = numbers(size, number)
            target = cuda._empty((size,), torch.uint8, device, False)
            (ring.download if device == "cpu" else ring.upload)(source, target)
            if device == "cpu":
                assert torch.equal(target, source)
            made.append((source, target))
            if data.draw(st.booleans()):
                ring.wait()
                assert all(torch.equal(*each) for each in made)
        ring.wait()
        assert all(torch.equal(*each) for each in made)
        assert cuda.pinned == (chunks * CHUNK if copies else 0)


def test_it_comes_after_what_the_thread_has_begun(cuda: Cuda) -> None:
    """Memory that was just taken may have been let go of by what is still computed."""
    ring, order = Ring("cuda:0", CHUNK, 3), []
    cuda.current_stream().queue.append(lambda: order.append("computed"))
    target = cuda._empty((10,), torch.uint8, "cuda:0", False)
    ring.upload(numbers(10), target)
    cuda.current_stream().queue.append(lambda: order.append(target.clone()))  # and so does what comes then
    cuda.current_stream().synchronize()
    assert order[0] == "computed"
    assert torch.equal(order[1], numbers(10))


@pytest.mark.parametrize(("fails_at", "device"), [(1, "cuda:0"), (5, "cuda:0"), (5, "cpu")])
def test_an_error_amid_it(cuda: Cuda, fails_at: int, device: str) -> None:
    """Nothing is on its way afterwards to what the caller lets go of, and the next copy is as ever."""
    ring, source = Ring("cuda:0", CHUNK, 3), numbers(7 * CHUNK)
    cuda.fails_at = fails_at
    with pytest.raises(RuntimeError, match="on purpose"):
        through(cuda, ring, source, device)
    assert len(cuda.copied) == fails_at - 1
    assert cuda.end() <= 1  # the mark that the thread's stream waits for
    assert len(cuda.copied) == fails_at - 1
    assert torch.equal(through(cuda, ring, source, device), source)


def test_what_is_not_its_bytes(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes torch's own way, and so does what is small."""
    moved: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(tensor) or tensor)
    tensors = [
        torch.ones(100),
        torch.ones(LARGE, 2)[:, 0],
        torch.ones(LARGE, dtype=torch.complex64).conj(),
        torch.eye(300).to_sparse(),
        torch.nn.Parameter(torch.ones(LARGE)),
    ]
    for tensor in tensors:
        assert Copies("cuda:0").of(tensor) is tensor
        assert moved.pop() is tensor
    assert cuda.copied == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_values_there_and_back(cuda: Cuda, dtype: Any) -> None:
    """What comes from a device is on the receiver's, complete, and goes through its ring; what doesn't is not."""
    there, here = cuda.ones(3, LARGE).to(dtype), torch.ones(LARGE)
    cuda._mine[there.untyped_storage()._cdata] = there.untyped_storage()
    received = unpack(pack({"there": there, "view": there[1:], "here": here}).copy(), "cuda:0")
    assert cuda.has(received["there"])
    assert not cuda.has(received["here"])
    assert torch.equal(received["there"], there)
    assert torch.equal(received["view"], there[1:])
    assert torch.equal(received["here"], here)
    ring = device_copies._rings["cuda:0"]
    assert sum(cuda.copied) == 2 * (there.nbytes + there[1:].nbytes)
    assert sum(chunk.memory.nbytes for chunk in ring._chunks) == 3 * (4 << 20)


# -- on the host once, however many read it

ROW = WORTH_BYTES // 4  # elements: each row is worth it
BYTES = WORTH_BYTES


def read(copies: HostCopies, value: Any) -> Any:
    """A value as somebody else gets it."""
    with copies.shared():
        return unpack(pack(value).copy())


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

    monkeypatch.setattr("colocate._devices.copies._begin", gated)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(read, copies, x)
        assert begun.wait(30)
        others = [pool.submit(read, copies, x[n % 4 :]) for n in range(5)]
        go.set()
        assert torch.equal(first.result(), x)
        for number, other in enumerate(others):
            assert torch.equal(other.result(), x[number % 4 :])
    assert cuda.copied == [x.nbytes]


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
