"""Drivers that have a pool one after the other: what their scripts define."""

from __future__ import annotations

import textwrap
from typing import Any

from colocate import Runtime
from colocate.executor import Detachable
from colocate.testing.executors._base import needs, of_executor
from colocate.testing.executors._detached import DetachedCase
from colocate.testing.executors.drivers import Driver, Scripts

_SCRIPT = """
import beside
from colocate import Role, method

LIMIT = 1

class Item:
    def __init__(self, size):
        self.size = size

    def over(self):
        return self.size > LIMIT

class Worker(Role):
    def __init__(self):
        self.kept = Item(7)
        self.given = []

    @method
    def make(self, size):
        return Item(size)

    @method
    def look(self, item):
        return type(item) is Item is type(self.kept), item.over(), beside.WHO

    @method
    def limit(self):
        return LIMIT

    @method
    def beside(self, value):
        return type(value) is beside.Value

    @method
    def put(self, value):
        self.given.append(value)
        return value.number()

    @method
    def get(self):
        return self.given

    @method
    def late(self):
        import later
        return later.Value()

    @method
    def is_late(self, value):
        import later
        return type(value) is later.Value
"""

_DETACHES = """
pool = runtime.reserve(1, cpus=0, detachable=True)
pool.spawn({"worker": colocate.role(Worker)}, name="working")
pool.detach(NAME, ttl=300)
say("detached")
"""

_ATTACHES = """
def tell(function):
    try:
        return function()
    except colocate.ColocateError as error:
        return str(error)

def use():
    with runtime.attach(NAME) as pool:
        worker = pool.groups["working"][Worker]
        made = [type(worker.make(3)[0]) is Item, worker.make(3)[0].over()]
        return made, worker.look(Item(2)), worker.make(3)[0].over(), worker.beside(beside.Value())
"""


_CLOSES = """
runtime.attach(NAME, own=True).close()
say("closed")
"""


class Successors(DetachedCase):
    """The next driver's script has the classes that the workers have, or is refused."""

    def _run(self, scripts: Scripts, name: str, text: str, who: str = "first") -> Driver:
        (scripts.folder / "beside.py").write_text(f"WHO = {who!r}\nclass Value: pass\n")
        return self.start(scripts, text, name)

    def _said(self, scripts: Scripts, name: str, text: str, who: str = "first") -> Any:
        driver = self._run(scripts, name, text, who)
        said = driver.hear()
        assert driver.end() == (0, "")
        return said

    @needs(Detachable)
    @of_executor
    def test_the_same_script(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """It has the classes that the workers have; a global of its own is what counts from then on."""
        self._said(scripts, name, _SCRIPT + _DETACHES)
        used = _SCRIPT + _ATTACHES + "say(tell(use))"
        assert self._said(scripts, name, used) == [[True, True], [[True, True, "first"]], True, [True]]
        used = "moved = 1\n" + used.replace("LIMIT = 1", "LIMIT = 2")
        assert self._said(scripts, name, used) == [[True, True], [[True, False, "first"]], True, [True]]
        assert self._said(scripts, name, _CLOSES) == "closed"

    @needs(Detachable)
    @of_executor
    def test_globals_of_the_roles(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """Those of this driver's script count from its first call on, whatever that is given."""
        self._said(scripts, name, _SCRIPT + _DETACHES)
        used = _SCRIPT + 'with runtime.attach(NAME) as pool:\n    say(pool.groups["working"][Worker].limit())\n'
        assert self._said(scripts, name, used) == [1]
        assert self._said(scripts, name, used.replace("LIMIT = 1", "LIMIT = 2")) == [2]
        assert self._said(scripts, name, _CLOSES) == "closed"

    @needs(Detachable)
    @of_executor
    def test_as_long_as_the_group(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """A class is one as long as there is a group that names it, whatever Python collects and whoever was closed."""
        detaches = """
        pool = runtime.reserve(2, cpus=0, detachable=True)
        pool[:1].spawn({"worker": colocate.role(Worker)}, name="first")
        pool[1:].spawn({"worker": colocate.role(Worker)}, name="second")
        pool.detach(NAME, ttl=300)
        say("detached")
        """
        self._said(scripts, name, _SCRIPT + textwrap.dedent(detaches))
        uses = """
        import gc

        pool = runtime.attach(NAME)
        first, second = (pool.groups[each]["worker"] for each in ("first", "second"))
        kinds = []
        for worker in (first, second, first):
            kinds.append(type(worker.make(3)[0]))
            gc.collect()
        pool.groups["first"].close()
        del first, worker
        gc.collect()
        kinds.append(type(second.make(3)[0]))
        say([each is kinds[0] for each in kinds])
        pool.close()
        """
        assert self._said(scripts, name, textwrap.dedent(uses)) == [True] * 4
        assert self._said(scripts, name, _SCRIPT + textwrap.dedent(uses)) == [True] * 4
        assert self._said(scripts, name, _CLOSES) == "closed"

    @needs(Detachable)
    @of_executor
    def test_a_cell_that_ran_again(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """What a driver defines anew, in this borrow or the next, stands beside what it had: that is no other's."""
        self._said(scripts, name, _SCRIPT + _DETACHES)
        cells = """
        import gc

        CELL = "class Cell:\\n    def number(self):\\n        return {}\\n"
        had, numbers = [], []
        for _ in range(3):
            with runtime.attach(NAME) as pool:
                worker = pool.groups["working"]["worker"]
                for _ in range(2):
                    exec(CELL.format(len(had)))
                    had.append(Cell)
                    numbers += worker.put(Cell())
                [given] = worker.get()
            say([numbers == list(range(len(had))), [type(each) is cell for each, cell in zip(given, had)]])
            del worker, pool, given
            gc.collect()
        """
        driver = self._run(scripts, name, textwrap.dedent(cells))
        for borrow in range(3):
            assert driver.hear() == [True, [True] * 2 * (borrow + 1)]
        assert driver.end() == (0, "")
        assert self._said(scripts, name, _CLOSES) == "closed"

    @needs(Detachable)
    @of_executor
    def test_a_class_of_other_content(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """One of a name that the workers have is refused, before or when it is sent; the error names both."""
        self._said(scripts, name, _SCRIPT + _DETACHES)
        other = (_SCRIPT + _ATTACHES).replace("self.size > LIMIT", "self.size >= LIMIT")
        told = self._said(scripts, name, other + "say(tell(use))")
        assert "the scripts of two drivers define 'Item', and not alike: " in told
        assert told.count("script.py:") == 2
        other = (_SCRIPT + _ATTACHES).replace("return Item(size)", "return Item(size + 1)")
        told = self._said(scripts, name, other + "say(tell(use))")
        assert "the scripts of two drivers define 'Worker', and not alike: " in told
        other = _SCRIPT + _ATTACHES + "class Item: pass\nsay(tell(use))"
        assert f"this driver's at {scripts.folder / 'script.py'}, a former" in self._said(scripts, name, other)
        # A script that has nothing of that name hears of it only where it sends one.
        told = self._said(
            scripts,
            name,
            """
            def use(ctx, item):
                return item.size

            class Other:
                pass

            with runtime.attach(NAME) as pool:
                other = type("Item", (Other,), {"__module__": "__main__", "size": 3})
                group = pool.groups["working"]
                Item = other
                try:
                    say(group.run(use, other()))
                except colocate.ColocateError as error:
                    say(str(error))
            """,
        )
        assert "the scripts of two drivers define 'Item', and not alike: " in told
        assert self._said(scripts, name, _CLOSES) == "closed"

    @needs(Detachable)
    @of_executor
    def test_a_module_of_other_content(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """So is a module beside the script, if the driver has imported it."""
        self._said(scripts, name, _SCRIPT + _DETACHES)
        elsewhere = Scripts(scripts.folder / "elsewhere", scripts.connect)
        elsewhere.folder.mkdir()
        told = self._said(elsewhere, name, _SCRIPT + _ATTACHES + "say(tell(use))", who="second")
        assert "group 'working' can't be taken up here: module 'beside' of the driver" in told
        assert str(scripts.folder / "beside.py") in told
        assert str(elsewhere.folder / "beside.py") in told
        assert self._said(scripts, name, _SCRIPT + _ATTACHES + "say(tell(use))")[0] == [True, True]
        assert self._said(scripts, name, _CLOSES) == "closed"

    @needs(Detachable)
    @of_executor
    def test_a_module_that_is_imported_late(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """One that this driver imports after it has attached is compared then, whether by itself or for a result."""
        (scripts.folder / "later.py").write_text("class Value: pass\n")
        detaches = _DETACHES.replace('name="working")', 'name="working")[Worker].late()')
        self._said(scripts, name, _SCRIPT + detaches)
        uses = """
        with runtime.attach(NAME) as pool:
            worker = pool.groups["working"]["worker"]
            import sys
            early = "later" in sys.modules
            FIRST
            say([early, tell(lambda: [type(each).__module__ for each in worker.late()]), tell(use)])
        """
        uses = "def use():\n    import later\n    return worker.is_late(later.Value())\n" + textwrap.dedent(uses)
        uses = _SCRIPT + _ATTACHES.partition("def use")[0] + uses
        assert self._said(scripts, name, uses.replace("FIRST", "")) == [False, ["later"], [True]]
        elsewhere = Scripts(scripts.folder / "elsewhere", scripts.connect)
        elsewhere.folder.mkdir()
        (elsewhere.folder / "later.py").write_text("class Value: other = 1\n")
        for first in ("", "import later"):
            early, *told = self._said(elsewhere, name, uses.replace("FIRST", first))
            assert not early
            for each in told:
                assert "group 'working' can't be used here: module 'later' of the driver" in each
                assert str(scripts.folder / "later.py") in each
                assert str(elsewhere.folder / "later.py") in each
        assert self._said(scripts, name, _CLOSES) == "closed"
