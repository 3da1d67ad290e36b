"""What all ranks get leaves the driver's machine once, however many machines there are."""

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


def test_once_from_the_driver(cluster: Callable[..., OnMachines]) -> None:
    found = cluster(3)
    if found.engine == "dask":  # which had one worker on each
        for machine in [*found.machines][1:]:
            found.join(machine)
        found.wait_for(6)
    script = found.machines.shared / "takes.py"
    script.write_text(TAKES)
    out, err = found.driver(script).communicate(timeout=120)
    assert out.splitlines()[-1:] == ["True 3 True"], err
