"""Encode and decode messages on a stream socket. A message is a small head of builtins and, often, a `Packed` body.

A frame has a fixed prefix, the pickled head, the sizes of the body's segments (the pickle, then each buffer), and the
payload, which has the segments, each at a multiple of 64 bytes. A large payload is in one sealed memory file. A Unix
socket passes the file itself, so that a frame for many receivers costs one copy, and every receiver maps private
memory. Any other socket gets the file's bytes. A file that is written repeatedly (`ReusableFile`) is mapped once, and
shared.
"""

from __future__ import annotations

import array
import ctypes
import errno
import functools
import mmap
import os
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import attrs

from colocate._definitions.packed import Buffer, LostPacked, Packed, PackedInArea
from colocate.wire.arriving import IncomingBody, OpenBuffer
from colocate.wire.memory_files import NONE_FREE, create_file, create_memory_file, map_file, map_private, seal_length
from colocate.wire.tls import send_file

Head: TypeAlias = tuple[Any, ...]
Message: TypeAlias = tuple[Head, Packed | None]

_VERSION = 1
# The kinds of frames: without a body, payload inline, payload in a passed file, payload in a reused file.
_BARE, _INLINE, _FILE, _AREA = range(4)
_PREFIX = struct.Struct("<BBxxIIQ")  # Version, kind, size of the head, number of segments, size of the payload.
_ALIGN = 64
_ZEROS = bytes(_ALIGN)

# From this size on, a file is faster than the socket's buffers; measured as equal at 256 KiB.
FILE_BYTES = 256 << 10
# One write of a payload has at most this many bytes, so that no thread waits long for the lane's lock.
_STRIDE_BYTES = 4 << 20
# Messages up to this size are sent at once, in one write, if the socket is writable.
SMALL_BYTES = 16 << 10
SCRATCH_BYTES = 64 << 10
HOLE = 0x7E5EC0DED0C0FFEE
"""Placeholder in a head for a number to be filled in later."""
_NUMBER = struct.Struct("<q")
_DIRECT_BYTES = 16 << 10
_EXTRAS_BYTES = socket.CMSG_SPACE(4)
_TRUNCATED = int(socket.MSG_CTRUNC)  # A plain int, because a comparison with the enum costs more than receiving.


class Frame:
    """An encoded message with a copy of the body, ready for any number of sockets.

    The encoder closes the frame. Sockets that are still sending keep the memory until the end.

    Attributes:
        puts: Functions that fill a number into each placeholder of the head.
        small: The whole message if it is small enough for one write; else None.
    """

    __slots__ = ("_inline", "puts", "small")

    def __init__(self, inline: bytearray, places: Sequence[int] = ()) -> None:
        self._inline = inline
        self.small = inline if len(inline) <= SMALL_BYTES else None
        self.puts: Sequence[Callable[[int], object]] = (
            [partial(_NUMBER.pack_into, inline, place) for place in places] if places else ()
        )

    def create_sender(self, passes_files: bool) -> SmallSender | Sender:
        """Return a writer for one socket. The writer keeps the frame's memory until closed."""
        return SmallSender(self._inline)

    def hold(self) -> None:
        """Add a reference to the frame's memory; `close` drops a reference."""

    def close(self) -> None:
        """Drop a reference to the frame's memory. The last reference frees the memory."""

    def abandon(self) -> None:
        """Close the inherited file in a forked child, regardless of references."""

    def __enter__(self) -> Frame:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _FileFrame(Frame):
    """A frame with the payload in a file. Sockets that can't pass files get the payload's bytes."""

    __slots__ = ("_file", "_holders", "_lock", "_passed", "arriving", "payload_bytes")
    arriving: IncomingBody  # The source of a payload that is still arriving.

    def __init__(
        self, passed: bytearray, inline: bytearray, file: int, payload_bytes: int, places: Sequence[int]
    ) -> None:
        super().__init__(inline)
        self._passed = passed
        self._file = file
        self._holders = 1
        self._lock = threading.Lock()
        self.payload_bytes = payload_bytes
        self.small = None
        self.puts = [partial(self._put, place) for place in places]

    def _put(self, place: int, number: int) -> None:
        for start in (self._passed, self._inline):
            _NUMBER.pack_into(start, place, number)

    def create_sender(self, passes_files: bool) -> Sender:
        return Sender(self, passes_files)

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                raise ValueError("the frame is closed: send it before closing it")
            self._holders += 1

    def close(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._file >= 0:
                os.close(self._file)
                self._file = -1
                self.puts = ()  # This breaks a reference cycle.
                # `_FileFrame` has no finalizer, in which a signal handler's exception would be lost.
                object.__setattr__(self, "__class__", _FileFrame)

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _OpenFrame(_FileFrame):
    """A frame with an open file, which the finalizer closes at the latest."""

    __slots__ = ()

    def __del__(self) -> None:
        self.abandon()


@attrs.frozen(eq=False)
class FileBody:
    """A body that is already in a reusable file; see `ReusableFile`."""

    file: int
    sizes: tuple[int, ...]
    length: int

    def to_frame(self, header: bytes) -> Frame:
        """Return a frame that sends the body by passing the file."""
        by_file, by_bytes = _build_heads(header, self.sizes, self.length, _AREA)
        return _OpenFrame(by_file, by_bytes, os.dup(self.file), self.length, ())


class _ArrivingFrame(_OpenFrame):
    """A frame with a body that is still arriving. Arrived bytes are sent at once; the file is passed when complete."""

    __slots__ = ()

    def __init__(self, header: bytes, arriving: IncomingBody) -> None:
        by_file, by_bytes = _build_heads(header, arriving.sizes, arriving.length)
        super().__init__(by_file, by_bytes, os.dup(arriving.file), arriving.length, ())
        self.arriving = arriving

    def create_sender(self, passes_files: bool) -> Sender:
        if passes_files:
            self.arriving.wait_for_more(self.payload_bytes - 1)
        return _RelaySender(self, passes_files)


class ReusableFile:
    """A reusable shared-memory file, in which the next body overwrites the previous body after all readers are done.

    New memory and new mappings cost more than a copy into existing memory.
    """

    def __init__(self) -> None:
        self._file = -1
        self._memory: mmap.mmap | None = None

    def write_body(self, body: Packed) -> FileBody | Packed:
        """Write a body into the file; return a small body unchanged, because direct sending is faster.

        Raises:
            OSError: No descriptor is free, or no memory.
        """
        sizes = (len(body.data), *[buffer.nbytes for buffer in body.buffers])
        pieces, length = _lay_out((body.data, *body.buffers), [*sizes])
        if length < FILE_BYTES:
            return body
        if self._memory is None or length > len(self._memory):
            self.close()
            self._file = create_file()
            os.ftruncate(self._file, length)
            seal_length(self._file)
            self._memory = mmap.mmap(self._file, length)
        at, start = 0, ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for piece in pieces:
            with memoryview(piece) as memory:
                if memory.readonly:
                    self._memory[at : at + memory.nbytes] = memory
                elif memory.nbytes:  # Copy without the GIL, because readers send requests meanwhile.
                    ctypes.memmove(start + at, ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes)
                at += memory.nbytes
        return FileBody(self._file, sizes, length)

    def close(self, above: int = -1) -> None:
        """Close the file if the file is larger than `above` bytes. Existing mappings stay valid."""
        if len(self._memory or b"") <= above:
            return
        if self._memory is not None:
            self._memory.close()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._memory = -1, None


def encode(head: Head, body: Packed | FileBody | IncomingBody | None = None) -> Frame:
    """Encode a message. The body is copied, so that the original memory may change afterwards.

    Args:
        head: Plain builtins, small.
        body: The body from `pack`, or None.

    Returns:
        The frame; close it after all lanes have it.
    """
    header = pickle.dumps(head, protocol=5)
    if isinstance(body, IncomingBody):
        return _ArrivingFrame(header, body)
    return body.to_frame(header) if isinstance(body, FileBody) else _build_frame(header, (), body)


def encode_numbered(head: Head, count: int, body: Packed | None = None) -> Frame:
    """Encode a message with placeholders for numbers in the head, which the frame's `puts` fill.

    Args:
        head: As for `encode`, with `HOLE`, `HOLE + 1` and so on as placeholders.
        count: The number of placeholders.
        body: As for `encode`.
    """
    return _build_frame(*(_pickle_with_hole(head) if count == 1 else _pickle_with_holes(head, count)), body)


def _build_frame(header: bytes, places: Sequence[int], body: Packed | None) -> Frame:
    if body is None:
        return Frame(bytearray(_PREFIX.pack(_VERSION, _BARE, len(header), 0, 0) + header), places)
    sizes = [len(body.data), *[buffer.nbytes for buffer in body.buffers]]
    pieces, length = _lay_out((body.data, *body.buffers), sizes)
    by_file, by_bytes = _build_heads(header, sizes, length)
    if length < FILE_BYTES:
        return Frame(bytearray().join((by_bytes, *pieces)), places)
    return _OpenFrame(by_file, by_bytes, create_memory_file(pieces), length, places)


def _build_heads(header: bytes, sizes: Sequence[int], length: int, kind: int = _FILE) -> tuple[bytearray, bytearray]:
    """Return the bytes before the payload twice: for a payload in a file (`kind`), and for an inline payload."""
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    passed = _PREFIX.pack(_VERSION, kind, len(header), len(sizes), length)
    inline = _PREFIX.pack(_VERSION, _INLINE, len(header), len(sizes), length)
    return bytearray().join((passed, header, table)), bytearray().join((inline, header, table))


@functools.lru_cache(maxsize=1024)
def _pickle_with_hole(head: Head) -> tuple[bytes, Sequence[int]]:
    """Return a cached result of `_pickle_with_holes`, because repeated calls of a method often have the same head."""
    return _pickle_with_holes(head, 1)


def _pickle_with_holes(head: Head, count: int) -> tuple[bytes, Sequence[int]]:
    """Return a pickled head, and the offsets of the head's placeholders in the frame."""
    header, places, at = pickle.dumps(head, protocol=5), list[int](), 0
    for number in range(HOLE, HOLE + count):
        at = header.index(_NUMBER.pack(number), at)
        places.append(_PREFIX.size + at)
    return header, places


def _lay_out(segments: tuple[Buffer, ...], sizes: list[int]) -> tuple[list[Buffer], int]:
    if len(sizes) == 1:
        return list(segments), sizes[0]
    pieces: list[Buffer] = []
    length = 0
    for segment, size in zip(segments, sizes, strict=True):
        if gap := -length % _ALIGN:
            pieces.append(_ZEROS[:gap])
        pieces.append(segment)
        length += gap + size
    return pieces, length


def _split_body(payload: memoryview, sizes: tuple[int, ...]) -> Packed:
    segments = []
    start = 0
    for size in sizes:
        start += -start % _ALIGN
        segments.append(payload[start : start + size])
        start += size
    return Packed(segments[0], tuple(segments[1:]))


class SmallSender:
    """The writer of a frame without a file, for one socket."""

    __slots__ = ("_left",)

    def __init__(self, data: bytearray, sent: int = 0) -> None:
        self._left = memoryview(data)[sent:]

    def write_to(self, sock: socket.socket) -> bool:
        """Write the rest of the frame; return True. Raises the errors of `Sender.write_to`."""
        while self._left:
            self._left = self._left[sock.send(self._left) :]
        return True

    def close(self) -> None:
        """Do nothing, because no memory is held."""

    abandon = close


class Sender:
    """The writer of a frame with a file, for one socket. Holds the frame's memory until `close`."""

    __slots__ = ("_from", "_left", "_pass", "frame")

    def __init__(self, frame: _FileFrame, passes_files: bool) -> None:
        frame.hold()
        self.frame = frame
        self._pass = passes_files
        self._left: bytearray | memoryview = frame._passed if self._pass else frame._inline
        self._from = frame.payload_bytes if self._pass else 0

    def write_to(self, sock: socket.socket) -> bool:
        """Write a bounded number of bytes to the socket.

        Returns:
            Whether all is written. False: call again.

        Raises:
            BlockingIOError: The socket takes no more for now.
            OSError: The connection is broken.
        """
        if self._pass:
            self._pass_file(sock)
        while self._left:
            written = sock.send(self._left)
            if written == len(self._left):
                self._left = bytearray()
            else:
                self._left = memoryview(self._left)[written:]
        frame = self.frame
        until = min(self._get_available_bytes(), self._from + _STRIDE_BYTES)
        while self._from < until:
            self._from += send_file(sock, frame._file, self._from, until - self._from)
        return self._from == frame.payload_bytes

    def close(self) -> None:
        """Release the frame, even if the frame isn't sent completely."""
        self.frame.close()

    def abandon(self) -> None:
        """Close the inherited file in a forked child."""
        self.frame.abandon()

    def _get_available_bytes(self) -> int:
        return self.frame.payload_bytes

    def _pass_file(self, sock: socket.socket) -> None:
        rights = array.array("i", [self.frame._file])
        try:
            written = sock.sendmsg([self._left], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self._left = memoryview(self._left)[written:]
        except OSError as error:
            # Too many passed files are still in sockets, so send the bytes instead.
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._left = self.frame._inline
            self._from = 0
        self._pass = False


class _RelaySender(Sender):
    """The writer of a frame whose payload is still arriving, for one socket. Waits for missing bytes."""

    __slots__ = ()

    def _get_available_bytes(self) -> int:
        assert isinstance(self.frame, _ArrivingFrame)
        return self._from if self._from == self.frame.payload_bytes else self.frame.arriving.wait_for_more(self._from)


class Reader:
    """Decodes messages from one socket.

    The memory of messages is the receiver's own, except in an `ReusableFile`, which the sender may overwrite after the
    receiver's use. An area is mapped once, as long as a message from there is alive.
    """

    def __init__(self, passes_files: bool) -> None:
        self._areas: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # The mapped reusable files, by inode.
        self._passes_files = passes_files
        self._files: deque[int] = deque()  # Received descriptors; -1 for a descriptor that was lost.
        self._pending = bytearray()  # The bytes of an incomplete frame.
        self._head: Head = ()
        self._sizes: tuple[int, ...] = ()
        self._payload: memoryview | None = None  # A long payload, which the socket fills directly.
        self._filled = 0
        self.open_buffer: OpenBuffer | None = None  # Chooses the destination of long payloads.
        self._arriving: IncomingBody | None = None
        self._unread = 0  # Bytes to skip of a payload that didn't fit into memory.

    def receive_messages(self, sock: socket.socket, scratch: memoryview) -> list[Message]:
        """Receive once, and decode the complete messages.

        Args:
            sock: The socket.
            scratch: Memory to overwrite.

        Returns:
            The messages that are now complete, in order; may be empty.

        Raises:
            BlockingIOError: There is nothing to read.
            EOFError: The peer has closed.
            OSError: The connection is broken.
            ValueError: The data are no message.
        """
        payload = self._payload
        if payload is not None:
            count = sock.recv_into(payload[self._filled :])
        elif self._unread:
            count = sock.recv_into(scratch[: self._unread])
        else:
            count = self._receive(sock, scratch)
        if not count:
            amid = payload is not None or self._unread or self._pending
            raise EOFError("closed in the middle of a message" if amid else "closed")
        if payload is not None:
            self._filled += count
            if (arriving := self._arriving) is not None:
                arriving.set_received(self._filled)
            if self._filled < len(payload):
                return []
            self._payload = self._arriving = None
            if arriving is not None:
                return [(self._head, self._map_body(_FILE, len(payload), self._sizes, arriving.duplicate_file()))]
            return [(self._head, _split_body(payload, self._sizes))]
        if self._unread:
            self._unread -= count
            return []
        if not self._pending:
            messages, used = self._parse(scratch[:count])
            if used < count:
                self._pending += scratch[used:count]
            return messages
        self._pending += scratch[:count]
        with memoryview(self._pending) as view:
            messages, used = self._parse(view)
        del self._pending[:used]
        return messages

    def close(self) -> None:
        """Drop incomplete messages, and close received descriptors."""
        while self._files:
            if (file := self._files.popleft()) >= 0:
                os.close(file)
        self._pending = bytearray()
        self._payload = None
        if self._arriving is not None:
            self._arriving.mark_failed()

    def _receive(self, sock: socket.socket, scratch: memoryview) -> int:
        if not self._passes_files:
            return sock.recv_into(scratch)
        count, extras, flags, _ = sock.recvmsg_into([scratch], _EXTRAS_BYTES, socket.MSG_CMSG_CLOEXEC)
        for _level, kind, data in extras:
            if kind == socket.SCM_RIGHTS:
                self._files.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if flags & _TRUNCATED:
            self._files.append(-1)
        return count

    def _parse(self, view: memoryview) -> tuple[list[Message], int]:
        messages: list[Message] = []
        at, end = 0, len(view)
        while end - at >= _PREFIX.size:
            version, kind, head_bytes, count, length = _PREFIX.unpack_from(view, at)
            if version != _VERSION or kind > _AREA:
                raise ValueError(f"no message of version {_VERSION}: do both sides run the same colocate?")
            table = at + _PREFIX.size + head_bytes
            start = table + 8 * count
            if start > end or (kind == _INLINE and length < _DIRECT_BYTES and start + length > end):
                break
            head = pickle.loads(view[at + _PREFIX.size : table])
            at = start
            if kind == _BARE:
                messages.append((head, None))
                continue
            sizes = struct.unpack_from(f"<{count}Q", view, table)
            if kind != _INLINE:
                messages.append((head, self._map_body(kind, length, sizes, self._next_file())))
                continue
            at = min(start + length, end)
            payload = memoryview(bytearray(view[start:at])) if start + length == at else None
            if payload is None:
                messages += self._begin_payload(head, sizes, length, view[start:at])
            else:
                messages.append((head, _split_body(payload, sizes)))
        return messages, at

    def _next_file(self) -> int:
        if not self._files:
            raise ValueError("a message came without its memory")
        return self._files.popleft()

    def _map_body(self, kind: int, length: int, sizes: tuple[int, ...], file: int) -> Packed:
        """Return the body in a file; if the file or memory is missing, return a body that raises when unpacked."""
        if file < 0:
            return LostPacked.from_error(OSError(errno.EMFILE, NONE_FREE))
        try:
            if kind == _FILE:
                return _split_body(map_private(file, length), sizes)
            return PackedInArea(*_split_body(memoryview(self._map_area(file, length)), sizes))
        except OSError as error:
            return LostPacked.from_error(OSError(error.errno, f"no memory is free for a message of {length} bytes"))
        finally:
            os.close(file)

    def _map_area(self, file: int, length: int) -> mmap.mmap:
        status = os.fstat(file)
        memory = self._areas.get(status.st_ino)
        if memory is None or len(memory) < length:
            memory = self._areas[status.st_ino] = map_file(file, max(status.st_size, length), mmap.MAP_SHARED)
        return memory

    def _begin_payload(self, head: Head, sizes: tuple[int, ...], length: int, first: memoryview) -> list[Message]:
        """Allocate the buffer for a long payload. If memory is missing, return the message with a `LostPacked` body."""
        try:
            self._arriving = None if self.open_buffer is None else self.open_buffer(head, sizes, length)
            self._payload = memoryview(bytearray(length)) if self._arriving is None else self._arriving.memory
        except (MemoryError, OSError):
            self._unread = length - len(first)
            return [
                (
                    head,
                    LostPacked.from_error(OSError(errno.ENOMEM, f"no memory is free for a message of {length} bytes")),
                )
            ]
        self._head, self._sizes = head, sizes
        self._payload[: len(first)] = first
        self._filled = len(first)
        if self._arriving is not None:
            self._arriving.set_received(self._filled)
        return []
