"""Work deferred from the main thread: an interrupted wait, idle threads, and interpreter exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from colocate._signals.deferred import COURIER, defer, run_deferred
from colocate.testing.waiting import wait_until

PATIENCE_S = 10.0


def test_interruption_waits_for_undo() -> None:
    """Ctrl-C during deferred work raises after the undo has completed, even if the work ended earlier."""
    main = threading.main_thread().ident
    assert main is not None
    waiting, told, undone = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        waiting.set()
        told.wait(PATIENCE_S)

    def undo() -> None:
        told.set()
        threading.Event().wait(0.3)
        undone.set()

    def interrupt() -> None:
        waiting.wait(PATIENCE_S)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_deferred(work, undo, PATIENCE_S)
    assert undone.is_set()


def test_idle_threads_end_after_burst() -> None:
    """At most three idle threads remain after a burst of work; a thread whose child process runs stays too."""
    before, goes_on = _couriers(), threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def work() -> None:
        goes_on.wait(PATIENCE_S)

    def start() -> None:
        processes.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        names.append(threading.current_thread().name)
        goes_on.wait(PATIENCE_S)

    names: list[str] = []
    done = [defer(each) for each in (start, *[work] * 30)]
    wait_until(lambda: names and len(_couriers()) > 30, "all work at once")
    goes_on.set()
    assert all(each.wait(PATIENCE_S) for each in done if each is not None)
    wait_until(lambda: len(_couriers() - before) <= 3, "the others have ended")
    assert names[0] in _couriers()
    processes[0].communicate()


def _couriers() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith(COURIER)}


def test_interpreter_exit() -> None:
    """Interpreter exit completes deferred work, and a `__del__` can still close a runtime."""
    code = """
        import time
        import colocate
        from colocate._signals.deferred import defer

        class Owner:
            def __init__(self):
                self.runtime = colocate.connect()

            def __del__(self):
                self.runtime.close()  # no other thread runs any more
                print("closed", flush=True)

        def late():
            time.sleep(0.3)
            print("done", flush=True)

        owner = Owner()
        defer(late)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("done\nclosed\n", "", 0)
