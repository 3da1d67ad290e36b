"""The README's first commands, in an environment that has only Python; and the content of a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT, blocks_of

FRESH = "installs; tests/docs/test_first_hour.py does, in a fresh environment"
TRAINS = "trains for about a minute; tests/docs/test_first_hour.py does"
PACKAGES = {path.parent.name for top in ("core", "executors", "plugins") for path in ROOT.glob(f"{top}/*/py.typed")}


def commands(reason: str, page: Path = ROOT / "README.md") -> list[str]:
    """Return the commands in a page's blocks that aren't run for the given reason."""
    texts = [block.text for block in blocks_of(page) if block.not_run == reason]
    return [line.removeprefix("$ ") for text in texts for line in text.splitlines()]


def typed(command: str, folder: Path, environment: Path, **variables: str) -> str:
    """Run a command in a folder, with the programs of an environment; return its output."""
    path = os.pathsep.join([str(environment / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of this checkout, as a clone has them."""
    folder = tmp_path_factory.mktemp("first") / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path) -> Path:
    """Build a wheel and an sdist; return their folder."""
    build = "import sys; from hatchling import build; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(clone.parent)], cwd=clone, check=True, capture_output=True)
    return clone.parent


def test_wheel_and_sdist_are_complete(built: Path) -> None:
    """A wheel has each package's types and the examples, an sdist has the site's config, and the metadata fits."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as found:
        names = set(found.namelist())
        (metadata,) = [found.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert {name.split("/")[0] for name in names if name.endswith("/py.typed")} == PACKAGES
    assert {path.name for path in ROOT.glob("executors/*")} <= PACKAGES
    assert {"colocate/examples/words.py", "colocate/examples/haiku/pond.yaml", "colocate/__main__.py"} <= names
    assert "Classifier: Operating System :: POSIX :: Linux" in metadata
    assert re.search(r"^Requires-Dist: jinja2\S*$", metadata, re.MULTILINE | re.IGNORECASE)
    assert re.search(r"^Requires-Dist: requests\S*; extra == 'mlflow'$", metadata, re.MULTILINE)
    with tarfile.open(sdist) as found:
        assert f"{sdist.name.removesuffix('.tar.gz')}/mkdocs.yml" in found.getnames()


@pytest.mark.long
def test_installed_wheel_has_runnable_examples(built: Path, tmp_path: Path) -> None:
    """An installed wheel has examples to copy and run, and its hints name the packages of an extra."""
    (wheel,), site, work = built.glob("*.whl"), tmp_path / "site", tmp_path / "work"
    work.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    path = {"PYTHONPATH": str(site)}
    _, command = commands(FRESH)
    printed = typed(command, work, site, **path)
    assert printed.startswith("words.py\nwords.yaml\nrun it: colocate run words.yaml\n")
    assert printed.endswith("everything is closed: 1 runtime, 1 pool, 1 group, 2 workers, 4 roles\n")
    assert (work / "runs" / "words" / "report.html").exists()
    listed = typed("python -m colocate example", work, site, **path)
    assert "first-group.ipynb" in listed
    assert "haiku" in listed
    said = typed("colocate example words 2>&1 || colocate example wrods 2>&1 || true", work, site, **path)
    assert said.startswith("error: words.py, words.yaml: there already, and nothing was copied; use another folder\n")
    assert "did you mean 'words'?" in said
    say = (
        "from colocate._system.installed import get_pip_line, get_same_line; "
        "print(get_pip_line('ray'), get_pip_line('ppo'), get_same_line(), sep='\\n')"
    )
    ray, ppo, same = typed(f'python -c "{say}"', work, site, **path).splitlines()
    assert re.fullmatch(r"pip install 'ray>=[\d.]+'", ray)
    assert re.fullmatch(r"pip install( '[\w-]+>=[\d.]+')+", ppo)
    assert "'torch>=" in ppo
    assert "'transformers>=" in ppo
    assert same == "pip install the same wheel of colocate"


@pytest.mark.long
def test_the_first_command(clone: Path) -> None:
    """The first command installs under 300 MB into a fresh environment, and the example runs to its end."""
    subprocess.run([sys.executable, "-m", "venv", str(clone / "fresh")], check=True)
    command, _ = commands(FRESH)
    assert command.startswith("pip install . && colocate run ")
    assert typed(command, clone, clone / "fresh").endswith("2 workers, 4 roles\n")
    taken = sum(path.stat().st_size for path in (clone / "fresh").rglob("*") if not path.is_symlink())
    assert taken < 300e6


@pytest.mark.long
def test_the_demo(clone: Path) -> None:
    """The demo trains with these tests' packages; the Makefile installs the extra `ppo` for it."""
    (command,) = commands(TRAINS)
    assert "\n.venv/demo/.installed: EXTRA := ppo\n" in (ROOT / "Makefile").read_text()
    printed = typed(f"{command} DEMO={Path(sys.executable).parents[1]}", clone, clone)
    assert "report: runs/ppo/report.html" in printed
    assert printed.endswith("everything is closed: 1 runtime, 1 pool, 1 group, 1 worker, 4 roles\n")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_verls_first_commands(clone: Path) -> None:
    """verl's first commands run in a fresh environment with the extra alone, at pinned versions."""
    subprocess.run([sys.executable, "-m", "venv", str(clone / "verl")], check=True)
    install, v0, v1 = commands(FRESH, ROOT / "docs" / "verl.md")
    assert install.startswith("pip install ")
    pins = ROOT / "constraints-verl.txt"
    typed(install, clone, clone / "verl", PIP_CONSTRAINT=str(pins))
    for command, ray in ((v0, "none"), (v1, "gcs_server, raylet")):
        printed = typed(command, clone, clone / "verl", PYTHONPATH="")
        assert len(re.findall(r"^ +\d ", printed, re.MULTILINE)) == 3
        assert printed.endswith(f"Processes of Ray: {ray}.\n")
