"""A first Ctrl-C or SIGTERM asks, a second one ends."""

import os
import signal
import threading

import pytest

from colocate_run.run import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_noted_and_the_second_raises(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    noticed: list[str] = []
    with StopSignals(noticed.append) as signals:
        os.kill(os.getpid(), number)
        assert (signals.received, noticed) == (number.name, [number.name])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert noticed == [number.name]
    assert signal.getsignal(number) is before


def test_a_job_on_another_thread_sets_no_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    found = []

    def job() -> None:
        with StopSignals(print):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert found == [before]
