"""A private cluster: nobody else reaches it, and nothing of it is left."""

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
    """Processes, threads, descriptors and files are gone; two clusters don't know each other."""
    one, two = (colocate.connect("dask", cpus=1) for _ in range(2))
    with one, two, one.reserve(1), two.reserve(1) as pool:
        assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None]
        with pytest.raises(PlacementTimeout):
            one.reserve(1, timeout=0)


def test_listens_nowhere(no_leaks: None) -> None:
    """No other user of the machine can talk to it."""
    before = listeners()  # a process that has used a role by itself keeps gloo's
    with colocate.connect("dask") as runtime, runtime.reserve(2, cpus=0) as pool:
        pool.spawn({"echo": colocate.role(Echo)})
        assert listeners() <= before


def listeners() -> set[tuple[int, Any]]:
    """The addresses at which this process and those below it listen."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = ((process.pid, each) for process in family for each in process.net_connections("inet"))
    return {(pid, each.laddr) for pid, each in sockets if each.status == "LISTEN"}


def test_offers_this_machine() -> None:
    """Its CPUs are this process's, unless told otherwise."""
    with colocate.connect("dask") as runtime:
        (node,) = runtime._node.services.executor.nodes()
        assert node.cpus == len(os.sched_getaffinity(0))
    with colocate.connect("dask", cpus=3, gpus=2) as runtime:
        (node,) = runtime._node.services.executor.nodes()
        assert (node.cpus, node.gpus) == (3, 2)


def test_not_the_default_client() -> None:
    """Dask's own default client is the user's business."""
    from distributed import default_client

    find: Any = default_client
    with colocate.connect("dask", cpus=1), pytest.raises(ValueError, match="No client"):
        find()


def test_logs_are_the_users(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask doesn't chat on the terminal while a private cluster lives; a handler that a user has added hears it all."""
    logger = logging.getLogger("distributed")
    dasks = logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [dasks])  # as Dask does where nobody has asked for a log before
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


def test_no_address_of_pages_that_nobody_serves(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever wants Dask's log isn't told of a dashboard, on an address of the network; another cluster's is."""
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
    """It goes with its driver."""
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
