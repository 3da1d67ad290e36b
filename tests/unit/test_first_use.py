"""Features work on their first use without a descriptor, after their files are deleted, and in a signal handler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import colocate

CORE = Path(colocate.__file__).parents[1]
ROLES = """
import itertools, os, resource, shutil, signal, sys, threading
import colocate
from colocate import First, Role, method

class Counter(Role):
    def __init__(self):
        self.count = 0
    @method(collect=First())
    def step(self) -> int:
        self.count += 1
        return self.count
    @method(collect=First())
    def start(self) -> str:
        self.child = self.ctx.start(["sleep", "100"])
        return self.child.state
    @method(collect=First())
    def stop(self) -> int:
        breakpoint()
        return 1
    @method(rows="x", concurrency=4)
    async def play(self, x):
        return x
    def save(self, folder) -> None:
        open(f"{folder}/count", "w").write(str(self.count))
    def restore(self, folder) -> None:
        self.count = int(open(f"{folder}/count").read())
"""
WITHOUT_DESCRIPTORS = f"""{ROLES}
from contextlib import contextmanager
@contextmanager
def crowded():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def terminal():
    from colocate.features.debugging.attach import attach
    for _ in range(200):
        try:
            return attach(os.getpid(), None)
        except colocate.ConfigError:
            threading.Event().wait(0.1)

with colocate.connect(processes=True) as runtime, runtime.reserve() as pool:
    group = pool.spawn({{"counter": colocate.role(Counter)}})
    counter = group["counter"]
    with crowded():
        call, stop = counter.start.submit(), counter.stop.submit()
        print(call.result(20))
        while not group._node.stopped_slots():
            threading.Event().wait(0.01)
    print(group.state, "sleep" in runtime.graph.render("tree"))
    attached = terminal()
    print(attached.stopped_ranks, stop.done())
    attached.close()
    print(stop.result(20), counter.step())
"""
WITHOUT_FILES = f"""{ROLES}
MODE, FOLDER = sys.argv[1:]
with colocate.connect(processes=MODE == "processes") as runtime, runtime.reserve() as pool:
    group = pool.spawn({{"counter": colocate.role(Counter)}})
    counter = group["counter"]
    counter.step()
    shutil.rmtree(os.path.dirname(colocate.__file__))
    group.checkpoint(FOLDER)
    print(counter.step(), counter.play([1, 2]), len(group.memory().slots))
    group.restore(FOLDER)
    print(counter.step(), "counter" in runtime.graph.render("tree"), not runtime.audit())
"""
IN_A_HANDLER = f"""{ROLES}
def pipeline():
    with group.pipeline():
        call = counter.step.submit()
    return call.result() > 0

def pause():
    name = next(names)  # The handler may run while the outer pause waits, so each has a role of its own.
    group.pause(name)
    group.resume(name)
    return True

USES = {{
    "rows/driver": lambda: counter.play([1, 2]) == [1, 2],
    "pipelines/driver": pipeline,
    "looking/graph": lambda: "counter" in runtime.graph.render("tree"),
    "memory/driver": lambda: len(group.memory().slots) == 1,
    "pausing/driver": pause,
    "weights/comparing": lambda: colocate.compare_weights is not None,
    "profiling/driver": lambda: colocate.profile is not None,
}}
armed, names = [], itertools.cycle(["other", "third"])

def hook(event, args):
    if event == "exec" and armed and getattr(args[0], "co_filename", "").endswith(armed[0]):
        armed.clear()
        signal.raise_signal(signal.SIGUSR1)

sys.addaudithook(hook)
with colocate.connect() as runtime, runtime.reserve() as pool:
    background = {{name: colocate.role(Counter).on(background=True) for name in ("other", "third")}}
    roles = {{"counter": colocate.role(Counter), **background}}
    group = pool.spawn(roles)
    counter = group["counter"]
    for name, use in USES.items():
        inside = []
        signal.signal(signal.SIGUSR1, lambda *_: inside.append(use()))
        armed[:] = [f"features/{{name}}.py"]
        first = use()
        while not inside:  # amid the import it is put off
            threading.Event().wait(0.001)
        print(name, first, inside, use())
"""


def run(code: str, *args: str, **env: str) -> list[str]:
    """Return the lines that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_driver_has_no_descriptor_for_a_first_message() -> None:
    """A driver that can open nothing handles the reports of a child and of a stop; a terminal attaches later."""
    lines = [line for line in run(WITHOUT_DESCRIPTORS) if not line.startswith("[colocate]")]
    assert lines == ["running", "ready True", "None False", "1 1"]


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_features_import_after_file_deletion(tmp_path: Path, mode: str) -> None:
    """Features are first imported from memory, in the driver and in its workers, after their files were deleted."""
    copy = tmp_path / "copy"
    shutil.copytree(CORE, copy, ignore=shutil.ignore_patterns("testing"))
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    lines = run(WITHOUT_FILES, mode, str(tmp_path / "checkpoint"), PYTHONPATH=path)
    assert lines == ["2 [1, 2] 1", "2 True True"]
    assert not (copy / "colocate").exists()


def test_a_handler_interrupts_a_first_import() -> None:
    """A signal handler may use the feature that the main thread is importing."""
    lines = run(IN_A_HANDLER)
    assert len(lines) == 7
    assert [line for line in lines if not line.endswith(" True [True] True")] == []


def test_a_package_with_compiled_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose name is like ours can still import its compiled modules."""
    import _struct
    import importlib

    from colocate._system.own_modules import preload_modules

    package = tmp_path / "colocate_compiled"
    package.mkdir()
    (package / "__init__.py").touch()
    suffix = ".py" if _struct.__spec__.origin == "built-in" else "".join(Path(_struct.__file__).suffixes)
    if suffix == ".py":
        pytest.skip("this Python has its compiled modules built in")
    shutil.copy(_struct.__file__, package / f"_struct{suffix}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("colocate_compiled")
    preload_modules()
    try:
        assert importlib.import_module("colocate_compiled._struct").calcsize("i") == 4
    finally:
        for name in ("colocate_compiled", "colocate_compiled._struct"):
            sys.modules.pop(name, None)
