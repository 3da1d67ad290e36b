"""Slots are placed on the requested machines, also on a machine that joins later."""

from __future__ import annotations

from collections.abc import Callable

from tests.clusters.engines import OnMachines

DRIVER = """
import os, sys
import colocate
from colocate import Role, method

class Where(Role):
    @method
    def where(self):
        return os.uname().nodename

def lie(slots, **where):
    with runtime.reserve(slots, cpus=0, **where) as pool:
        return sorted(pool.spawn({"where": colocate.role(Where)})["where"].where())

def refused(slots, **where):
    try:
        lie(slots, **where)
    except colocate.PlacementError as error:
        assert "can never fit" in str(error), error
        return True

engine, address, of_n2 = sys.argv[1:]
where = {"ray": {"resources": {f"node:{of_n2}": 0.1}}, "dask": {"labels": {"host": of_n2}}}[engine]
with colocate.connect(engine, address=address) as runtime:
    assert lie(1, **where) == ["n2"]
    if engine == "ray":
        [one, same] = lie(2, strategy="strict_pack")
        assert one == same
    else:
        assert refused(2, strategy="strict_pack")  # each machine has one Dask worker
    apart = {"ray": ["n0", "n1", "n2"], "dask": ["n1", "n2"]}[engine]
    assert lie(len(apart), strategy="strict_spread") == apart
    assert refused(len(apart) + 1, strategy="strict_spread")
    print("waits", flush=True)
    print(*lie(len(apart) + 1, strategy="strict_spread", grow=True, timeout=100), flush=True)
"""


def test_places(cluster: Callable[..., OnMachines]) -> None:
    """A slot is placed by node, slots are packed and spread, and a waiting reservation gets a node that joins."""
    found = cluster(3, later=1)
    script = found.machines.shared / "driver.py"
    script.write_text(DRIVER)
    driver = found.driver(script, found.machines[2].address)

    def says() -> list[str]:
        assert driver.stdout is not None
        assert driver.stderr is not None
        line = driver.stdout.readline()
        assert line, driver.stderr.read()
        return line.split()

    assert says() == ["waits"]
    found.join(found.machines[3])
    assert says()[-3:] == ["n1", "n2", "n3"]
    assert driver.wait() == 0
