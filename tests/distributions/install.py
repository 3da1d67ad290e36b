"""Installation of the distributions beside this file, each into its own folder."""

import fcntl
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Installed:
    """Folders with one installed distribution each, made at the first request of any process: `installed("acme")`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Path:
        target = self._folder / name
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index")
                command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(HERE / name)]
                subprocess.run(command, check=True, capture_output=True, text=True)
        return target
