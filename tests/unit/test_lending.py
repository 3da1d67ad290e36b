"""A worker reads another one's device memory in place; the device and its driver are played."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from colocate import First, wire
from colocate._devices import lending
from colocate._protocol.consequence import PoisonedPart
from colocate._protocol.taken import Receipt
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
    """An owner and a reader, which both have the device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cuda = Cuda(patch)
        self.driver = PlayedDriver(self.cuda, patch)
        patch.setattr(torch.Tensor, "to", lambda tensor, device: self._to(tensor, device))
        self.store = Store(False, Scope(), "cuda:0")
        self.owner = ChannelPeers(self._host("owners", self.store))
        self.reader = ChannelPeers(self._host("readers", Store(False, Scope(), "cuda:0")))

    def _to(self, tensor: Any, device: str) -> Any:
        """Copy a small tensor as torch does."""
        found = self.cuda._empty(tensor.shape, tensor.dtype, device, False)
        return found.copy_(tensor)

    def _host(self, group: str, store: Store) -> Any:
        return SimpleNamespace(
            boot=SimpleNamespace(
                ports=None, host=wire.LOOPBACK, secret=b"s" * 32, device="cuda:0", slot=0, group=group, generation=0
            ),
            report_broken=lambda reason: None,
            store=store,
            codec=BY_VALUE,
            get_wait_refusal=lambda: None,
            ask_driver=lambda question: self.owner.address,
            pack_result=lambda value, maker, wait: wire.pack(value),
            device=SimpleNamespace(use_side_stream=contextlib.nullcontext),
        )

    def keep(self, value: Any) -> Any:
        self.store.expect_value(KEY)
        self.store.put_value(KEY, value, "role.make", None)
        return value

    def part(self) -> tuple[Any, Receipt]:
        taken: list[Receipt] = []
        return self.reader.fetch_part(SOURCE, 0, taken), taken[0]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    two = Two(monkeypatch)
    yield two
    two.owner.close()
    two.reader.close()
    assert two.driver.open_now == []
    two.cuda.end()


def test_value_is_copied_between_devices(two: Two) -> None:
    """A value is copied from device to device, complete on any stream, and not by the host."""
    x = two.keep(two.cuda.ones(4, ROW))
    found, taken = two.part()
    assert two.cuda.has(found)
    assert found.data_ptr() != x.data_ptr()
    assert torch.equal(found, x)
    assert taken[5:] == (4 * BYTES, "")
    assert 4 * BYTES < taken[2] < 4 * BYTES + 4096
    assert two.cuda.copied == []


def test_rows(two: Two) -> None:
    """Rows are copied from their place in the lent memory, without the host."""
    x = two.keep({"x": two.cuda.ones(8, ROW), "y": two.cuda.ones(8, 2)})
    taken: list[Receipt] = []
    found = two.reader.fetch_rows(SOURCE, 0, 3, 6, taken)
    assert torch.equal(found["x"], x["x"][3:6])
    assert torch.equal(found["y"], x["y"][3:6])  # This one is too small, and goes by the host.
    assert taken[0][5:] == (3 * BYTES, "")
    assert two.cuda.copied == []


@pytest.mark.parametrize("who", ["lends", "opens"])
def test_a_driver_that_refuses(two: Two, who: str) -> None:
    """A pair whose driver refuses always copies by the host, and its first receipt says why."""
    x = two.keep(two.cuda.ones(2, ROW))
    setattr(two.driver, who, "memory of an allocator that maps it piece by piece")
    for turn in range(3):
        found, taken = two.part()
        assert torch.equal(found, x)
        assert two.cuda.has(found)
        assert taken[5:] == (0, "" if turn else "memory of an allocator that maps it piece by piece")
    assert two.driver.asked == 1
    assert two.cuda.copied == 4 * [2 * BYTES]  # one to the host, and one from there per turn


def test_written_into_meanwhile(two: Two) -> None:
    """A reader of a value that is changed meanwhile gets the same error as by the host."""
    x = two.keep(two.cuda.ones(2, ROW))

    def write() -> None:
        x.add_(1)
        assert [key for key, *_ in two.store.pop_written(None, "role.write")] == [KEY]

    two.driver.amid = write
    with pytest.raises(PoisonedPart, match=r"returned by role\.make, was changed in place by role\.write"):
        two.part()
