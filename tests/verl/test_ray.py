"""What is so on Ray alone, by a script with a Ray of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

if os.environ["COLOCATE_VERL"] != "ray":
    pytest.skip("on Ray only", allow_module_level=True)


@pytest.fixture(scope="module")
def found():
    with tempfile.TemporaryDirectory(prefix="verl", dir="/tmp") as folder:  # Ray wants a short name
        script = Path(__file__).with_name("on_ray.py")
        done = subprocess.run([sys.executable, "-W", "ignore", script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_worker_says_of_itself_what_an_actor_would(found):
    assert found["workers"] == [found["driver"]] * 2


def test_a_worker_finds_the_drivers_actors(found):
    assert found["counts"][-1] == 3
    assert found["mixed"] == [4, 5]


def test_collectives_of_ray_between_workers(found):
    assert found["reduced"] == [3, 3]


def test_a_driver_that_is_an_actor(found):
    assert found["by an actor"] == [6, 7]


def test_groups_end_with_ray(found):
    assert found["again"] == [6, 7]
