"""Wait for readable descriptors, including descriptors above the limit of `select`."""

from __future__ import annotations

import select


def readable(descriptor: int, within_s: float) -> bool:
    """Wait up to `within_s` seconds until a descriptor is readable or closed; return False if the time is over.

    This uses `poll`, because `select` is limited to descriptors below 1024.
    """
    news = select.poll()
    news.register(descriptor, select.POLLIN)
    return bool(news.poll(within_s * 1000))
