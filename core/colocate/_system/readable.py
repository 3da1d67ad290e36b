"""`readable`: whether there is something to read, whatever number a descriptor has."""

from __future__ import annotations

import select


def readable(descriptor: int, within_s: float) -> bool:
    """Wait until something can be read, or has ended; False when nothing has by then.

    By `poll`: `select` can't take descriptors from 1024 on, which a driver with many open files has.
    """
    news = select.poll()
    news.register(descriptor, select.POLLIN)
    return bool(news.poll(within_s * 1000))
