"""Audits on an existing cluster use the scheduler's own table, not the drivers' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dask.conftest import planted

import colocate
from colocate import Runtime
from colocate.testing.probes.plain import Echo
from colocate_run.cli.cluster import Cluster, find_strays


@pytest.mark.long
@pytest.mark.usefixtures("runtime")  # the first driver installs objects in the scheduler
def test_a_config_names_the_cluster(
    cluster: str, other: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit command joins the cluster that a config names; without an address it says that none was looked at."""
    monkeypatch.setattr("colocate.driver.list_strays", list)
    config = tmp_path / "audited.yaml"
    config.write_text("executor: {use: dask, with: {address: 'tcp://127.0.0.1:1', timeout: 1}}\n")
    change = [f"executor.with.address={cluster}", "executor.with.timeout=30"]
    with planted(other, "elsewhere-7-2/lost"):
        assert find_strays(Cluster(config, changes=change), json=False) == 1
        title, line = capsys.readouterr().out.splitlines()
        assert title == f"1 left on this machine and dask at {cluster}"
        assert line.startswith("leaked: reservation elsewhere-7-2/lost (node 127.0.0.")
        assert find_strays(Cluster(config, address=cluster), json=True) == 1
        capsys.readouterr()
    assert find_strays(Cluster(config, address=cluster), json=False) == 0
    assert capsys.readouterr().out == f"clean: nothing has been left on this machine and dask at {cluster}\n"
    assert find_strays(Cluster(config), json=False) == 1
    told = capsys.readouterr()
    assert told.out == "clean: nothing has been left on this machine\n"
    assert "no Dask scheduler can be reached at tcp://127.0.0.1:1" in told.err
    assert find_strays(Cluster(executor="dask"), json=False) == 0
    assert capsys.readouterr().out.splitlines()[1] == "no cluster of dask was looked at: that needs its --address"


@pytest.mark.long
def test_other_drivers_are_nobodys_strays(cluster: str, runtime: Runtime) -> None:
    """Reservations of living drivers are in no driver's audit."""
    with colocate.connect("dask", address=cluster) as driver, driver.reserve(2, cpus=0, name="theirs") as pool:
        pool.spawn({"echo": colocate.role(Echo)})
        assert not runtime.audit()
        assert not driver.audit()
        (held,) = (each for each in driver._node.services.executor.running() if each.kind == "reservation")
        assert held.id == f"{driver._node.services.id}/theirs"
        assert held.detail.startswith("2 Dask workers held for client ")
