"""What a run's record waits for: observers are told of every call that has ended, unless one of them hangs."""

from __future__ import annotations

import threading

import pytest

import colocate
from colocate import CallRecord
from colocate._calls import services
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S


class Observer:
    """Is told of a call, and returns when it is let."""

    def __init__(self) -> None:
        self.hangs, self.returns = threading.Event(), threading.Event()
        self.told: list[CallRecord] = []

    def colocate_call_finished(self, record: CallRecord) -> None:
        self.hangs.set()
        self.returns.wait()
        self.told.append(record)


def test_an_observer_that_hangs_does_not_keep_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that returns late is waited for, and one that doesn't return only for a limited time."""
    observer = Observer()
    with colocate.connect("local") as runtime:
        echo = runtime.reserve(1).spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        runtime.observe(observer)
        settle = runtime._node.services.settle
        try:
            echo.noop()
            assert observer.hangs.wait(PATIENCE_S)
            monkeypatch.setattr(services, "TOLD_WITHIN_S", 0.2)
            settled: list[bool] = []
            settling = threading.Thread(target=lambda: settled.append(settle()), daemon=True)
            settling.start()
            settling.join(PATIENCE_S)
            assert settled == [False]
            assert not observer.told
            monkeypatch.setattr(services, "TOLD_WITHIN_S", PATIENCE_S)
            threading.Timer(0.2, observer.returns.set).start()
            assert settle()
            assert len(observer.told) == 1
        finally:
            observer.returns.set()
