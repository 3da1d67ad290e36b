"""Private Dask clusters: nobody else can reach them, and they leave nothing."""

from __future__ import annotations

import io
import json
import logging
import os
from typing import Any

import psutil
import pytest
from tests.dask.conftest import script

import colocate
from colocate.errors import PlacementTimeout
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes


def test_leaves_nothing(no_leaks: None) -> None:
    """A private cluster leaves no process, thread, descriptor or file, and shares no slots with another one."""
    one, two = (colocate.connect("dask", cpus=1) for _ in range(2))
    with one, two, one.reserve(1), two.reserve(1) as pool:
        assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None]
        with pytest.raises(PlacementTimeout):
            one.reserve(1, timeout=0)


def test_listens_nowhere(no_leaks: None) -> None:
    """A private cluster listens on no network address."""
    before = listeners()  # gloo's may stay from a role used without a worker
    with colocate.connect("dask") as runtime, runtime.reserve(2, cpus=0) as pool:
        pool.spawn({"echo": colocate.role(Echo)})
        assert listeners() <= before


def listeners() -> set[tuple[int, Any]]:
    """Return the addresses at which this process and its descendants listen."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = ((process.pid, each) for process in family for each in process.net_connections("inet"))
    return {(pid, each.laddr) for pid, each in sockets if each.status == "LISTEN"}


def test_offers_this_machine() -> None:
    """A private cluster has this process's CPUs, unless options say otherwise."""
    with colocate.connect("dask") as runtime:
        (node,) = runtime._node.services.executor.nodes()
        assert node.cpus == len(os.sched_getaffinity(0))
    with colocate.connect("dask", cpus=3, gpus=2) as runtime:
        (node,) = runtime._node.services.executor.nodes()
        assert (node.cpus, node.gpus) == (3, 2)


def test_not_the_default_client() -> None:
    """A private cluster doesn't set Dask's default client."""
    from distributed import default_client

    find: Any = default_client
    with colocate.connect("dask", cpus=1), pytest.raises(ValueError, match="No client"):
        find()


def test_logs_are_the_users(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask prints no log while a private cluster lives; a handler that a user added still gets every record."""
    logger = logging.getLogger("distributed")
    dasks = logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [dasks])  # Dask adds this handler if nothing configures its log
    heard = io.StringIO()
    mine = logging.StreamHandler(heard)
    with colocate.connect("dask", cpus=1), colocate.connect("dask", cpus=1):
        logger.addHandler(mine)
        try:
            with colocate.connect("dask", cpus=1) as runtime, runtime.reserve(1):
                logger.warning("of somebody else's cluster")
                assert mine.level == logging.NOTSET
        finally:
            logger.removeHandler(mine)
        assert dasks.filters
    assert "of somebody else's cluster" in heard.getvalue()
    assert "Failed" not in heard.getvalue()  # Dask's complaint about a folder that it can't remove
    printed = capfd.readouterr()
    assert not [line for text in printed for line in text.splitlines() if not line.startswith("[colocate] ")]
    assert dasks.level == logging.NOTSET
    assert dasks.filters == []


def test_private_cluster_logs_no_dashboard_address(caplog: pytest.LogCaptureFixture) -> None:
    """Dask's log names no dashboard of a private cluster, which serves none; another cluster's line stays."""
    caplog.set_level(logging.INFO, "distributed")
    logger = logging.getLogger("distributed.scheduler")
    with colocate.connect("dask", cpus=1) as runtime, runtime.reserve(1):
        logger.info("  dashboard at:  http://another")
    assert "Scheduler at: " in caplog.text
    assert "Start worker at: " in caplog.text
    assert [each.getMessage() for each in caplog.records if "dashboard at:" in each.getMessage()] == [
        "  dashboard at:  http://another"
    ]
    assert logger.filters == []


def test_killed_driver() -> None:
    """The workers of a private cluster end when their driver is killed."""
    driver = script("""
        runtime = colocate.connect("dask")
        echo = runtime.reserve(2, cpus=0).spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        print(json.dumps([pid for pid, _, _ in echo.place()]), flush=True)
        threading.Event().wait()
        """)
    with driver:
        assert driver.stdout is not None
        workers = Processes(json.loads(driver.stdout.readline()))
        driver.kill()
        workers.wait_all()
        workers.release_all()
