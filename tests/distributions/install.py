"""Really installing the distributions beside this file, each into a folder of its own."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Installed:
    """Folders with an installed distribution each: `installed("acme")`. Made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Path:
        target = self._folder / name
        if not target.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(HERE / name)]
            subprocess.run(command, check=True, capture_output=True, text=True)
        return target
