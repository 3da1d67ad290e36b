"""Wait for readable descriptors, of any number."""

from __future__ import annotations

import select


def readable(descriptor: int, within_s: float) -> bool:
    """Wait until a descriptor is readable or closed, at most `within_s` seconds; return whether it is.

    By `poll`: `select` is limited to descriptors below 1024, and a driver with many open files has higher ones.
    """
    news = select.poll()
    news.register(descriptor, select.POLLIN)
    return bool(news.poll(within_s * 1000))
