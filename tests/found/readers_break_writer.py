"""One driver writes a checkpoint again and again while two others are spawned from it: no write fails by that.

Modes: threads, processes, ray, dask.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hx import attempt, connect, end, mode, verdict

import colocate
from colocate import Role, method

SPAWNS = 10


class Many(Role):
    @method
    def nothing(self):
        pass

    def save(self, directory):
        for number in range(20):
            Path(directory, f"{self.ctx.rank}-{number}").write_text("1" * 100)

    def restore(self, directory):
        whole = [Path(directory, f"{self.ctx.rank}-{number}").read_text() for number in range(20)]
        assert whole == ["1" * 100] * 20


def write(folder):
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        group = pool.spawn({"many": colocate.role(Many)}, name="group")
        group.checkpoint(folder)
        (folder.parent / "begun").touch()
        while not (folder.parent / "over").exists():
            group.checkpoint(folder)


def read(folder):
    found = Counter()
    with connect() as runtime, runtime.reserve(slots=1) as pool:
        while not (folder.parent / "begun").exists():
            time.sleep(0.1)
        for _ in range(SPAWNS):
            group = attempt(pool.spawn, {"many": colocate.role(Many)}, name="group", restore=folder)
            if isinstance(group, colocate.ColocatedGroup):
                group.close()
                found["restored"] += 1
            else:
                found["refused" if "another one has taken its place" in str(group) else repr(group)] += 1
    verdict("a reader restores one, or is told", not found.keys() - {"restored", "refused"}, found)
    end()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"write": write, "read": read}[sys.argv[2]](Path(sys.argv[3]))
        sys.exit()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "shared")
        writer, *readers = (
            subprocess.Popen([sys.executable, __file__, mode(), what, str(folder)])
            for what in ("write", "read", "read")
        )
        verdict("readers are well", [reader.wait() for reader in readers] == [0, 0])
        Path(place, "over").touch()
        verdict("every write succeeds", writer.wait() == 0)
        names = sorted(os.listdir(place))
        verdict("nothing else is left", names == ["begun", "over", "shared"], names)
    end()
