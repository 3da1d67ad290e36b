"""A Ray cluster that has nodes made for slots that are waited for, and ends those that hold none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.clusters import NONE_IDLE, SPARING, started

import colocate
from colocate import Runtime
from colocate.errors import PlacementError, PlacementTimeout
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, wait_until

_ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # nodes that an autoscaler has made don't end with it
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    command = [sys.executable, str(Path(__file__).with_name("growing.py"))]
    with (
        started("ray", command, {**SPARING, **NONE_IDLE, **_ENVIRONMENT}) as (_, options),
        colocate.connect("ray", **options) as runtime,
    ):
        yield runtime
        wait_until(lambda: nodes(runtime) == 1, "none is left but the head")


def nodes(runtime: Runtime) -> int:
    return len(runtime._node.services.executor.nodes())


@pytest.mark.parametrize("detachable", [False, True])
def test_from_none_to_two(runtime: Runtime, detachable: bool) -> None:
    """Nodes are made for pools, also by labels; they stay as long as a pool has slots there, and go when none has."""
    assert nodes(runtime) == 1
    reserve = partial(runtime.reserve, cpus=2, labels={"kind": "new"}, timeout=PATIENCE_S, detachable=detachable)
    with reserve() as kept:
        echo = kept.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        with reserve():
            assert nodes(runtime) == 3
        wait_until(lambda: nodes(runtime) == 2, "the one goes that holds nothing")
        assert echo.noop() == [None]
    assert not runtime.audit()
    wait_until(lambda: nodes(runtime) == 1, "so does the other")


def test_more_than_it_makes(runtime: Runtime) -> None:
    """The error has the autoscaler's words; a pool that doesn't want to wait for it is refused at once."""
    words = (
        r"within 1 s \(Ray's autoscaler has 1 ray\.head\.default, and makes no more: of its types of nodes none would"
    )
    with pytest.raises(PlacementTimeout, match=words) as caught:
        runtime.reserve(1, cpus=3, timeout=1)
    assert len(caught.value.nodes) == 1
    with pytest.raises(PlacementError, match="can never fit"):
        runtime.reserve(1, cpus=1, grow=False)
