"""How code gets to the workers: peers, restarts, late imports, and what can't travel, which is told in words."""

from __future__ import annotations

from pathlib import Path

from tests.identity.conftest import Program

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
