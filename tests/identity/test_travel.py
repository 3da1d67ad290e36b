"""Code on its way to the workers: restarts, edits, late imports, and the errors of code that can't travel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.identity.conftest import EXECUTORS, HEAD, Program

MAKER = """
import os, time

class Actor(Role):
    @method
    def make(self):
        class Made:
            def five(self):
                return 5
        self.made = Made
        return Made()

    @method
    def took(self, things):
        return [thing.five() for thing in things], things

    @method
    def die(self):
        os._exit(3)

class Batch:
    pass

class Other(Role):
    @method
    def look(self, batch):
        return type(batch) is Batch

    @method
    def die(self):
        os._exit(3)
"""


def test_restart(program: Program) -> None:
    """The workers of the next generation get the script's classes again."""
    program(
        MAKER
        + """
with CONNECT as runtime, runtime.reserve(1) as pool:
    group = pool.spawn({"other": colocate.role(Other)}, on_failure="restart")
    assert group["other"].look(Batch()) == [True]
    try:
        group["other"].die()
    except colocate.WorkerDied:
        pass
    group.wait_ready(60)
    assert group["other"].look(Batch()) == [True]
"""
    )


def test_a_module_that_is_edited(program: Program) -> None:
    """Workers keep the driver's version of an edited module, also after restarts, until the driver reloads it."""
    program(
        """
import importlib, os, pathlib, rules, sys

sys.dont_write_bytecode = True

class Actor(Role):
    @method
    def limit(self):
        return rules.limit()

    @method
    def die(self):
        os._exit(3)

def restarted(group):
    try:
        group["actor"].die()
    except colocate.WorkerDied:
        pass
    group.wait_ready(60)
    return group["actor"].limit()

with CONNECT as runtime, runtime.reserve(2) as pool:
    group = pool[:1].spawn({"actor": colocate.role(Actor)}, on_failure="restart")
    assert group["actor"].limit() == [1]
    pathlib.Path(rules.__file__).write_text("def limit():\\n    return 2 + 0\\n")
    assert restarted(group) == [rules.limit()] == [1]
    assert pool[1:].spawn({"actor": colocate.role(Actor)})["actor"].limit() == [1]
    importlib.reload(rules)
    assert restarted(group) == [rules.limit()] == [2]
""",
        rules="def limit():\n    return 1\n",
    )


def test_late_import(program: Program, executor: str) -> None:
    """A late import of role code finds modules beside the driver's script, also in packages."""
    program(
        """
import package

class Actor(Role):
    @method
    def late(self):
        from package.inner import VALUE
        import traceback, inspect
        return VALUE, package.__name__, "VALUE" in inspect.getsource(__import__("package.inner").inner)

with CONNECT as runtime, runtime.reserve(1, timeout=120) as pool:
    assert pool.spawn({"actor": colocate.role(Actor)})["actor"].late() == [(7, "package", True)]
""",
        executor,
        package__in____init__="",
        package__in__inner="from .deeper import VALUE\n",
        package__in__deeper="VALUE = 7\n",
    )


def test_other_content_under_one_name(program: Program, tmp_path: Path) -> None:
    """A group doesn't start if a worker has imported a module with other content; the error names both files."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "sneaky.py").write_text("X = 2\n")
    (there / "sitecustomize.py").write_text("import sneaky\n")
    told = program(
        f"""
import sneaky

class Actor(Role):
    @method
    def x(self):
        return sneaky.X

with CONNECT as runtime, runtime.reserve(1, env={{"PYTHONPATH": {str(there)!r}}}) as pool:
    pool.spawn({{"actor": colocate.role(Actor)}})
""",
        code=1,
        sneaky="X = 1\n",
    )
    assert "RoleStartError" in told
    assert str(tmp_path / "project" / "sneaky.py") in told
    assert str(there / "sneaky.py") in told


def test_name_that_was_set_after_the_import(program: Program) -> None:
    """A name that the driver has set in a module after the import is reported at a spawn, if roles use the name."""
    told = program(
        """
import settings, sys, warnings

warnings.simplefilter("error", RuntimeWarning)

class Actor(Role):
    @method
    def lr(self):
        return settings.LR

with CONNECT as runtime, runtime.reserve(1) as pool:
    pool.spawn({"actor": colocate.role(Actor)}).close()
    settings.UNUSED = 3
    settings.COUNT = 5  # the module's own code sets that
    pool.spawn({"actor": colocate.role(Actor)}).close()
    settings.LR = 0.5
    pool.spawn({"actor": colocate.role(Actor)})
""",
        code=1,
        settings="LR = 0.1\nUNUSED = 1\nCOUNT = 0\ndef count():\n    global COUNT\n    COUNT += 1\n",
    )
    assert "settings.LR is 0.5 now, and 0.1 where the module is imported" in told
    assert "UNUSED" not in told
    assert "COUNT" not in told.partition("RuntimeWarning")[2]


def test_option_classes_and_reimports_are_warned_of(program: Program) -> None:
    """A class with options for a module's base, and a module imported anew, are warned of, the latter once.

    The base is notified of the script's classes in the workers, too, but not of the options in their statements.
    """
    program(
        """
import beside, importlib, warnings
from pathlib import Path

class Fine(beside.Base):
    def five(self):
        return 5

class Item(beside.Base, tag="a"):
    def five(self):
        return 5

class Actor(Role):
    @method
    def known(self, thing):
        return beside.Base.known, thing.tag

def told(thing):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return actor.known(thing), [str(each.message) for each in found]

with CONNECT as runtime, runtime.reserve(1) as pool:
    actor = pool.spawn({"actor": colocate.role(Actor)}, "first")["actor"]
    Fine.tag = "changed"
    assert told(Fine()) == ([(["Fine"], "changed")], [])
    found, (text,) = told(Item())
    assert found == [(["Fine", "Item"], "a")]
    assert "Item was defined with options for its base beside.Base" in text, text
    fine, file = Fine(), Path(beside.__file__)
    file.write_text(file.read_text() + "X = 20\\n")
    importlib.reload(beside)
    assert told(fine)[1] == [
        f"the driver has imported module 'beside' again ({file}); its source has changed since the workers of "
        "group 'first' imported it. The workers keep the old version: spawn the group again"
    ]
    assert told(fine)[1] == []
""",
        beside="""
class Base:
    known = []
    def __init_subclass__(cls, *, tag="none"):
        Base.known.append(cls.__name__)
        cls.tag = tag
        assert cls.five(cls) == 5  # it is whole
""",
    )


def test_module_in_the_place_of_the_standard_librarys(program: Program, executor: str) -> None:
    """A module beside the script with the name of one of Python's is the workers' module, too."""
    told = program(
        """
import cmd, profile

class Actor(Role):
    @method
    def look(self, batch):
        return type(batch) is profile.Batch, cmd.WHO, profile.Batch()

with CONNECT as runtime, runtime.reserve(1, timeout=60) as pool:
    is_one, who, batch = pool.spawn({"actor": colocate.role(Actor)})["actor"].look(profile.Batch())[0]
    print(is_one, who, type(batch) is profile.Batch)
""",
        executor,
        python=sys.executable,  # a fork would have its parent's imports
        profile="class Batch: pass\n",
        cmd="WHO = 'mine'\n",
    )
    assert told == "True mine True\n"


def test_module_of_pythons_that_is_there_already(program: Program) -> None:
    """A group doesn't start if its worker has imported Python's module of that name; the error names the driver's."""
    told = program(
        """
import calendar

class Actor(Role):
    @method
    def who(self):
        return calendar.WHO

with CONNECT as runtime, runtime.reserve(1, env={"PYTHONPATH": HERE + "/there"}) as pool:
    pool.spawn({"actor": colocate.role(Actor)})
""".replace("HERE", "__file__.rpartition('/')[0]"),
        code=1,
        python=sys.executable,
        calendar="WHO = 'mine'\n",
        there__in__sitecustomize="import sys; sys.path.append(sys.path.pop(0)); import calendar\n",
    )
    assert "RoleStartError" in told
    assert "module 'calendar' of the driver" in told
    assert "project/calendar.py" in told


def test_connect_at_import_is_refused_in_worker(program: Program) -> None:
    """A worker that imports a module with a `connect` at the top starts no workers, and the error names the line."""
    told = program(
        "import train\n",
        code=1,
        train=HEAD
        + f"""
class Actor(Role):
    @method
    def one(self):
        return 1

with {EXECUTORS["processes"]} as runtime, runtime.reserve(1) as pool:
    pool.spawn({{"actor": colocate.role(Actor)}})
""",
    )
    assert "module 'train' calls connect('local') when it is imported" in told
    assert "project/train.py:9), and a worker imports it" in told
    assert 'Put the call into a function, or under `if __name__ == "__main__":`' in told


@pytest.mark.parametrize(
    "processes", ["processes", *(pytest.param(each, marks=pytest.mark.long) for each in ("ray", "dask"))]
)
def test_definition_that_cannot_be_made_there(program: Program, processes: str) -> None:
    """A definition that fails in a worker is named in the error, at a start and at a call, and is sent again later.

    The constructor or method isn't blamed.
    """
    program(
        """
import pathlib

READY = pathlib.Path(__file__).with_name("ready")

class Part:
    def __getstate__(self):
        return {"x": 1}
    def __setstate__(self, state):
        if not READY.exists():
            raise ValueError("no parts here")

class Whole:
    part = Part()

class Names(Role):
    @method
    def part(self):
        return Whole.part

class Takes(Role):
    @method
    def take(self, x):
        return x

with CONNECT as runtime, runtime.reserve(1, timeout=120) as pool:
    try:
        pool.spawn({"names": colocate.role(Names)})
    except colocate.RoleStartError as error:
        told = str(error)
        assert "the constructor of role 'names' could not begin on rank 0" in told, told
        assert "the class Whole of __main__ can't be rebuilt there: ValueError: no parts here" in told, told
        assert "in __setstate__" in told and "colocate/" not in told, told
    takes = pool.spawn({"takes": colocate.role(Takes)})["takes"]
    try:
        takes.take(Whole)
    except colocate.RoleError as error:
        told = str(error)
        assert "takes.take could not begin on rank 0" in told, told
        assert "the class Whole of __main__ can't be rebuilt there: ValueError: no parts here" in told, told
        assert isinstance(error.__cause__, ValueError)
    assert takes.take(1) == [1]
    READY.touch()
    assert takes.take(Whole) == [Whole]
print("told")
""",
        processes,
    )


def test_lines_of_the_script_in_a_workers_traceback(program: Program) -> None:
    """A worker's traceback has the script's file and line, for methods and for functions inside these."""
    told = program(
        """
class Faulty(Role):
    @method
    def fail(self):
        return (lambda: 1 / 0)()  # here

with CONNECT as runtime, runtime.reserve(1, timeout=120) as pool:
    faulty = pool.spawn({"faulty": colocate.role(Faulty)})["faulty"]
    try:
        faulty.fail()
    except colocate.RoleError as error:
        print(error)
"""
    )
    assert 'main.py", line 7, in fail' in told
    assert 'main.py", line 7, in <lambda>' in told
    assert "return (lambda: 1 / 0)()  # here" in told
