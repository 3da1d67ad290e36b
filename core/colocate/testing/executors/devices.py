"""Devices: the tensors among a method's arguments are on its slot's device, whatever made them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.executor import Boot, Host, HostEvents, Place
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.probes.devices import Batch, Placed, places_in

# torch's device without contents: it needs no hardware, and shows where a tensor was put.
AWAY = "meta"


class Devices(TensorCase):
    """Slots whose device isn't the host's."""

    @pytest.fixture
    def away(
        self, torch: Any, no_leaks: None, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[ColocatedGroup]:
        """A group of two slots that have such a device, or so their workers are told."""
        launch = runtime._node.services.executor.launch

        def elsewhere(place: Place, boot: Boot, events: HostEvents) -> Host:
            return launch(place, attrs.evolve(boot, device=AWAY), events)

        monkeypatch.setattr(runtime._node.services.executor, "launch", elsewhere)
        with runtime.reserve(2, cpus=0) as pool:
            yield pool.spawn({"placed": colocate.role(Placed, [torch.ones(1), Batch(torch.ones(1))])})

    def test_arguments_arrive_on_the_device(self, torch: Any, away: ColocatedGroup) -> None:
        """By every dispatch and every way to call: a value of the driver's, a resident, and what was fetched of one."""
        placed, there = away.role("placed", Placed), [AWAY] * 2
        with placed.make.keep(1) as kept:
            for x in (torch.ones(2, 2), kept.ref, kept.fetch()):
                assert placed.broadcast(x) == there
                assert placed.scattered(x) == there
                assert placed.each([x, x]) == there
                assert placed.soon(x) == there
                assert placed.broadcast({"deep": [x]}) == [{"deep": [AWAY]}] * 2
                assert away.run(places_in, x) == there
                with away.pipeline():
                    seen = placed.scattered.submit(x)
                assert seen.result() == there

    def test_in_what_it_is_nested(self, torch: Any, away: ColocatedGroup) -> None:
        """In records of one's own, in modules and in TensorDicts, made by the driver or by a role."""
        placed, there = away.role("placed", Placed), [AWAY] * 2
        assert placed.broadcast(Batch(torch.ones(1))) == there
        assert placed.broadcast([torch.nn.Linear(1, 1)]) == [[there]] * 2
        with placed.make_record.keep() as kept:
            assert placed.broadcast(kept.ref) == placed.broadcast(kept.fetch()) == [there] * 2
        tensordict = pytest.importorskip("tensordict")
        assert placed.scattered(tensordict.TensorDict({"a": torch.ones(2)}, [2])) == there

    def test_some_stay_on_the_host(self, torch: Any, away: ColocatedGroup) -> None:
        """`host=` names parameters that arrive there. A constructor's arguments do, too."""
        placed = away.role("placed", Placed)
        with placed.make.keep(1) as kept:
            for x in (torch.ones(2, 2), kept.ref, kept.fetch()):
                for lengths in (torch.ones(2, 2), kept.ref, kept.fetch()):
                    assert placed.mixed(x, lengths, more=Batch(torch.ones(1))) == [[AWAY, "cpu", "cpu"]] * 2
        assert placed.constructed() == [["cpu", "cpu"]] * 2
