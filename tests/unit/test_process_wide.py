"""Random generators of a role: libraries imported amid role code, and checkpoints from before the import."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, random, sys
from colocate.worker.process_wide import ProcessState, create_role_state
wide = ProcessState("cpu")
own, other = (create_role_state(0, "group", name, 0, 0) for name in ("role", "other"))
wide.switch_to(own)
saved = wide.save_generators(own)  # by a run that had no other library yet
assert not {"numpy.random", "torch"} & sys.modules.keys()
if sys.argv[1] == "restored":
    random.random()
    wide.restore_generators(own, json.loads(json.dumps(saved)))
drawn = [random.random()]
import torch
wide.on_library_imported()
drawn.append(float(torch.rand(())))
import numpy.random
wide.on_library_imported()  # torch's goes on
drawn += [float(torch.rand(())), float(numpy.random.rand())]
wide.switch_to(other)
torch.manual_seed(0)
wide.switch_to(own)
print(json.dumps([*drawn, random.random(), float(torch.rand(())), float(numpy.random.rand())]))
"""


def drawn(how: str) -> Any:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_libraries_that_come_amid_role_code() -> None:
    """Generators of a library imported amid role code start once from the role's seed, also in a restored run."""
    first = drawn("begun")
    assert len({*first}) == len(first) == 7
    assert drawn("begun") == drawn("restored") == first
