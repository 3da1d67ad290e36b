"""Raise a signal at each place of the framework's own frames on the main thread, one place per run.

`python -m tests.signals.program OPERATION,… ENGINE HANDLER SHARE OF` runs each operation again and again, each time
with a signal at a new place (a code object and an offset in it): at every OF-th place, from the SHARE-th on. After each
run the program tries later calls, closes everything, and looks for leftovers. The program prints the number of places;
at the first place with a failure it exits with an error, or with the stacks of all threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import faulthandler
import gc
import itertools
import operator
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil

import colocate
from colocate import ColocatedGroup, Role, Runtime, method
from colocate._api.connection import live_connections
from colocate._signals.deferred import COURIER
from colocate._system.lines import is_own_code

HANGS_AFTER_S = 30.0
PUT_OFF_S = 10.0  # a handler that our own code defers runs by then
ENDS_WITHIN_S = 10.0
CLOSES_WITHIN_S = 8.0
ROWS = 12  # of a stream: more rows than may run unread


class Adder(Role):
    """A role that adds, and can be saved."""

    @method(collect=colocate.First())
    def add(self, number: int, other: int) -> int:
        """Return the sum."""
        return number + other

    @method(rows="number", concurrency=2)
    async def twice(self, number: int) -> int:
        """Double a row."""
        return 2 * number

    def save(self, directory: str) -> None:
        """Write a file, in the place of a state."""
        Path(directory, f"rank-{self.ctx.rank}").write_text("saved", encoding="utf-8")

    def restore(self, directory: str) -> None:
        """Restore nothing: the role has no state."""


class Stage:
    """The objects of one run: a runtime, an undisturbed group, and perhaps a group for the operation."""

    def __init__(self, engine: str, folder: str) -> None:
        self.engine = engine
        self.folder = folder
        self.runs = 0
        self.runtime = self.connect()
        self.bystander = self.spawn(self.runtime, "bystander")
        self.group: ColocatedGroup | None = None
        self.kept: object = None  # keeps an object alive beyond the operation: errors of `__del__` are lost

    def connect(self) -> Runtime:
        """Return a new runtime."""
        return colocate.connect("local", processes=self.engine == "processes")

    def spawn(self, runtime: Runtime, name: str | None = None) -> ColocatedGroup:
        """Return a new group."""
        return runtime.reserve(1).spawn({"adder": colocate.role(Adder)}, name)

    def checkpoint(self, group: ColocatedGroup) -> None:
        """Write a checkpoint of a group to a new folder."""
        self.runs += 1
        group.checkpoint(os.path.join(self.folder, f"{id(self)}-{self.runs}"))


def view(group: ColocatedGroup | None) -> Adder:
    assert group is not None
    return group.role("adder", Adder)


# -- operations: what is prepared, and what is interrupted


def connect_and_reserve(stage: Stage) -> None:
    stage.connect().reserve(1)


def spawn(stage: Stage) -> None:
    stage.group = stage.spawn(stage.runtime)


def call(stage: Stage) -> None:
    assert view(stage.group).add(1, 2) == 3


def submit(stage: Stage) -> None:
    assert view(stage.group).add.submit(1, 2).result() == 3


def keep(stage: Stage) -> None:
    with view(stage.group).add.keep(1, 2) as kept:
        assert kept.fetch() == 3
        assert view(stage.group).add(kept.ref, 1) == 4


def pipeline(stage: Stage) -> None:
    assert stage.group is not None
    with stage.group.scope():
        with stage.group.pipeline():
            kept = view(stage.group).add.keep(1, 2)
            call = view(stage.group).add.submit(kept.ref, 3)
        assert call.result() == 6


def checkpoint(stage: Stage) -> None:
    assert stage.group is not None
    stage.checkpoint(stage.group)


def close(stage: Stage) -> None:
    assert stage.group is not None
    stage.group.close()


def leave(stage: Stage) -> None:
    with stage.connect() as runtime, runtime.reserve(1) as pool, pool.spawn({"adder": colocate.role(Adder)}) as group:
        assert view(group).add(1, 2) == 3


def read(take: Callable[[list[Any]], bool], index: Callable[[Any], int] = operator.itemgetter(0)) -> None:
    """Take all items, also after an interruption, and check that no item is lost.

    `take` adds an item to the list in the same step that yields the item, so that no handler runs in between.
    """
    found, raised = list[Any](), None
    while True:
        try:
            if not take(found):
                break
        except (KeyboardInterrupt, Ended) as error:
            raised = error
    assert sorted(map(index, found)) == [*range(ROWS)]
    if raised is not None:
        raise raised


def _take_next(items: Iterator[Any], found: list[Any]) -> bool:
    before = len(found)
    found.extend(itertools.islice(items, 1))
    return len(found) > before


def stream(stage: Stage) -> None:
    rows = stage.kept = view(stage.group).twice.stream(list(range(ROWS)))
    read(partial(_take_next, rows))


def stream_async(stage: Stage) -> None:
    rows = stage.kept = view(stage.group).twice.stream(list(range(ROWS)))

    def take(found: list[Any]) -> bool:
        async def one() -> bool:
            try:
                found.append(await anext(rows))
            except StopAsyncIteration:
                return False
            return True

        return asyncio.run(one())

    read(take)


def completed(stage: Stage) -> None:
    calls = {view(stage.group).add.submit(number, 0): number for number in range(ROWS)}
    read(partial(_take_next, colocate.as_completed(calls)), calls.__getitem__)


OPERATIONS: dict[str, Callable[[Stage], None]] = {
    each.__name__: each
    for each in (
        *(connect_and_reserve, spawn, call, submit, keep, pipeline, checkpoint, close, leave),
        *(stream, stream_async, completed),
    )
}
_WITHOUT_GROUP = (connect_and_reserve, spawn, leave)


# -- handlers


class Ended(SystemExit):
    """The exit that a user's handler of SIGTERM raises."""


def _interrupt(stage: Stage) -> None:
    raise KeyboardInterrupt


def _exit(stage: Stage) -> None:
    raise Ended(143)


def _each(stage: Stage) -> Iterator[ColocatedGroup]:
    yield stage.bystander
    if stage.group is not None and stage.group.alive:
        yield stage.group


def _call(stage: Stage) -> None:
    for group in _each(stage):
        with _unless_closed(group):
            assert view(group).add(20, 1) == 21


def _submit(stage: Stage) -> None:
    for group in _each(stage):
        with _unless_closed(group):
            assert view(group).add.submit(20, 1).result() == 21


def _keep(stage: Stage) -> None:
    for group in _each(stage):
        with _unless_closed(group), view(group).add.keep(20, 1) as kept:
            assert view(group).add(kept.ref, 1) == 22
            assert kept.fetch() == 21


def _checkpoint(stage: Stage) -> None:
    for group in _each(stage):
        with _unless_closed(group):
            stage.checkpoint(group)


def _close(stage: Stage) -> None:
    stage.runtime.close(grace=1, force=True)


@contextlib.contextmanager
def _unless_closed(group: ColocatedGroup) -> Iterator[None]:
    """Accept refusals of a group that closes, has an open pipeline, or a half-read stream; none of the bystander."""
    try:
        yield
    except (colocate.ClosedError, colocate.PipelineError):
        assert group.name != "bystander"
    except colocate.ColocateError as error:
        if group.name == "bystander" or "comes after the stream" not in str(error):
            raise


HANDLERS: dict[str, Callable[[Stage], None]] = {
    "interrupt": _interrupt,
    "exit": _exit,
    "call": _call,
    "submit": _submit,
    "keep": _keep,
    "checkpoint": _checkpoint,
    "close": _close,
}
_RAISES = {"interrupt": KeyboardInterrupt, "exit": Ended}


# -- where


_RETURNS = dis.opmap["RETURN_VALUE"]


class Places:
    """A trace function that raises the signal at the first new place of its share."""

    def __init__(self, share: int, of: int) -> None:
        self._seen: set[tuple[CodeType, int]] = set()
        self._share = share
        self._of = of
        self.count = 0
        self.fired = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_framework(frame.f_code.co_filename) or _is_in_del(frame):
            return None
        frame.f_trace_opcodes = True
        # While a function returns, Python runs no handler before the caller has the value. Exceptions that a handler
        # raises amid any `__del__` are ignored.
        if event == "opcode" and not self.fired and frame.f_code.co_code[frame.f_lasti] != _RETURNS:
            place = frame.f_code, frame.f_lasti
            if place not in self._seen:
                self._seen.add(place)
                if len(self._seen) % self._of == self._share:
                    self.count += 1
                    self.fired = f"{frame.f_code.co_filename}:{frame.f_lineno} (offset {frame.f_lasti})"
                    signal.raise_signal(signal.SIGUSR1)
        return self


def _is_in_del(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_framework(file: str) -> bool:
    return is_own_code(file) or f"{os.sep}colocate_local{os.sep}" in file


# -- one run


def run(operation: Callable[[Stage], None], engine: str, handler: str, places: Places, folder: str) -> bool:
    """Run an operation with one signal; return False when no place is left."""
    stage = Stage(engine, folder)
    if operation not in _WITHOUT_GROUP:
        stage.group = stage.spawn(stage.runtime)
    handled: list[bool] = []

    arrived = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        arrived.set()
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        HANDLERS[handler](stage)
        handled.append(True)

    signal.signal(signal.SIGUSR1, handle)
    places.fired = ""
    raised: BaseException | None = None
    sys.settrace(places)
    try:
        try:
            operation(stage)
        finally:
            sys.settrace(None)
            arrived.wait(PUT_OFF_S if places.fired else 0.0)
    except BaseException as error:
        raised = error
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if not places.fired:
        if raised is not None:
            raise raised
        close_all()
        return False
    expected = _RAISES.get(handler)
    if expected is not None:
        assert isinstance(raised, expected), f"the interruption became {raised!r}"
    else:
        if not handled and raised is not None:
            raise raised
        assert handled, "the handler wasn't run to its end"
        if handler != "close" and raised is not None:
            raise raised
        assert raised is None or isinstance(raised, colocate.ColocateError), repr(raised)
    del raised
    if handler != "close":
        assert view(stage.bystander).add(2, 3) == 5
        if stage.group is not None and stage.group.alive and operation is not close:
            assert view(stage.group).add(2, 3) == 5
            assert not list(stage.group._node.residents.scopes), "a scope is open for good"
        assert not stage.runtime.audit(), stage.runtime.audit()
    close_all()
    return True


def close_all() -> None:
    """Close every runtime, whatever its state, and check that each close ends in time."""
    for connection in list(live_connections.values()):
        began = time.monotonic()
        Runtime._wrap(connection).close(grace=1, force=True)
        took = time.monotonic() - began
        assert took < CLOSES_WITHIN_S, f"the close took {took:.1f} s"
        assert connection.state == "closed", connection.state


def what_is_there() -> dict[str, list[str]]:
    """Return the threads, child processes and descriptors of this process."""
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            descriptors.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
    return {
        "threads": sorted(t.name for t in threading.enumerate() if not t.name.startswith(COURIER)),
        "processes": sorted(str(child.pid) for child in psutil.Process().children(recursive=True)),
        "descriptors": sorted(descriptors),
    }


def nothing_more_than(before: dict[str, list[str]]) -> None:
    """Check that new threads, processes and descriptors are gone within seconds."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while is_more(now := what_is_there(), before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not is_more(now, before), f"left behind: {now}\nbefore: {before}"


def is_more(now: dict[str, list[str]], before: dict[str, list[str]]) -> bool:
    """Return whether something was added or removed; a thread of `before` may have ended."""
    if Counter(now["threads"]) - Counter(before["threads"]):
        return True
    return {**now, "threads": []} != {**before, "threads": []}


def run_all(operation: Callable[[Stage], None], engine: str, handler: str, places: Places, folder: str) -> None:
    """Run an operation once for each place, and check that nothing is left."""
    none = Places(0, 1 << 60)
    for _ in range(2):  # objects that are made once stay
        run(operation, engine, handler, none, folder)
    before = what_is_there()
    more = True
    while more:
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        try:
            more = run(operation, engine, handler, places, folder)
            nothing_more_than(before)
        except BaseException as error:
            error.add_note(f"{operation.__name__} with a signal at {places.fired}")
            raise
    faulthandler.cancel_dump_traceback_later()
    assert places.count, f"there was no place in {operation.__name__}"


def main() -> None:
    """Run the operations on the command line; print the number of places of each."""
    operations, engine, handler, share, of = sys.argv[1:]
    faulthandler.enable()
    for operation in operations.split(","):
        places = Places(int(share), int(of))
        with tempfile.TemporaryDirectory(prefix="colocate-signals-") as folder:
            run_all(OPERATIONS[operation], engine, handler, places, folder)
        print(places.count)


if __name__ == "__main__":
    main()
