"""A value for all ranks leaves the driver's machine once, and a worker's machine once per other machine."""

from __future__ import annotations

from collections.abc import Callable

from tests.clusters.engines import OnMachines

TAKES = """
import sys
import colocate
from colocate import Role, method

class Takes(Role):
    @method
    def take(self, value):
        return value == bytes(range(256)) * (1 << 15)

def sent():
    with open("/proc/self/net/dev") as file:
        (line,) = (line for line in file if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])

with colocate.connect(sys.argv[1], address=sys.argv[2]) as runtime:
    with runtime.reserve(slots=6, strategy="spread") as pool:
        takes = pool.spawn({"takes": colocate.role(Takes)})["takes"]
        takes.take(b"")
        value = bytes(range(256)) * (1 << 15)
        before = sent()
        found = takes.take(value)
        print(found == [True] * 6, len({slot.node for slot in pool.slots}), (sent() - before) / len(value) < 1.5)
"""

KEPT = """
import sys, time
from pathlib import Path
import colocate
from colocate import First, Role, method
import numpy

class Keeps(Role):
    @method(collect=First())
    def keep(self):
        return numpy.arange(1 << 21)

    @method(collect=First())
    def sent(self):
        with open("/proc/self/net/dev") as file:
            (line,) = (line for line in file if "eth0:" in line)
        return int(line.partition(":")[2].split()[8])

class Takes(Role):
    @method
    def take(self, value, folder, late):
        # As in a collective: nobody is through before all have it.
        Path(folder, f"{late}-{self.ctx.rank}").touch()
        while len(list(Path(folder).glob(f"{late}-*"))) < self.ctx.world_size:
            time.sleep(0.01)
        return bool((value == numpy.arange(1 << 21)).all())

with colocate.connect(sys.argv[1], address=sys.argv[2]) as runtime:
    with runtime.reserve(slots=6, strategy="spread") as pool:
        keeps = pool[:1].spawn({"keeps": colocate.role(Keeps)})["keeps"]
        takes = pool[1:].spawn({"takes": colocate.role(Takes)})["takes"]
        value = keeps.keep.keep()
        before = keeps.sent()
        for late in range(4):
            found = takes.take(value, sys.argv[3], late)
            print(found)
            after = keeps.sent()
            print(len({slot.node for slot in pool.slots}), round((after - before) / (8 << 21), 1))
            before = after
"""


def test_once_from_the_driver(cluster: Callable[..., OnMachines]) -> None:
    found = cluster(3)
    if found.engine == "dask":  # a second Dask worker per machine
        for machine in [*found.machines][1:]:
            found.join(machine)
        found.wait_for(6)
    script = found.machines.shared / "takes.py"
    script.write_text(TAKES)
    out, err = found.driver(script).communicate(timeout=120)
    assert out.splitlines()[-1:] == ["True 3 True"], err


def test_kept_resident_leaves_machine_twice_per_call(cluster: Callable[..., OnMachines]) -> None:
    """In each call, a resident for ranks on three machines leaves its own machine twice."""
    found = cluster(3)
    if found.engine == "dask":  # a second Dask worker per machine
        for machine in [*found.machines][1:]:
            found.join(machine)
        found.wait_for(6)
    script, folder = found.machines.shared / "kept.py", found.machines.shared / "kept"
    script.write_text(KEPT)
    folder.mkdir()
    out, err = found.driver(script, str(folder)).communicate(timeout=120)
    assert out.splitlines()[-8:] == ["[True, True, True, True, True]", "3 2.0"] * 4, err
