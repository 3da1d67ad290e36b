"""Distributions that were removed by half (their .dist-info has no METADATA): `colocate doctor` and spawns go on.

`doctor` says which it is, for one that has a plugin.

Modes: processes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hx import end, verdict

SPAWNS = """
import attr
import colocate

class Nothing(colocate.Role):
    @colocate.method
    def nothing(self):
        pass

with colocate.connect(processes=True) as runtime:
    group = runtime.reserve(slots=1).spawn({"r": colocate.role(Nothing)})
    group.run(attr.has)  # of attrs, which isn't called like its package
    print("spawned")
"""
SEES = "import importlib_metadata\n"  # it reads metadata in place of Python's own, and raises


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("gone-1.0", "numpy-1.0"):
            (folder / f"{name}.dist-info").mkdir()
            (folder / f"{name}.dist-info" / "RECORD").write_text("some_module.py,,\n")
        (folder / "some_module.py").touch()
        (folder / "gone-1.0.dist-info" / "entry_points.txt").write_text("[colocate.roles]\ngone = gone_plugin\n")
        done = run(folder, "-m", "colocate", "doctor")
        told = "".join(done.stdout.split())
        verdict("doctor ends well", done.returncode == 0, done.stderr[-400:])
        verdict("doctor says whose metadata is lost", "gone-1.0.dist-info,whichhasnoMETADATA" in told, told[-800:])
        for before in ("", SEES):
            done = run(folder, "-c", before + SPAWNS)
            verdict("a group is spawned", done.stdout == "spawned\n", done.stderr[-400:])
    end()
