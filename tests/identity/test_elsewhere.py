"""Workers without the project's files, as on another machine: the source that the driver sends, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.identity.conftest import Program

# A process that starts with this imports nothing from the project's folder.
BLIND = """
import sys

class Nothing:
    def find_spec(self, name, target=None):
        return None

def hook(path):
    if path.startswith({project!r}):
        return Nothing()
    raise ImportError

sys.path_hooks.insert(0, hook)
"""

PROCESSES = ["processes", *(pytest.param(each, marks=pytest.mark.long) for each in ("ray", "dask"))]


@pytest.fixture
def blind(tmp_path: Path) -> str:
    """Return a folder that, in PYTHONPATH, hides the project's files from a process."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "sitecustomize.py").write_text(BLIND.format(project=str(tmp_path / "project")))
    return str(there)


@pytest.mark.parametrize("executor", PROCESSES)
def test_modules_come_from_the_driver(program: Program, blind: str, executor: str) -> None:
    """Workers import modules of the driver: beside the script, in packages, late, and from folders added later."""
    program(
        f"""
import os, pathlib, sys
import rules
from package.inner import Item

class Actor(Role):
    @method
    def look(self, item):
        import late
        return type(item) is Item, rules.limit(item), late.VALUE, rules.__name__

    @method
    def imported(self, name):
        return __import__(name).VALUE

with CONNECT as runtime, runtime.reserve(1, timeout=120, env={{"PYTHONPATH": {blind!r}}}) as pool:
    actor = pool.spawn({{"actor": colocate.role(Actor)}})["actor"]
    assert actor.look(Item(3)) == [(True, 4, 7, "rules")]
    folder = pathlib.Path(__file__).parent / "more"
    folder.mkdir()
    (folder / "added.py").write_text("VALUE = 8\\n")
    sys.path.append(str(folder))
    assert actor.imported("added") == [8]
""",
        executor,
        rules="from package import one\ndef limit(item):\n    return item.value + one.ONE\n",
        late="VALUE = 7\n",
        package__in____init__="",
        package__in__inner="class Item:\n    def __init__(self, value):\n        self.value = value\n",
        package__in__one="ONE = 1\n",
    )


def test_bound_of_the_source(program: Program, blind: str) -> None:
    """Source above the limit isn't sent, and the error says so."""
    program(
        f"""
from colocate._definitions import sources

sources.LIMIT_BYTES = 1 << 20

class Actor(Role):
    @method
    def use(self):
        import large

with CONNECT as runtime, runtime.reserve(1, env={{"PYTHONPATH": {blind!r}}}) as pool:
    try:
        pool.spawn({{"actor": colocate.role(Actor)}})["actor"].use()
    except colocate.RoleError as error:
        assert "module 'large' can't be had in this worker" in str(error), error
        assert "more than 1 MiB of source" in str(error), error
    else:
        assert False
""",
        large="# " + "x" * (1 << 20) + "\n",
    )


def test_source_travels_once(program: Program, blind: str) -> None:
    """A module comes with all its imports: a worker asks once, however many messages name the module."""
    program(
        f"""
from colocate._definitions import sources
import one

asked, answer = [], sources.collect_sources
sources.collect_sources = lambda name: asked.append(name) or answer(name)

class Actor(Role):
    @method
    def use(self, thing):
        import one, two, three
        return type(thing) is one.Thing

with CONNECT as runtime, runtime.reserve(1, env={{"PYTHONPATH": {blind!r}}}) as pool:
    actor = pool.spawn({{"actor": colocate.role(Actor)}})["actor"]
    del asked[:]
    for _ in range(3):
        assert actor.use(one.Thing()) == [True]
    assert asked in ([], ["one"]), asked
""",
        one="import two\nclass Thing:\n    pass\n",
        two="import three\n",
        three="",
    )


@pytest.mark.parametrize("executor", PROCESSES)
def test_class_that_only_another_worker_knows(program: Program, executor: str) -> None:
    """A resident brings a class of the script to a worker that was never sent the class."""
    program(
        """
class Batch:
    def five(self):
        return 5

class Holder(Role):
    @method
    def hold(self, batch):
        return batch

class Stranger(Role):
    @method
    def use(self, batches):
        return [(batch.five(), type(batch).__qualname__) for batch in batches], batches[0]

with CONNECT as runtime, runtime.reserve(2, timeout=120) as pool:
    holder = pool[:1].spawn({"holder": colocate.role(Holder)})["holder"]
    stranger = pool[1:].spawn({"stranger": colocate.role(Stranger)})["stranger"]
    kept = holder.hold.keep(Batch())
    ((told, batch),) = stranger.use(kept.ref)
    assert told == [(5, "Batch")] and type(batch) is Batch
""",
        executor,
    )
