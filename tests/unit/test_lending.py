"""A device's memory from worker to worker, where it lies; the device and its driver are played."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from colocate import First, wire
from colocate._devices import cuda_driver, lending
from colocate._devices.cuda_driver import HANDLE_BYTES, Driver, DriverError, driver
from colocate._protocol.consequence import Poisoned
from colocate._protocol.taken import Taken
from colocate._protocol.uses import Origin, Source
from colocate._values.codec import BY_VALUE
from colocate._values.mesh import Ranks
from colocate.worker.residents.peers import ChannelPeers
from colocate.worker.residents.store import Store
from colocate.worker.serving.scope import Scope

torch = pytest.importorskip("torch")

from tests.unit.played import Cuda, PlayedDriver  # noqa: E402

ROW = lending.WORTH_LENDING_BYTES // 4  # elements: each row is worth a handle
BYTES = lending.WORTH_LENDING_BYTES
KEY = 7
SOURCE = Source(KEY, Origin("owners", range(1), Ranks(1), First(), "role.make"))


class Two:
    """An owner and a reader, each of which has the device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cuda = Cuda(patch)
        self.is_aside = False
        self.driver = PlayedDriver(self.cuda, patch)
        patch.setattr(torch.Tensor, "to", lambda tensor, device: self._to(tensor, device))
        self.store = Store(False, Scope(), "cuda:0")
        self.owner = ChannelPeers(self._host("owners", self.store))
        self.reader = ChannelPeers(self._host("readers", Store(False, Scope(), "cuda:0")))

    def _to(self, tensor: Any, device: str) -> Any:
        """Torch's own way, of what is small."""
        found = self.cuda._empty(tensor.shape, tensor.dtype, device, False)
        return found.copy_(tensor)

    def _host(self, group: str, store: Store) -> Any:
        return SimpleNamespace(
            boot=SimpleNamespace(
                ports=None, host=wire.LOOPBACK, secret=b"s" * 32, device="cuda:0", slot=0, group=group, generation=0
            ),
            broken=lambda reason: None,
            store=store,
            codec=BY_VALUE,
            why_not=lambda: None,
            ask=lambda question: self.owner.address,
            packed=lambda value, maker, wait: wire.pack(value),
            device=SimpleNamespace(aside=self._aside),
        )

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self.is_aside = True
        yield
        self.is_aside = False

    def keep(self, value: Any) -> Any:
        self.store.expect(KEY)
        self.store.put(KEY, value, "role.make", None)
        return value

    def part(self) -> tuple[Any, Taken]:
        taken: list[Taken] = []
        return self.reader.part(SOURCE, 0, taken), taken[0]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    two = Two(monkeypatch)
    yield two
    two.owner.close()
    two.reader.close()
    assert two.driver.open_now == []
    two.cuda.end()


def test_from_where_it_lies(two: Two) -> None:
    """It is copied from device to device, and nothing of it comes to the host; complete on whatever stream."""
    x = two.keep(two.cuda.ones(4, ROW))
    found, taken = two.part()
    assert two.cuda.has(found)
    assert found.data_ptr() != x.data_ptr()
    assert torch.equal(found, x)
    assert taken[5:] == (4 * BYTES, "")
    assert 4 * BYTES < taken[2] < 4 * BYTES + 4096
    assert two.cuda.copied == []


def test_rows(two: Two) -> None:
    """So are rows, from their place in what was lent, which is opened once."""
    x = two.keep({"x": two.cuda.ones(8, ROW), "y": two.cuda.ones(8, 2)})
    taken: list[Taken] = []
    found = two.reader.slice(SOURCE, 0, 3, 6, taken)
    assert torch.equal(found["x"], x["x"][3:6])
    assert torch.equal(found["y"], x["y"][3:6])  # which is too small, and goes by the host
    assert taken[0][5:] == (3 * BYTES, "")
    assert two.cuda.copied == []


@pytest.mark.parametrize("who", ["lends", "opens"])
def test_a_driver_that_refuses(two: Two, who: str) -> None:
    """It goes by the host then, and for this pair always; the first transfer tells why."""
    x = two.keep(two.cuda.ones(2, ROW))
    setattr(two.driver, who, "memory of an allocator that maps it piece by piece")
    for turn in range(3):
        found, taken = two.part()
        assert torch.equal(found, x)
        assert two.cuda.has(found)
        assert taken[5:] == (0, "" if turn else "memory of an allocator that maps it piece by piece")
    assert two.driver.asked == 1
    assert two.cuda.copied == 4 * [2 * BYTES]  # once to the host, and from there to each


def test_written_into_meanwhile(two: Two) -> None:
    """Who reads it is told what is wrong with it, as where it goes by the host."""
    x = two.keep(two.cuda.ones(2, ROW))

    def write() -> None:
        x.add_(1)
        assert [key for key, *_ in two.store.written(None, "role.write")] == [KEY]

    two.driver.amid = write
    with pytest.raises(Poisoned, match=r"returned by role\.make, was changed in place by role\.write"):
        two.part()


@attrs.frozen
class Batch:
    x: Any


def test_an_error_of_the_device(two: Two) -> None:
    """It is told as that of this copy, and what was opened is closed."""
    two.keep(two.cuda.ones(2, ROW))

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    two.driver.amid = fails
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        two.part()
    assert caught.value.__notes__ == ["cuda:0 told this when memory that another worker lends was copied there"]
    assert two.driver.open_now == []


def test_what_cannot_be_lent(two: Two) -> None:
    """Neither what isn't its bytes, nor rows that were gathered, which nobody keeps."""
    x = two.keep(two.cuda.ones(ROW, 4).t())
    found, taken = two.part()
    assert torch.equal(found, x)
    assert taken[5:] == (0, "")
    lender = lending.Lender("cuda:0", [x])
    assert lender.handle(two.cuda.ones(2, ROW)) is None
    assert two.driver.asked == 0


def test_places(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine, a kind of device, which needn't be in use yet, a version of torch; none where nothing can be lent."""
    monkeypatch.setattr(lending, "in_use", lambda device: None)
    assert lending.place("cuda:0") == lending.place("cuda:1") == f"{lending._machine()} cuda torch {torch.__version__}"
    assert lending.place("cpu") == ""
    monkeypatch.setattr(lending, "driver", lambda device: None)
    assert lending.place("cuda:0") == ""


class Library:
    """Plays libcuda: memory of 1000 bytes at 5000."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.within: list[int] = []
        self.capture_mode = 0  # global

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        assert self.within == [80]
        mode._obj.value, self.capture_mode = self.capture_mode, mode._obj.value
        return 0

    def cuDeviceGet(self, number: Any, ordinal: Any) -> int:
        number._obj.value = ordinal.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        context._obj.value = 77 + number.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.within.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.within.pop()
        return 0

    def note(self, what: str) -> None:
        assert self.within == [80]
        self.called.append(what)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        base._obj.value, size._obj.value = 5000, 1000
        return 0 if 5000 <= address.value < 6000 else 1

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:
        assert base.value == 5000
        ctypes.memmove(ctypes.addressof(handle._obj), bytes(range(HANDLE_BYTES)), HANDLE_BYTES)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        address._obj.value = 9000
        return 0 if bytes(handle.reserved) == bytes(range(HANDLE_BYTES)) and flags.value == 1 else 201

    def cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self.note(f"{size.value} from {source.value} to {target.value} on {stream.value}")
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        self.note(f"pin {size.value} at {address.value}, {flags.value}")
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        self.note(f"unpin {address.value}")
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.note(f"close {address.value}")
        return 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        text._obj.value = b"invalid argument" if code.value == 1 else None
        return 0


def test_the_driver() -> None:
    """What it is asked for, on threads that have no context."""
    library = Library()
    made = Driver(library, "cuda:3")
    handle, offset = made.handle(5100, 900)
    assert (handle, offset) == (bytes(range(HANDLE_BYTES)), 100)
    assert made.open(handle) == 9000
    made.copy(1, 9100, 900, SimpleNamespace(cuda_stream=4))
    made.close(9000)
    assert library.called == ["900 from 9100 to 1 on 4", "close 9000"]
    made.pin(4096, 900)
    made.unpin(4096)
    assert library.called[2:] == ["pin 900 at 4096, 1", "unpin 4096"]
    with pytest.raises(DriverError, match="several pieces"):
        made.handle(5100, 901)
    with pytest.raises(DriverError, match="cuMemGetAddressRange_v2: invalid argument"):
        made.handle(1, 1)
    with pytest.raises(DriverError, match="cuIpcOpenMemHandle_v2: error 201"):
        made.open(bytes(HANDLE_BYTES))
    assert not library.within


@pytest.mark.parametrize("wrong", [False, True])
def test_beside_captures(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """A thread takes no part in those of others for a block, and then again, also where something goes wrong there."""
    library = Library()
    monkeypatch.setattr(cuda_driver, "driver", {"cuda:3": Driver(library, "cuda:3"), "cpu": None}.get)
    fails = pytest.raises(DriverError, match="said in the block") if wrong else contextlib.nullcontext()
    with fails, cuda_driver.beside_captures("cuda:3"):
        assert library.capture_mode == 1  # thread-local
        assert not library.within
        if wrong:
            raise DriverError("said in the block")
    assert library.capture_mode == 0
    assert not library.within
    with cuda_driver.beside_captures("cpu"):
        pass


def test_where_there_is_no_driver() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    assert driver("cuda:0", missing) is None
    assert driver("xpu:0") is None
    assert isinstance(driver("cuda:0", lambda name: Library()), Driver)
    old = driver("cuda:0", lambda name: SimpleNamespace())
    with pytest.raises(DriverError, match="cuDeviceGet: this driver lacks it"):
        old.handle(1, 1)
    cuda_driver.driver.cache_clear()
