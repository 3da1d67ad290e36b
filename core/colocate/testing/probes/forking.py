"""Roles that start processes, end them at once, and fork."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from colocate import First, Role, method
from colocate.testing.waiting import PATIENCE_S


class Sandbox(Role):
    """Has processes of its own."""

    @method(collect=First())
    def terminated(self, times: int) -> list[int | None]:
        """The exit codes of some that are terminated as soon as they are started."""
        codes = []
        for _ in range(times):
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE_S,))
            process.start()
            process.terminate()
            process.join(PATIENCE_S / 2)
            codes.append(process.exitcode)
            process.kill()
        return codes

    @method(collect=First())
    def forked(self, how: str) -> int:
        """The exit code of a fork."""
        return _code(pid) if (pid := os.fork()) else _end(how)

    @method(collect=First())
    async def forked_amid(self, how: str) -> int:
        """The same in an async method."""
        return _code(pid) if (pid := os.fork()) else _end(how)


def _end(how: str) -> int:
    if how == "exit":
        sys.exit(5)
    if how == "text":
        sys.exit("why")
    if how == "raise":
        raise ValueError("in the fork")
    return 7


def _code(pid: int) -> int:
    """That of a child, which ends within the patience of who waits for the call."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
