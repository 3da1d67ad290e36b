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
        self.kept = value

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
        (made,) = worker.make(3)
        return made.over(), worker.look(made), worker.limit(), worker.beside(beside.Value())
"""


_CLOSES = """
runtime.attach(NAME, own=True).close()
say("closed")
"""


class Successors(DetachedCase):
    """The next driver has what the workers have from the one before it; its own script stays where it is."""

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
    def test_another_script(self, scripts: Scripts, runtime: Runtime, name: str) -> None:
        """It calls and fetches, and gives back what it has got; what is defined in it can't go, which is told."""
        self._said(scripts, name, _SCRIPT + _DETACHES)
        used = (_SCRIPT + _ATTACHES).replace("LIMIT = 1", "LIMIT = 9")
        assert self._said(scripts, name, used + "say(tell(use))") == [True, [[True, True, "first"]], [1], [True]]
        sends = """
        with runtime.attach(NAME) as pool:
            group = pool.groups["working"]
            for each in (
                lambda: group[Worker].put(Item(3)),
                lambda: group.run(lambda ctx: LIMIT),
                lambda: group.run(tell),
                lambda: group.run(lambda ctx: 3),
                lambda: group[Worker].limit(),
            ):
                say(tell(each))
        """
        driver = self._run(scripts, name, used + textwrap.dedent(sends))
        for what in ("Item", "<lambda>, which names the global 'LIMIT',", "tell"):
            assert (
                f"{what} is of this driver's script, and can't go to workers that another driver has" in driver.hear()
            )
        assert [driver.hear(), driver.hear()] == [[3], [1]]
        assert driver.end() == (0, "")
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
        assert self._said(scripts, name, _SCRIPT + _ATTACHES + "say(tell(use))")[0] is True
        assert self._said(scripts, name, _CLOSES) == "closed"
