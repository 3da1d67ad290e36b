"""What a call leads to, name by name: asked only where some of that can't be had, or mustn't be."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator

from colocate._definitions.codec import pickler_for
from colocate._definitions.known import Global, Need
from colocate._definitions.lots import Lot, Receiver
from colocate._definitions.pickler import Pickler


def reached(needs: Iterable[Need]) -> set[Global]:
    """The globals that code of something names, and code of what these are, and so on."""
    lot = Lot(Receiver("another"))
    pickler = pickler_for(io.BytesIO(), lambda buffer: None, lot)
    return {need for need in followed(needs, pickler, lot) if isinstance(need, Global)}


def followed(needs: Iterable[Need], pickler: Pickler, lot: Lot) -> Iterator[Need]:
    """What is needed, and what is needed for that: each when it has been pickled, by a pickler that fills the lot."""
    found, todo = set[Need](), list(needs)
    while todo:
        need = todo.pop()
        if need in found:
            continue
        found.add(need)
        # What can't be pickled leads nowhere; who sends it says so.
        with contextlib.suppress(Exception):
            pickler.dump(need.value if isinstance(need, Global) else need.object)
        yield need
        todo += lot.take_named()
