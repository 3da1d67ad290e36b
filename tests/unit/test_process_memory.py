"""What imports add to a process's memory, and what `malloc` keeps of what was freed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest

import colocate

_HOLDS_MIB = 32
_MODULES = {
    "inner": f"held = b'x' * ({_HOLDS_MIB} << 20)",
    "outer": f"import inner\nheld = b'x' * ({_HOLDS_MIB} << 20)",
    "failing": "import inner\nraise ValueError('on purpose')",
    "waiting": "import script\nscript.begun.set()\nscript.go_on.wait(60)",
    "torch_like": f"held = b'x' * ({_HOLDS_MIB} << 20)\nimport script\nscript.memory.begin()\nimport inner",
}


def run(tmp_path: Path, script: str) -> list[int]:
    """Run a script beside modules that hold memory; what it has told in units of that."""
    for name, text in _MODULES.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    begin = """
        import sys, threading, traceback
        sys.modules["script"] = sys.modules["__main__"]
        from colocate.worker import process_memory
        memory = process_memory.ProcessMemory()
        memory.notice_imports()
        memory.begin()

        def told(size=None):
            print(round((memory.code if size is None else size) / MIB))
    """
    text = textwrap.dedent(begin) + textwrap.dedent(script)
    (tmp_path / "script.py").write_text(text.replace("MIB", str(_HOLDS_MIB << 20)))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_each_import_counts_once(tmp_path: Path) -> None:
    """What a module imports is part of it; what is there already is no import, and other memory is none."""
    script = """
        import outer
        told()
        import inner
        held = b'x' * (64 << 20)
        told()
    """
    assert run(tmp_path, script) == [2, 2]


def test_import_that_fails(tmp_path: Path) -> None:
    """It counts what stays of it, its traceback has the frames that it has otherwise, and later ones count, too."""
    script = """
        try:
            import failing
        except ValueError as error:
            files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
            assert not any("process_memory" in file for file in files), files
        told()
        import outer
        told()
    """
    assert run(tmp_path, script) == [1, 2]


def test_imports_of_two_threads(tmp_path: Path) -> None:
    """Nothing counts twice, and neither waits for the other."""
    script = """
        begun, go_on = threading.Event(), threading.Event()
        thread = threading.Thread(target=__import__, args=["waiting"])
        thread.start()
        begun.wait(60)
        import outer
        go_on.set()
        thread.join()
        told()
    """
    assert run(tmp_path, script) == [2]


def test_begin_amid_an_import(tmp_path: Path) -> None:
    """What that had before is the empty worker's."""
    assert run(tmp_path, "before = memory.empty\nimport torch_like\ntold()\ntold(memory.empty - before)") == [1, 1]


def test_import_while_no_descriptor_is_free(tmp_path: Path) -> None:
    """Nobody can look then, and the import goes on."""
    script = """
        plain = process_memory.private_bytes

        def refusing():
            raise OSError(24, "Too many open files")

        process_memory.private_bytes = refusing
        import inner
        process_memory.private_bytes = plain
        told()
        import outer
        told()
    """
    assert run(tmp_path, script) == [0, 1]


def test_what_is_held_back(tmp_path: Path) -> None:
    """What is free between what is in use; what was given back isn't."""
    script = """
        from ctypes import CDLL
        now = process_memory.Malloced.now
        before = now().held_back
        pieces = [b'x' * 65536 for _ in range(1024)]
        del pieces[::2]
        told(now().held_back - before)
        large = b'x' * (256 << 20)
        del large
        told(now().held_back - before)
    """
    assert run(tmp_path, script) == [1, 1]


def test_what_others_have_been_given(tmp_path: Path) -> None:
    """What is in use since the beginning, without what roles have or had imported, or what lies in files now."""
    script = """
        before = memory.look(process_memory.InFiles(0, 0, 0), 0, 0, 0)
        import inner
        role, library = b'x' * (MIB), b'x' * (2 * MIB)
        after = memory.look(process_memory.InFiles(0, 0, 0), MIB, 0, 0)
        told(after["objects"] - before["objects"])
        told(memory.look(process_memory.InFiles(0, 0, 0), 0, MIB, 0)["objects"] - before["objects"])
    """
    assert run(tmp_path, script) == [2, 2]


class Mapped(colocate.Role):
    """Has a file in its address space, and an array where nobody finds it."""

    def __init__(self, path: str) -> None:
        self.weights = numpy.memmap(path, numpy.uint8, "r+")
        hidden = numpy.ones(_HOLDS_MIB << 20, numpy.uint8)
        self.leak = lambda: hidden

    @colocate.method
    def read(self) -> int:
        return int(self.weights.sum())


def test_a_leak_beside_a_file(tmp_path: Path) -> None:
    """It is told whole, though no `malloc` has the file's memory; and all adds up before that was read and after."""
    size = _HOLDS_MIB << 20
    (tmp_path / "weights").write_bytes(b"\1" * size)
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1, cpus=0) as pool:
        group = pool.spawn({"mapped": colocate.role(Mapped, str(tmp_path / "weights"))})
        found = []
        for _ in range(2):
            (slot,) = group.memory().slots
            found.append(slot.unread)
            assert slot.roles[0].total == size
            assert slot.unowned["objects"] == pytest.approx(size, rel=0.1)
            assert abs(slot.unowned["other"]) < size / 10
            assert slot.unowned.get("unread", 0) == -slot.unread
            assert sum(slot.unowned.values()) + slot.roles[0].total == slot.process
            assert group.role("mapped", Mapped).read() == [size]
    assert found == [size, 0]


def test_what_nobody_has_touched(tmp_path: Path) -> None:
    """It is no memory yet, whoever has been given it."""
    script = """
        from ctypes import CDLL, c_size_t, c_void_p
        malloc = CDLL(None).malloc
        malloc.restype, malloc.argtypes = c_void_p, [c_size_t]
        before = memory.look(process_memory.InFiles(0, 0, 0), 0, 0, 0)["objects"]
        assert malloc(16 * MIB)
        told(memory.look(process_memory.InFiles(0, 0, 0), 0, 0, 0)["objects"] - before)
    """
    assert run(tmp_path, script) == [0]
