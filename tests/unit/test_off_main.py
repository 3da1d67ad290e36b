"""The main thread hands over: what an interruption of its wait leaves, and what is waited for at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from colocate._signals.off_main import off_main

PATIENCE_S = 10.0


def test_interruption_waits_for_what_undoes_the_work() -> None:
    """The exception comes out when all of it is over, also where the work itself had ended before that."""
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
        off_main(work, undo, PATIENCE_S)
    assert undone.is_set()


def test_interpreter_exit() -> None:
    """What was handed over is done by then; an object that goes with its module's names may close a runtime yet."""
    code = """
        import time
        import colocate
        from colocate._signals.off_main import hand_over

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
        hand_over(late)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("done\nclosed\n", "", 0)
