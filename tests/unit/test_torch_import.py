"""What is done when torch comes, and threads that import it at the same time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(tmp_path: Path, script: str) -> str:
    """Run a script with a torch of its own, whose parts import each other."""
    package = tmp_path / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import distributed, last\n")
    (package / "last.py").write_text("")
    (package / "distributed" / "__init__.py").write_text("")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import builtins, importlib\nfrom colocate.worker.torch_groups.hooks import when_torch_comes\n"
        + textwrap.dedent(script)
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["import torch.distributed", "importlib.import_module('torch.distributed')"])
def test_once_it_is_whole(tmp_path: Path, how: str) -> None:
    """It is told once, when all of torch is there, and nothing of it is left in the import system."""
    script = f"""
        import sys
        plain, module = builtins.__import__, importlib.import_module
        when_torch_comes(lambda: print("came", "torch.last" in sys.modules))
        import other
        print("not yet")
        {how}
        import torch.last
        print(builtins.__import__ is plain, importlib.import_module is module)
    """
    assert run(tmp_path, script).splitlines() == ["not yet", "came True", "True True"]


def test_at_once_where_it_is(tmp_path: Path) -> None:
    """What is imported already needn't be waited for."""
    script = """
        import torch
        plain = builtins.__import__
        when_torch_comes(lambda: print("came"))
        print(builtins.__import__ is plain)
    """
    assert run(tmp_path, script).splitlines() == ["came", "True"]


def test_two_threads() -> None:
    """One in torch, the other in a part of it: without turns that ends the process, in `terminate called`."""
    script = """
import threading, sys
from colocate.worker.torch_groups.hooks import when_torch_comes
when_torch_comes(lambda: None)
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
"""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[True, True]"), done.stderr
