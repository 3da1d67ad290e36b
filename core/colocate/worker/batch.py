"""Several calls in one message: how the worker takes them apart again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from colocate.wire import Packed

# Where in a message's body the one of a call lies: the index, where bodies are handed over as they are, or the range
# of bytes of its pickle and the buffers that it refers to.
Where: TypeAlias = "int | tuple[int, int, tuple[int, ...]] | None"
Entry: TypeAlias = "tuple[tuple[Any, ...], Where]"


def take_apart(entries: Sequence[Entry], body: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Head and body of each call, in order."""
    for head, where in entries:
        if where is None:
            yield head, None
        elif isinstance(where, int):
            yield head, body[where]
        else:
            start, end, places = where
            # What the whole needs, each does: within one process nobody else holds it when the whole is gone.
            yield head, Packed(body.data[start:end], tuple(body.buffers[place] for place in places), body.needs)
