"""Faults once seen with classes and functions of a script, and of modules beside it, one test each."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import attrs
import pytest
from tests.identity.conftest import Program


def test_globals_do_not_travel_with_each_value(program: Program) -> None:
    """A second value of a class costs its own bytes, without the globals that the methods name."""
    program(
        """
import numpy
import colocate._worker_group.published as taught
from colocate import wire

WEIGHTS = numpy.zeros(25_000_000)

class Batch:
    def __init__(self, x):
        self.x = x

    def total(self):
        return WEIGHTS.sum() + self.x

class Actor(Role):
    @method
    def total(self, batch):
        return batch.total()

sent = []
encode = wire.encode
wire.encode = lambda head, body=None: sent.append(0 if body is None else body.nbytes) or encode(head, body)
with CONNECT as runtime, runtime.reserve(1, timeout=120) as pool:
    actor = pool.spawn({"actor": colocate.role(Actor)})["actor"]
    assert actor.total(Batch(1)) == [1]
    assert max(sent) >= 200_000_000
    sent.clear()
    assert actor.total(Batch(2)) == [2]
    assert sum(sent) <= 1000, sent
"""
    )


def test_colocate_importable_but_not_installed(tmp_path: Path) -> None:
    """A role of the script works if colocate is on the path only."""
    root = Path(__file__).parents[2]
    folders = [root / "core", root / "executors"]
    site = Path(attrs.__file__).parents[1]
    script = tmp_path / "main.py"
    script.write_text(
        "import colocate\n"
        "class Actor(colocate.Role):\n"
        "    @colocate.method\n"
        "    def rank(self): return self.ctx.rank\n"
        "with colocate.connect('local', processes=True) as runtime, runtime.reserve(1) as pool:\n"
        "    import colocate._definitions.names as names\n"
        "    assert not names.is_installed(colocate)\n"
        "    assert pool.spawn({'actor': colocate.role(Actor)})['actor'].rank() == [0]\n"
    )
    # The environment's packages without its .pth files, which make colocate an installed distribution.
    links = tmp_path / "site"
    links.mkdir()
    for entry in site.iterdir():
        if not entry.name.endswith(".pth"):
            (links / entry.name).symlink_to(entry)
    path = os.pathsep.join([*map(str, folders), str(links)])
    base = Path(sys.base_prefix) / "bin" / "python3"
    done = subprocess.run(
        [str(base), str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["PYTHONPATH", "below"])
def test_distributions_outside_the_environment(
    way: str, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of distributions in PYTHONPATH, or in an environment below the driver's (`uv run --with`), go by name."""
    packages, overlay, cached = tmp_path / "packages", tmp_path / "overlay", tmp_path / "cache" / "acme"
    packages.mkdir()
    cached.mkdir(parents=True)
    (cached / "__init__.py").write_text("from acme.words import WORDS\n")
    (cached / "words.py").write_text("WORDS = 2\n")
    (packages / "acme").symlink_to(cached)  # a link, as uv can make it
    (packages / "acme-1.0.dist-info").mkdir()
    (packages / "acme-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (packages / "linked.pth").write_text("../linked\n")  # an editable distribution, as some tools write it
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "linked_in.py").write_text("")
    python = None
    if way == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), str(tmp_path / "linked")]))
    else:
        venv.create(overlay, symlinks=True)
        (site,) = overlay.glob("lib/python*/site-packages")
        here = "\n".join(path for path in sys.path if path.startswith("/"))
        (site / "overlay.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n{here}")
        python = str(overlay / "bin" / "python")
    program(
        """
from colocate._definitions import sources

class Actor(Role):
    @method
    def look(self):
        import acme, linked_in
        return acme.WORDS

with CONNECT as runtime, runtime.reserve(1) as pool:
    assert pool.spawn({"actor": colocate.role(Actor)})["actor"].look() == [2]
    import acme, linked_in
    assert [sources.collect_sources(name) for name in ("acme", "acme.words", "linked_in")] == [{}, {}, {}]
""",
        python=python,
    )


def test_no_global_is_reset(program: Program) -> None:
    """A global that role code has set stays when the script's other globals change; rebound globals are followed."""
    program(
        """
FOLLOWED, COUNT = 1, 0

class Actor(Role):
    @method
    def step(self):
        global COUNT
        COUNT += 1
        return FOLLOWED, COUNT

with CONNECT as runtime, runtime.reserve(1) as pool:
    group = pool.spawn({"actor": colocate.role(Actor)})
    assert group["actor"].step() == [(1, 1)]
    FOLLOWED, COUNT = 2, 10
    assert group.run(lambda ctx: (FOLLOWED, COUNT)) == [(2, 1)]
    assert group["actor"].step() == [(2, 2)]
"""
    )


def test_class_with_reused_name_stays_same(program: Program) -> None:
    """A class whose name in its module is now another class's stays the same class in a worker."""
    program(
        """
import shapes

class Actor(Role):
    @method
    def sides(self, *things):
        return [thing.sides() for thing in things], things

Former = shapes.Box
shapes.change()
with CONNECT as runtime, runtime.reserve(1) as pool:
    ((sides, things),) = pool.spawn({"actor": colocate.role(Actor)})["actor"].sides(Former())
    assert sides == [4] and type(things[0]) is Former is not shapes.Box
""",
        shapes="""
class Box:
    def sides(self):
        return 4

def change():
    global Box
    class Box:
        def sides(self):
            return 6
    Box.__qualname__ = "Box"
""",
    )


@pytest.mark.parametrize("saved", ["pickle", "torch"])
def test_plain_pickle_in_a_role(program: Program, saved: str) -> None:
    """The script's classes are in a worker's `__main__`, so plain pickle and `torch.save` work there."""
    use = {
        "pickle": "import pickle; return type(pickle.loads(pickle.dumps(batch))) is type(batch)",
        "torch": "import io, torch; file = io.BytesIO(); torch.save(batch, file); file.seek(0); "
        "return type(torch.load(file, weights_only=False)) is type(batch)",
    }[saved]
    program(
        f"""
class Batch:
    pass

class Actor(Role):
    @method
    def save(self, batch):
        {use}

with CONNECT as runtime, runtime.reserve(1) as pool:
    assert pool.spawn({{"actor": colocate.role(Actor)}})["actor"].save(Batch()) == [True]
"""
    )


def test_class_that_a_generic_one_makes(program: Program, executor: str) -> None:
    """pydantic's `Box[int]` is one class everywhere, whoever made it first, also in models with mutual references."""
    program(
        """
import typing, pydantic

T = typing.TypeVar("T")

class Box(pydantic.BaseModel, typing.Generic[T]):
    x: T

class Pair(pydantic.BaseModel, typing.Generic[T]):
    x: T
    rest: "typing.Optional[Pair[T]]" = None

class Has(pydantic.BaseModel):
    boxes: list[Box[int]]

class Actor(Role):
    @method
    def take(self, box, has, pair):
        assert type(box) is Box[int] is type(has.boxes[0]) and type(pair) is type(pair.rest) is Pair[int]
        return box, has, pair, Has(boxes=[Box[int](x=1)]), Pair[int](x=1, rest=Pair[int](x=2))

    @method
    def made(self):
        return Box[str](x="a"), Box[Box[float]](x=Box[float](x=1.0)), Pair[str](x="a"), Box[T]

with CONNECT as runtime, runtime.reserve(2, timeout=120) as pool:
    first, second = (part.spawn({"actor": colocate.role(Actor)})["actor"] for part in (pool[:1], pool[1:]))
    for actor in (first, second):
        made = actor.made()[0]
        assert type(made[0]) is Box[str] and type(made[1]) is Box[Box[float]] and type(made[2]) is Pair[str]
        assert type(made[1].x) is Box[float] and made[3] is Box[T]
        box, has, pair, had, made = actor.take(
            Box[int](x=1), Has(boxes=[Box[int](x=1)]), Pair[int](x=1, rest=Pair[int](x=2))
        )[0]
        assert type(box) is type(has.boxes[0]) is type(had.boxes[0]) is Box[int]
        assert type(pair) is type(pair.rest) is type(made) is type(made.rest) is Pair[int]
""",
        executor,
    )
