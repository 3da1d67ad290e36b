"""What `sleep="vmm"` needs of a machine and of torch, and what it does beside a role's constructor."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.played_vmm import PlayedVmm

import colocate
from colocate import Role, gpus, method
from colocate._plugins import needs
from colocate.errors import CapabilityError, RoleStartError
from colocate.worker.memory.holdings import Objects
from colocate.worker.memory.vmm import Vmm, VmmError, compiled, kept_addresses
from colocate.worker.serving import build


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[PlayedVmm]:
    played = PlayedVmm(tmp_path)
    yield played
    played.end()


class PlayedTorch:
    """What torch has for it, with the signatures of this version's.

    Attributes:
        compiled: The files that allocators were made of.
        pools: Those that are there.
        inside: The numbers of the devices on which the block's pool is used.
        segments: Those of its allocator.
    """

    def __init__(self, torch: Any, gpu: PlayedVmm, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[Path] = []
        self.pools: weakref.WeakSet[Any] = weakref.WeakSet()
        self.inside: list[int] = []
        self.segments: list[dict[str, Any]] = []
        given, current = [], [0]
        as_is = {each.__name__: inspect.signature(each) for each in (torch.cuda.MemPool, torch.cuda.use_mem_pool)}

        class Allocator(torch.cuda.memory._CUDAAllocator):  # type: ignore[misc, name-defined]
            def __init__(this, path: str, alloc: str, free: str) -> None:
                library = ctypes.CDLL(path)
                assert getattr(library, alloc)
                assert getattr(library, free)
                self.compiled.append(Path(path))
                super().__init__(given)

        class Pool:
            def __init__(this, *args: Any) -> None:
                assert as_is["MemPool"].bind(*args).args == (given,)
                self.pools.add(this)

        @contextlib.contextmanager
        def use_mem_pool(*args: Any) -> Iterator[None]:
            pool, device = as_is["use_mem_pool"].bind(*args).args
            assert pool in self.pools
            assert device == current[0]
            self.inside.append(device)
            try:
                yield
            finally:
                self.inside.pop()

        @contextlib.contextmanager
        def device(number: int) -> Iterator[None]:
            before, current[0] = current[0], number
            try:
                yield
            finally:
                current[0] = before

        load = Vmm.__init__
        patch.setattr(Vmm, "__init__", lambda self, path: load(self, path, gpu.path))
        patch.setattr(Vmm, "_made", None)
        patch.setattr(torch.version, "cuda", "12.9")
        patch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Allocator)
        patch.setattr(torch.cuda, "init", lambda: None)
        patch.setattr(torch.cuda, "MemPool", Pool)
        patch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
        patch.setattr(torch.cuda, "device", device)
        patch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)


class TestConstructors:
    """The block in which a role is constructed, beside torch."""

    @pytest.fixture
    def played(self, gpu: PlayedVmm, monkeypatch: pytest.MonkeyPatch) -> PlayedTorch:
        return PlayedTorch(pytest.importorskip("torch"), gpu, monkeypatch)

    def test_a_pool_for_each(self, played: PlayedTorch) -> None:
        """It is on the device of the slot, and nobody's afterwards, so that what is let go of goes back to the device.

        What was compiled isn't left behind, and isn't compiled again.
        """
        for device, number in (("cuda:1", 1), ("cuda", 0), ("cuda:1", 1)):
            with kept_addresses(device):
                assert played.inside == [number]
                assert len(played.pools) == 1
            assert played.inside == []
            assert not played.pools
        (path,) = played.compiled
        assert not path.parent.exists()
        assert Vmm.in_use() is not None

    def test_two_beside_each_other(self, played: PlayedTorch) -> None:
        """Slots may be threads. No pool ends while another is used on its device: torch would end the process."""
        with kept_addresses("cuda:0"):
            with kept_addresses("cuda:0"):
                pass
            assert len(played.pools) == 2
            with kept_addresses("cuda:1"):
                assert len(played.pools) == 3
            assert len(played.pools) == 2
        assert not played.pools

    def test_memory_of_a_role_that_has_ended(self, played: PlayedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torch gives it back as the next one is constructed, which may have no more segments than that; or later."""
        import torch

        library = Vmm.made()[0]._library
        library.colocate_vmm_alloc.restype = ctypes.c_void_p
        made: list[int] = []
        ended: list[int] = []

        def give_back() -> None:
            while ended:
                library.colocate_vmm_free(ctypes.c_void_p(ended.pop()), ctypes.c_ssize_t(0), ctypes.c_int(0), None)

        monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: len(made))

        def construct(while_it_runs: bool) -> None:
            with kept_addresses("cuda:0"):
                made.append(library.colocate_vmm_alloc(ctypes.c_ssize_t(1), ctypes.c_int(0), None))
                assert made[-1]
                if while_it_runs:
                    torch.cuda.empty_cache()

        for while_it_runs in (False, False, True):
            construct(while_it_runs)
            ended += made[-1:]
        with pytest.raises(CapabilityError, match="torch has not asked for the memory"), kept_addresses("cuda:0"):
            made.append(0)

    def test_what_other_threads_make(self, played: PlayedTorch) -> None:
        """It is told of what somebody holds, without what was there before, is in a pool, or is let go of again."""

        def segment(address: int, pool: tuple[int, int], *states: str) -> None:
            blocks = [{"size": 512, "state": state} for state in states]
            played.segments.append({"address": address, "segment_pool_id": pool, "blocks": blocks})

        held = [SimpleNamespace(data_ptr=lambda at=at: at, nbytes=lambda: 400) for at in range(512, 10 * 512, 512)]
        active, gone = "active_allocated", "inactive"
        segment(0, (0, 0), active, active)
        with kept_addresses("cuda:0") as elsewhere:
            assert elsewhere is not None
            segment(2 * 512, (1, 0), active)
            segment(3 * 512, (0, 0), gone, "active_pending_free", active, active)
            segment(7 * 512, (0, 2), active)
        assert elsewhere(held) == 2 * 400
        assert elsewhere(held[:5]) == 400
        with kept_addresses("cuda:0") as elsewhere:
            assert elsewhere is not None
        assert elsewhere(held) == 0

    def test_a_device_that_can_not(self, played: PlayedTorch, gpu: PlayedVmm) -> None:
        """The role isn't constructed."""
        gpu.driver.played_supported(0)
        with pytest.raises(CapabilityError, match=r"cuda:0 can't have memory"), kept_addresses("cuda:0"):
            raise AssertionError


class Plain(Role):
    """A role that has nothing."""

    @method
    def look(self) -> int:
        return 1


class Holds(Plain):
    """Has a parameter, which has a gradient; or nothing."""

    def __init__(self, count: int) -> None:
        import torch

        self.held = torch.nn.Parameter(torch.ones(count)) if count else None
        if self.held is not None:
            self.held.sum().backward()
            self.gradients = [self.held.grad]


class OnDevice(Objects):
    """Storages of the host's, as if they were a device's."""

    def add_pieces(self, items: list[Any], sizes: dict[int, int], device: str) -> None:
        for item in items:
            storage = item.untyped_storage()
            self.setdefault(device, {})[storage._cdata] = storage.nbytes()
            self.storages[storage._cdata] = storage


class TestHadHere:
    """What it needs of a machine."""

    def test_a_driver_that_lacks_something(self, gpu: PlayedVmm, tmp_path: Path) -> None:
        path = compiled(tmp_path)
        with pytest.raises(VmmError, match=r"libnone\.so: .*No such file"):
            Vmm(path, "libnone.so")
        source, old = tmp_path / "old.c", tmp_path / "old.so"
        source.write_text("int cuGetErrorString, cuDeviceGet, cuDeviceGetAttribute, cuDevicePrimaryCtxRetain;\n")
        subprocess.check_call(["cc", "-shared", "-fPIC", "-o", str(old), str(source)])
        with pytest.raises(VmmError, match="cuCtxGetCurrent isn't in it"):
            Vmm(path, str(old))

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(CapabilityError, match=r"needs a C compiler .* install one"):
            compiled(tmp_path)

    def test_a_machine_without_a_gpu(self, gpu: PlayedVmm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """It says so, and leaves nothing behind."""
        folder = tmp_path / "temporary"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        load = Vmm.__init__
        monkeypatch.setattr(Vmm, "__init__", lambda self, path: load(self, path, "libnone.so"))
        with pytest.raises(CapabilityError, match=r'sleep="vmm" can\'t be had here: libnone\.so'):
            Vmm.made()
        assert list(folder.iterdir()) == []
        assert Vmm.in_use() is None

    @pytest.mark.parametrize("maker", ["AMD", "Intel"])
    def test_gpus_of_others(self, monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
        """They are refused before anything starts; slots without one take it."""
        monkeypatch.setattr(needs, "KIND", gpus.KINDS[maker])
        with colocate.connect("local", gpus=1) as runtime:
            with runtime.reserve(gpus=1) as pool, pytest.raises(CapabilityError, match=f"those of {maker} .* Leave it"):
                pool.spawn({"one": colocate.role(Plain).on(sleep="vmm")})
            with runtime.reserve() as pool:
                assert pool.spawn({"one": colocate.role(Plain).on(sleep="vmm")}).role("one", Plain).look() == [1]

    def test_a_role_whose_memory_others_have_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It isn't spawned, and is told what to do; gradients may be, wherever they are held, and others' memory."""
        pytest.importorskip("torch")
        asked: list[list[Any]] = []

        @contextlib.contextmanager
        def kept(device: str) -> Iterator[Any]:
            def elsewhere(storages: Any) -> int:
                asked.append(list(storages))
                return sum(storage.nbytes() for storage in asked[-1])

            yield elsewhere

        monkeypatch.setattr(build, "kept_addresses", kept)
        monkeypatch.setattr(build, "Objects", OnDevice)
        with colocate.connect("local") as runtime, runtime.reserve() as pool:
            with pytest.raises(
                RoleStartError, match=r"1 KiB of weights and buffers on cpu .*HF_DEACTIVATE_ASYNC_LOAD"
            ) as told:
                pool.spawn({"one": colocate.role(Holds, 256).on(sleep="vmm")})
            assert isinstance(told.value.__cause__, CapabilityError)
            assert pool.spawn({"one": colocate.role(Holds, 0).on(sleep="vmm")}).role("one", Plain).look() == [1]
        assert [len(storages) for storages in asked] == [1, 0]
