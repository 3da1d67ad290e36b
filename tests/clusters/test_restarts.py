"""After a machine's end, a group restarts on a machine that joins, at once on a spare, or with fewer slots."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.clusters.engines import OnMachines

DRIVER = """
import json, logging, os, sys, time
from pathlib import Path
import colocate
from colocate import Role, method
from tests.clusters.machines import ask

class Counts(Role):
    def __init__(self):
        self.count = 0
    @method
    def add(self):
        self.count += 1
        return self.count
    @method
    def where(self):
        return os.uname().nodename
    @method
    def sleep(self):
        time.sleep(600)
    def save(self, directory):
        Path(directory, str(self.ctx.rank)).write_text(str(self.count))
    def restore(self, directory, ranks):
        self.count = max(int(Path(directory, str(rank)).read_text()) for rank in range(ranks))

def say(word, **more):
    print(json.dumps([word, more]), flush=True)

def until(condition):
    while not condition():
        time.sleep(0.1)

engine, address, told = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with colocate.connect(engine, address=address) as runtime:
    pool = runtime.reserve(strategy="spread", **told)
    group = pool.spawn({"counts": colocate.role(Counts)}, on_failure="restart")
    counts = group.role("counts", Counts)
    counts.add()
    group.checkpoint("here")
    call = counts.sleep.submit()
    began = ask("kill", "n2")
    error = call.exception(60)
    seen = time.time()
    assert isinstance(error, colocate.GroupRestarted), error
    def is_missing():
        try:
            group.wait_ready(0.1)
        except TimeoutError as error:
            return "waits for slots" in str(error)
        return True
    until(is_missing)
    say("restarts")
    group.wait_ready(150)
    say("back", seen=seen - began, took=time.time() - seen, where=counts.where(), counts=counts.add())
    if told["spares"] or told["slots"] != 2:
        group.checkpoint("there")
        def is_whole():
            return group.resize() == 2 and all(spare.state == "spare" for spare in pool.spares)
        until(is_whole)
        say("whole", where=counts.where(), counts=counts.add(), audit=str(runtime.audit()))
"""


class Driver:
    """A driver with a group of two slots, one of these on n2; each machine has room for one slot."""

    def __init__(self, cluster: OnMachines, slots: int | tuple[int, int] = 2, spares: int = 0, **more: Any) -> None:
        script = cluster.machines.shared / "driver.py"
        script.write_text(DRIVER)
        cpus = 3 if cluster.engine == "ray" else 1
        self.process = cluster.driver(script, json.dumps({"slots": slots, "spares": spares, "cpus": cpus, **more}))

    def says(self, word: str) -> dict[str, Any]:
        """Return the data of the driver's next message, which has to be `word`."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        said, more = json.loads(line)
        assert said == word, more
        found: dict[str, Any] = more
        return found


def another(cluster: OnMachines) -> None:
    """Boot a new machine in the place of n2, and join the cluster."""
    cluster.machines[2].boot()
    cluster.join(cluster.machines[2])


def test_another_machine_comes(cluster: Callable[..., OnMachines]) -> None:
    """A group without a spare waits for a machine, and restarts from the checkpoint when one has joined."""
    found = cluster(2)
    driver = Driver(found)
    driver.says("restarts")
    another(found)
    back = driver.says("back")
    assert (back["where"], back["counts"]) == (["n1", "n2"], [2, 2])
    assert driver.process.wait() == 0


def test_a_spare(cluster: Callable[..., OnMachines]) -> None:
    """A spare takes the place of a lost slot, and a machine that joins becomes a spare."""
    found = cluster(3)
    driver = Driver(found, spares=1)
    driver.says("restarts")
    back = driver.says("back")
    assert (back["where"], back["counts"]) == (["n1", "n3"], [2, 2])
    another(found)
    whole = driver.says("whole")
    assert (whole["where"], whole["counts"]) == (["n1", "n3"], [3, 3])
    assert whole["audit"].startswith("clean")
    assert driver.process.wait() == 0


def test_fewer(cluster: Callable[..., OnMachines]) -> None:
    """A group with at least one slot restarts with one, and has both after a machine has joined and a resize."""
    found = cluster(2)
    driver = Driver(found, slots=(1, 2), regrow_timeout=1)
    driver.says("restarts")
    back = driver.says("back")
    assert (back["where"], back["counts"]) == (["n1"], [2])
    another(found)
    whole = driver.says("whole")
    assert (whole["where"], whole["counts"]) == (["n1", "n2"], [3, 3])
    assert whole["audit"].startswith("clean")
    assert driver.process.wait() == 0
