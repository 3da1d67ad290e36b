"""The suite on two machines: network namespaces that only one cable connects."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from tests.distributions.install import Installed

import colocate
from colocate import RoleSpec
from colocate.errors import RoleError, WorkerDied
from colocate.testing.executors import Executor, Smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes

FAR = """
from collections.abc import Mapping

import colocate
from colocate.executor import Node
from colocate.placement import Ledger
from outpost.executor import Outposts, Post


@colocate.hookimpl
def colocate_executor():
    return Far


class Far(Outposts):
    name = "far"

    def __init__(self, *, cpus=None, gpus=0, addresses: Mapping | None = None, namespace: str = ""):
        super().__init__(cpus=cpus, gpus=gpus)
        self._addresses = dict(addresses or {})
        self._namespace = namespace
        self._nodes = [Node(name, cpus, gpus) for name in self._addresses] or self._nodes
        self._ledger = Ledger(self._nodes, lambda devices: "cpu")

    def start_post(self, place, request):
        through = ["nsenter", f"--net=/run/netns/{self._namespace}"] if place.node == "there" else []
        command = [*through, self._python, "-m", "outpost.post"]
        return Post(self._keepers, place, request, self._gpus, command, self._addresses.get(place.node))
"""


@attrs.frozen
class Cable:
    """The cable between this machine and the other one."""

    namespace: str
    here: str
    there: str
    end: str

    def pull(self) -> None:
        """Cut the cable; neither side is notified."""
        ip("link", "set", self.end, "down")

    def plug(self) -> None:
        """Reconnect the cable."""
        ip("link", "set", self.end, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    """Create the other machine and a cable to it; skip if this user may not."""
    number = os.getpid()
    name, end, other = f"colocate-{number}", f"ch{number}", f"ct{number}"
    subnet = f"10.213.{number % 250}"
    cable = Cable(name, f"{subnet}.1", f"{subnet}.2", end)
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        pytest.skip(f"no network namespace can be made here (`ip netns add`): {why}")
    try:
        try:
            ip("link", "add", end, "type", "veth", "peer", "name", other)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no cable between network namespaces can be made here (`ip link add`): {error.stderr}")
        ip("link", "set", other, "netns", name)
        ip("addr", "add", f"{cable.here}/24", "dev", end)
        ip("link", "set", end, "up")
        ip("-n", name, "addr", "add", f"{cable.there}/24", "dev", other)
        ip("-n", name, "link", "set", other, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield cable
    finally:
        ip("netns", "del", name)  # deletes both ends, too


@pytest.fixture(scope="module", autouse=True)
def far(installed: Installed, cable: Cable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install an executor with a post on each machine, as pip would."""
    folder = tmp_path_factory.mktemp("far")
    (folder / "far_executor.py").write_text(textwrap.dedent(FAR))
    about = folder / "far-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[colocate.executors]\nfar = far_executor\n")
    TestTwoMachines.address = cable.here
    TestTwoMachines.options = {
        "addresses": {"here": cable.here, "there": cable.there},
        "namespace": cable.namespace,
    }
    with pytest.MonkeyPatch.context() as patch:
        for path in (installed("outpost"), folder):
            patch.syspath_prepend(str(path))
            patch.setenv("PYTHONPATH", str(path), prepend=":")
        yield


class TestTwoMachines(Smoke):
    """Each pair of slots lies on two machines."""

    executor = "far"
    private: ClassVar = {}
    strategy = "spread"
    last_words = "its post ended with exit code -9"

    test_between_slots = Executor.test_between_slots
    test_between_groups = Executor.test_between_groups
    test_all_ranks = Executor.test_all_ranks
    test_default_group = Executor.test_default_group

    def test_the_slots_lie_on_both(self, pair: colocate.ColocatedGroup) -> None:
        """The two slots lie on the two machines; otherwise these tests would prove nothing."""
        assert [slot.node for slot in pair.owner.slots] == ["here", "there"]


ROLES: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


def test_a_cable_that_is_pulled(cable: Cable) -> None:
    """A cut cable fails the group with the node's name, and the workers of both sides end without a message.

    A runtime that tolerates longer silences continues when the cable is back: its calls and its process groups.
    """
    patient = colocate.connect("far", **TestTwoMachines.options, cut_s=PATIENCE_S)
    with (
        patient,
        colocate.connect("far", **TestTwoMachines.options, cut_s=2) as runtime,
        Gate() as gate,
        Gate() as other_gate,
    ):
        both = patient.reserve(2, cpus=0, strategy="spread").spawn({**ROLES, "all": colocate.role(Collective)})
        both.role("all", Collective).sum(1.0)
        waits = both.role("faulty", Faulty).wait.options(ranks=[0]).submit(other_gate.address)
        other_gate.wait_for()
        pool = runtime.reserve(2, cpus=0, strategy="spread")
        group = pool.spawn(ROLES)
        with Processes([pid for pid, *_ in group.role("echo", Echo).place()]) as workers:
            call = group.role("faulty", Faulty).wait.options(ranks=[0]).submit(gate.address)
            gate.wait_for()
            cable.pull()
            try:
                error = call.exception(PATIENCE_S)
                assert isinstance(error, WorkerDied)
                assert "node there)" in str(error)
                workers.wait_all()
                pool.close()
                late = both.role("echo", Echo).noop.submit()
            finally:
                cable.plug()
        other_gate.open()
        assert waits.result(PATIENCE_S) == [0]
        assert late.result(PATIENCE_S) == [None, None]
        assert both.role("all", Collective).sum(1.0) == [2.0, 2.0]


def test_a_large_value_crosses_the_cable_once(cable: Cable) -> None:
    """A large argument crosses the cable once: a worker there forwards it to its peers, also after a failed call."""
    with colocate.connect("far", **TestTwoMachines.options) as runtime:
        group = runtime.reserve(4, cpus=0, strategy="spread").spawn(ROLES)
        echo, faulty = group.role("echo", Echo), group.role("faulty", Faulty)
        there = [slot.node for slot in group.owner.slots].count("there")
        assert there == 2
        value = bytes(range(256)) * (1 << 14)
        echo.echo(value)
        echo.noop()  # the workers' addresses are known by now
        for again in range(3):
            before = sent(cable)
            assert echo.echo([value, again]) == [[value, again]] * 4
            assert len(value) < sent(cable) - before < 1.5 * len(value)
            with pytest.raises(RoleError):
                faulty.fail.options(ranks=[2])("x")
        kept = echo.echo.keep(value)
        with group.pipeline():
            calls = [echo.echo.submit(each) for each in (value, 1, value[::-1])]
        assert [call.result(PATIENCE_S) for call in calls] == [[each] * 4 for each in (value, 1, value[::-1])]
        assert kept.fetch() == [value] * 4


def sent(cable: Cable) -> int:
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if f"{cable.end}:" in line)
    return int(line.partition(":")[2].split()[8])
