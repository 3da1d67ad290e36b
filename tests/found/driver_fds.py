"""The driver, or a worker, has no descriptor free when a large value comes: that is the error of the one call.

Modes: processes, ray, dask.
"""

import contextlib
import os
import resource

from hx import attempt, connect, end, verdict

import colocate
from colocate import First, Role, method

LARGE = 4_000_000
open_files = []


def open_all():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            open_files.append(os.open(os.devnull, os.O_RDONLY))


def close_all():
    while open_files:
        os.close(open_files.pop())


class W(Role):
    @method(collect=First())
    def echo(self, x):
        return x

    @method
    def open_all(self):
        open_all()

    @method
    def close_all(self):
        close_all()


if __name__ == "__main__":
    with connect() as runtime, runtime.reserve(slots=2) as pool:
        group = pool.spawn({"w": colocate.role(W)}, name="g")
        w = group.role("w", W)
        kept = w.echo.keep(bytes(LARGE))
        kept.wait()
        open_all()
        got = attempt(w.echo, bytes(LARGE))
        verdict("a large argument is told what is lacking", "no file descriptor is free" in str(got), got)
        got = attempt(kept.fetch)
        verdict("a large result is told what is lacking", "no file descriptor is free" in str(got), got)
        verdict("a small call goes on", attempt(w.echo, 1) == 1)
        close_all()
        got = attempt(kept.fetch)
        verdict("the result is there afterwards", got == bytes(LARGE), got)
        w.open_all()
        for what, call in (("an argument", lambda: w.echo(bytes(LARGE))), ("a result", kept.fetch)):
            got = attempt(call)
            verdict(f"a worker without descriptors: {what}", "no file descriptor is free" in str(got), got)
        verdict("a small call goes on there", attempt(w.echo, 2) == 2)
        w.close_all()
        verdict("a large one afterwards", attempt(w.echo, bytes(LARGE)) == bytes(LARGE))
        verdict("the group is ready", group.state == "ready", group.state)
    end()
