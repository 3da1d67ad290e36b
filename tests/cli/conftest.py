import os
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest
from tests.distributions.install import Installed
from tests.forked import Forks


@attrs.frozen
class CommandLine:
    """The `colocate` command as a user runs it: in a folder, in a process of its own, with distributions installed."""

    folder: Path
    installed: Installed
    forks: Forks

    def __call__(
        self, *args: str, distributions: tuple[str, ...] = (), **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run it to its end; with `variables`, in an interpreter that begins with them."""
        command, environment = self.command(*args, distributions=distributions)
        if not variables:
            return self.forks.run(args, self.folder, environment)
        environment |= variables
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )

    def command(self, *args: str, distributions: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
        """What to start, and its environment."""
        path = [str(self.installed(name)) for name in distributions]
        path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200"}
        return [sys.executable, "-W", "error", "-m", "colocate", *args], environment

    def start(
        self, *args: str, distributions: tuple[str, ...] = (), stdin: bool = False, **variables: str
    ) -> "subprocess.Popen[str]":
        """Start it as a terminal does, in a process group of its own, and let it run; with `stdin`, it reads a pipe."""
        command, environment = self.command(*args, distributions=distributions)
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment | variables,
            stdin=subprocess.PIPE if stdin else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path


@pytest.fixture
def colocate(tmp_path: Path, installed: Installed, forks: Forks) -> CommandLine:
    return CommandLine(tmp_path, installed, forks)
