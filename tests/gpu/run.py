"""`python3 -m tests.gpu.run`: run tests/gpu on a machine with a GPU and no network, and write the results.

The machine needs only Python 3.11 or later with torch, and the folder that `make gpu-wheels` has filled. The tests run
in an environment in a temporary folder, which sees the packages of this Python; missing packages come from the wheels,
and colocate is this checkout. Results go to $OUT, or to build/gpu: gpu.json, and gpu.md with the section for
docs/internals/gpu.md. On a machine that is lent for less time than all tests take, run each --part by itself, and
make one result of them with --join.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core", "executors", "plugins")
_ENDS_WITHIN_S = 15.0
_NO_TESTS = 5  # pytest's exit code, where a part has tests of one kind only
PARTS = {
    "a": (
        "TestCore",
        "TestChildren",
        "TestRows",
        "TestProfiles",
        "TestWeights",
        "TestSharing",
        "TestBackground",
        "TestSaving",
        "TestEngines",
        "TestSync",
        "TestDevices",
        "TestChoice",
        "TestTrainers",
        "TestErrors",
    ),
    "b": ("TestWork", "TestLending", "TestPinning", "TestContexts", "TestGroups", "TestSpinning", "TestPpo"),
    "c": ("TestSleep", "TestTurns", "TestAddresses", "TestOverhead", "TestLlama"),
}
_OF_ALL = ("commit", "sources", "device", "python", "torch", "cuda", "driver")
"""The facts that all parts of a run have in common."""


def main() -> int:
    """Run the tests, or join results; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / "gpu-wheels", help="where the wheels are")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu"))
    parser.add_argument("--minutes", type=float, default=9.0, help="end the tests after so many (default: 9)")
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU, run what runs on a CPU")
    parser.add_argument("--part", choices=PARTS, help="only these: " + "; ".join(map(_words, PARTS)))
    parser.add_argument("--join", type=Path, nargs="+", metavar="JSON", help="run nothing: make one of these results")
    parser.add_argument("pytest", nargs="*", help="more for pytest, after --")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.join:
        write(options.out, joined([json.loads(path.read_text()) for path in options.join]))
        return 0
    facts = look(options.wheels)
    print("\n".join(f"{key:10} {value}" for key, value in facts.items()), flush=True)
    if facts["device"] is None and not options.allow_cpu:
        print("there is no GPU that torch can use: nothing has been run (--allow-cpu runs what a CPU can)")
        return 2
    with tempfile.TemporaryDirectory(prefix="colocate-gpu-") as folder:
        python = environment(Path(folder), options.wheels)
        left = options.minutes * 60 - (time.monotonic() - began)
        more = [*(["-k", " or ".join(PARTS[options.part])] if options.part else []), *options.pytest]
        code, results = run(python, Path(folder), more, left, cpu=facts["device"] is None)
    write(options.out, {**facts, "seconds": round(time.monotonic() - began, 1), "exit": code, "tests": results})
    return code if isinstance(code, int) else 1


def _words(part: str) -> str:
    return f"{part} {' '.join(name.removeprefix('Test') for name in PARTS[part])}"


def write(out: Path, record: dict[str, Any]) -> None:
    (out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    text = section(record)
    (out / "gpu.md").write_text(text)
    print(text)


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of parts as one run's; exit with an error if the parts' sources, say, differ."""
    first, *others = records
    for other in others:
        for fact in _OF_ALL:
            if other.get(fact) != first.get(fact):
                sys.exit(f"these aren't parts of one run: their {fact} is {first.get(fact)} and {other.get(fact)}")
    ends = [record["exit"] for record in records]
    return {
        **first,
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "exit": next((end for end in ends if end not in (0, 1)), max(ends, key=str)),
        "tests": [test for record in records for test in record["tests"]],
    }


def look(wheels: Path) -> dict[str, Any]:
    """Return facts about this machine and the tested sources."""
    # A separate process: this one must hold no part of the GPU while the tests run.
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False)
    lines = found.stdout.splitlines()
    why = (found.stderr.splitlines() or [f"exit code {found.returncode}"])[-1]
    gpu = json.loads(lines[-1]) if found.returncode == 0 and lines else {"torch": f"can't be used ({why[-300:]})"}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(wheels),
        "sources": digest(),
        "device": None,
        **gpu,
        "python": platform.python_version(),
    }


_LOOK = """
import json, subprocess, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    one = torch.cuda.get_device_properties(0)
    found["device"] = f"{torch.cuda.device_count()} x {one.name}, {one.total_memory / 2**30:.0f} GiB"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    found["driver"] = said[0] if said else "unknown"
    free, total = torch.cuda.mem_get_info()
    found["in use"] = f"{(total - free) / 2**20:.0f} MiB, with this process's context"
print(json.dumps(found))
"""


def _commit(wheels: Path) -> str:
    """Return the commit noted with the wheels if the sources are the same, or else git's answer.

    For copied files, git may describe another commit.
    """
    note = wheels / "commit"
    noted, _, sources = note.read_text().strip().partition(" ") if note.is_file() else ("unknown", "", "")
    if sources == digest():
        return noted
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{noted}, changed since" if sources else noted


def digest() -> str:
    """Return a digest of the sources, with or without git."""
    found = hashlib.sha256()
    for path in sorted(path for folder in (*SOURCES, "tests/gpu") for path in (ROOT / folder).rglob("*.py")):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def environment(folder: Path, wheels: Path) -> Path:
    """Make an environment with this Python's packages, missing ones and this checkout; return its Python."""
    home = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    (packages / "base.pth").write_text("".join(f"{path}\n" for path in _beside()))
    install(packages, wheels)
    link(packages)
    return python


def _beside() -> list[str]:
    """Return the folders of this Python's packages, and folders that are linked there. This may be an environment."""
    sites = [*site.getsitepackages(), sysconfig.get_path("purelib")]
    sites += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    links = [link for folder in sites for link in sorted(Path(folder).glob("*.pth"))]
    linked = [line for link in links for line in link.read_text().splitlines() if line.startswith("/")]
    own = [str(ROOT / name) for name in SOURCES]  # An installed checkout isn't the tested one.
    return [path for path in dict.fromkeys([*sites, *linked]) if Path(path).is_dir() and path not in own]


def install(packages: Path, wheels: Path) -> None:
    """Install the packages that are missing here into the environment, without a network."""
    installed = {_plain(found.name) for found in importlib.metadata.distributions()}
    files = [file for file in sorted(wheels.glob("*")) if file.name.endswith((".whl", ".tar.gz"))]
    missing = [file for file in files if _plain(file.name.partition("-")[0]) not in installed]
    print(f"{len(files)} in {wheels}, of which {len(missing)} are missing here", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--target", str(packages)]
    ready = [str(file) for file in missing if file.suffix == ".whl"]
    if ready:
        subprocess.run([*pip, *ready], check=True)
    for source in (file for file in missing if file.suffix != ".whl"):
        # A source may not compile there: pip prints the reason, and tests that need the package are skipped.
        subprocess.run([*pip, "--no-build-isolation", str(source)], check=False)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def link(packages: Path) -> None:
    """Install this checkout as `pip install --editable` would, without the network that a build would need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "core" / "colocate" / "_version.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    (packages / "colocate.pth").write_text("".join(f"{ROOT / name}\n" for name in SOURCES))
    info = packages / f"colocate-{found[1]}.dist-info"
    info.mkdir()
    needs = [f"Requires-Dist: {need}" for need in project["dependencies"]]
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", "Name: colocate", f"Version: {found[1]}", *needs])
    )
    points = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in own.items()) for group, own in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    tops = sorted(path.name for name in SOURCES for path in (ROOT / name).iterdir() if (path / "__init__.py").is_file())
    (info / "top_level.txt").write_text("\n".join(tops))
    (info / "RECORD").write_text("".join(f"{info.name}/{file.name},,\n" for file in info.iterdir()))


def run(
    python: Path, folder: Path, more: list[str], within_s: float, cpu: bool
) -> tuple[int | str, list[dict[str, Any]]]:
    """Run the tests; return pytest's exit code, or the word of a timeout, and the result of each test."""
    results = folder / "results.jsonl"
    results.touch()
    # Other versions than ours give other warnings, and a GPU is too rare to fail because of one.
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "tests/gpu"]
    # Pytest here is no worker of an outer pytest.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    env = {**outer, "COLOCATE_GPU_RESULTS": str(results), "COLOCATE_GPU_DRY": "1" if cpu else ""}
    env.pop("PYTHONPATH", None)
    ends = time.monotonic() + within_s
    codes = [_pytest([*command, *wave, *more], env, ends - time.monotonic()) for wave in waves()]
    code = next((code for code in codes if code not in (0, _NO_TESTS)), min(codes, key=str))
    return code, [json.loads(line) for line in results.read_text().splitlines()]


def waves() -> list[list[str]]:
    """Return pytest's options of each run: tests in parallel, if xdist is there, then tests that need the GPU alone."""
    if importlib.util.find_spec("xdist") is None:
        return [[]]
    several = min(8, os.cpu_count() or 1)
    return [["-m", "not alone", "-n", str(several), "--dist", "worksteal"], ["-m", "alone", "-n", "0"]]


def _pytest(command: list[str], env: dict[str, str], within_s: float) -> int | str:
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(max(1.0, within_s))
    except subprocess.TimeoutExpired:
        _end(process)
        return "time was up"
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, so that its fixtures end the workers; after a while kill its process group."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


KINDS = ("passed", "failed", "skipped")


def section(record: dict[str, Any]) -> str:
    """Return a run as a section of docs/internals/gpu.md."""
    tests: list[dict[str, Any]] = record["tests"]
    device = record["device"] or "no GPU (--allow-cpu)"
    versions = [f"Python {record['python']}", f"torch {record['torch']}"]
    if record["device"]:
        versions += [f"CUDA {record['cuda']}", f"driver {record['driver']}"]
    words = ", ".join(f"{count} {kind}" for kind in KINDS if (count := _count(tests, kind))) or "no test has ended"
    end = "" if record["exit"] in (0, 1) else f" ({record['exit']})"
    parts = [
        f"### {record['date']}: {device}",
        f"Commit {record['commit']} (sources {record['sources']}), {', '.join(versions)}: {words} in "
        f"{record['seconds']:.0f} s{end}.",
        _table(("area", *KINDS, "seconds"), [_row(tests, area) for area in dict.fromkeys(t["area"] for t in tests)]),
        _table(("figure", "value"), [list(pair) for test in tests for pair in test["figures"].items()]),
        "\n".join(f"- failed: `{test['test']}`: {test['reason']}" for test in tests if test["outcome"] == "failed"),
        "\n".join(dict.fromkeys(f"- skipped: {test['reason']}" for test in tests if test["outcome"] == "skipped")),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _row(tests: list[dict[str, Any]], area: str) -> list[str]:
    own = [test for test in tests if test["area"] == area]
    seconds = sum(test["seconds"] for test in own)
    return [area, *(str(_count(own, kind)) for kind in KINDS), f"{seconds:.0f}"]


def _count(tests: list[dict[str, Any]], kind: str) -> int:
    return sum(test["outcome"] == kind for test in tests)


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


if __name__ == "__main__":
    # SIGTERM is to be as tidy as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
