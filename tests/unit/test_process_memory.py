"""What imports add to a process's memory, and what `malloc` keeps of what was freed."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest

import colocate
from colocate import First, Role, method


class Looking(Role):
    """Looks at its process."""

    @method(collect=First())
    def left_for_later(self) -> bool:
        return left_for_later()


_HOLDS_MIB = 32
_MODULES = {
    "inner": f"held = b'x' * ({_HOLDS_MIB} << 20)",
    "pieces": f"held = [b'x' * 65536 for _ in range({_HOLDS_MIB * 16})]",
    "outer": f"import inner\nheld = b'x' * ({_HOLDS_MIB} << 20)",
    "failing": "import inner\nraise ValueError('on purpose')",
    "waiting": "import script\nscript.begun.set()\nscript.go_on.wait(60)",
    "small": """
from colocate._system.malloc import _of_small_objects
held, before = [], _of_small_objects().most
while _of_small_objects().most == before:
    held += [bytes([number]) * 400 for number in range(16)]
""",
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


@pytest.mark.parametrize("given_back", [False, True])
def test_import_that_takes_what_was_freed(tmp_path: Path, given_back: bool) -> None:
    """It counts, whether that was held back or given back to the system."""
    script = f"""
        from colocate._system.malloc import trim
        import threading

        held = [b'x' * 65536 for _ in range({_HOLDS_MIB * 32})]
        last = b'x' * 65536  # so that what is freed isn't at the end of the heap
        del held
        if {given_back}:
            trim()
        told()
        import pieces
        told()
    """
    assert run(tmp_path, script) == [0, 1]


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


def test_import_that_takes_room_for_more(tmp_path: Path) -> None:
    """The interpreter has taken a mebibyte for small objects then: what comes to lie there later has an owner, too."""
    script = """
        import small
        more = [bytes([number % 256]) * 400 for number in range(2000)]
        found = memory.look(process_memory.InFiles(0, 0), 0, 0, [], {})
        others = found["private"] - sum(found[each] for each in ("empty", "code", "held back", "objects"))
        print(others * 100 // sum(map(sys.getsizeof, more)))
    """
    (others,) = run(tmp_path, script)
    assert others < 20


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
    """What is free between what is in use; what was given back isn't, and neither is what sleeps among it."""
    script = """
        from ctypes import CDLL, c_size_t
        from colocate._system.malloc import Heap

        def told_held_back(away=None):
            told(Heap().held_back(away or {}) - before)

        before = Heap().held_back({})
        pieces = [b'x' * 65536 for _ in range(1024)]
        del pieces[::2]
        told_held_back()
        large = b'x' * (256 << 20)
        del large
        told_held_back()
        CDLL(None).malloc_trim(c_size_t(0))
        told_held_back()

        def on_another_thread():
            others = [b'x' * 65536 for _ in range(1024)]
            del others[::2]
            told_held_back()
            told_held_back({id(each): 65536 for each in others})  # as if it were away, which makes the rest free
            CDLL(None).malloc_trim(c_size_t(0))
            told_held_back()

        thread = threading.Thread(target=on_another_thread)
        thread.start()
        thread.join()
    """
    assert run(tmp_path, script) == [1, 1, 0, 1, 2, 0]


def test_where_the_kernel_does_not_say_what_is_held_back(tmp_path: Path) -> None:
    """All that was freed and not given back counts."""
    script = """
        from colocate._system import malloc
        malloc.present_in = lambda area: open("/nowhere")
        before = malloc.Heap().held_back({})
        pieces = [b'x' * 65536 for _ in range(1024)]
        del pieces[::2]
        told(malloc.Heap().held_back({}) - before)
        told(malloc.Heap().handed_out([(1, MIB)]))
    """
    assert run(tmp_path, script) == [1, 1]


def test_what_begins_before_its_file(tmp_path: Path) -> None:
    """Of a piece, a part that isn't in its file any more is where it is; the rest counts as the file has it."""
    script = """
        import mmap, os
        from ctypes import addressof, c_char, memset
        from colocate._system.libc import libc
        from colocate._system.mappings import PAGE
        from colocate._system.spill_files import MAP_FIXED

        size, access, private = 4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
        with open("weights", "wb") as file:
            file.write(bytes(size))
        with open("weights", "r+b") as file:
            start = libc().mmap(None, size, access, private, file.fileno(), 0)
        assert libc().mmap(start, 2 * PAGE, access, private | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0) == start
        found = process_memory.in_files({start: size}, None)
        assert found == process_memory.InFiles(0, 2 * PAGE), found
    """
    assert run(tmp_path, script) == []


NOTHING = "process_memory.InFiles(0, 0), 0, 0, [], {}"


def test_what_others_have_been_given(tmp_path: Path) -> None:
    """What is in use since the beginning, without what roles have or had imported, large pieces and small ones."""
    script = f"""
        import numpy
        memory.begin()
        before = memory.look({NOTHING})
        import inner
        role, library = numpy.ones(MIB, numpy.uint8), numpy.ones(2 * MIB, numpy.uint8)
        small = [numpy.ones(65536, numpy.uint8) for _ in range(512)]
        pieces = [(each.ctypes.data, each.nbytes) for each in (role, *small)]
        after = memory.look(process_memory.InFiles(0, 0), 2 * MIB, 0, pieces, {{}})
        told(after["objects"] - before["objects"])
        away = memory.look(process_memory.InFiles(0, 0), 0, 0, pieces, {{}})  # what sleeps is in use, too
        told(away["objects"] - before["objects"])
        objects = [(float(n), str(n)) for n in range(MIB // 200)]
        told(memory.look(process_memory.InFiles(0, 0), 2 * MIB, 0, pieces, {{}})["objects"] - after["objects"])
    """
    assert run(tmp_path, script) == [2, 2, 1]


def test_what_was_handed_out(tmp_path: Path) -> None:
    """Pieces of all sizes; what is mapped by others isn't, whatever stands before it."""
    script = """
        import mmap, numpy
        from colocate._system.malloc import Heap

        pieces = [numpy.ones(size, numpy.uint8) for size in (1, 1000, 65536, MIB // 2, MIB, 3 * MIB)]
        places = [(each.ctypes.data, each.nbytes) for each in pieces]
        assert Heap().handed_out(places) == sum(size for _, size in places)
        mapped = numpy.frombuffer(mmap.mmap(-1, 2 * MIB), numpy.uint8)
        within = [(mapped.ctypes.data, MIB), (mapped.ctypes.data + MIB, MIB)]
        assert Heap().handed_out(within) == 0
        assert Heap().handed_out([(16, MIB), (0, MIB)]) == 0
    """
    assert run(tmp_path, script) == []


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


class Small(colocate.Role):
    """Has tensors that aren't whole pages."""

    def __init__(self, nbytes: int) -> None:
        torch = pytest.importorskip("torch")
        self.tensors = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2000)]

    @colocate.method
    def count(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("nbytes", [3 << 10, 15 << 10])
def test_small_tensors_that_sleep(nbytes: int) -> None:
    """Their whole pages go; what stays of them is told, and nothing is left that isn't explained."""
    pytest.importorskip("torch")
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1, cpus=0) as pool:
        group = pool.spawn({"small": colocate.role(Small, nbytes)})
        gone = group.sleep("small")
        (slot,) = group.memory().slots
        assert slot.roles[0].asleep == 2000 * nbytes
        assert slot.edges == slot.unowned["edges"] == 2000 * nbytes - gone
        assert gone == 0 if nbytes < 4 << 10 else gone >= 2000 * (nbytes - (8 << 10))
        assert slot.process is not None
        assert abs(slot.unowned["other"]) < 0.05 * (slot.process - slot.unowned["empty worker"])
        group.wake("small")
        assert group.memory().slots[0].edges == 0


def test_what_nobody_has_touched(tmp_path: Path) -> None:
    """It is no memory yet, whoever has been given it."""
    script = """
        from ctypes import CDLL, c_size_t, c_void_p
        malloc = CDLL(None).malloc
        malloc.restype, malloc.argtypes = c_void_p, [c_size_t]
        before = memory.look(process_memory.InFiles(0, 0), 0, 0, [], {})["objects"]
        assert malloc(16 * MIB)
        told(memory.look(process_memory.InFiles(0, 0), 0, 0, [], {})["objects"] - before)
    """
    assert run(tmp_path, script) == [0]


def left_for_later() -> bool:
    """Whether `malloc` has what was freed just now, and hasn't merged it."""
    import ctypes

    from colocate._system.malloc import _mallinfo2

    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = _mallinfo2()().fsmblks
    for piece in [library.malloc(32) for _ in range(100)]:
        library.free(piece)
    return bool(_mallinfo2()().fsmblks > before)


def test_what_is_freed_is_merged_at_once(tmp_path: Path) -> None:
    """Not all of it later, amid some operation."""
    script = """
        told(MIB if left_for_later() else 0)
        from colocate._system.malloc import merge_at_once
        merge_at_once()
        told(MIB if left_for_later() else 0)
    """
    assert run(tmp_path, inspect.getsource(left_for_later) + textwrap.dedent(script)) == [1, 0]


def test_workers_merge_at_once() -> None:
    """Those that are processes; threads leave the driver's as it is."""
    with colocate.connect("local", processes=True) as runtime:
        looking = runtime.reserve(1).spawn({"looking": colocate.role(Looking)}).role("looking", Looking)
        assert not looking.left_for_later()
    assert left_for_later()


def test_what_was_freed_and_never_written(tmp_path: Path) -> None:
    """It isn't in memory: at the heap's end that is known always, elsewhere to forks of a process that has looked."""
    script = """
        import ctypes
        from colocate._system.malloc import held_back_by_now, look_at_free
        library = ctypes.CDLL(None)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        for setting in (-1, -3):  # all is from the heap, and stays there
            assert library.mallopt(setting, 1 << 30)
        library.free(library.malloc(4096))
        held_back_by_now()
        before = held_back_by_now()
        library.free(library.malloc(MIB))  # nothing else takes memory meanwhile, as a new name may: it is at the end
        told(held_back_by_now() - before)
        inside, behind = library.malloc(MIB), library.malloc(MIB)
        library.free(inside)
        told(held_back_by_now() - before)
        look_at_free()
        told(held_back_by_now() - before)
    """
    assert run(tmp_path, script) == [0, 1, 0]
