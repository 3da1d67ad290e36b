"""What importing colocate costs, and what works where torch isn't installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import colocate

HEAVY = ("torch", "numpy", "ray", "distributed", "transformers", "matplotlib", "jinja2")
OF_COMMANDS = ("typer", "rich", "ruamel", "jinja2", "colocate_run", "colocate_report")


def run(python: str, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    """`import colocate` loads neither torch nor an engine, nor any library of an extra."""
    names = "[getattr(colocate, name) for name in colocate.__all__]"
    code = f"import colocate, sys; {names}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(sys.executable, code).strip() == "[]"


def test_core_loads_nothing_of_commands() -> None:
    """Nor does a worker: neither the packages that run and report jobs, nor a library that only these need."""
    code = f"""
import colocate, sys

class Echo(colocate.Role):
    @colocate.method
    def echo(self, word: str) -> str:
        return word

def loaded(ctx: object) -> list[str]:
    import sys
    return [name for name in {OF_COMMANDS!r} if name in sys.modules]

[getattr(colocate, name) for name in colocate.__all__ if name not in colocate._BESIDE]
with colocate.connect(processes=True) as runtime, runtime.reserve() as pool:
    group = pool.spawn({{"words": colocate.role(Echo)}})
    print(loaded(None), group.run(loaded))
"""
    assert run(sys.executable, code).strip() == "[] [[]]"


@pytest.mark.parametrize("name", ["config.load_config", "errors.RoleError", "executor.Executor", "torch.renew"])
def test_modules_that_messages_name(name: str) -> None:
    """They are there after `import colocate`."""
    assert run(sys.executable, f"import colocate; print(colocate.{name}.__name__)").strip() == name.partition(".")[2]


def test_threads_load_only_what_is_needed() -> None:
    """torch comes in when a tensor or a role needs it, a loop when there is something to await."""
    code = """
import sys
import colocate

class Echo(colocate.Role):
    @colocate.method
    def echo(self, word: str) -> str:
        return word

with colocate.connect() as runtime, runtime.reserve() as pool:
    pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo("a")
print([name for name in ("torch", "asyncio") if name in sys.modules])
"""
    assert run(sys.executable, code).strip() == "[]"


@pytest.fixture(scope="module")
def bare_python() -> str:
    """The interpreter of an environment with the base dependencies alone, which `make test` sets up."""
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
    """Without torch `local` works with lists, and what needs torch is an ImportError with the pip line."""
    script = tmp_path / "words.py"
    script.write_text(SCRIPT)
    done = subprocess.run([bare_python, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    assert lines[::4] == ["['A', 'BC', 'DEF'] 6"] * 3
    for line in (line for index, line in enumerate(lines) if index % 4):
        assert line.startswith("ImportError ")
        assert line.endswith("needs torch, which isn't installed: pip install '.[torch]' in a checkout of colocate")


def test_ppo_says_the_pip_line_without_torch(bare_python: str) -> None:
    """A plugin whose extra isn't installed is a PluginError that names the line that helps."""
    code = (
        "import colocate\n"
        "try:\n"
        "    with colocate.connect() as r, r.reserve() as p: p.spawn({'actor': colocate.role('ppo.actor')})\n"
        "except colocate.PluginError as error: print(error)"
    )
    assert "pip install '.[ppo]' in a checkout of colocate" in run(bare_python, code)


@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_engines_say_the_pip_line(bare_python: str, engine: str) -> None:
    """So is an executor whose engine isn't installed."""
    code = (
        f"import colocate\ntry: colocate.connect({engine!r})\nexcept colocate.PluginError as error: print(error.hint)"
    )
    assert run(bare_python, code).strip() == f"pip install '.[{engine}]' in a checkout of colocate"


def test_public_names_are_the_same_for_checkers_and_at_run_time() -> None:
    """Each name is written twice in `colocate/__init__.py`: both say where it comes from, and it is there."""
    tree = ast.parse(Path(colocate.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.name: str(node.module).removeprefix("colocate.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == colocate._HOME_OF | colocate._BESIDE
    assert sorted(declared) == colocate.__all__
    assert all(getattr(colocate, name) is not None for name in colocate.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        colocate.nothing  # type: ignore[attr-defined]  # noqa: B018
