"""Memory that goes to a file and comes back in place."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate._system import mappings, pages, shared_spill, spill_files
from colocate._system.emptying import Emptying
from colocate._system.libc import libc
from colocate._system.mappings import PAGE, Area, Mapping, areas_of, mapping, mappings_now, own, without_areas
from colocate._system.pages import Spill
from colocate._system.room import free_memory, spill_directories
from colocate._system.spill_files import MAP_FIXED

DISK = Path("/var/tmp")
BIG = 64 * PAGE
LARGE = 8 << 20


@pytest.fixture
def file() -> Iterator[Spill]:
    made = Spill(DISK)
    yield made
    made.close()


def piece(array: np.ndarray) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def numbers(seed: int, nbytes: int = BIG) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)


def never_away(nbytes: int) -> np.ndarray:
    """Memory where nobody else's has been, which might be in a file yet, with a page behind that isn't part of it."""
    region = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(region, np.uint8, nbytes)


def in_memory(array: np.ndarray) -> int:
    """How many of the pages that lie in an array are in memory."""
    (area,) = areas_of([piece(array)])
    with open("/proc/self/pagemap", "rb", buffering=0) as found:
        data = os.pread(found.fileno(), (area.stop - area.start) // PAGE * 8, area.start // PAGE * 8)
    return int((np.frombuffer(data, dtype=np.uint64) >> np.uint64(63)).sum())


def put_away(file: Spill, *arrays: np.ndarray) -> int:
    areas = areas_of(map(piece, arrays))
    file.write(areas).put_away()
    return sum(area.stop - area.start for area in areas)


def test_away_and_back(file: Spill) -> None:
    """Nothing of it is in memory, then all of it is, with the same contents."""
    array = numbers(0)
    copy = array.copy()
    assert put_away(file, array) >= BIG - 2 * PAGE
    assert in_memory(array) == 0
    assert file.in_memory() == 0
    areas = areas_of([piece(array)])
    file.bring_back(areas)
    assert in_memory(array) == (areas[0].stop - areas[0].start) // PAGE
    assert file.in_memory() == areas[0].stop - areas[0].start
    assert (array == copy).all()


def test_read_and_written_while_away(file: Spill) -> None:
    """It is what it was, and what is written into it stays."""
    array = numbers(1)
    copy = array.copy()
    put_away(file, array)
    copy[7 * PAGE] = array[7 * PAGE] = 77
    file.bring_back(areas_of([piece(array)]))
    assert (array == copy).all()
    put_away(file, array)
    assert (array == copy).all()


def test_only_what_was_written_is_written_again(file: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hasn't changed since is put away at no cost."""
    array = numbers(2)
    put_away(file, array)
    file.bring_back(areas_of([piece(array)]))
    array[10 * PAGE], array[11 * PAGE], array[40 * PAGE] = 1, 2, 3
    copy, sizes, pwrite = array.copy(), [], os.pwrite

    def noted(fd: int, data: bytes, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    put_away(file, array)
    assert sizes == [2 * PAGE, PAGE]
    assert (array == copy).all()


def copy_back(file: Spill, *arrays: np.ndarray) -> None:
    areas = areas_of(map(piece, arrays))
    file.bring_back(areas, areas)


def test_copied_back(file: Spill) -> None:
    """It is memory of the process's own then, at its place, and has its place in the file again when it goes again."""
    array = numbers(7, LARGE)
    copy = array.copy()
    put_away(file, array)
    room = file.room()
    for number in range(4):
        copy_back(file, array)
        assert file.in_memory() == 0
        assert in_memory(array) >= LARGE // PAGE - 2
        assert (array == copy).all()
        array[number * PAGE] = copy[number * PAGE] = number
        put_away(file, array)
        assert in_memory(array) == 0
        assert file.room() == room
    assert (array == copy).all()


def test_copied_back_in_batches(file: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much comes: all of it is the process's own then, and what somebody has written meanwhile isn't lost."""
    monkeypatch.setattr(pages, "_BATCH_BYTES", 4 << 20)
    arrays = [numbers(seed, 3 * LARGE + seed * PAGE) for seed in range(3)]
    copies = [array.copy() for array in arrays]
    put_away(file, *arrays)
    arrays[1][LARGE] = copies[1][LARGE] = 77  # its batch stays in the file
    copy_back(file, *arrays)
    assert all((array == copy).all() for array, copy in zip(arrays, copies, strict=True))
    assert all(in_memory(array) >= 3 * LARGE // PAGE - 2 for array in arrays)
    assert 0 < file.in_memory() <= 2 * (4 << 20)
    put_away(file, *arrays)
    assert all((array == copy).all() for array, copy in zip(arrays, copies, strict=True))


def test_small_pieces_are_not_copied_back(file: Spill) -> None:
    """They are less than a large page."""
    array = numbers(8)
    put_away(file, array)
    copy_back(file, array)
    assert file.in_memory() == in_memory(array) * PAGE > 0


def test_written_while_away_and_copied_back(file: Spill) -> None:
    """What isn't in the file isn't lost."""
    arrays = [numbers(seed, LARGE) for seed in range(2)]
    copies = [array.copy() for array in arrays]
    put_away(file, *arrays)
    arrays[0][LARGE // 2] = copies[0][LARGE // 2] = 77
    copy_back(file, *arrays)
    assert all((array == copy).all() for array, copy in zip(arrays, copies, strict=True))
    put_away(file, *arrays)
    assert all((array == copy).all() for array, copy in zip(arrays, copies, strict=True))


def test_no_memory_to_copy_back(file: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the file, where it was, and can be had later."""
    array = numbers(9, LARGE)
    copy = array.copy()
    put_away(file, array)
    mapped = len(mappings_now())

    def broken(fd: int, buffers: object, offset: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match="Cannot allocate"):
            copy_back(file, array)
    assert len(mappings_now()) == mapped
    assert in_memory(array) == 0
    copy_back(file, array)
    assert (array == copy).all()


def test_freed_after_it_was_copied_back(file: Spill) -> None:
    """The disk's room is free again, or somebody else's, when its memory is."""
    for seed in range(8):
        array = numbers(seed, LARGE * 8)
        put_away(file, array)
        copy_back(file, array)
        del array
    other = numbers(10, LARGE)
    copy = other.copy()
    put_away(file, other)
    assert (other == copy).all()
    assert file.room() <= 2 * 8 * LARGE


def test_emptied(file: Spill) -> None:
    """Nothing of it is in memory, nor on the disk; what lies beside it on its pages is what it was."""
    whole = numbers(12)
    part = whole[PAGE // 2 : BIG - PAGE // 2]
    copy = whole.copy()
    copy[PAGE // 2 : BIG - PAGE // 2] = 0
    put_away(file, part)
    for _ in range(2):
        emptying = Emptying.of([piece(part)])
        emptying.check()
        emptying.empty()
        assert in_memory(part) == 0
        assert file.in_memory() == 0
        assert (whole == copy).all()
        whole[:] = copy  # as memory of its own
        part[:] = 1
    other = numbers(13, 8 * PAGE)
    room = file.room()
    put_away(file, numbers(14))  # who is emptied has given back its place
    assert file.room() == pytest.approx(room, abs=2 * PAGE)
    Emptying.of([piece(other)]).empty()
    assert not other.any()


def test_no_mappings_to_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's limit is told before anything is done."""
    emptying = Emptying.of([piece(numbers(15))])
    most = len(mappings_now()) + 4
    monkeypatch.setattr(mappings, "most_mappings", lambda: most)
    with pytest.raises(OSError, match=r"vm\.max_map_count"):
        emptying.check(beside=8)


def test_what_is_its_own() -> None:
    """Not what others see, or what can't be written; also a few bytes in the midst of a page."""
    import mmap

    shared = np.frombuffer(mmap.mmap(-1, BIG, mmap.MAP_SHARED), dtype=np.uint8)
    fixed = np.frombuffer(mmap.mmap(-1, BIG, mmap.MAP_PRIVATE, prot=mmap.PROT_READ), dtype=np.uint8)
    few, many = numbers(16, 3), numbers(17)
    pieces = [piece(each) for each in (shared, few, fixed, many)]
    assert list(own(pieces, mappings_now())) == [piece(few), piece(many)]


def test_pages_that_hold_something_else_stay(file: Spill) -> None:
    """Of a piece that begins and ends in the midst of pages, these aren't taken."""
    array = numbers(3)
    part = array[PAGE // 2 :][: BIG - PAGE]
    (area,) = areas_of([piece(part)])
    assert area.start >= part.ctypes.data
    assert area.stop <= part.ctypes.data + part.nbytes
    assert area.start % PAGE == area.stop % PAGE == 0


def test_beside_memory_that_is_shared() -> None:
    """Pages of which the next ones belong to others, too, go all the same."""
    with mmap.mmap(-1, 2 * BIG, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared:
        address = np.frombuffer(shared, np.uint8).ctypes.data
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        assert libc().mmap(address, BIG, protection, flags, -1, 0) == address
        assert areas_of([(address, BIG), (address + BIG, BIG)]) == [Area(address, address + BIG)]


def test_what_can_not_be_taken() -> None:
    """Small pieces, memory that others see, and memory that can't be written."""
    import mmap

    shared = mmap.mmap(-1, BIG, mmap.MAP_SHARED)
    fixed = mmap.mmap(-1, BIG, mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    for memory in (shared, fixed):
        assert areas_of([piece(np.frombuffer(memory, dtype=np.uint8))]) == []
    assert areas_of([(PAGE * 1000 + 8, 2 * PAGE - 16)]) == []
    assert areas_of([]) == []


def test_small_pieces_stay_when_mappings_run_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may take two, and there is no sleep at all when there would be too many."""
    tiny, small, large = (never_away(pages * PAGE) for pages in (1, 8, 32))
    pieces = [piece(each) for each in (tiny, small, large)]

    def least() -> tuple[int, list[int]]:
        areas, told = areas_of(pieces), without_areas(pieces, mappings_now())
        return min(area.stop - area.start for area in areas), sorted(told)

    assert least() == (PAGE, [])
    monkeypatch.setattr(mappings, "most_mappings", lambda: 2 * (len(mappings_now()) + 5))
    found, told = least()
    assert (4 * PAGE <= found < 16 * PAGE, told) == (True, [pieces[0][0]])
    monkeypatch.setattr(mappings, "most_mappings", lambda: 2 * (len(mappings_now()) + 1))
    found, told = least()
    assert (found > 16 * PAGE, told) == (True, sorted(each[0] for each in pieces[:2]))


def test_small_pieces_that_have_been_away(file: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have mappings of their own already, and go again."""
    small = numbers(4, 8 * PAGE)
    put_away(file, small)
    monkeypatch.setattr(mappings, "most_mappings", lambda: 2 * (len(mappings_now()) + 1))
    assert len(areas_of([piece(small)])) == 1
    assert areas_of([piece(never_away(8 * PAGE))]) == []
    monkeypatch.setattr(mappings, "most_mappings", lambda: len(mappings_now()))  # others have taken theirs since
    assert len(areas_of([piece(small)])) == 1
    assert without_areas([piece(small)], mappings_now()) == []


def test_files_of_all_threads() -> None:
    """They stay as long as something lies there, of whichever worker, and no longer."""
    one, other = shared_spill.take(str(DISK)), shared_spill.take(str(DISK))
    assert one is other
    regions = [mmap.mmap(-1, BIG, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    array, beside = (np.frombuffer(region, np.uint8) for region in regions)
    array[:], beside[:] = numbers(2), numbers(1)
    areas, later = areas_of([piece(array)]), areas_of([piece(beside)])
    written = one.write(areas)
    other.write(later).put_away()  # frees what nobody has a place in: not what is about to have one
    written.put_away()
    other.bring_back(later)
    assert (array == numbers(2)).all()
    assert (beside == numbers(1)).all()
    del beside
    shared_spill.give_back(one)
    shared_spill.give_back(other)
    assert shared_spill.kept_open() >= set(one.descriptors)
    assert (array == numbers(2)).all()
    again = shared_spill.take(str(DISK))
    assert again is one
    del array
    for region in regions:
        region.close()
    shared_spill.give_back(again)
    anew = shared_spill.take(str(DISK))
    assert anew is not one
    shared_spill.give_back(anew)


def test_a_fork_before_it_goes(file: Spill) -> None:
    """What was written goes to the files that it was written to, though others put theirs into new ones."""
    first, array, other = numbers(0), numbers(1), numbers(2)
    put_away(file, first)
    areas = areas_of([piece(array)])
    written = file.write(areas)
    child = Child(array)
    put_away(file, other)
    written.put_away()
    del written
    file.bring_back(areas)
    put_away(file, other)  # which closes them
    assert (array == numbers(1)).all()
    assert (other == numbers(2)).all()
    assert (first == numbers(0)).all()
    assert (child.finds() == numbers(1)[:: PAGE // 2]).all()


@pytest.mark.parametrize(
    ("number", "says", "words"),
    [
        (errno.ENOSPC, "No space left on device", "No space"),
        (errno.EFBIG, "File too large", r"File too large, as the limit of this process has it \(ulimit -f\): "),
    ],
)
def test_no_room_on_the_disk(file: Spill, monkeypatch: pytest.MonkeyPatch, number: int, says: str, words: str) -> None:
    """Nothing has changed, and it can be done later."""
    arrays = [numbers(seed) for seed in range(2)]
    copies = [array.copy() for array in arrays]

    allocate, filled = os.posix_fallocate, []

    def full(fd: int, offset: int, size: int) -> None:
        if filled:
            raise OSError(number, says)
        filled.append(fd)
        allocate(fd, offset, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        where = r"B are to sleep in /var/tmp \(spill_dir\), on whose disk .*B are free"
        with pytest.raises(OSError, match=rf"{words}.*{where}"):
            put_away(file, *arrays)
    assert filled
    assert file.room() == 0
    assert all(in_memory(array) > 0 for array in arrays)
    put_away(file, *arrays)
    assert all((array == copy).all() for array, copy in zip(arrays, copies, strict=True))


@contextlib.contextmanager
def disk_of(nbytes: int, file: Spill, when_full: Callable[[], object] = lambda: None) -> Iterator[None]:
    """As if the disk were so large."""
    allocate, pwrite, one = os.posix_fallocate, os.pwrite, threading.Lock()

    def written(fd: int, data: Any, offset: int) -> int:
        with one:
            before = file.room()
            done = pwrite(fd, data, offset)
            if nbytes < file.room() > before:  # there was nothing
                libc().fallocate(fd, 0x03, offset, done)
                raise OSError(errno.ENOSPC, "No space left on device")
        return done

    def limited(fd: int, offset: int, size: int) -> None:
        if file.room() + size > nbytes:
            when_full()
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", limited)
        patch.setattr(os, "pwrite", written)
        yield


@pytest.mark.parametrize("how", ["copied", "written", "read"])
def test_places_of_what_is_awake_are_given_up(file: Spill, how: str) -> None:
    """When there is no room: what is kept for the next time is nothing that anybody needs."""
    arrays = [numbers(seed, LARGE) for seed in range(2)]
    copies = [array.copy() for array in arrays]
    with disk_of(LARGE * 3 // 2, file):
        for index in (0, 1, 0, 1):
            array = arrays[index]
            put_away(file, array)
            assert in_memory(array) == 0
            assert file.room() <= LARGE * 3 // 2
            file.bring_back(areas_of([piece(array)]), areas_of([piece(array)]) if how == "copied" else ())
            if how == "written":
                array += 1
                copies[index] += 1
            assert all((one == other).all() for one, other in zip(arrays, copies, strict=True))


def test_places_of_what_sleeps_are_not(file: Spill) -> None:
    """That there is no room is an error then, and all is where it was."""
    asleep, read, other = (numbers(seed, LARGE) for seed in range(3))
    copies = [array.copy() for array in (asleep, read, other)]
    put_away(file, asleep, read)
    file.bring_back(areas_of([piece(read)]))
    with disk_of(LARGE * 2, file):
        put_away(file, other)
        with pytest.raises(OSError, match="No space"):
            put_away(file, read)
        assert in_memory(asleep) == in_memory(other) == 0
        assert file.room() <= LARGE * 2
        assert all((one == copy).all() for one, copy in zip((asleep, read, other), copies, strict=True))
        file.bring_back(areas_of([piece(other)]), areas_of([piece(other)]))
        put_away(file, read)
    assert all((one == copy).all() for one, copy in zip((asleep, read, other), copies, strict=True))


@pytest.mark.parametrize("why", ["memory", "dax"])
def test_what_was_only_read_stays_in_its_place(file: Spill, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Where there is no memory for it, or the kernel doesn't tell whether anybody has written into it."""
    read, other = numbers(0, LARGE), numbers(1, LARGE)
    copies = [read.copy(), other.copy()]
    put_away(file, read)
    file.bring_back(areas_of([piece(read)]))
    with monkeypatch.context() as patch, disk_of(LARGE * 3 // 2, file):
        if why == "memory":
            patch.setattr(pages, "free_memory", lambda: LARGE // 2)
        else:
            patch.setattr(mappings, "_WRITTEN", b"\1" * 256)
        with pytest.raises(OSError, match="No space"):
            put_away(file, other)
    assert (read == copies[0]).all()
    assert (other == copies[1]).all()


def test_places_that_a_process_has_which_is_forked_meanwhile(file: Spill) -> None:
    """They stay: it has what was there."""
    read, other = numbers(0, LARGE), numbers(1, LARGE)
    copy = read.copy()
    children: list[Child] = []
    put_away(file, read)
    file.bring_back(areas_of([piece(read)]))

    def forks() -> None:
        if not children:
            children.append(Child(read))
            read[:] = 0

    with disk_of(LARGE * 3 // 2, file, forks):
        put_away(file, other)
    assert (children[0].finds() == copy[:: PAGE // 2]).all()
    assert not read.any()


def test_a_page_that_the_kernel_moves() -> None:
    """It is told as swapped, also where it is a file's: then nobody has written into it."""
    assert mappings._WRITTEN[0x40]
    assert mappings._WRITTEN[0x80]
    assert not mappings._WRITTEN[0x40 | 0x20]
    assert not mappings._WRITTEN[0x80 | 0x20]


def test_room_of_what_could_not_be_written(file: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is free again."""
    array = numbers(0, LARGE)
    copy = array.copy()

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="quota"):
            put_away(file, array)
    assert file.room() == 0
    put_away(file, array)
    assert (array == copy).all()


def test_memory_that_was_freed_while_away(file: Spill) -> None:
    """Whoever gets it next has what it puts there, and the disk's room is free again."""
    for seed in range(24):
        array = numbers(seed, 16 * BIG)
        put_away(file, array)
        del array
        fresh = np.zeros(16 * BIG, dtype=np.uint8)
        assert not fresh.any()
        other = numbers(100 + seed, 16 * BIG)
        copy = other.copy()
        put_away(file, other)
        assert (other == copy).all()
    # What malloc keeps for the next time has its places yet: four to eight of them, and no more come.
    assert file.room() <= 12 * 16 * BIG


def test_names_with_ends_of_lines(tmp_path: Path) -> None:
    """Files that are mapped may be called anything."""
    path = tmp_path / "a\r\x0b\u2028b\nc"
    path.write_bytes(b"x" * PAGE)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        assert mapped[0] == ord("x")
        assert any("\x0b" in each.file[2] for each in mappings_now())


def test_in_a_child_of_a_thread_that_moves() -> None:
    """Another one has the lock: not there."""
    with pages._one_at_a_time:
        child = os.fork()
        if not child:
            os._exit(pages._one_at_a_time.locked())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("moves", ["write", "bring_back"])
def test_threads_with_the_same_memory(moves: str) -> None:
    """Each with a file of its own: what one finds it goes by before the other one moves the same pages."""
    one, two = Spill(DISK), Spill(DISK)
    array = np.ones(LARGE, dtype=np.uint8)
    areas = areas_of([piece(array)])
    one.write(areas).put_away()
    if moves == "write":
        one.bring_back(areas)
        array[:] = 2

    def other() -> None:
        if moves == "bring_back":
            two.bring_back(areas, areas)
            array[:] = 2
        two.write(areas).put_away()

    thread = threading.Thread(target=other)
    find = one._homes

    def found(mappings: Any) -> Any:
        homes = find(mappings)
        if thread.ident is None:
            thread.start()
            thread.join(0.3)  # it waits, and so isn't over
        return homes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "_homes", found)
        if moves == "write":
            one.write(areas).put_away()
        else:
            one.bring_back(areas, areas)
        thread.join()
    assert (array == 2).all()
    for each in (one, two):
        each.close()


def test_several_files(file: Spill) -> None:
    """What is large lies in as many as there are threads, which write at the same time."""
    array = numbers(11, 96 << 20)
    put_away(file, array)
    rooms = [each.room() for each in file.files]
    assert len(rooms) == min(4, len(os.sched_getaffinity(0)))
    assert min(rooms) > 0
    assert sum(rooms) == file.room() <= array.nbytes + PAGE


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["away", "back", "copied", "write", "new", "empty"]), st.integers(0, 3)), max_size=24
    ),
    st.sampled_from([1 << 40, LARGE * 3 // 2]),
)
def test_any_order(steps: list[tuple[str, int]], room: int) -> None:
    """Whatever is done in whatever order, everything holds what was last written into it, also where room is short."""
    file = Spill(DISK)
    arrays = [numbers(seed, LARGE if seed % 2 else BIG) for seed in range(4)]
    copies = [array.copy() for array in arrays]
    for number, (what, index) in enumerate(steps):
        if what == "away":
            with disk_of(room, file), contextlib.suppress(OSError):
                put_away(file, *arrays[: index + 1])
        elif what == "back":
            file.bring_back(areas_of([piece(arrays[index])]))
        elif what == "copied":
            copy_back(file, *arrays[index:])
        elif what == "write":
            place = number * 4111 % (BIG // 2)
            arrays[index][place] = copies[index][place] = number
        elif what == "empty":
            Emptying.of(map(piece, arrays[index:])).empty()
            for copy in copies[index:]:
                copy[:] = 0
        else:
            arrays[index] = numbers(number + 10, len(arrays[index]) - PAGE)
            copies[index] = arrays[index].copy()
    for array, copy in zip(arrays, copies, strict=True):
        assert (array == copy).all()
    file.close()


def test_folders_in_memory_are_refused() -> None:
    """What is put there stays in memory."""
    with pytest.raises(ValueError, match="/dev/shm is a tmpfs"):
        Spill(Path("/dev/shm"))
    with pytest.raises(OSError, match="No such file"):
        Spill(DISK / "there-is-none")


def test_what_a_file_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel shows it where it is mapped: on btrfs and overlays `fstat` tells another device."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: types.SimpleNamespace(st_dev=1, st_ino=1))
        file = Spill(DISK)
    array = numbers(30)
    size = put_away(file, array)
    file.bring_back(areas_of([piece(array)]))
    assert file.in_memory() == size
    file.close()


def test_a_file_of_another_subvolume(file: Spill) -> None:
    """It may have the device and the number of one of ours, and another name."""
    device, number, name = file.files[0].id

    def shown(path: str) -> Mapping:
        return mapping(f"7f0000000000-7f0000010000 rw-p 00000000 {device} {number}      {path}")

    assert file.owns(shown(f"/elsewhere/{name}"))
    assert not file.owns(shown("/data/weights of #1"))


def test_a_folder_whose_files_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused: what is put away there couldn't be found again."""
    before = os.listdir("/proc/self/fd")
    for line in (None, "7f0000000000-7f0000010000 rw-p 00000000 00:00 0"):
        with monkeypatch.context() as patch:
            patch.setattr(spill_files, "mapping_at", lambda address, line=line: line and mapping(line))
            with pytest.raises(OSError, match="where files of /var/tmp are mapped: put memory away elsewhere"):
                Spill(DISK)
    assert os.listdir("/proc/self/fd") == before


def test_on_an_overlay_of_several_file_systems() -> None:
    """What is away stays there when more goes, and comes back."""
    mounts = """
        set -e; mkdir up work low; mount -t tmpfs tmpfs low; mkdir low/low low/all
        mount -t overlay overlay -o lowerdir=low/low,upperdir=up,workdir=work low/all || exit 77
        exec "$0" -c "$1"
    """
    program = """if True:
        from pathlib import Path
        import numpy as np
        from colocate._system.mappings import areas_of
        from colocate._system.pages import Spill

        file = Spill(Path("low/all"))
        arrays = [np.full(1 << 20, seed, dtype=np.uint8) for seed in range(1, 4)]
        for array in arrays:
            file.write(areas_of([(array.ctypes.data, array.nbytes)])).put_away()
        print([int(array.min()) for array in arrays], [int(array.max()) for array in arrays])
    """
    unshare = ["unshare", "--mount", "bash", "-c", mounts, sys.executable, program]
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        try:
            subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
            done = subprocess.run(unshare, cwd=folder, capture_output=True, text=True, timeout=60)
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip("no file systems can be mounted")
    if done.returncode == 77:
        pytest.skip("there are no overlays")
    assert done.stdout == "[1, 2, 3] [1, 2, 3]\n", done


def test_another_allocator_is_refused(tmp_path: Path) -> None:
    """One that may take pages which were put away for empty ones."""
    source = tmp_path / "own.c"
    source.write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    library = tmp_path / "own.so"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no compiler")
    program = f"from pathlib import Path; from colocate._system.pages import Spill; Spill(Path({str(DISK)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True
    )
    assert "own.so, which may take pages that were put away for empty ones" in done.stderr


def test_too_many_mappings(file: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's limit is told before anything is done."""
    array = numbers(6)
    areas = areas_of([piece(array)])
    most = len(mappings_now())
    monkeypatch.setattr(mappings, "most_mappings", lambda: most)
    with pytest.raises(OSError, match=r"vm\.max_map_count"):
        file.write(areas)


def test_room() -> None:
    """Free memory is some, and memory is put away where somebody says."""
    assert 0 < free_memory() < 1 << 50
    assert spill_directories("/scratch") == ["/scratch"]
    assert "/var/tmp" in spill_directories(None)


class Child:
    """A process that is forked here; what it finds in an array, when it is asked."""

    def __init__(self, array: np.ndarray) -> None:
        ask, self._ask = os.pipe()
        self._told, tell = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.read(ask, 1)
            os.write(tell, bytes(memoryview(array[:: PAGE // 2])))
            os._exit(0)
        os.close(ask)
        os.close(tell)

    def finds(self) -> np.ndarray:
        os.write(self._ask, b"x")
        found = b"".join(iter(lambda: os.read(self._told, 2**16), b""))
        os.close(self._ask)
        os.close(self._told)
        _, status = os.waitpid(self._pid, 0)
        assert status == 0
        return np.frombuffer(found, dtype=np.uint8)


@pytest.mark.parametrize("what", ["writes", "frees", "empties"])
def test_a_process_that_was_forked(file: Spill, what: str) -> None:
    """It has the memory as it was then, whatever becomes of it here."""
    array: np.ndarray | None = numbers(20)
    assert array is not None
    copy = array.copy()
    areas = areas_of([piece(array)])
    put_away(file, array)
    file.bring_back(areas)
    child = Child(array)
    if what == "writes":
        array += 1
        put_away(file, array)
        file.bring_back(areas)
        assert (array == copy + 1).all()
        assert file.in_memory() == areas[0].stop - areas[0].start
    elif what == "frees":
        array = None
        put_away(file, numbers(21))
    else:
        Emptying(areas, ()).empty()
        file.forget(areas)
        put_away(file, numbers(21))
    assert (child.finds() == copy[:: PAGE // 2]).all()


def test_what_was_away_when_a_process_was_forked(file: Spill) -> None:
    """It comes back, and goes again, as ever; its former places are free when nobody has them any more."""
    array = numbers(22, LARGE)
    copy = array.copy()
    areas = areas_of([piece(array)])
    put_away(file, array)
    child = Child(array)
    for _ in range(2):
        put_away(file, numbers(23))
        file.bring_back(areas, areas)
        assert (array == copy).all()
        put_away(file, array)
        assert (array == copy).all()
    assert file.room() <= LARGE + 2 * BIG
    assert (child.finds() == copy[:: PAGE // 2]).all()
