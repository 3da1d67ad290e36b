"""A slow start says what it does: the module that is imported, the constructor that runs, and the workers.

Modes: processes, ray, dask.
"""

import io
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from hx import connect, end, verdict

import colocate

ROLES = """
import os
import time
from colocate import Role, method

def wait_for(name):
    while not os.path.exists(f"FOLDER/{name}"):
        time.sleep(0.05)

if os.getpid() != DRIVER:
    wait_for("imported")

class Late(Role):
    def __init__(self):
        wait_for("constructed")

    @method
    def there(self):
        return True
"""


def heard(words):
    """Return whether the words are on stderr within a minute."""
    until = time.time() + 60
    while words not in sys.stderr.getvalue() and time.time() < until:
        time.sleep(0.05)
    return words in sys.stderr.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, connect() as runtime, runtime.reserve(slots=2) as pool:
        Path(folder, "late_roles.py").write_text(ROLES.replace("FOLDER", folder).replace("DRIVER", str(os.getpid())))
        sys.path.append(folder)
        from late_roles import Late

        shown, sys.stderr = sys.stderr, io.StringIO()
        spawning = threading.Thread(target=pool.spawn, args=({"late": colocate.role(Late)},), kwargs={"name": "slowly"})
        spawning.start()
        for what, made in (("importing late_roles", "imported"), ("late.__init__", "constructed")):
            said = heard(f"[colocate] group 'slowly' starts: {what}: ")
            verdict(f"it says {what}", said, sys.stderr.getvalue())
            Path(folder, made).touch()
        spawning.join()
        verdict("and on which workers", " s on workers 0, 1\n" in sys.stderr.getvalue(), sys.stderr.getvalue())
        sys.stderr = shown
    end()
