"""Storages that lose their memory and get it again: the host's own, which stand for a device's here, too."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from itertools import permutations
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.played import Cuda  # noqa: E402

from colocate.worker.memory import digests as digests_module  # noqa: E402
from colocate.worker.memory import offload as offload_module  # noqa: E402
from colocate.worker.memory.digests import digests  # noqa: E402
from colocate.worker.memory.offload import Offload, Resized, _view  # noqa: E402


@pytest.fixture(params=["cpu", "other:0"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where memory is: the host's goes to a file, a device's to the host."""
    found: str = request.param
    monkeypatch.setattr(offload_module, "name_of", lambda device: found)
    return found


def _digest(view: Any) -> int | None:
    (found,) = digests([view])
    return found


def storages(*tensors: Any) -> dict[int, Any]:
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


def test_away_and_back() -> None:
    """The same objects with the same bits: tied weights, views, gradients and Adam's state with them."""
    net, tied = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
    tied.weight = net.weight
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    view = net.weight.detach()[3:]
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [net.weight, net.bias, net.weight.grad, *state]
    before = [tensor.detach().clone() for tensor in (*tensors, view)]
    offload, chosen = Offload("cpu"), storages(*tensors)
    offload.write(chosen).put_away()
    assert all(storage.nbytes() == 0 for storage in chosen.values())
    assert all(map(offload.away, chosen))
    offload.bring_back(chosen)
    assert not any(map(offload.away, chosen))
    assert tied.weight is net.weight
    for tensor, copy in zip((*tensors, view), before, strict=True):
        assert torch.equal(tensor, copy)
    net(torch.ones(1, 100)).sum().backward()
    optimizer.step()


def test_what_has_not_changed_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference model's copy stays; it is seen when its weights have changed, however that was done."""
    weights = torch.randn(10_000)
    offload, chosen = Offload("cpu"), storages(weights)
    copied: list[int] = []
    to_host = offload._put

    def noted(storage: Any) -> Any:
        copied.append(storage.nbytes())
        return to_host(storage)

    monkeypatch.setattr(offload, "_put", noted)
    for _ in range(3):
        offload.write(chosen).put_away()
        offload.bring_back(chosen)
    assert copied == [40_000]
    weights.data[77] += 1
    before = weights.clone()
    offload.write(chosen).put_away()
    offload.bring_back(chosen)
    offload.let_go(chosen)
    assert copied == [40_000, 40_000]
    assert torch.equal(weights, before)


def test_in_several_pieces() -> None:
    """What is taken when others have left gaps."""
    offload = Offload("cpu")
    several = [torch.full((1 << 18,), float(number)) for number in range(8)]
    chosen = storages(*several)
    offload.write(chosen).put_away()
    offload.bring_back(chosen)
    offload.let_go(list(chosen)[::2])
    tensor = torch.arange(float(3 * 2**18 + 77))
    before, more = tensor.clone(), storages(tensor)
    offload.write(more).put_away()
    (key,) = more
    assert len(offload._copies[key].room.parts) == 4
    offload.bring_back(more)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("fails", [False, True])
def test_who_computes_meanwhile_does_not_wait(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Copies come after what was begun before on the usual stream, which another thread uses, and hold up no more."""
    cuda, done = Cuda(monkeypatch), []
    monkeypatch.setattr(offload_module, "in_use", cuda.in_use)
    usual = cuda.current_stream()
    usual.queue.append(lambda: done.append("computed"))
    with contextlib.suppress(MemoryError), Offload("cuda:0")._copying():
        cuda.current_stream().queue.append(lambda: done.append("copied"))
        if fails:
            raise MemoryError("no pinned memory")
    assert done == ["computed", "copied"]
    assert not usual.queue


def test_a_device_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sleeps makes room there, whether there is some to find out what has changed or not: all is copied then."""

    def fail(view: Any, places: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 MiB")

    weights = torch.randn(1000)
    offload, chosen = Offload("cpu"), storages(weights)
    for is_full in (False, True, True, False):
        weights.data[77] += 1
        before = weights.clone()
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(digests_module, "_digest", fail)
            offload.write(chosen).put_away()
        offload.bring_back(chosen)
        assert torch.equal(weights, before)


@pytest.mark.parametrize("moves", ["goes", "is undone", "doesn't fit"])
def test_amid_a_capture(monkeypatch: pytest.MonkeyPatch, moves: str) -> None:
    """Another thread captures a graph, and torch can't give back what it keeps: that is left, and nothing is lost."""
    asked: list[str] = []

    class Capturing:
        def empty_cache(self) -> None:
            asked.append("empty_cache")
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    weights = torch.randn(1000)
    before = weights.clone()
    offload, chosen = Offload("cpu"), storages(weights)
    monkeypatch.setattr(offload, "_copying", contextlib.nullcontext)
    monkeypatch.setattr(offload_module, "in_use", lambda device: Capturing())
    monkeypatch.setattr(offload_module, "pinned", lambda nbytes, device: [torch.empty(nbytes, dtype=torch.uint8)])
    offload.write(chosen).put_away()
    if moves == "is undone":
        offload.bring_back(chosen)
        offload.undo(chosen)
    elif moves == "doesn't fit":
        with monkeypatch.context() as patch:
            patch.setattr(offload, "_copying", fail)
            with pytest.raises(MemoryError, match=r"3\.9 KiB are needed on cpu"):
                offload.bring_back(chosen)
    assert len(asked) == (1 if moves == "goes" else 2)
    offload.bring_back(chosen)
    assert torch.equal(weights, before)


def test_a_copy_of_something_that_is_gone() -> None:
    """Nothing is kept for it, and who gets its place has its own."""
    offload = Offload("cpu")
    for seed in range(20):
        torch.manual_seed(seed)
        weights = torch.randn(1000)
        before = weights.clone()
        chosen = storages(weights)
        offload.write(chosen).put_away()
        offload.bring_back(chosen)
        assert torch.equal(weights, before)
        del weights, chosen


def test_no_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed: all of it is away, and can come back later."""
    one, other = torch.randn(1000), torch.randn(1000)
    before = one.clone(), other.clone()
    offload, chosen = Offload("cpu"), storages(one, other)
    offload.write(chosen).put_away()

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 KiB\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_copying", fail)
        with pytest.raises(
            MemoryError, match=r"7.8 KiB are needed on cpu: CUDA out of memory. Tried to allocate 4 KiB$"
        ):
            offload.bring_back(chosen)
    assert all(storage.nbytes() == 0 for storage in chosen.values())
    offload.bring_back(chosen)
    assert torch.equal(one, before[0])
    assert torch.equal(other, before[1])


def test_an_array_of_what_sleeps() -> None:
    """It keeps the memory from coming back, which is said."""
    tensor = torch.randn(1000)
    offload, chosen = Offload("cpu"), storages(tensor)
    offload.write(chosen).put_away()
    assert tensor.numpy().shape == (1000,)
    with pytest.raises(MemoryError, match="an array was made of a tensor while that slept"):
        offload.bring_back(chosen)


@pytest.mark.parametrize("restores", [False, True])
def test_what_somebody_else_has_at_the_end(restores: bool) -> None:
    """On threads it has its memory again, as nobody could give that back later."""
    tensor = torch.randn(1000)
    before = tensor.clone()
    offload, chosen = Offload("cpu"), storages(tensor)
    offload.write(chosen).put_away()
    del chosen
    offload.close(restores)
    assert tensor.untyped_storage().nbytes() == (before.nbytes if restores else 0)
    if restores:
        assert torch.equal(tensor, before)


def test_undone() -> None:
    """Another rank has no room: it is away as before."""
    tensor = torch.randn(1000)
    before = tensor.clone()
    offload, chosen = Offload("cpu"), storages(tensor)
    offload.write(chosen).put_away()
    offload.bring_back(chosen)
    offload.undo(chosen)
    assert all(map(offload.away, chosen))
    assert next(iter(chosen.values())).nbytes() == 0
    offload.bring_back(chosen)
    assert torch.equal(tensor, before)


def test_what_can_not_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storages before it have their memory and their contents again, and their copies are forgotten."""
    tensors = [torch.randn(1000), torch.randn(2000), torch.randn(3000)]
    before = [each.clone() for each in tensors]
    offload, chosen = Offload("cpu"), storages(*tensors)
    offloading = offload.write(chosen)

    def take(self: Resized, some: Collection[Any]) -> int:
        for storage in list(some)[:2]:
            storage.resize_(0)
        raise RuntimeError("Trying to resize storage that is not resizable")

    with monkeypatch.context() as patch:
        patch.setattr(Resized, "take", take)
        with pytest.raises(RuntimeError, match="not resizable"):
            offloading.put_away()
    assert not any(map(offload.away, chosen))
    assert all(map(torch.equal, tensors, before))
    for _ in range(2):
        offload.write(chosen).put_away()
        offload.bring_back(chosen)
    assert all(map(torch.equal, tensors, before))


def test_contents_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are zeros when the memory is there again, also after it couldn't be, or another rank couldn't have it."""
    kept, lost = torch.randn(1000), torch.randn(1000)
    before = kept.clone()
    offload, chosen, emptied = Offload("cpu"), storages(kept), storages(lost)
    offload.write(storages(lost)).put_away()
    offload.bring_back(emptied)
    offload.write(chosen, emptied)
    assert lost.all()  # it hasn't been put away
    offload.write(chosen, emptied).put_away()
    assert all(map(offload.away, [*chosen, *emptied]))
    assert [offload._copies[key].room for key in emptied] == [None]  # nor what was there before
    everything = {**chosen, **emptied}

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_copying", fail)
        with pytest.raises(MemoryError, match=r"7\.8 KiB are needed on cpu"):
            offload.bring_back(everything)
    assert all(map(offload.away, everything))
    offload.bring_back(everything)
    offload.undo(everything)
    assert all(storage.nbytes() == 0 for storage in everything.values())
    offload.bring_back(everything)
    assert torch.equal(kept, before)
    assert not lost.any()
    offload.let_go(emptied)
    lost += 1
    offload.write(everything).put_away()
    offload.write({}, chosen).put_away()  # of what is away already
    offload.bring_back(everything)
    assert not kept.any()
    assert lost.eq(1).all()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 3 * 8 * (1 << 20) + 5])
def test_digests(nbytes: int) -> None:
    """Each byte and its place make a difference."""
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    found = _digest(_view(data.untyped_storage()))
    assert found == _digest(_view(data.clone().untyped_storage()))
    for place in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        other = data.clone()
        other[place] ^= 1
        assert _digest(_view(other.untyped_storage())) != found
    if nbytes > 16:
        swapped = data.clone()
        swapped[0:8], swapped[8:16] = data[8:16], data[0:8]
        assert _digest(_view(swapped.untyped_storage())) != found


def _changes() -> Iterator[tuple[str, Any, Any]]:
    """Two tensors that differ as those of a step do, by what has been done."""
    doubles = torch.randn(1000, dtype=torch.float64)
    yield "all signs", doubles, -doubles
    floats = torch.randn(1000)
    some = floats.clone()
    some[1:4:2].neg_()
    yield "two signs", floats, some
    complexes = torch.randn(1000, dtype=torch.complex64)
    yield "conjugated", complexes, complexes.conj().resolve_conj()
    for dtype, width in ((torch.float32, 512), (torch.bfloat16, 1024), (torch.bool, 1024)):
        hot = torch.zeros(64, width, dtype=dtype)
        other = hot.clone()
        hot[3, 5] = other[4, 5] = 1
        yield f"another row of {dtype}", hot, other
    for one, two in (([5, 5, 5], [6, 3, 6]), ([0, 1, 1, 0], [1, 0, 0, 1]), ([1, 0, 3, 2, 4, 5], [0, 2, 1, 4, 3, 5])):
        yield f"{one} to {two}", torch.tensor(one), torch.tensor(two)
    yield "longer by zeros", torch.zeros(1000), torch.zeros(1002)
    yield "none to some", torch.zeros(0), torch.zeros(2)


@pytest.mark.parametrize(("one", "two"), [pytest.param(*pair, id=name) for name, *pair in _changes()])
def test_digests_of_what_changes_alike(one: Any, two: Any) -> None:
    """What leaves a sum, or the sum of products with places, as it was."""
    assert _digest(_view(one.clone().untyped_storage())) != _digest(_view(two.clone().untyped_storage()))


def test_digests_of_permutations() -> None:
    digests = {_digest(_view(torch.tensor(each).untyped_storage())) for each in permutations(range(6))}
    assert len(digests) == 720


def test_what_has_grown_in_place() -> None:
    """It comes back as large as it was."""
    cache = torch.zeros(1000)
    offload, chosen = Offload("cpu"), storages(cache)
    for size in (1000, 200_000, 0, 10):
        cache.resize_(size).zero_()
        offload.write(chosen).put_away()
        offload.bring_back(chosen)
        assert cache.untyped_storage().nbytes() >= 4 * size
        assert float(cache.sum()) == 0


def test_copies_that_might_serve_again_make_room(place: str) -> None:
    """Those of what is awake, where the host has no more; those that this sleep needs stay."""
    if place == "cpu":
        pytest.skip("a file has as much room as its disk")
    free = [8 << 20]

    def left() -> int:
        return free[0] - offload.pinned

    offload = Offload("cpu", left)
    frozen, trained = torch.ones(2 << 20), torch.ones(2 << 20)
    for tensor in (frozen, trained, frozen):
        offload.write(storages(tensor)).put_away()
        offload.bring_back(storages(tensor))
        assert bool((tensor == 1).all())
    with pytest.raises(MemoryError, match=r"8 MiB .* to be pinned, beside the 8 MiB that are: 0 B are free"):
        offload.write(storages(frozen, trained))
    offload.close()
    assert offload.pinned == 0


def test_digests_of_several() -> None:
    """Each is what it is by itself, whatever is looked at with it."""
    views = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (0, 5, 8, 17, 4096, (9 << 20) + 3)]
    found = digests(views)
    assert found == [_digest(view) for view in views]
    assert len(set(found)) == len(views)
    assert digests([]) == []
