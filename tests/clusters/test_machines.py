"""Machines are what they are taken for: apart from each other, cut silently, killed at once, new when they boot."""

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
def test_an_engine_on_them(cluster: Callable[..., OnMachines], on: int) -> None:
    """Workers run where they are reserved, for drivers on any machine."""
    found = cluster(2)
    script = found.machines.shared / "where.py"
    script.write_text(WHERE)
    driver = found.driver(script, on=on)
    out, err = driver.communicate(timeout=120)
    assert out.splitlines()[-1:] == ["n1 n2"], err
