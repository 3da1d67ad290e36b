"""`Packed`: a value as bytes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from colocate._definitions.known import Need

Buffer: TypeAlias = bytes | bytearray | memoryview


class Plain:
    """Base of what plain pickle sends as it should be: it consists of colocate's own classes and of small builtins."""

    __slots__ = ()


class Packed(NamedTuple):
    """A value as bytes.

    Attributes:
        data: The pickle.
        buffers: What it refers to: contiguous readable memory. After `pack` it is the value's own memory; after a
            transport it is the receiver's, writable and shared with nobody.
        needs: What the receiver has to know before it unpacks this: classes and functions that are only named in it.
    """

    data: Buffer
    buffers: tuple[memoryview, ...] = ()
    needs: tuple[Need, ...] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes it is, all together."""
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)

    def __reduce__(self) -> Any:
        # Inside another value: what it needs, its sender says of the whole.
        return Packed, (self.data, self.buffers)

    def copy(self) -> Packed:
        """The same in memory of its own, as after a transport."""
        return Packed(bytes(self.data), tuple(memoryview(bytearray(buffer)) for buffer in self.buffers), self.needs)


def packed_bytes(body: Any) -> int:
    """How many bytes a message's body is, all together: none where there is none, or a value as it is."""
    return body.nbytes if isinstance(body, Packed) else 0
