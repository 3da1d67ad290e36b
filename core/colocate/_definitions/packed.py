"""The encoded form of a value (`Packed`): a pickle, and buffers with the memory of tensors and arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from colocate._definitions.ids import Need

Buffer: TypeAlias = bytes | bytearray | memoryview


class PlainData:
    """Base class of types that plain pickle can send, because all attributes are `PlainData` or small builtins."""

    __slots__ = ()


class Packed(NamedTuple):
    """An encoded value: a pickle, and the buffers that the pickle refers to.

    Attributes:
        data: The pickle.
        buffers: Contiguous readable memory that the pickle refers to. After `pack` it is the value's own memory; after
            a transport it is the receiver's, writable and not shared.
        needs: Definitions that the receiver must have before unpacking: classes and functions sent by id.
        has_trained: Whether the value has parameters, or leaves with `requires_grad`. Checked before sending.
    """

    data: Buffer
    buffers: tuple[memoryview, ...] = ()
    needs: tuple[Need, ...] = ()
    has_trained: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)

    def __reduce__(self) -> Any:
        # `needs` is left out, because the enclosing value lists all needed definitions.
        return Packed, (self.data, self.buffers)

    def extract_part(self, start: int, end: int, places: Iterable[int]) -> Packed:
        """Return one of several values packed together, by a range in the pickle and the indices of buffers."""
        # Each part gets all of `needs`, because within one process nothing else keeps the definitions alive.
        return Packed(self.data[start:end], tuple(self.buffers[place] for place in places), self.needs)

    def copy(self) -> Packed:
        buffers = tuple(memoryview(bytearray(buffer)) for buffer in self.buffers)
        return Packed(bytes(self.data), buffers, self.needs, self.has_trained)


class PackedInArea(Packed):
    """An encoded value in shared memory (`wire.ReusableFile`), which the sender reuses when the receiver is done."""

    __slots__ = ()


class LostPacked(Packed):
    """A value that couldn't be received for lack of file descriptors or memory. Unpacking raises the OSError."""

    __slots__ = ()

    @classmethod
    def from_error(cls, error: OSError) -> LostPacked:
        """Return a value that raises this error when unpacked."""
        return cls.from_raiser(_raise, error.errno, error.strerror or str(error))

    @classmethod
    def from_raiser(cls, raises: Callable[..., NoReturn], *why: Any) -> LostPacked:
        """Return a value that calls `raises` with `why` when unpacked."""
        return cls(pickle.dumps(_RaisingCall((raises, why))))

    def extract_part(self, start: int, end: int, places: Iterable[int]) -> Packed:
        """Return this lost value itself, because no part of the value has arrived."""
        return self


class _RaisingCall(tuple[Any, ...]):
    """A function and arguments, as a tuple. Unpickling calls the function, which raises an error."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return tuple(self)


def _raise(number: int | None, text: str) -> NoReturn:
    raise OSError(number, text) if number is not None else OSError(text)


def copy_buffers(body: Any) -> Any:
    """Return a packed body with private copies of the buffers; return other bodies unchanged."""
    return body.copy() if isinstance(body, Packed) and body.buffers else body


def count_packed_bytes(body: Any) -> int:
    """Return the size of a message's body in bytes; 0 without a body or for a value passed by reference."""
    return body.nbytes if isinstance(body, Packed) else 0
