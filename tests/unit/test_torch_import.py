"""Callbacks for the import of torch, and threads that import torch at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import builtins, importlib, sys
from colocate.worker.birth.first_imports import call_on_import
plain, module = builtins.__import__, importlib.import_module
sys.path.insert(0, sys.argv[1])  # of a torch whose parts import each other
for how in ("import torch.distributed", "importlib.import_module('torch.distributed')"):
    call_on_import({"torch": lambda: print("came", "torch.last" in sys.modules)})
    import queue
    print("not yet")
    exec(how)
    import torch.last
    print(builtins.__import__ is plain, importlib.import_module is module)
    call_on_import({"torch": lambda: print("came at once")})
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
"""
TWO_THREADS = """
import sys, threading
from colocate.worker.birth.first_imports import call_on_import
call_on_import({"torch": lambda: None})
told = []

def whole():
    import torch
    told.append(hasattr(torch, "ones"))

def part():
    while "torch" not in sys.modules:  # the other is in the midst of it
        pass
    import torch.distributed
    told.append(hasattr(torch.distributed, "init_process_group"))

threads = [threading.Thread(target=each) for each in (whole, part)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(told)
import colocate.torch
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp") if name in sys.modules])
"""


def run(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_callback_runs_once_torch_is_loaded(tmp_path: Path) -> None:
    """A callback for torch runs once, when all of torch is loaded, and at once later; no import hook is left."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("from torch import distributed, last\n")
    (tmp_path / "torch" / "last.py").write_text("")
    (tmp_path / "torch" / "distributed" / "__init__.py").write_text("")
    assert run(SCRIPT, str(tmp_path)) == ["not yet", "came True", "True True", "came at once"] * 2


def test_two_threads() -> None:
    """Two threads can import torch and a part of torch at the same time, which without turns ends the process.

    `colocate.torch` then imports none of torch's other slow modules.
    """
    assert run(TWO_THREADS) == ["[True, True]", "[]"]
