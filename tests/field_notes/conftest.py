"""What the field notes' tests share: engines, and drivers as scripts of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import pytest
from tests.conformance.shared import cluster

import colocate
from colocate import Runtime
from colocate.testing import leaks
from colocate.testing.runtimes import make_first_worker

T = TypeVar("T")

PREAMBLE = """
import json, os, sys, threading
import colocate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo

ROLES = {"faulty": colocate.role(Faulty), "echo": colocate.role(Echo)}

def say(what):
    print(json.dumps(what), flush=True)
"""

PROCESSES: dict[str, Any] = {"executor": "local", "processes": True, "cpus": 8}
ENGINES = ["processes", pytest.param("ray", marks=pytest.mark.long)]

Script = Callable[..., "subprocess.Popen[str]"]


def hear(driver: subprocess.Popen[str]) -> Any:
    """What a script says next."""
    assert driver.stdout is not None
    return json.loads(driver.stdout.readline())


@contextmanager
def shared(make: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Something for all tests, which the first of them isn't blamed for."""
    with ExitStack() as stack:
        with leaks.shared():
            made = stack.enter_context(make())
            if isinstance(made, Runtime):
                make_first_worker(made)
        yield made


@pytest.fixture(scope="session")
def ray_options() -> Iterator[dict[str, Any]]:
    """A Ray cluster with 8 CPUs that is there already."""
    pytest.importorskip("ray")
    with shared(lambda: cluster("ray")) as options:
        yield options


@pytest.fixture(scope="session")
def on_ray(ray_options: dict[str, Any]) -> Iterator[Runtime]:
    with shared(lambda: colocate.connect("ray", **ray_options)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def on_dask() -> Iterator[Runtime]:
    pytest.importorskip("distributed")
    with shared(lambda: cluster("dask")) as options, shared(lambda: colocate.connect("dask", **options)) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def on_processes() -> Iterator[Runtime]:
    """Processes of this machine, with 8 CPUs."""
    with shared(lambda: colocate.connect(**PROCESSES)) as runtime:
        yield runtime


@pytest.fixture(params=ENGINES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Where the note's trouble could be; on Ray, which it was on, in `make suites`."""
    found: Runtime = request.getfixturevalue(f"on_{request.param}")
    return found


@pytest.fixture(params=ENGINES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a driver of its own connects with there."""
    return {"executor": "ray", **request.getfixturevalue("ray_options")} if request.param == "ray" else PROCESSES


@pytest.fixture
def script() -> Iterator[Script]:
    """Starts a driver; ends it if the test doesn't."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, **names: Any) -> subprocess.Popen[str]:
        given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        command = [sys.executable, "-W", "error", "-c", PREAMBLE + given + textwrap.dedent(text)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()
        driver.communicate()
