"""Messages as bytes may be cut anywhere and have any length, and arrive in the receiver's own memory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from colocate.wire import Packed, PackedInArea, encode, framing, memory_files
from colocate.wire.framing import FILE_BYTES, Reader, Sender

LARGE = FILE_BYTES // 2  # int64 elements: travels as a file where it can

bodies = st.none() | st.lists(
    st.binary(max_size=3000).map(bytearray) | st.integers(0, 40_000).map(bytearray), max_size=8
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.tuples(st.text(), st.integers()), bodies), max_size=5), st.data())
def test_frames_survive_any_cutting(messages: list[tuple[Any, Any]], data: st.DataObject) -> None:
    stream = b""
    for head, buffers in messages:
        body = None if buffers is None else Packed(b"data", tuple(memoryview(b) for b in buffers))
        with encode(head, body) as frame:
            stream += bytes(frame._inline)
    reader, scratch = Reader(passes_files=False), memoryview(bytearray(data.draw(st.integers(1, 100_000))))
    one, other = socket.socketpair()
    got: list[tuple[Any, Any]] = []
    with one, other:
        other.setblocking(False)
        while stream:
            cut = data.draw(st.integers(1, 100_000))
            one.sendall(stream[:cut])
            stream = stream[cut:]
            try:
                while True:
                    got += reader.receive_messages(other, scratch)
            except BlockingIOError:
                pass
    assert [(head, None if body is None else [bytes(b) for b in body.buffers]) for head, body in got] == [
        (head, None if buffers is None else [bytes(b) for b in buffers]) for head, buffers in messages
    ]
    assert all(body is None or (body.data == b"data" and not any(b.readonly for b in body.buffers)) for _, body in got)


def test_lengths_beyond_four_gigabytes() -> None:
    """A body of five gigabytes, sparse and so without memory, arrives whole."""
    length = 5 << 30
    file = os.memfd_create("colocate-sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(file, length)
    os.pwrite(file, b"end", length - 3)
    fcntl.fcntl(file, memory_files.F_ADD_SEALS, memory_files.ALL_SEALS)
    prefix = framing._PREFIX.pack(framing._VERSION, framing._FILE, 2, 2, length)
    start = prefix + b"N." + struct.pack("<2Q", 64, length - 64)
    one, other = socket.socketpair()
    with one, other, framing._OpenFrame(bytearray(start), bytearray(start), file, length, ()) as frame:
        sending = Sender(frame, passes_files=True)
        assert sending.write_to(one)
        sending.close()
        [(head, body)] = Reader(passes_files=True).receive_messages(other, memoryview(bytearray(1000)))
    assert head is None
    assert body is not None
    assert body.nbytes == length
    assert bytes(body.buffers[0][-3:]) == b"end"


@pytest.mark.parametrize("busy", [1, 3, 4])
def test_memory_that_the_kernel_is_busy_with(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing is retried while the kernel moves the pages; a long refusal is an error that leaves no file."""
    refusals = [OSError(errno.EBUSY, os.strerror(errno.EBUSY)) for _ in range(busy)]
    real = fcntl.fcntl

    def seal(file: int, command: int, *rest: int) -> int:
        if command == memory_files.F_ADD_SEALS and refusals:
            raise refusals.pop()
        return real(file, command, *rest)

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "fcntl", seal)
    if busy == 4:
        with pytest.raises(OSError, match="busy"):
            memory_files.create_memory_file([b"sealed"])
    else:
        file = memory_files.create_memory_file([b"sealed"])
        assert bytes(memory_files.map_private(file, 6)) == b"sealed"
        os.close(file)
    assert set(os.listdir("/proc/self/fd")) == before


def _mapped() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:colocate" in line for line in file)


def test_memory_that_is_written_again_is_mapped_once() -> None:
    """A reused file is mapped once while any of its bodies lives, has the last bytes, and leaves no descriptor."""
    before = set(os.listdir("/proc/self/fd"))
    one, other = socket.socketpair()
    area, reader, scratch = framing.ReusableFile(), Reader(passes_files=True), memoryview(bytearray(1000))
    bodies: list[Packed] = []
    size = 1 << 20
    with one, other:
        for text in (b"a", b"b", b"c"):
            body = area.write_body(Packed(b"N.", (memoryview(bytearray(text * size)), memoryview(text * size))))
            with encode(("area",), body) as frame:
                sending = frame.create_sender(passes_files=True)
                assert sending.write_to(one)
                sending.close()
            bodies += [body for _, body in reader.receive_messages(other, scratch) if body is not None]
            assert all(
                isinstance(body, PackedInArea) and [*map(bytes, body.buffers)] == [text * size] * 2 for body in bodies
            )
        assert _mapped() == 2  # One mapping is the sender's.
        for above, left in ((3 * size, 2), (size, 1)):
            area.close(above)
            assert _mapped() == left
        bodies.clear()
        assert _mapped() == 0
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_that_could_change_or_is_short_is_refused() -> None:
    file = os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(file, 100)
    with pytest.raises(ValueError, match="isn't sealed"):
        memory_files.map_private(file, 100)
    os.close(file)
    file = memory_files.create_memory_file([b"short"])
    with pytest.raises(ValueError, match="too short"):
        memory_files.map_private(file, 100)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    os.close(file)
