"""Copies between the host and a played device, on which work ends only when it is waited for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import colocate
from colocate import First, OnRank, Role, method

torch = pytest.importorskip("torch")

from tests.unit.played import Cuda  # noqa: E402

from colocate._devices import copies as device_copies  # noqa: E402
from colocate._devices.copies import WORTH_BYTES, Ring  # noqa: E402
from colocate.wire import pack, unpack  # noqa: E402

LARGE = WORTH_BYTES // 4 * 3
CHUNK = 1000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def numbers(count: int, seed: int = 0) -> Any:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)), dtype=torch.uint8)


def through(cuda: Cuda, ring: Ring, source: Any, device: str) -> Any:
    """Return a complete copy of bytes."""
    target = cuda._empty(source.shape, torch.uint8, device, False)
    if device == "cpu":
        ring.download(source, target)
    else:
        ring.upload(source, target)
        ring.wait_for_uploads()
    return target


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5 * CHUNK), st.sampled_from(["cuda:0", "cpu"])), max_size=6),
    st.integers(1, 4),
    st.data(),
)
def test_one_after_the_other(copies: list[tuple[int, str]], chunks: int, data: Any) -> None:
    """Each copy is complete, whatever came before it, and only the ring's buffers are pinned."""
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
                ring.wait_for_uploads()
                assert all(torch.equal(*each) for each in made)
        ring.wait_for_uploads()
        assert all(torch.equal(*each) for each in made)
        assert cuda.pinned == (chunks * CHUNK if copies else 0)


def test_copy_follows_earlier_work_of_thread(cuda: Cuda) -> None:
    """A copy comes after the work that its thread has begun, which may still use the target's memory."""
    ring, order = Ring("cuda:0", CHUNK, 3), []
    cuda.current_stream().queue.append(lambda: order.append("computed"))
    target = cuda._empty((10,), torch.uint8, "cuda:0", False)
    ring.upload(numbers(10), target)
    cuda.current_stream().queue.append(lambda: order.append(target.clone()))  # Later work comes after the copy.
    cuda.current_stream().synchronize()
    assert order[0] == "computed"
    assert torch.equal(order[1], numbers(10))


@pytest.mark.parametrize(("fails_at", "device"), [(1, "cuda:0"), (5, "cuda:0"), (5, "cpu")])
def test_copy_succeeds_after_failed_copy(cuda: Cuda, fails_at: int, device: str) -> None:
    """After a failed copy no bytes are under way any more, and the next copy succeeds."""
    ring, source = Ring("cuda:0", CHUNK, 3), numbers(7 * CHUNK)
    cuda.fails_at = fails_at
    with pytest.raises(RuntimeError, match="on purpose"):
        through(cuda, ring, source, device)
    assert len(cuda.copied) == fails_at - 1
    assert cuda.end() <= 1  # the mark that the thread's stream waits for
    assert len(cuda.copied) == fails_at - 1
    assert torch.equal(through(cuda, ring, source, device), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_values_there_and_back(cuda: Cuda, dtype: Any) -> None:
    """A device's tensor goes by the ring to the receiver's device, complete; a tensor of the host doesn't."""
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


# -- one copy on the host for all readers

ROW = WORTH_BYTES // 4  # elements: each row is worth a copy by the ring
BYTES = WORTH_BYTES


PLAYED: list[Cuda] = []


class Maker(Role):
    """A role whose result is on the played device."""

    @method(dispatch=OnRank(0))
    def make(self) -> Any:
        return PLAYED[0].ones(4, ROW)

    @method(collect=First())
    def total(self, x: Any) -> float:
        return float(x.double().sum())


def test_workers_and_the_driver(cuda: Cuda) -> None:
    """Workers and the driver read one copy, which the ledger counts for the role that has made the value."""
    PLAYED[:] = [cuda]
    with colocate.connect("local", strict=True) as runtime:
        group = runtime.reserve(3).spawn({"one": colocate.role(Maker), "two": colocate.role(Maker)}, name="copies")
        kept = group.role("one", Maker).make.keep()
        kept.wait()
        expected = torch.arange(4.0 * ROW)
        for _ in range(2):
            assert group.role("two", Maker).total(kept.ref) == float(expected.double().sum())
            assert torch.equal(kept.fetch(), expected.view(4, ROW))
        assert cuda.copied == [4 * BYTES]
        row = next(each for each in group.memory().slots[0].roles if each.role == "one")
        assert row.device["residents"] == 2 * 4 * BYTES  # The played device is in the host's memory.
