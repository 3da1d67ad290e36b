"""How code gets to the workers: peers, restarts, late imports, and what can't travel, which is told in words."""

from __future__ import annotations

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


def test_class_made_in_a_worker_reaches_another(program: Program, executor: str) -> None:
    """A resident whose class was made in its worker is of one class in another, which asks the driver for it."""
    program(
        MAKER
        + """
with CONNECT as runtime, runtime.reserve(2, timeout=120) as pool:
    first, second = (part.spawn({"actor": colocate.role(Actor)})["actor"] for part in (pool[:1], pool[1:]))
    kept = first.make.keep()
    ((fives, things),) = second.took(kept.ref)
    assert fives == [5]
    assert type(kept.fetch()[0]) is type(things[0])
    assert second.took([things[0], things[0]])[0][0] == [5, 5]
""",
        executor,
    )


def test_restart(program: Program) -> None:
    """The workers of the next generation are sent everything anew."""
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
    """Workers go on with what the driver has, after a restart and in a further group, until the driver reloads it."""
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
    """What role code imports later is found beside the driver's script, in packages too."""
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
    """A module that a worker has imported already, with other content than the driver's, keeps the group from starting;
    the error names both files."""
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
    """The driver sets a name of a module that its roles use: that is told when the group is spawned."""
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


TELLERS = """
class Base:
    known = []
    def __init_subclass__(cls, *, tag="none", **options):
        super().__init_subclass__(**options)
        Base.known.append(cls.__name__)
        cls.tag = tag
        assert cls.five(cls) == 5  # it is whole

class Wants:
    known = []
    def __init_subclass__(cls, *, tag):
        Wants.known.append(cls.__name__)

class Meta(type):
    known = []
    def __init__(cls, name, bases, names):
        super().__init__(name, bases, names)
        Meta.known.append(name)
"""


def test_bases_that_hear_of_subclasses(program: Program, executor: str) -> None:
    """A base or metaclass of a module is told in the workers, too, of what the script derives from it, once."""
    program(
        """
from tellers import Base, Meta

class Item(Base):
    def five(self):
        return 5

class Further(Item):
    pass

class Thing(metaclass=Meta):
    pass

Item.tag = "changed"

class Actor(Role):
    @method
    def known(self, *used):
        return Base.known, Meta.known, Item.tag

with CONNECT as runtime, runtime.reserve(1, timeout=120) as pool:
    actor = pool.spawn({"actor": colocate.role(Actor)})["actor"]
    for _ in range(2):
        ((bases, metas, tag),) = actor.known(Item(), Further(), Thing())
        assert sorted(bases) == ["Further", "Item"] and metas == ["Thing"], (bases, metas)
        assert tag == "changed"
""",
        executor,
        tellers=TELLERS,
    )


@pytest.mark.parametrize("statement", ['Item(Base, tag="a")', 'Item(Wants, tag="a")'])
def test_options_of_a_subclass(program: Program, statement: str) -> None:
    """Those that a class statement gives a base of a module don't travel, which the driver warns of with the line."""
    told = program(
        f"""
import warnings
from tellers import Base, Wants

warnings.simplefilter("error", RuntimeWarning)  # which refuses it

class Fine(Base):
    def five(self):
        return 5

class {statement}:
    def five(self):
        return 5

class Actor(Role):
    @method
    def look(self, thing):
        return thing.five()

with CONNECT as runtime, runtime.reserve(1) as pool:
    actor = pool.spawn({{"actor": colocate.role(Actor)}})["actor"]
    assert actor.look(Fine()) == [5]
    try:
        actor.look(Item())
    except RuntimeWarning as warning:
        print(warning)
    warnings.simplefilter("ignore", RuntimeWarning)
    assert actor.look(Item()) == [5]
""",
        tellers=TELLERS,
    )
    assert "Item was defined with options for its base tellers." in told
    assert "Define it in a module beside the script" in told


def test_compiled_module(program: Program, tmp_path: Path) -> None:
    """A compiled extension of the driver's that isn't there is told as that."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "quick.so").write_bytes(b"")
    told = program(
        """
import pathlib, sys

class Actor(Role):
    @method
    def use(self):
        sys.path[:] = [entry for entry in sys.path if not entry.endswith("project")]  # as on another machine
        import quick

with CONNECT as runtime, runtime.reserve(1) as pool:
    pool.spawn({"actor": colocate.role(Actor)})["actor"].use()
""",
        code=1,
    )
    assert "module 'quick' can't be had in this worker" in told
    assert "quick.so, which isn't Python source, and only source travels to the workers" in told


@pytest.mark.parametrize(
    "processes", ["processes", *(pytest.param(each, marks=pytest.mark.long) for each in ("ray", "dask"))]
)
def test_module_that_is_imported_anew(program: Program, processes: str) -> None:
    """A module that the driver reloads after an edit is told with the next call, once; a reload alone isn't."""
    program(
        """
import beside, importlib, warnings
from pathlib import Path

warnings.simplefilter("error", RuntimeWarning)

class Actor(Role):
    @method
    def x(self, value):
        return beside.X

def told(actor):
    try:
        return actor.x(beside.Value())
    except RuntimeWarning as warning:
        return str(warning)

with CONNECT as runtime, runtime.reserve(2, timeout=60) as pool:
    first = pool[:1].spawn({"actor": colocate.role(Actor)}, "first")["actor"]
    assert told(first) == [1]
    importlib.reload(beside)
    assert told(first) == [1]
    file = Path(beside.__file__)
    file.write_text(file.read_text() + "X = 20\\n")
    assert told(first) == [1]
    importlib.reload(beside)
    assert told(first) == (
        f"the driver has imported module 'beside' anew ({file}), with other content than the workers of group 'first' "
        "have of it. They keep theirs: spawn the group anew"
    )
    assert told(first) == [1]
    second = pool[1:].spawn({"actor": colocate.role(Actor)}, "second")["actor"]
    assert told(second) == [20]
    assert told(first) == [1]
""",
        processes,
        beside="X = 1\nclass Value: pass\n",
    )


def test_module_whose_file_is_gone(program: Program) -> None:
    """A module whose file was deleted since the driver imported it is told as that, with the file."""
    told = program(
        """
import beside, os

os.remove(beside.__file__)

class Actor(Role):
    @method
    def use(self):
        return beside.X

with CONNECT as runtime, runtime.reserve(1) as pool:
    pool.spawn({"actor": colocate.role(Actor)})["actor"].use()
""",
        code=1,
        beside="X = 1\n",
    )
    assert "module 'beside' can't be had in this worker: the driver has imported it from " in told
    assert "project/beside.py, which can't be read any more: put the file back" in told


def test_name_of_a_module_that_only_the_role_imports(program: Program) -> None:
    """So is one of a module inside a package, and of one that a method imports."""
    told = program(
        """
import package.settings, warnings

warnings.simplefilter("error", RuntimeWarning)

class Actor(Role):
    @method
    def lr(self):
        import late
        return package.settings.LR, late.SEED

def main():
    import late
    late.SEED = 7
    package.settings.LR = 0.5
    with CONNECT as runtime, runtime.reserve(1) as pool:
        pool.spawn({"actor": colocate.role(Actor)})

main()
""",
        code=1,
        package__in____init__="",
        package__in__settings="LR = 0.1\n",
        late="SEED = 0\n",
    )
    assert "package.settings.LR is 0.5 now, and 0.1 where the module is imported" in told
    assert "late.SEED is 7 now, and 0 where the module is imported" in told


def test_module_in_the_place_of_the_standard_librarys(program: Program, executor: str) -> None:
    """A module beside the script that is named as one of Python's is the workers', too."""
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
        profile="class Batch: pass\n",
        cmd="WHO = 'mine'\n",
    )
    assert told == "True mine True\n"


def test_module_of_pythons_that_is_there_already(program: Program) -> None:
    """One that the worker has imported from Python itself keeps the group from starting; the error names both files."""
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
        calendar="WHO = 'mine'\n",
        there__in__sitecustomize="import sys; sys.path.append(sys.path.pop(0)); import calendar\n",
    )
    assert "RoleStartError" in told
    assert "module 'calendar' of the driver" in told
    assert "project/calendar.py" in told


def test_module_that_connects_when_it_is_imported(program: Program) -> None:
    """A worker that imports it begins no workers of its own, which would import it in turn; the error says where."""
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
    """What was to be made is told, at a start and at a call; not as if the constructor or the method had raised it."""
    program(
        """
class Part:
    def __getstate__(self):
        return {"x": 1}
    def __setstate__(self, state):
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
print("told")
""",
        processes,
    )


def test_what_could_not_be_rebuilt_once(program: Program) -> None:
    """It is told as what it belongs to, with what its code used by then, and is sent again with what needs it: it comes
    when the reason is gone."""
    program(
        """
import os

class Wrong(Exception):
    pass

class Config:
    def __init__(self):
        self.number = 1
    def __setstate__(self, state):
        if os.path.exists("flag"):
            raise Wrong(EARLY)
        self.__dict__.update(state)

EARLY, CONFIG = 7, Config()

class Uses:
    def number(self):
        return CONFIG.number

class Plain:
    pass

class Actor(Role):
    @method
    def echo(self, value):
        return value
    @method
    def number(self, uses):
        return uses.number()

with CONNECT as runtime, runtime.reserve(1) as pool:
    actor = pool.spawn({"actor": colocate.role(Actor)})["actor"]
    open("flag", "w").close()
    for _ in range(2):
        try:
            actor.echo((Uses(), Plain()))
        except colocate.RoleError as error:
            told = "the global 'CONFIG' of __main__, which Uses.number names, can't be rebuilt there: __main__.Wrong: 7"
            assert told in str(error), error
        else:
            raise AssertionError
        assert type(actor.echo(Plain())[0]) is Plain
    os.unlink("flag")
    assert actor.number(Uses()) == [1]
"""
    )


def test_globals_that_are_bound_anew(program: Program) -> None:
    """Code that was sent goes on with what they were, which is told once; new code has what they are."""
    told = program(
        """
import warnings

LR, SAME, SEED = 1, 0.5, 3

class Actor(Role):
    @method
    def lr(self):
        return LR, SAME, SEED

def told(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return function(), [str(each.message) for each in found]

with CONNECT as runtime, runtime.reserve(2) as pool:
    group = pool.spawn({"actor": colocate.role(Actor)})
    actor = group["actor"]
    assert actor.lr() == [(1, 0.5, 3)] * 2
    LR, SAME = 2, float("0.5")
    found, (text,) = told(actor.lr)
    assert found == [(1, 0.5, 3)] * 2
    print(text)
    for LR in range(3, 6):
        assert told(actor.lr) == ([(1, 0.5, 3)] * 2, [])
    SEED = 4
    assert told(lambda: group.run(lambda ctx: (LR, SEED)))[0] == [(5, 4)] * 2
    assert told(actor.lr) == ([(5, 0.5, 4)] * 2, [])
"""
    )
    assert "the script has bound LR anew since the workers of group 'group-1' were sent code that names it." in told


def test_lines_of_the_script_in_a_workers_traceback(program: Program) -> None:
    """A method of the script tells its file and its line, as do functions in it, whatever release cloudpickle is."""
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


def test_what_is_told_of_a_global_that_cannot_travel(program: Program) -> None:
    """Its name; and nothing of the workers, which had nothing to run."""
    told = program(
        """
import threading, traceback

LOCK = threading.Lock()

class Locks(Role):
    @method
    def go(self):
        with LOCK: ...

with CONNECT as runtime, runtime.reserve(2, timeout=120) as pool:
    for name in "abcdef":
        try:
            pool.spawn({"locks": colocate.role(Locks)}, name=name)
        except colocate.SerializationError:
            traceback.print_exc(file=__import__("sys").stdout)
"""
    )
    assert told.count("the global 'LOCK' of __main__") == 6
    assert "and then, closing" not in told
