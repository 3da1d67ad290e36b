"""Detached pools on Ray: their owner process, and the table of names in Ray's own store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from typing import Any

import psutil
import pytest
from tests.ray.test_joined import everything_is_free, script

import colocate
from colocate import Pool, Runtime
from colocate._api.detached import close_detached
from colocate.errors import ClusterError, ConfigError
from colocate.keeper import Lease, PoolKeepers
from colocate.testing.probes.counting import Counting
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until

# These tests need their own cluster; `make test` runs the suite's tests of detached pools on Ray.
pytestmark = pytest.mark.long


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def new(runtime: Runtime) -> tuple[Pool, Counting]:
    pool = runtime.reserve(2, cpus=0, gpus=1, detachable=True)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)


def owners(cluster: Any) -> list[psutil.Process]:
    """Return the owner processes in a cluster."""
    found = []
    for each in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.cmdline()[:1] and each.cmdline()[0].startswith("ray::Owner"):
                found.append(each)
    return found


def detached(runtime: Runtime, cluster: Any, name: str) -> tuple[list[int], psutil.Process]:
    """Detach a pool; return its workers' pids and its owner process."""
    pool, view = new(runtime)
    pids: list[int] = view.pid()
    pool.detach(name, ttl=300)
    (owner,) = owners(cluster)
    return pids, owner


def test_all_of_the_driver_is_killed(runtime: Runtime, cluster: Any) -> None:
    """A pool's owner gives everything back when the driver and its envoy are killed before the detach."""
    assert owners(cluster) == []
    driver = script(
        """
        from colocate.testing.probes.counting import Counting
        runtime = colocate.connect("ray", **OPTIONS)
        pool = runtime.reserve(2, cpus=0, gpus=1, detachable=True)
        group = pool.spawn({"counting": colocate.role(Counting)})
        envoy = runtime._node.services.executor._envoy
        print(json.dumps([group.role("counting").pid(), envoy._process.pid]), flush=True)
        sys.stdin.read()
        """,
        cluster,
    )
    assert driver.stdout is not None
    pids, envoy = json.loads(driver.stdout.readline())
    (owner,) = owners(cluster)
    gone = Processes([*pids, owner.pid])
    os.kill(envoy, signal.SIGKILL)
    driver.kill()
    gone.wait_all()
    gone.release_all()
    driver.communicate(timeout=PATIENCE_S)
    with runtime.reserve(3, cpus=0, gpus=1):
        pass


def test_envoy_ends_unconnected_owner(cluster: Any) -> None:
    """The envoy ends an owner that its killed driver hasn't connected to."""
    assert owners(cluster) == []
    driver = script(
        """
        from colocate.executor import Request
        runtime = colocate.connect("ray", **OPTIONS)
        envoy = runtime._node.services.executor._envoy
        print(envoy.call("open_owner", Request(1, id="a/b"), b"k" * 32)[0], flush=True)
        sys.stdin.read()
        """,
        cluster,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline()
    assert len(owners(cluster)) == 1
    driver.kill()
    wait_until(lambda: not owners(cluster), "the owner has gone")
    driver.communicate()


def test_owner_is_killed(runtime: Runtime, cluster: Any, name: str) -> None:
    """A killed owner ends its pool: the workers end, and the name is no longer known."""
    pids, owner = detached(runtime, cluster, name)
    workers = Processes(pids)
    owner.kill()
    workers.wait_all()
    workers.release_all()
    wait_until(lambda: not runtime.detached(), "it isn't listed any more")
    with pytest.raises(ConfigError, match="no pool"):
        runtime.attach(name)


def test_owner_is_stopped(runtime: Runtime, cluster: Any, name: str) -> None:
    """A pool whose owner doesn't answer can be closed by force."""
    _, owner = detached(runtime, cluster, name)
    owner.suspend()
    with pytest.raises(ClusterError, match=f"colocate close {name} --force"):
        close_detached(runtime._node, name, force=False)
    close_detached(runtime._node, name, force=True)
    assert not owner.is_running()
    everything_is_free(runtime)


def test_name_of_dead_owner_is_reusable(runtime: Runtime, cluster: Any, name: str) -> None:
    """A name that a dead owner left in the table can be used again."""
    _, owner = detached(runtime, cluster, name)
    owner.kill()
    wait_until(lambda: not runtime.detached(), "it isn't listed any more")
    again, view = new(runtime)
    view.add()
    again.detach(name, ttl=300)
    with runtime.attach(name, own=True) as mine:
        assert mine.groups["counting"].role("counting", Counting).add() == [2, 2]
    assert runtime.detached() == []
    everything_is_free(runtime)


def test_detached_in_vain(runtime: Runtime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detach that fails leaves the pool with its driver, and nobody can attach it."""
    detach = PoolKeepers.detach

    def fail(keepers: PoolKeepers, lease: Lease) -> None:
        detach(keepers, lease)
        raise ClusterError("it was told to")

    monkeypatch.setattr(PoolKeepers, "detach", fail)
    pool, view = new(runtime)
    with pytest.raises(ClusterError, match="it was told to"):
        pool.detach(name, ttl=300)
    assert runtime.detached() == []
    with pytest.raises(ConfigError, match=f"no pool '{name}' is detached"):
        runtime.attach(name, own=True)
    assert view.add() == [1, 1]
    pool.close()
    everything_is_free(runtime)


def test_store(cluster: Any) -> None:
    """Ray's internal store puts, overwrites, gets, lists and deletes keys as `colocate_ray.names` needs."""
    text = """
    import sys, ray
    from colocate_ray import names
    ray.init(address=sys.argv[1], log_to_driver=False)
    key = b"colocate/test"
    put, get = names._put_value, names._get_value
    print([put(key, b"1", overwrite=False), put(key, b"2", overwrite=False), get(key)])
    print([names._put_value(key, b"3", overwrite=True), names._get_value(key), names._list_keys(b"colocate/te")])
    print([names._delete_key(key), names._get_value(key), names._list_keys(b"colocate/te"), names.find_owner("nobody")])
    """
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": cluster.options["token_file"]}
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), cluster.address]
    found = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "[False, True, b'1']",
        "[True, b'3', [b'colocate/test']]",
        "[1, None, [], None]",
    ]
