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
    """The `colocate` command, run in a folder, in its own process, with distributions installed."""

    folder: Path
    installed: Installed
    forks: Forks

    def __call__(
        self, *args: str, distributions: tuple[str, ...] = (), **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run the command to its end; `variables` are set in a fresh interpreter."""
        command, environment = self.command(*args, distributions=distributions)
        if not variables:
            return self.forks.run(args, self.folder, environment)
        environment |= variables
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )

    def command(self, *args: str, distributions: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
        """Return the command line and its environment."""
        path = [str(self.installed(name)) for name in distributions]
        path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200"}
        return [sys.executable, "-W", "error", "-m", "colocate", *args], environment

    def start(
        self, *args: str, distributions: tuple[str, ...] = (), stdin: bool = False, **variables: str
    ) -> "subprocess.Popen[str]":
        """Start the command in its own session, as a terminal does; with `stdin`, the process reads a pipe."""
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
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path


@pytest.fixture
def colocate(tmp_path: Path, installed: Installed, forks: Forks) -> CommandLine:
    return CommandLine(tmp_path, installed, forks)
