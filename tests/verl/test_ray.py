"""Behaviour on Ray alone, in a script with a Ray of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.verl.test_demo import assert_equal, by_verl

if os.environ["COLOCATE_VERL"] != "ray":
    pytest.skip("on Ray only", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # a dozen processes import verl, beside a second Ray and a third


def run(script, *folders):
    with tempfile.TemporaryDirectory(prefix="verl", dir="/tmp") as folder:  # Ray's socket paths must be short.
        command = [sys.executable, "-W", "ignore", Path(__file__).with_name(script), *folders, folder]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return run("on_ray.py")


def test_worker_describes_itself_like_actor(found):
    assert found["workers"] == [found["driver"]] * 2


def test_a_worker_finds_the_drivers_actors(found):
    assert found["counts"][-1] == 3
    assert found["mixed"] == [4, 5]


def test_collectives_of_ray_between_workers(found):
    assert found["reduced"] == [3, 3]


def test_a_driver_that_is_an_actor(found):
    assert found["by an actor"] == [6]


def test_groups_end_with_ray(found):
    assert found["again"] == [6]


def test_main_ppo(tmp_path):
    """V1's losses equal verl's own with verl's task runner, a Ray actor, as the driver."""
    assert_equal(run("by_main_ppo.py", tmp_path), by_verl(tmp_path, "v1"), "v1")
