"""Pack the bodies of several calls into one body that includes shared buffers once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from colocate._protocol.to_worker import Call, Where
from colocate.wire import Packed


def bundle_bodies(bodies: Sequence[Any]) -> tuple[list[Where], Any]:
    """Pack several bodies into one body; return the places of the bodies within, and the packed body."""
    real_bodies = [body for body in bodies if body is not None]
    if not real_bodies:
        return [None] * len(bodies), None
    if not all(isinstance(body, Packed) for body in real_bodies):  # Bodies that aren't pickled pass through unchanged.
        return [None if body is None else index for index, body in enumerate(bodies)], tuple(bodies)
    data: list[Any] = []
    buffers: dict[int, tuple[int, memoryview]] = {}
    wheres: list[Where] = []
    where_by_body: dict[int, Where] = {}
    end = 0
    for body in bodies:
        if body is not None and id(body) not in where_by_body:
            start, end = end, end + len(body.data)
            data.append(body.data)
            places = tuple(buffers.setdefault(id(buffer), (len(buffers), buffer))[0] for buffer in body.buffers)
            where_by_body[id(body)] = start, end, places
        wheres.append(None if body is None else where_by_body[id(body)])
    needs = tuple({id(need): need for body in real_bodies for need in body.needs}.values())
    return wheres, Packed(b"".join(data), tuple(buffer for _, buffer in buffers.values()), needs)


def split_bundle(calls: Sequence[tuple[Call, Where]], body: Any) -> Iterator[tuple[Call, Any]]:
    """Yield the calls of a packed body in order, each with the call's own body."""
    for call, where in calls:
        if where is None:
            yield call, None
        elif isinstance(where, int):
            yield call, body[where]
        else:
            start, end, places = where
            yield call, body.extract_part(start, end, places)
