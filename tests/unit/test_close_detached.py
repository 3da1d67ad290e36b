"""An interrupted `colocate close` keeps no reservation."""

from __future__ import annotations

import signal
import threading
from typing import Any, cast

import pytest

from colocate._api.connection import Connection
from colocate._api.detached import close_detached
from colocate.executor import Adopted, Reservation
from colocate.testing.waiting import wait_until


class Interrupted:
    """A cluster with one pool, whose record can't be read; Ctrl-C reaches the driver right after the first grant."""

    def __init__(self) -> None:
        self.alive = True
        self.executor = self.services = self
        self.granted = self.given_back = 0

    def adopt(self, *_: Any) -> Adopted:
        self.granted += 1
        if self.granted == 1:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        return Adopted(cast("Reservation", None), self.granted, b"")

    def detach(self, _: Reservation) -> None:
        self.given_back += 1

    release = detach

    def check_usable(self) -> None:
        """Accept: the cluster is open."""


def test_interrupted_close_detached_returns_reservations() -> None:
    """Ctrl-C during `close_detached` is raised, and each reservation that was granted is given back."""
    cluster = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        close_detached(cast("Connection", cluster), "pool", force=False)
    wait_until(lambda: cluster.granted == cluster.given_back == 3, "the borrow, the attempt and the end are given back")
