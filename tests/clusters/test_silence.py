"""A call survives its machine's silence for less than `cut_s`, and fails after more; other slots stay available."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.clusters.engines import OnMachines

SOON_S = 3.0
"""A bound in seconds; five times an undisturbed reservation (a tenth of a second) is added for a busy machine."""

DRIVER = """
import json, sys, threading, time
import colocate
from colocate import Role, method
from tests.clusters.machines import ask

class Waits(Role):
    @method
    def wait(self, seconds):
        time.sleep(seconds)
        return self.ctx.rank
    @method
    def sum(self):
        import torch
        found = torch.ones(1)
        torch.distributed.all_reduce(found, group=self.ctx.process_group())
        return found.item()

engine, address, cut_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
runtime = colocate.connect(engine, address=address, cut_s=cut_s)

def reserve(slots):
    return runtime.reserve(slots=slots, strategy="spread", cpus=1)

def timed(what, function):
    began = time.monotonic()
    try:
        answer = function()
        said = answer if isinstance(answer, bool | int | float | str | list) else None
    except Exception as error:
        answer, said = error, f"{type(error).__name__}: {error}"
    print(json.dumps([what, round(time.monotonic() - began, 2), said]), flush=True)
    return answer

reserve(2).close()
timed("usual", lambda: reserve(2).close())

def ends():
    timed("close", pool.close)
    timed("audit", lambda: str(runtime.audit()))
    timed("others", lambda: reserve(len(OTHERS)).close())
    timed("runtime", runtime.close)
    print(json.dumps(["over", 0, None]), flush=True)
"""
UNUSED = """
reserve(3).close()
ask("cut", "n4")
timed("others", lambda: reserve(3).close())
timed("others", lambda: reserve(3).close())
timed("all", lambda: runtime.reserve(slots=4, strategy="strict_spread", timeout=0).close())
timed("runtime", runtime.close)
print(json.dumps(["over", 0, None]), flush=True)
"""
USED = """
OTHERS = ["n1"]
pool = reserve(2)
waits = pool.spawn({"waits": colocate.role(Waits)}).role("waits", Waits)
waits.sum()
call = waits.wait.submit(HEALS_S + 4 if HEALS_S else 600)
ask("VERB", "n2")
if HEALS_S:
    threading.Timer(HEALS_S, ask, ("heal", "n2")).start()
timed("call", lambda: call.result(120))
if HEALS_S:
    timed("sum", waits.sum)
ends()
"""
BOOTED = """
OTHERS = ["n1"]
pool = reserve(2)
call = pool.spawn({"waits": colocate.role(Waits)}).role("waits", Waits).wait.submit(600)
ask("cut", "n2")
ask("kill", "n2")
ask("boot", "n2")
timed("call", lambda: call.result(120))
ends()
"""
BOOKS = """
OTHERS = ["n1"]
pool = reserve(2)
waits = pool.spawn({"waits": colocate.role(Waits)}).role("waits", Waits)
ask("VERB", "n0")
time.sleep(1)
timed("call", lambda: waits.wait(0))
timed("others", lambda: reserve(1).close())
ends()
"""


class Driver:
    """A driver program, which reports the duration and result of each step."""

    def __init__(self, cluster: OnMachines, text: str, cut_s: float, on: int = 0) -> None:
        script = cluster.machines.shared / "driver.py"
        script.write_text(DRIVER + text)
        self.process = cluster.driver(script, str(cut_s), on=on)
        self.soon_s = SOON_S + 5 * self.says("usual")[0]

    def says(self, what: str) -> tuple[float, Any]:
        """Return the seconds and the result of the next step, which has to be `what`."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        said, seconds, result = json.loads(line)
        print(said, seconds, result)
        assert said == what
        return seconds, result

    def ends(self) -> None:
        """Check that closes succeed soon, that the audit is clean, and that other slots can be reserved."""
        for what, wanted in {"close": None, "audit": "clean", "others": None, "runtime": None}.items():
            seconds, result = self.says(what)
            assert result == wanted or (wanted and result.startswith(wanted)), result
            assert seconds < self.soon_s
        self.says("over")
        assert self.process.wait() == 0


def test_unused_silent_machine_is_avoided(cluster: Callable[..., OnMachines]) -> None:
    """Beside an unused silent machine other slots are reserved at once, and a reservation of all machines times out."""
    driver = Driver(cluster(4), UNUSED, 15)
    for _ in range(2):
        seconds, result = driver.says("others")
        assert (result, seconds < driver.soon_s) == (None, True)
    _, result = driver.says("all")
    assert result.startswith("PlacementTimeout")
    assert "answer" in result
    driver.says("runtime")
    driver.says("over")


def test_a_short_cut(cluster: Callable[..., OnMachines]) -> None:
    """A call and its process group survive a cut of ten seconds, when `cut_s` is 15."""
    driver = Driver(cluster(2), USED.replace("HEALS_S", "10").replace("VERB", "cut"), 15)
    _, result = driver.says("call")
    assert result == [0, 1]
    _, result = driver.says("sum")
    assert result == [2.0, 2.0]
    driver.ends()


@pytest.mark.parametrize(("verb", "cut_s"), [("cut", 3), ("cut", 15), ("kill", 3)])
def test_a_cut_for_good(cluster: Callable[..., OnMachines], verb: str, cut_s: float) -> None:
    """A call on a machine that is cut for good, or killed, raises WorkerDied after about `cut_s`."""
    driver = Driver(cluster(2), USED.replace("HEALS_S", "0").replace("VERB", verb), cut_s)
    seconds, result = driver.says("call")
    assert result.startswith("WorkerDied: worker 1")
    assert cut_s - 1.5 < seconds < cut_s + driver.soon_s
    driver.ends()


def test_a_machine_that_boots_anew(cluster: Callable[..., OnMachines]) -> None:
    """A call on a machine that has rebooted raises WorkerDied soon, long before `cut_s`."""
    driver = Driver(cluster(2), BOOTED, 60)
    seconds, result = driver.says("call")
    assert result.startswith("WorkerDied: worker 1")
    assert seconds < driver.soon_s
    driver.ends()


@pytest.mark.parametrize("verb", ["kill", "cut"])
def test_calls_and_closes_survive_lost_scheduler(cluster: Callable[..., OnMachines], verb: str) -> None:
    """Without the scheduler or head calls and closes succeed, and an audit raises ClusterError."""
    driver = Driver(cluster(2), BOOKS.replace("VERB", verb), 15, on=1)
    _, result = driver.says("call")
    assert result == [0, 1]
    for what in ("others", "close", "audit", "others", "runtime"):
        seconds, result = driver.says(what)
        assert result is None or (what in ("audit", "others") and result.startswith("ClusterError: "))
        assert seconds < driver.soon_s
    driver.says("over")
    assert driver.process.wait() == 0
