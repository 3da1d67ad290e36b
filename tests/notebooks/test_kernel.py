"""Notebooks have an event loop in the main thread, classes in cells, and a button for Ctrl-C."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.notebooks.kernel import WITHIN_S, Kernel, html_of, kernel

CELL = """\
import asyncio, os, time
from pathlib import Path
import colocate
from colocate import Concat, Role, Scatter, method

class Writer(Role):
    @method(dispatch=Scatter("words"), collect=Concat())
    def write(self, words):
        return [word.upper() for word in words]

    @method
    def hold(self):
        Path("began").touch()
        while not Path("over").exists():
            time.sleep(0.01)

    @method
    def fail(self):
        raise ValueError("on purpose")

    @method
    def pid(self):
        return os.getpid()

runtime = colocate.connect("local", processes={processes}, replace=True)
pool = runtime.reserve(slots=2)
group = pool.spawn({{"writer": colocate.role(Writer)}}, name="demo")
writer = group.role("writer", Writer)
"""


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["threads", "processes"]
)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kernel, str]]:
    """Yield a kernel and its first cell; a kernel that stops without a close, as at "Restart", leaves no worker."""
    workers: list[psutil.Process] = []
    with kernel(tmp_path_factory.mktemp("notebook")) as running:
        cell = CELL.format(processes=request.param)
        yield running, cell
        if request.param:
            running.run(cell)
            workers += [psutil.Process(int(pid)) for pid in running.shows("print(*writer.pid())").split()]
            assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=WITHIN_S)
    assert not alive


@pytest.fixture
def started(session: tuple[Kernel, str]) -> Iterator[Kernel]:
    """Run the first cell, perhaps once more; yield the kernel, and close the runtime."""
    running, cell = session
    for name in ("began", "over"):
        (running.folder / name).unlink(missing_ok=True)
    assert running.shows(cell) == ""
    yield running
    assert running.shows("runtime.close()") == ""


def interrupt_when_it_has_begun(running: Kernel) -> threading.Thread:
    """Interrupt the kernel, from a thread, when a rank is in `hold`."""

    def press() -> None:
        deadline = time.monotonic() + WITHIN_S
        while not (running.folder / "began").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.interrupt()

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_calls_are_awaited_on_the_loop_that_runs(started: Kernel) -> None:
    assert started.shows("await writer.write.submit(['a', 'b', 'c'])") == "['A', 'B', 'C']"
    several = "await asyncio.gather(*(writer.write.submit([word, 'x']) for word in 'ab'))"
    assert started.shows(several) == "[['A', 'X'], ['B', 'X']]"
    meanwhile = (
        "call = writer.hold.submit()\n"
        "async def end():\n"
        "    Path('over').touch()\n"
        "    return 'ended by another task'\n"
        "task = asyncio.create_task(end())\n"
        "print(await call, await task)"
    )
    assert started.shows(meanwhile) == "[None, None] ended by another task\n"
    assert started.shows("writer.write(['a', 'b'])") == "['A', 'B']"  # a call without an await


def test_a_run_is_recorded(started: Kernel) -> None:
    """A recorded run adds no output to a cell, run and record have one-line reprs, and the tables are in log.txt."""
    cell = (
        "with colocate.record(runtime, 'runs/sums') as run:\n    writer.write(['a', 'b'])\n    run.log(0, loss=1.0)\n"
        "print(run.directory, run, sep='|')\nrun.record"
    )
    directory, shown = started.shows(cell).split("|")
    assert re.fullmatch(rf"<run 'sums' in {directory}>\n<record of run 'sums' in {directory}, [\d.]+ s>", shown)
    log = (Path(directory) / "log.txt").read_text()
    assert "time per role" in log
    assert "writer  write" in log


def test_a_class_that_is_changed_in_a_later_cell(started: Kernel) -> None:
    changed = (
        "class Writer(Role):\n    @method\n    def shout(self):\n        return 'new'\n"
        "group.close()\npool.spawn({'writer': colocate.role(Writer)}, name='demo')['writer'].shout()"
    )
    assert started.shows(changed) == "['new', 'new']"
    assert started.shows(CELL.format(processes=False) + "writer.write(['a', 'b'])") == "['A', 'B']"  # run again


def test_the_button_ends_a_wait(started: Kernel) -> None:
    """The interrupt button raises KeyboardInterrupt in a call, and the group works afterwards."""
    button = interrupt_when_it_has_begun(started)
    shown = started.shows("writer.hold()")
    button.join()
    assert "KeyboardInterrupt" in shown
    (started.folder / "over").touch()
    assert started.shows("writer.write(['a', 'b'])") == "['A', 'B']"


def test_the_button_ends_an_await(started: Kernel) -> None:
    button = interrupt_when_it_has_begun(started)
    # The kernel cancels the cell's task at the loop's next turn, and a second task keeps the loop turning.
    shown = started.shows("ticks = asyncio.create_task(asyncio.sleep(0))\n"
                          "async def tick():\n    while True: await asyncio.sleep(0.05)\n"
                          "ticks = asyncio.create_task(tick())\nawait writer.hold.submit()")  # fmt: skip
    button.join()
    assert "CancelledError" in shown
    (started.folder / "over").touch()
    assert started.shows("ticks.cancel()\nawait writer.write.submit(['a', 'b'])") == "['A', 'B']"


def test_cells_are_named_by_number(started: Kernel) -> None:
    """The graph, errors and tracebacks name a cell by number and line."""
    first = int(started.shows("len(In)")) - 2
    assert re.search(rf"group demo \(ready, \d+ s, Cell In\[{first}\]:27\)", started.shows("print(runtime.graph)"))
    shown = started.shows("writer.fail()")
    assert f"The call was made at Cell In[{first + 3}]:1\n" in shown
    assert f'  File "Cell In[{first}]", line 19, in fail\n    raise ValueError("on purpose")\n' in shown
    (failed,) = started.run("writer.fail()").outputs
    assert "    writer.fail()\n  ... 2 frames of colocate\ncolocate.errors.RoleError: " in "\n".join(failed.traceback)
    shown = started.shows("group.close(); writer.pid()")
    assert f"group 'demo' was closed by group.close() at Cell In[{first + 5}]:1" in shown


def test_values_are_shown_as_html(started: Kernel) -> None:
    for name in ("runtime", "runtime.graph", "pool", "group", "writer.write.keep(['a', 'b'])"):
        (output,) = started.run(name).outputs
        assert 'class="colocate"' in html_of(output)
        assert output.data["text/plain"]
