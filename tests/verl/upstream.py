"""verl's own tests of worker groups, on colocate: `python tests/verl/upstream.py FOLDER EXECUTOR [FILE ...]`.

FOLDER has verl's source distribution, unpacked and unchanged. `upstream.txt` lists the tests that aren't run, with the
reasons. Each file runs in a process of its own, as some change verl for their whole process.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

LIST = Path(__file__).with_name("upstream.txt")
WITHIN_S = 600
ENVIRONMENT = {
    # verl itself runs only on accelerators: the shim presents the CPU as one.
    "VERL_USE_EXTERNAL_MODULES": "colocate_verl.demo.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # These tests start a Ray with the machine's CPUs, and put more workers there.
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 100}',
}
OPTIONS = {"dask": {"cpus": 100}}  # Dask needs as many.
RUN = "import sys, pytest, colocate_verl; colocate_verl.install({!r}, **{!r}); sys.exit(pytest.main(sys.argv[1:]))"


def left_out(executor: str) -> dict[str, str]:
    """Return the files and tests that aren't run, with the reasons."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    rows = [[part.strip() for part in line.split("|")] for line in lines]
    return {name: reason for executors, name, reason in rows if executor in executors.split()}


def main(folder: Path, executor: str, *chosen: str) -> int:
    """Run the tests; return the number of files with a failed test."""
    tests, out = folder / "tests" / "single_controller", left_out(executor)
    files = sorted(tests.glob("test_*.py"))
    names = {f"{file.name}{rest}" for file in files for rest in ("", *_tests_of(file))}
    if unknown := [*out.keys() - names, *set(chosen) - {file.name for file in files}]:
        raise SystemExit(f"verl has no test {', '.join(unknown)}")
    failed = []
    for file in files:
        if file.name in out or (chosen and file.name not in chosen):
            continue
        command = [sys.executable, "-c", RUN.format(executor, OPTIONS.get(executor, {}))]
        command += ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
        every = _tests_of(file)
        kept = [test for test in every if f"{file.name}{test}" not in out]
        command += [f"{file.relative_to(folder)}{test}" for test in ([""] if kept == every else kept)]
        began = time.monotonic()
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(command, cwd=folder, env=environment, timeout=WITHIN_S, capture_output=True, text=True)
        print(
            f"{executor:5} {file.name:45} {done.stdout.splitlines()[-1]} ({time.monotonic() - began:.0f} s)", flush=True
        )
        if done.returncode != 0:
            failed.append(file.name)
            print(f"{file.name} ended with {done.returncode}:", done.stdout, done.stderr)
    for name, reason in out.items():
        print(f"{executor:5} {name}: not run: {reason}")
    return len(failed)


def _tests_of(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    return [f"::{line.removeprefix('def ').partition('(')[0]}" for line in lines if line.startswith("def test")]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
