"""A class is one class everywhere: whatever it is, wherever it is defined, however its values travel."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.identity.conftest import BUILT_IN, EXECUTORS
from tests.identity.kinds import KINDS, code

PLACES = ("script", "beside", "package", "cell", "redefined cell", "installed")

SCRIPT = """
import colocate, queue, sys
from colocate import Role, method

NAMES = sys.modules["__main__"].__dict__
{definitions}

def plain(seen):
    return repr(seen).split(" at 0x")[0]  # instances show where they lie

class Wrong(Exception):
    def __init__(self, thing, cls):
        super().__init__("wrong")
        self.thing, self.cls = thing, cls

def same(thing, cls, found):
    # `found` is where the class is defined, as code that runs there sees it.
    assert type(thing) is cls is found, (type(thing), cls, found)
    assert isinstance(thing, found)
    return plain(thing.seen())

class Actor(Role):
    def __init__(self, *things):
        self.seen = [same(thing, cls, find()) for thing, cls, find in things]

    @method
    def constructed(self):
        return self.seen

    @method
    def take(self, thing, cls, find):
        return same(thing, cls, find())

    @method
    def give(self, thing, cls):
        return [thing, cls, cls.__qualname__]

    @method
    def took(self, given, find):
        ((thing, cls, _),) = given
        return same(thing, cls, find())

    @method
    def wrong(self, thing, cls):
        raise Wrong(thing, cls)

def check(thing, find):
    cls = find()
    seen = plain(thing.seen())
    for actor in (first, second):
        assert actor.take(thing, cls, find) == [seen]
        thing_back, cls_back, name = actor.give(thing, cls)[0]
        assert cls_back is cls and name == cls.__qualname__ and same(thing_back, cls, cls) == seen
        try:
            actor.wrong(thing, cls)
        except colocate.RoleError as error:
            assert type(error.__cause__) is Wrong
            assert error.__cause__.cls is cls and same(error.__cause__.thing, cls, cls) == seen
        heard = queue.SimpleQueue()
        for call in (actor.give.submit(thing, cls), actor.wrong.submit(thing, cls)):
            call.add_done_callback(heard.put)
            called = heard.get(timeout=60)
            thing_back, cls_back = called.result()[0][:2] if called.exception() is None else (
                called.exception().__cause__.thing, called.exception().__cause__.cls)
            assert cls_back is cls and same(thing_back, cls, cls) == seen
    kept = first.give.keep(thing, cls)
    fetched = kept.fetch()[0]
    assert fetched[1] is cls and same(fetched[0], cls, cls) == seen
    assert second.took(kept.ref, find) == [seen]

with {connect} as runtime, runtime.reserve(2, cpus=1, timeout=120) as pool:
    things = [{things}]
    roles = {{"actor": colocate.role(Actor, *[(thing, find(), find) for thing, find in things])}}
    first, second = (part.spawn(roles)["actor"] for part in (pool[:1], pool[1:]))
    expected = [plain(thing.seen()) for thing, find in things]
    assert first.constructed() == second.constructed() == [expected]
    for thing, find in things:
        check(thing, find)
{again}
print("agreed")
"""


def environment(folder: Path) -> None:
    """An environment with all that this one has, and room for more."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.startswith("/")))


def write(folder: Path, drawn: list[tuple[str, str]], executor: str) -> Path:
    """A script with classes of some kinds, each in its place."""
    definitions, things, again = [], [], []
    for number, (kind, place) in enumerate(drawn):
        name = f"Thing{number}"
        text, made = code(kind, name, number)
        if place in ("beside", "installed"):
            where = folder if place == "beside" else next(folder.glob("venv/lib/python*/site-packages"))
            (where / f"{place}{number}.py").write_text(text)
            definitions.append(f"import {place}{number}")
            things.append(f"(eval({made!r}, vars({place}{number})), lambda: {place}{number}.{name})")
            continue
        if place == "package":
            (folder / f"package{number}").mkdir()
            (folder / f"package{number}" / "__init__.py").write_text("")
            (folder / f"package{number}" / "inner.py").write_text(text)
            definitions.append(f"import package{number}.inner")
            things.append(f"(eval({made!r}, vars(package{number}.inner)), lambda: package{number}.inner.{name})")
            continue
        definitions.append(text if place == "script" else f"exec({text!r}, NAMES)")
        things.append(f"({made}, lambda: {name})")
        if place == "redefined cell":
            changed, _ = code(kind, name, number + 100)
            again.append(
                f"    old, kept = {made}, None\n    old_class = {name}\n    kept = first.give.keep(old, {name})\n"
                f"    exec({changed!r}, NAMES)\n    assert old_class is not {name}\n    check({made}, lambda: {name})\n"
                f"    assert first.give(old, old_class)[0][1] is old_class is type(kept.fetch()[0][0])"
            )
    main = folder / "main.py"
    main.write_text(
        SCRIPT.format(
            definitions="\n".join(definitions),
            things=", ".join(things),
            again="\n".join(again),
            connect=EXECUTORS[executor],
        )
    )
    return main


def agrees(drawn: list[tuple[str, str]], executor: str) -> None:
    """Whether the script says so."""
    with tempfile.TemporaryDirectory() as folder:
        python = sys.executable
        if any(place == "installed" for _, place in drawn):
            environment(Path(folder, "venv"))
            python = f"{folder}/venv/bin/python"
        main = write(Path(folder), drawn, executor)
        done = subprocess.run([python, str(main)], capture_output=True, text=True, timeout=240, check=False)
        assert done.stdout == "agreed\n", f"{drawn}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize("executor", BUILT_IN)
@hypothesis.settings(max_examples=4, deadline=None, database=None, derandomize=True)
@given(drawn=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(PLACES)), min_size=1, max_size=5))
def test_a_class_is_one_class(executor: str, drawn: list[tuple[str, str]]) -> None:
    """Drawn: kinds of classes and the places of their definitions; values of all of them go all ways."""
    agrees(drawn, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.long
def test_all_kinds(executor: str, place: str) -> None:
    """All kinds, in each of the places."""
    agrees([(kind, place) for kind in sorted(KINDS)], executor)
