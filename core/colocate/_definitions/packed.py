"""`Packed`: a value as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from colocate._definitions.ids import Need

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
        has_trained: Whether tensors are in it of which gradients are computed. Its sender asks, before it is sent.
    """

    data: Buffer
    buffers: tuple[memoryview, ...] = ()
    needs: tuple[Need, ...] = ()
    has_trained: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes it has, all together."""
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)

    def __reduce__(self) -> Any:
        # Inside another value: what it needs, its sender says of the whole.
        return Packed, (self.data, self.buffers)

    def part(self, start: int, end: int, places: Iterable[int]) -> Packed:
        """Return one of several values that were put together: its pickle's place, and which buffers are its."""
        # What the whole needs, each does: within one process nobody else holds it when the whole is gone.
        return Packed(self.data[start:end], tuple(self.buffers[place] for place in places), self.needs)

    def copy(self) -> Packed:
        """Return the same in memory of its own, as after a transport."""
        buffers = tuple(memoryview(bytearray(buffer)) for buffer in self.buffers)
        return Packed(bytes(self.data), buffers, self.needs, self.has_trained)


class InArea(Packed):
    """A value in memory that its sender has, too, and writes over when it knows that it is over (`wire.Area`)."""

    __slots__ = ()


class Lost(Packed):
    """A value whose memory hasn't arrived, for want of a descriptor or of room: to unpack it raises that OSError."""

    __slots__ = ()

    @classmethod
    def of(cls, error: OSError) -> Lost:
        """Make one, given what is lacking."""
        return cls.when_unpacked(_raise, error.errno, error.strerror or str(error))

    @classmethod
    def when_unpacked(cls, raises: Callable[..., NoReturn], *why: Any) -> Lost:
        """Make one by what is to be raised."""
        return cls(pickle.dumps(_Lacking((raises, why))))

    def part(self, start: int, end: int, places: Iterable[int]) -> Packed:
        """Return this: none of several values has arrived."""
        return self


class _Lacking(tuple[Any, ...]):
    """Is pickled as the call that it has, which raises."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return tuple(self)


def _raise(number: int | None, text: str) -> NoReturn:
    raise OSError(number, text) if number is not None else OSError(text)


def owned(body: Any) -> Any:
    """Copy the buffers of a packed body; a body that is passed by reference comes back unchanged."""
    return body.copy() if isinstance(body, Packed) and body.buffers else body


def packed_bytes(body: Any) -> int:
    """Return how many bytes a message's body is, all together: none where there is none, or a value as it is."""
    return body.nbytes if isinstance(body, Packed) else 0
