"""`Packed`: a value as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from colocate._definitions.ids import Need

Buffer: TypeAlias = bytes | bytearray | memoryview


class Plain:
    """Base of types that plain pickle sends correctly: their attributes are `Plain` objects and small builtins."""

    __slots__ = ()


class Packed(NamedTuple):
    """A value as bytes.

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
        # Inside another value: the needs are recorded with the whole.
        return Packed, (self.data, self.buffers)

    def part(self, start: int, end: int, places: Iterable[int]) -> Packed:
        """Return one of several packed values, given the range in the pickle and the indices of buffers."""
        # Each part keeps all needs: within one process no other object holds them once the whole is gone.
        return Packed(self.data[start:end], tuple(self.buffers[place] for place in places), self.needs)

    def copy(self) -> Packed:
        buffers = tuple(memoryview(bytearray(buffer)) for buffer in self.buffers)
        return Packed(bytes(self.data), buffers, self.needs, self.has_trained)


class InArea(Packed):
    """A value in memory shared with the sender, to be overwritten after the receiver's use (`wire.Area`)."""

    __slots__ = ()


class Lost(Packed):
    """A value that couldn't be received for lack of descriptors or memory: unpacking raises that OSError."""

    __slots__ = ()

    @classmethod
    def of(cls, error: OSError) -> Lost:
        """Return a value that raises this error when unpacked."""
        return cls.when_unpacked(_raise, error.errno, error.strerror or str(error))

    @classmethod
    def when_unpacked(cls, raises: Callable[..., NoReturn], *why: Any) -> Lost:
        """Return a value that calls `raises` with `why` when unpacked."""
        return cls(pickle.dumps(_Lacking((raises, why))))

    def part(self, start: int, end: int, places: Iterable[int]) -> Packed:
        """Return the same lost value: no part has arrived."""
        return self


class _Lacking(tuple[Any, ...]):
    """A call, as a tuple, which unpickling executes; the call raises."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return tuple(self)


def _raise(number: int | None, text: str) -> NoReturn:
    raise OSError(number, text) if number is not None else OSError(text)


def owned(body: Any) -> Any:
    """Copy the buffers of a packed body; a body that is passed by reference comes back unchanged."""
    return body.copy() if isinstance(body, Packed) and body.buffers else body


def packed_bytes(body: Any) -> int:
    """Return the size of a message's body in bytes; 0 for no body, or a value passed by reference."""
    return body.nbytes if isinstance(body, Packed) else 0
