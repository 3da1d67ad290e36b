"""A class is one class everywhere, for all kinds of classes, places of definition, and ways of values."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import hypothesis
import pytest
from hypothesis import given, strategies as st
from tests.forked import Forks
from tests.identity.conftest import BUILT_IN, EXECUTORS
from tests.identity.kinds import KINDS, code

PLACES = ("script", "beside", "package", "cell", "redefined cell", "installed")
WAYS = ("constructor", "argument", "result", "resident", "peer", "error", "callback")

Drawn: TypeAlias = tuple[str, str, str]  # the kind, the place and the way

SCRIPT = """
import colocate, enum, queue, re, sys
from colocate import Role, method

NAMES = sys.modules["__main__"].__dict__
{definitions}

def plain(seen):
    return re.sub("0x[0-9a-f]+", "0x", repr(seen))  # where things lie

class Wrong(Exception):
    def __init__(self, thing, cls):
        super().__init__("wrong")
        self.thing, self.cls = thing, cls

# What a class has that is made anew in each process, or not before it is used; pydantic's own has addresses in it, and
# Python 3.13's list of what methods set is in the order of a set.
OWN = re.compile("_abc_impl|__slotnames__|__weakref__|__dict__|__pydantic_.*|__static_attributes__")

def attributes(cls):
    return {{name: plain(value) for name, value in vars(cls).items() if not OWN.fullmatch(name)}}

def same(thing, cls, find, make, agreed):
    # `find` is where the class is defined, as code that runs here sees it, and `make` makes such a value and its class.
    found, (another, made) = find(), make()
    assert type(thing) is type(another) is cls is found is made, (type(thing), cls, found)
    assert isinstance(thing, found) and isinstance(another, cls)
    assert not isinstance(thing, enum.Enum) or thing is another
    here = plain(thing.seen()), plain(another.seen()), thing == another
    there, its = agreed
    assert here == there, (here, there)
    differ = dict(attributes(cls).items() ^ its.items())
    assert not differ, (cls, differ)
    return cls.__qualname__

class Actor(Role):
    def __init__(self, *things):
        self.seen = [same(*thing) for thing in things]

    @method
    def constructed(self):
        return self.seen

    @method
    def take(self, *thing):
        return same(*thing)

    @method
    def took(self, made, *known):
        (given,) = made
        return same(*given, *known)

    @method
    def echo(self, *things):
        return things

    @method
    def make(self, make):
        return make()

    @method
    def wrong(self, make):
        raise Wrong(*make())

def by_argument(actor, thing, cls, *known):
    assert actor.take(thing, cls, *known) == [cls.__qualname__]

def by_result(actor, thing, cls, find, make, agreed):
    (made,) = actor.make(make)
    same(*made, find, make, agreed)

def by_error(actor, thing, cls, find, make, agreed):
    try:
        actor.wrong(make)
    except colocate.RoleError as error:
        assert type(error.__cause__) is Wrong
        return same(error.__cause__.thing, error.__cause__.cls, find, make, agreed)
    raise AssertionError("not raised")

def by_callback(actor, thing, cls, find, make, agreed):
    heard = queue.SimpleQueue()
    for call in actor.make.submit(make), actor.wrong.submit(make):
        call.add_done_callback(heard.put)
        error = heard.get(timeout=60).exception()
        same(*(call.result()[0] if error is None else (error.__cause__.thing, error.__cause__.cls)), find, make, agreed)

def by_resident(actor, thing, cls, find, make, agreed):
    (fetched,) = actor.make.keep(make).fetch()
    same(*fetched, find, make, agreed)

def by_peer(actor, thing, cls, find, make, agreed):
    (other,) = {{first, second}} - {{actor}}
    kept = other.make.keep(make)
    assert actor.took(kept.ref, find, make, agreed) == [cls.__qualname__]

WAYS = {{name[3:]: way for name, way in list(NAMES.items()) if name.startswith("by_")}}

def known(find, make):
    (one, cls), (other, _) = make(), make()
    return one, cls, find, make, ((plain(one.seen()), plain(other.seen()), one == other), attributes(cls))

def check(way, find, make):
    one = known(find, make)
    for each in sorted(WAYS, key=lambda name: name != way):  # nothing of it has gone any other way before
        for actor in first, second:
            WAYS[each](actor, *one)

with {connect} as runtime, runtime.reserve(2, cpus=1, timeout=120) as pool:
    things = [{things}]
    constructed = [known(find, make) for way, find, make in things if way == "constructor"]
    roles = {{"actor": colocate.role(Actor, *constructed)}}
    first, second = (part.spawn(roles)["actor"] for part in (pool[:1], pool[1:]))
    names = [cls.__qualname__ for _, cls, *_ in constructed]
    assert first.constructed() == second.constructed() == [names]
    for thing in things:
        check(*thing)
{again}
print("agreed")
"""


def environment(folder: Path) -> None:
    """Make an environment with all packages of this one, and room for more."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.startswith("/")))


def write(folder: Path, drawn: Sequence[Drawn], executor: str) -> Path:
    """Write a script with classes of the drawn kinds, each in its place, whose values travel their ways."""
    definitions, things, again = [], [], []
    for number, (kind, place, way) in enumerate(drawn):
        name = f"Thing{number}"
        text, made = code(kind, name, number)
        finds = name
        if place in ("beside", "installed", "package"):
            module = f"{place}{number}"
            where = next(folder.glob("venv/lib/python*/site-packages")) if place == "installed" else folder
            if place == "package":
                (folder / module).mkdir()
                (folder / module / "__init__.py").write_text("")
                module += ".inner"
            (where / f"{module.replace('.', '/')}.py").write_text(text)
            definitions.append(f"import {module}")
            made, finds = f"eval({made!r}, vars({module}))", f"{module}.{name}"
        else:
            definitions.append(text if place == "script" else f"exec({text!r}, NAMES)")
        both = f"lambda: {finds}, lambda: ({made}, {finds})"
        things.append(f"({way!r}, {both})")
        if place == "redefined cell":
            changed, _ = code(kind, name, number + 100)
            again.append(
                f"    old, old_class = {made}, {name}\n    kept = first.echo.keep(old, {name})\n"
                f"    exec({changed!r}, NAMES)\n    assert old_class is not {name}\n    check({way!r}, {both})\n"
                f"    assert first.echo(old, old_class)[0][1] is old_class is type(kept.fetch()[0][0])"
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


def agrees(drawn: Sequence[Drawn], executor: str, forks: Forks) -> None:
    """Assert that the script of the drawn classes agrees."""
    with tempfile.TemporaryDirectory() as folder:
        installed = any(place == "installed" for _, place, _ in drawn)
        if installed:
            environment(Path(folder, "venv"))
        main = write(Path(folder), drawn, executor)
        if installed:
            command = [f"{folder}/venv/bin/python", str(main)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        else:
            done = forks.run((), Path(folder), os.environ, main, strict=False)
        assert done.stdout == "agreed\n", f"{drawn}\n{done.stderr[-6000:]}"


@pytest.mark.in_make_test("threads")
@pytest.mark.parametrize("executor", [*BUILT_IN, "strict"])
@hypothesis.settings(max_examples=2, deadline=None, database=None, derandomize=True)
@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(PLACES), st.sampled_from(WAYS)),
        min_size=1,
        max_size=5,
    )
)
@hypothesis.example(drawn=[("parametrised", "beside", "result"), ("enum", "package", "error")])  # all name these first
@hypothesis.example(drawn=[(kind, "script", "argument") for kind in ("parameters", "names_of_types") if kind in KINDS])
def test_a_class_is_one_class(executor: str, forks: Forks, drawn: list[Drawn]) -> None:
    """Values of the drawn classes have one class on every way.

    Drawn are kinds of classes, the places of their definitions, and each class's first way.
    """
    agrees(drawn, executor, forks)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.long
def test_all_kinds(executor: str, place: str, forks: Forks) -> None:
    """Classes of all kinds are one class each, in each of the places."""
    ways = WAYS[PLACES.index(place) :] + WAYS
    agrees([(kind, place, ways[number % len(WAYS)]) for number, kind in enumerate(sorted(KINDS))], executor, forks)
