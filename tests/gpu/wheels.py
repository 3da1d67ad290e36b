"""`python -m tests.gpu.wheels FOLDER`: gather the packages that a machine with a GPU and no network lacks.

By default for Python 3.12 on x86-64, whatever Python runs this. The folder and the checkout together must fit into an
upload to such a machine; more is an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.run import digest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
LIMIT_BYTES = 64 * 2**20
_A_FILE_BYTES = 1024  # A file in an archive has this overhead.
_MANYLINUX = tuple(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5))
_PLATFORMS = (*_MANYLINUX, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")
# Packages without wheels: pure Python, whose wheels can be made here; and one to be compiled there.
PURE_SOURCES = ("cellpylib", "zss")
SOURCES = ("pycosat",)
# Ray's wheel is larger than all others together; our code needs none of these parts.
_NOT_OF_RAY = ("ray/jars/", "ray/rllib/", "ray/dashboard/client/", "ray/cpp/", "ray/llm/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12", help="that of the machine (default: 3.12)")
    options = parser.parse_args()
    gather(options.folder, options.python_version)


def gather(folder: Path, version: str) -> None:
    """Fill a folder and print its files; exit with an error above the limit."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    names = list(requirements(REQUIREMENTS.read_text()))
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    there = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp", *platforms]
    _pip("download", *there, "--dest", folder, *(name for name in names if name not in (*PURE_SOURCES, *SOURCES)))
    _pip("wheel", "--wheel-dir", folder, *PURE_SOURCES)
    _pip("download", "--no-binary=:all:", "--no-build-isolation", "--dest", folder, *SOURCES)
    for wheel in folder.glob("ray-*.whl"):
        trim(wheel, _NOT_OF_RAY)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    (folder / "commit").write_text(f"{commit.stdout.strip()} {digest()}\n")  # The machine may have no git.
    wrong = [wheel.name for wheel in folder.glob("*.whl") if not _fits(wheel.name, version)]
    if wrong:
        sys.exit(f"these are not for Python {version} on x86-64: {', '.join(wrong)}")
    tell(folder)


def requirements(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if name := line.partition("#")[0].strip():
            yield name


def trim(wheel: Path, parts: tuple[str, ...]) -> None:
    """Leave parts of a wheel out, and compress the rest with LZMA, which pip can read."""
    whole = wheel.with_suffix(".whole")
    wheel.rename(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w") as new:
        for item in old.infolist():
            if item.filename.startswith(parts):
                continue
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                kept = [line for line in data.decode().splitlines() if not line.startswith(parts)]
                data = "\n".join([*kept, ""]).encode()
            new.writestr(item, data, zipfile.ZIP_LZMA)
    whole.unlink()


def tell(folder: Path) -> None:
    """Print the files; exit with an error above the limit."""
    files = sorted(folder.iterdir(), key=lambda file: -file.stat().st_size)
    for file in files:
        print(f"{file.stat().st_size / 2**20:8.2f} MiB  {file.name}")
    gathered = sum(file.stat().st_size + _A_FILE_BYTES for file in files)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in tracked.split("\0") if name]
    checkout = sum(path.stat().st_size + _A_FILE_BYTES for path in paths if path.is_file())
    total = gathered + checkout
    print(f"{gathered / 2**20:8.2f} MiB  in {len(files)} files; with the checkout {total / 2**20:.1f} of 64 MiB")
    if total > LIMIT_BYTES:
        sys.exit(f"too much: {folder} and the checkout have to fit into {LIMIT_BYTES // 2**20} MiB together")


def _fits(name: str, version: str) -> bool:
    python, abi, platform = name.removesuffix(".whl").rsplit("-", 3)[1:]
    own = f"cp{version.replace('.', '')}"
    pure = any(tag in python for tag in ("py3", own)) or abi == "abi3"
    return pure and (platform == "any" or "x86_64" in platform)


def _pip(command: str, *arguments: str | Path) -> None:
    constraints = ROOT / "constraints.txt"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--constraint", str(constraints)]
    subprocess.run([sys.executable, "-m", "pip", command, *options, *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
