"""The cost of `import colocate`, and colocate without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "ray", "distributed", "transformers", "matplotlib", "jinja2")
OF_COMMANDS = ("typer", "rich", "ruamel", "jinja2", "colocate_run", "colocate_report")


def run(python: str, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


ECHO = """
import colocate, sys

class Echo(colocate.Role):
    @colocate.method
    def echo(self, word: str) -> str:
        return word
"""


def test_import_loads_nothing_heavy() -> None:
    """`import colocate` loads no heavy library, and calls on threads need neither torch nor asyncio.

    The modules that messages name are there after the import.
    """
    code = f"""
{ECHO}
print(colocate.config.load_config, colocate.errors.RoleError, colocate.executor.Executor)
[getattr(colocate, name) for name in colocate.__all__]
print([name for name in {HEAVY!r} if name in sys.modules])
with colocate.connect() as runtime, runtime.reserve() as pool:
    pool.spawn({{"echo": colocate.role(Echo)}}).role("echo", Echo).echo("a")
print([name for name in ("torch", "asyncio") if name in sys.modules])
"""
    assert run(sys.executable, code).splitlines()[1:] == ["[]", "[]"]


def test_core_loads_nothing_of_commands() -> None:
    """Neither core nor a worker loads the packages that run and report jobs, or a library that only these need."""
    code = f"""
{ECHO}
def loaded(ctx: object) -> list[str]:
    import sys
    return [name for name in {OF_COMMANDS!r} if name in sys.modules]

[getattr(colocate, name) for name in colocate.__all__ if name not in colocate._BESIDE]
with colocate.connect(processes=True) as runtime, runtime.reserve() as pool:
    group = pool.spawn({{"words": colocate.role(Echo)}})
    print(loaded(None), group.run(loaded))
"""
    assert run(sys.executable, code).strip() == "[] [[]]"


@pytest.fixture(scope="module")
def bare_python() -> str:
    """Return the interpreter of an environment with the base dependencies alone, which `make test` sets up."""
    python = os.environ.get("COLOCATE_BASE_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("COLOCATE_BASE_PYTHON names no environment without extras; `make test` sets one up")
    return python


SCRIPT = """
import colocate
from colocate import Concat, First, Reduce, Role, Scatter, method

class Words(Role):
    @method(dispatch=Scatter("words"), collect=Concat())
    def upper(self, words: list) -> list:
        return [word.upper() for word in words]

    @method(dispatch=Scatter("words"), collect=Reduce("sum"))
    def count(self, words: list) -> int:
        return sum(map(len, words))

    @method(collect=First())
    def device(self) -> str:
        return str(self.ctx.device)

    @method(collect=First())
    def group(self) -> None:
        self.ctx.process_group()

    @method(collect=First())
    def random(self) -> None:
        self.ctx.generator

for options in ({}, {"strict": True}, {"processes": True}):
    with colocate.connect("local", **options) as runtime, runtime.reserve(slots=2) as pool:
        words = pool.spawn({"words": colocate.role(Words)}).role("words", Words)
        kept = words.upper.keep(["a", "bc", "def"])
        print(kept.fetch(), words.count(kept.ref))
        for call in (words.device, words.group, words.random):
            try:
                call()
            except colocate.RoleError as error:
                print(type(error.__cause__).__name__, error.__cause__)
"""


def test_lists_work_without_torch(bare_python: str, tmp_path: Path) -> None:
    """Without torch `local` works with lists, and a use of torch is an ImportError with the pip line."""
    script = tmp_path / "words.py"
    script.write_text(SCRIPT)
    done = subprocess.run([bare_python, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    assert lines[::4] == ["['A', 'BC', 'DEF'] 6"] * 3
    for line in (line for index, line in enumerate(lines) if index % 4):
        assert line.startswith("ImportError ")
        assert "needs torch, which isn't installed: pip install 'numpy>=2.0' 'torch>=" in line


def test_the_pip_line(bare_python: str) -> None:
    """A plugin or an executor without its extra raises a PluginError with the pip line."""
    code = """
import colocate
try:
    with colocate.connect() as r, r.reserve() as p: p.spawn({'actor': colocate.role('ppo.actor')})
except colocate.PluginError as error: print(error.hint)
for engine in ("ray", "dask"):
    try: colocate.connect(engine)
    except colocate.PluginError as error: print(error.hint)
"""
    ppo, ray, dask = run(bare_python, code).splitlines()
    assert "'torch>=" in ppo
    assert ray.startswith("pip install 'ray>=")
    assert dask.startswith("pip install 'distributed>=")
