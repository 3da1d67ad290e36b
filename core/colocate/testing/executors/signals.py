"""Signals on the driver: handlers that call, and Ctrl-C where something takes long."""

from __future__ import annotations

import signal

from colocate.executor import OwnProcess
from colocate.testing.executors._base import needs, of_executor
from colocate.testing.executors.drivers import Scripted, Scripts
from colocate.testing.gate import Gate
from colocate.testing.waiting import Processes

BEGIN = """
import time
from colocate.testing.probes.faulty import HangsAtStart

def interrupted(function):
    try:
        function()
    except KeyboardInterrupt:
        return "interrupted"
    except BaseException as error:
        return repr(error)
    return "not interrupted"

"""


class Signals(Scripted):
    """Signals, which Python handles on the main thread, between any two lines of whatever runs there."""

    def test_handler_that_calls(self, scripts: Scripts) -> None:
        """Calls and closes work in a handler, also when it has interrupted the wait for another call."""
        with Gate() as gate:
            driver = scripts.start(f"""
                {_indented(BEGIN)}
                def handle(number, frame):
                    kept = echo.first.options(ranks=[0]).keep("kept")
                    say([echo.first.options(ranks=[0])("called"), kept.fetch(),
                         echo.first.options(ranks=[0]).submit("submitted").result()])
                    other.close()
                    say(other.state)

                with CONNECT as runtime:
                    pool = runtime.reserve(3, cpus=0)
                    group, other = pool[:2].spawn(ROLES), pool[2].spawn(ROLES)
                    echo = group.role("echo", Echo)
                    signal.signal(signal.SIGUSR1, handle)
                    waiting = group.role("faulty").wait.options(ranks=[1]).submit({gate.address!r})
                    say("waiting")
                    say(waiting.result())
                    say(echo.first("afterwards"))
                """)
            assert driver.hear() == "waiting"
            gate.wait_for()
            for _ in range(3):
                driver.process.send_signal(signal.SIGUSR1)
                assert driver.hear() == ["called", "kept", "submitted"]
                assert driver.hear() == "closed"
            gate.open()
            assert driver.hear() == [1]
            assert driver.hear() == "afterwards"
            code, errors = driver.end()
        assert (code, errors) == (0, "")

    @needs(OwnProcess)
    @of_executor
    def test_interrupted_spawn(self, scripts: Scripts) -> None:
        """Ctrl-C in a start gives it up: nothing of it is left, and its slots are as good as before."""
        with Gate() as gate:
            driver = scripts.start(f"""
                {_indented(BEGIN)}
                with CONNECT as runtime:
                    pool = runtime.reserve(2, cpus=0)
                    hangs = {{"hangs": colocate.role(HangsAtStart, {gate.address!r})}}
                    say(interrupted(lambda: pool.spawn(hangs)))
                    say([[group.name for group in runtime.groups.values()], str(runtime.audit())])
                    group = pool.spawn(ROLES)
                    say(group.role("echo", Echo).first("works"))
                """)
            gate.wait_for()
            driver.process.send_signal(signal.SIGINT)
            assert driver.hear() == "interrupted"
            assert driver.hear() == [[], "clean: nothing is leaked, nothing is missing"]
            assert driver.hear() == "works"
            code, errors = driver.end()
        assert (code, errors) == (0, "")

    @needs(OwnProcess)
    def test_interrupted_close(self, scripts: Scripts) -> None:
        """Ctrl-C while a close waits: what runs has no grace any more. It is raised once all of it is closed."""
        with Gate() as gate:
            driver = scripts.start(f"""
                {_indented(BEGIN)}
                runtime = CONNECT
                group = runtime.reserve(2, cpus=0).spawn(ROLES)
                say([pid for pid, _, _ in group.role("echo", Echo).place()])
                call = group.role("faulty").wait.submit({gate.address!r})

                def tell():
                    while runtime.state == "ready":
                        time.sleep(0.01)
                    say("closing")

                wait()
                threading.Thread(target=tell).start()
                say(interrupted(lambda: runtime.close(grace=1000)))
                say([runtime.state, group.state, type(call.exception()).__name__])
                runtime.close()
                """)
            workers = Processes(driver.hear())
            gate.wait_for()
            driver.go_on()
            assert driver.hear() == "closing"
            driver.process.send_signal(signal.SIGINT)
            assert driver.hear() == "interrupted"
            assert driver.hear() == ["closed", "closed", "ClosedError"]
            workers.wait()
            workers.close()
            code, errors = driver.end()
        assert (code, errors) == (0, "")

    @of_executor
    def test_executor_is_called_off_the_main_thread(self, scripts: Scripts) -> None:
        """Whatever the main thread asks for: a signal's handler finds no lock of the executor taken by it.

        But for `numbered`, which takes none: the main thread makes frames that it posts itself.
        """
        driver = scripts.start("""
            from colocate.executor import Executor
            called = []

            def watched(name, method):
                def call(self, *args, **options):
                    called.append((name, threading.current_thread() is threading.main_thread()))
                    return method(self, *args, **options)
                return call

            with CONNECT as runtime:
                kind = type(runtime._node.services.executor)
                for name, method in vars(Executor).items():
                    if not name.startswith("_") and callable(method):  # not the class's own methods
                        setattr(kind, name, watched(name, getattr(kind, name)))
                pool = runtime.reserve(2, cpus=0)
                group = pool.spawn(ROLES)
                echo = group.role("echo", Echo)
                with group.scope(), group.pipeline():
                    kept = echo.first.keep("kept")
                    sent = echo.first.submit(kept.ref)
                say([echo.first("called"), sent.result(), group.run(lambda ctx: ctx.rank), str(runtime.audit())])
                group.close()
                pool.close()
            say(sorted({name for name, on_main in called if on_main} - {"numbered", "post"}))
            say(sorted({"reserve", "launch", "frame", "running", "release", "close"} - {name for name, _ in called}))
            """)
        assert driver.hear() == ["called", "kept", [0, 1], "clean: nothing is leaked, nothing is missing"]
        assert driver.hear() == []
        assert driver.hear() == []
        code, errors = driver.end()
        assert (code, errors) == (0, "")


def _indented(text: str) -> str:
    """To stand in a script that is indented."""
    return text.replace("\n", "\n" + " " * 16)
