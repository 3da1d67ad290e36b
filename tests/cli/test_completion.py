"""Shell completion, asked for as shells do; and `colocate --version`."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine

from colocate._protocol.versions import PROTOCOL
from colocate_run.cli.installed import configs

EXECUTORS = ["dask", "local", "ray"]
OTHERS = ["grpo", "mlflow", "opentelemetry", "ppo", "prometheus", "rollout", "tensorboard", "transformers"]
OTHERS += ["vllm", "wandb"]
COMMAND = Path(sys.executable).with_name("colocate")
BEGIN = """\
eval "$(colocate --show-completion)"
complete -p colocate >&2
"""
ASK = """\
COMP_WORDS=(colocate {words})
COMP_CWORD={last}
_colocate_completion colocate
printf '%s\\n' "${{COMPREPLY[@]}}" ,
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home folder, where completions are installed."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(COMMAND.parent), prepend=os.pathsep)
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a user's working folder with configs and other files."""
    for name in (
        "words.yaml",
        "notes.md",
        "configs/ppo.yaml",
        "configs/deep/er/most.yml",
        ".hidden/no.yaml",
        "a b.yaml",
    ):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "work"


def bash(folder: Path, *lines: list[str]) -> list[list[str]]:
    """Return bash's completions of each line's last word, by the script of `colocate --show-completion`."""
    shell = shutil.which("bash")
    assert shell is not None
    script = BEGIN + "".join(ASK.format(words=shlex.join(words), last=len(words)) for words in lines)
    done = subprocess.run([shell, "--norc", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == "complete -o default -F _colocate_completion colocate\n"
    return [sorted(filter(None, offered.split("\n"))) for offered in done.stdout.split(",\n")[:-1]]


def asked(folder: Path, **variables: str) -> list[str]:
    environment = os.environ | variables
    done = subprocess.run([COMMAND], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_and_options(home: Path, folder: Path) -> None:
    command, option, options = bash(folder, ["pl"], ["run", "x.yaml", "--res"], ["--"])
    assert command == ["plan", "plugins"]
    assert option == ["--resume"]
    assert "--version" in options


def test_configs(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion offers configs here and one folder below; without a match the shell offers files (`-o default`)."""
    assert bash(folder, ["run", ""], ["audit", "../work/wo"]) == [
        ["a b.yaml", "configs/ppo.yaml", "words.yaml"],
        ["../work/words.yaml"],
    ]
    monkeypatch.chdir(folder)
    assert configs(f"{folder}/w") == [f"{folder}/words.yaml"]
    assert configs("con") == ["configs/ppo.yaml"]
    assert sorted(configs("configs/")) == ["configs/deep/er/most.yml", "configs/ppo.yaml"]
    assert configs(".hidden/") == [".hidden/no.yaml"]
    assert configs("notes") == configs("nowhere/") == []


def test_executors_and_plugins(home: Path, folder: Path) -> None:
    assert bash(folder, ["run", "words.yaml", "--executor", ""], ["plugins", ""]) == [
        EXECUTORS,
        sorted([*EXECUTORS, *OTHERS]),
    ]


def test_other_shells(home: Path, folder: Path) -> None:
    """zsh completion describes a plugin, and fish completion offers a config."""
    zsh = asked(folder, _COLOCATE_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="colocate plugins pp")
    assert "\n".join(zsh).count('"ppo":"roles, jobs') == 1
    fish = asked(
        folder,
        _COLOCATE_COMPLETE="complete_fish",
        _TYPER_COMPLETE_ARGS="colocate run wo",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert fish == ["words.yaml"]


def test_completion_imports_no_heavy_modules(home: Path, folder: Path) -> None:
    code = (
        "import sys, os; sys.argv = ['colocate']\n"
        "os.environ |= dict(_COLOCATE_COMPLETE='complete_bash', COMP_WORDS='colocate plugins ', COMP_CWORD='2')\n"
        "from colocate_run.cli import main\n"
        "try: main()\nexcept SystemExit as end: pass\n"
        "print([m for m in ('torch', 'numpy', 'ruamel.yaml', 'psutil', 'colocate_ppo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    *found, imported = done.stdout.split()
    assert (sorted(found), imported) == (sorted([*EXECUTORS, *OTHERS]), "[]")


def test_completion_is_installed(home: Path) -> None:
    shell = shutil.which("bash")
    assert shell is not None
    subprocess.run([shell, "--norc", "-c", "colocate --install-completion; true"], check=True, capture_output=True)
    assert "_colocate_completion()" in (home / ".bash_completions" / "colocate.sh").read_text()
    assert ".bash_completions/colocate.sh" in (home / ".bashrc").read_text()


def test_version(colocate: CommandLine) -> None:
    done = colocate("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"colocate {version('colocate')} (protocol {PROTOCOL}), Python {platform.python_version()}",
        f"executors: dask (distributed {version('distributed')}), local, ray (ray {version('ray')})",
    ]
