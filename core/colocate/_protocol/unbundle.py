"""Several calls in one message: how the worker takes them apart again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from colocate._protocol.messages import Call, Where
from colocate.wire import Packed


def take_apart(calls: Sequence[tuple[Call, Where]], body: Any) -> Iterator[tuple[Call, Any]]:
    """Each call with its body, in order."""
    for call, where in calls:
        if where is None:
            yield call, None
        elif isinstance(where, int):
            yield call, body[where]
        else:
            start, end, places = where
            # What the whole needs, each does: within one process nobody else holds it when the whole is gone.
            yield call, Packed(body.data[start:end], tuple(body.buffers[place] for place in places), body.needs)
