"""Uses every public operation on the main thread, and fails if that takes a lock of the framework.

Locks, conditions and events that the framework makes are replaced by ones that say who acquires them, before anything
of it is imported. `python -m tests.signals.law ENGINE`.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType
from typing import Any

_MAIN = threading.get_ident()
_PACKAGES = ("colocate.", "colocate_")
_lock, _rlock = threading.Lock, threading.RLock
taken: list[str] = []


class Told:
    """A lock that tells when the main thread acquires it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        """As any lock."""
        if threading.get_ident() == _MAIN:
            taken.append("".join(traceback.format_stack(limit=6)[:-1]))
        acquired: bool = self._lock.acquire(*args, **kwargs)
        return acquired

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _made_by_framework() -> bool:
    """Whether the framework makes this lock, by itself or in a condition, an event or a future of its own."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    return name.startswith(_PACKAGES) and not name.startswith("colocate.testing")


def _told_lock() -> Any:
    return Told(_lock()) if _made_by_framework() else _lock()


def _told_rlock() -> Any:
    return Told(_rlock()) if _made_by_framework() else _rlock()


threading.Lock, threading.RLock = _told_lock, _told_rlock  # type: ignore[assignment, misc]

import tempfile  # noqa: E402

from tests.signals.program import Adder  # noqa: E402

import colocate  # noqa: E402


def use_everything(engine: str, folder: str) -> None:
    """All that a driver can call."""
    done = threading.Event()
    with colocate.connect("local", processes=engine == "processes") as runtime, runtime.reserve(2) as pool:
        group = pool.spawn({"adder": colocate.role(Adder)}, on_failure="restart")
        adder = group.role("adder", Adder)
        assert adder.add(1, 2) == 3
        call = adder.add.submit(1, 2)
        call.add_done_callback(lambda call: done.set())
        assert colocate.wait([call])[0] == {call}
        assert [each.result() for each in colocate.as_completed([adder.add.submit(1, 1), call])] != []
        call.add_done_callback(lambda call: done.set())
        adder.add.submit(3, 4).cancel()
        with group.scope(), adder.add.keep(1, 2) as kept:
            assert kept.fetch() == 3
            assert kept.spec.bytes_per_rank == (0, 0)
            assert adder.add.options(timeout=60)(kept.ref, 1) == 4
            kept.free()
        dropped = adder.add.keep(1, 2)
        del dropped
        with group.pipeline():
            first = adder.add.keep(1, 2)
            second = adder.add.submit(first.ref, 3)
        assert second.result() == 6
        assert group.run(lambda ctx: ctx.rank) == [0, 1]
        group.checkpoint(f"{folder}/one")
        group.wait_ready()
        assert "adder" in runtime.graph.render("tree")
        assert not runtime.audit()
        assert len(pool.slots) == 2
        group.close()
        group.close()
    try:
        runtime.reserve(1)
    except colocate.ClosedError:
        pass
    assert done.wait(10)


def main() -> None:
    """See above."""
    with tempfile.TemporaryDirectory(prefix="colocate-signals-") as folder:
        use_everything(sys.argv[1], folder)
    if taken:
        sys.exit(f"the main thread has taken {len(taken)} locks of the framework, the first of them here:\n{taken[0]}")
    print("none")


if __name__ == "__main__":
    main()
