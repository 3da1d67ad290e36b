"""The globals that a call leads to, name by name: asked only where one of them can't be had."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable

from colocate._definitions.codec import pickler_for
from colocate._definitions.known import Global, Need
from colocate._definitions.lots import Lot, Receiver


def reached(needs: Iterable[Need]) -> set[Global]:
    """The globals that code of something names, and code of what these are, and so on."""
    lot, found, todo = Lot(Receiver("another")), set[Global](), list(needs)
    pickler = pickler_for(io.BytesIO(), lambda buffer: None, lot)
    while todo:
        need = todo.pop()
        if need in found:
            continue
        if isinstance(need, Global):
            found.add(need)
        # What can't be pickled leads nowhere; who sends it says so.
        with contextlib.suppress(Exception):
            pickler.dump(need.value if isinstance(need, Global) else need.object)
        todo += lot.take_named()
    return found
