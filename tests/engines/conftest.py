from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine
from tests.distributions.install import Installed
from tests.forked import Forks

ENGINES = ["ray", "dask"]
PACKAGES = {"ray": "ray", "dask": "distributed"}


@pytest.fixture
def colocate(tmp_path: Path, installed: Installed, forks: Forks) -> CommandLine:
    """Return the command in a folder of its own, with a config of a third party's role and a local one."""
    command = CommandLine(tmp_path, installed, forks)
    command.write("demo.yaml", CONFIG)
    command.write("beside.py", BESIDE)
    return command


CONFIG = """
    executor: local
    pools:
      main: {slots: 2}
    groups:
      policy:
        pool: main
        roles:
          reward: {use: acme.reward, with: {wanted: 4, scale: 0.5}}
          loud: {use: "beside:Loud", slots: [1]}
    job: {use: acme.tally, with: {steps: 3}}
"""

BESIDE = """
    import colocate

    class Loud(colocate.Role):
        def __init__(self):
            print("here I am")

        @colocate.method
        def go(self): ...
"""
