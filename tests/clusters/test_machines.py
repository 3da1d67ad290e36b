"""An engine on machines out of namespaces runs its workers on these machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.clusters.engines import OnMachines

WHERE = """
import sys
import colocate
from colocate import Role, method

class Where(Role):
    @method
    def where(self):
        import os
        return os.uname().nodename

with colocate.connect(sys.argv[1], address=sys.argv[2]) as runtime:
    with runtime.reserve(slots=2, strategy="spread") as pool:
        print(*sorted(pool.spawn({"where": colocate.role(Where)})["where"].where()))
"""


@pytest.mark.parametrize("on", [0, 1])
def test_spread_slots_use_both_nodes(cluster: Callable[..., OnMachines], on: int) -> None:
    """Two spread slots have their workers on the two nodes, for a driver on the first machine and on a node."""
    found = cluster(2)
    script = found.machines.shared / "where.py"
    script.write_text(WHERE)
    driver = found.driver(script, on=on)
    out, err = driver.communicate(timeout=120)
    assert out.splitlines()[-1:] == ["n1 n2"], err
