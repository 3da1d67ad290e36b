"""A value with all that it names, for those who can ask nobody: a record that another driver reads."""

from __future__ import annotations

import pickle
from typing import Any

from colocate._definitions.codec import pack, unpack
from colocate._definitions.inbox import Inbox
from colocate._definitions.lots import Receiver
from colocate._definitions.packed import Packed
from colocate.errors import SerializationError


def pack_whole(value: Any, what: str) -> bytes:
    """A value with all definitions that it names, for another script.

    Raises:
        SerializationError: It can't be pickled.
    """
    try:
        body = pack(value)
    except Exception as error:
        raise SerializationError(f"{what} can't be pickled: {type(error).__name__}: {error}", argument=what) from error
    lot = Receiver("another").lot(body.needs)
    return pickle.dumps((lot.ids, *_flat(lot.body), *_flat(body)), protocol=5)


def _flat(body: Packed) -> tuple[bytes, list[bytes]]:
    return bytes(body.data), [bytes(buffer) for buffer in body.buffers]


def unpack_whole(packed: bytes) -> tuple[Any, Inbox]:
    """The value, and what holds its definitions."""
    ids, data, buffers, value, its_buffers = pickle.loads(packed)
    inbox = Inbox(binds=True, of_another=True)
    inbox.put(ids, Packed(data, tuple(memoryview(bytearray(buffer)) for buffer in buffers)))
    inbox.load(1)
    return unpack(Packed(value, tuple(memoryview(bytearray(buffer)) for buffer in its_buffers))), inbox
