"""Copies between the host and a device, which is played: what is begun on it is done when it is waited for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.unit.played import Cuda  # noqa: E402

from colocate._devices import device_copies  # noqa: E402
from colocate._devices.device_copies import WORTH_BYTES, Copies, Ring, flat, to_host  # noqa: E402
from colocate._values.leaving import on_device, placed  # noqa: E402
from colocate.wire import pack, unpack  # noqa: E402

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


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1, 10 * CHUNK + 7])
def test_sizes(cuda: Cuda, size: int, device: str) -> None:
    """Around a buffer's size, and around that of all of them; in pieces of that size."""
    ring, source = Ring("cuda:0", CHUNK, 3), numbers(size)
    assert torch.equal(through(cuda, ring, source, device), source)
    assert cuda.copied == [min(CHUNK, size - start) for start in range(0, size, CHUNK)]
    assert cuda.pinned == 3 * CHUNK


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


def test_one_travels_while_the_next_is_filled(cuda: Cuda) -> None:
    """Nothing waits before all buffers are under way."""
    ring, source = Ring("cuda:0", CHUNK, 3), numbers(3 * CHUNK)
    ring.upload(source, cuda._empty((3 * CHUNK,), torch.uint8, "cuda:0", False))
    assert cuda.copied == []
    ring.upload(source[:CHUNK], cuda._empty((CHUNK,), torch.uint8, "cuda:0", False))
    assert cuda.copied == [CHUNK]  # the first of them, whose buffer is needed again


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


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("fails_at", [1, 2, 5])
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


@pytest.mark.parametrize("direction", ["there", "back"])
def test_without_pinned_memory(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """Torch has its own way."""
    cuda.no_more_pinned = True
    there = Copies("cuda:0" if direction == "there" else "cpu")
    moved: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(device) or tensor)
    tensor = torch.ones(LARGE) if direction == "there" else cuda.ones(LARGE)
    assert there.of(tensor) is tensor
    there.wait()
    assert moved == [there.device]
    assert torch.equal(to_host(cuda.ones(LARGE)), torch.arange(float(LARGE)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(100),
        lambda: torch.ones(LARGE, 2)[:, 0],
        lambda: torch.ones(LARGE, requires_grad=True),
        lambda: torch.ones(LARGE, dtype=torch.complex64).conj(),
        lambda: torch.eye(300).to_sparse(),
        lambda: torch.nn.Parameter(torch.ones(LARGE)),
    ],
    ids=["small", "strided", "with a graph", "conjugate", "sparse", "a subclass"],
)
def test_what_is_not_its_bytes(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Goes torch's own way, and so does what is small."""
    tensor, moved = make(), []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(device) or tensor)
    assert Copies("cuda:0").of(tensor) is tensor
    assert moved == ["cuda:0"]
    assert cuda.copied == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
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


def test_arguments(cuda: Cuda) -> None:
    """The host's are brought to the device, and a device's to the host; through one ring."""
    x, y = torch.arange(float(LARGE)), torch.arange(float(LARGE)) + 1
    found = placed({"x": x, "y": [y, y]}, "cuda:0")
    assert cuda.has(found["x"])
    assert torch.equal(found["x"], x)
    assert torch.equal(found["y"][0], y)
    assert found["y"][0] is found["y"][1]
    assert cuda.has(on_device(x, "cuda:0"))
    back = Copies("cpu").of(found["x"])
    assert not cuda.has(back)
    assert torch.equal(back, x)
    assert len(device_copies._rings) == 1


@pytest.mark.parametrize("locked", [False, True])
def test_tensordicts(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    """Their tensors go through the ring, too; nothing else of them changes."""
    tensordict = pytest.importorskip("tensordict")
    x = torch.arange(float(LARGE))
    value = tensordict.TensorDict({"x": x, "sub": {"y": x + 1}}, [LARGE], device="cpu", names=["rows"])
    monkeypatch.setattr(tensordict.TensorDict, "to", lambda self, device: self)  # no more is to be done there
    found = on_device(value.lock_() if locked else value, "cuda:0")
    assert all(map(cuda.has, (found["x"], found["sub", "y"])))
    assert torch.equal(found["sub", "y"], x + 1)
    assert (found.is_locked, found.names) == (locked, ["rows"])


def test_bytes_of_a_tensor() -> None:
    x = torch.arange(12, dtype=torch.int16).view(3, 1, 4)[1:]
    assert torch.equal(flat(x).view(torch.int16), x.reshape(-1))
