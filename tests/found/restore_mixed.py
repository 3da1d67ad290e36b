"""A checkpoint that is replaced amid restores gives all ranks one version, or the restore is an error.

Of two groups that share a folder, neither is restored with the state of the other.

Modes: threads, strict, processes, ray, dask.
"""

import os
import tempfile
import threading
from collections import Counter
from pathlib import Path

from hx import attempt, connect, end, mode, verdict

import colocate
from colocate import Role, method


class Walker(Role):
    def __init__(self):
        self.step = 0

    @method
    def go_to(self, step):
        self.step = step

    @method
    def at(self):
        return self.step

    @method
    def crash(self):
        os._exit(3)

    def save(self, directory):
        Path(directory, str(self.ctx.rank)).write_text(str(self.step))

    def restore(self, directory):
        self.step = int(Path(directory, str(self.ctx.rank)).read_text())


def train(group, folder, stop):
    step = 0
    while not stop.is_set():
        step += 1
        group.role("walker").go_to(step)
        group.checkpoint(folder, tag=step)


WALKER = {"walker": colocate.role(Walker)}


def looked_at(found, group, tag):
    """Count the outcome of a restore: one checkpoint on all ranks, a mixture, or an error."""
    if isinstance(tag, Exception):
        found["refused" if "another one has taken its place" in str(tag) else repr(tag)] += 1
    else:
        steps = group.role("walker").at()
        found["one" if steps == [tag] * 2 else f"mixed: {steps}"] += 1


def replaced_all_the_time(runtime, folder):
    stop, found = threading.Event(), Counter()
    with runtime.reserve(slots=2) as trainers, runtime.reserve(slots=2) as readers:
        trainer = trainers.spawn(WALKER, name="trainer")
        trainer.checkpoint(folder, tag=0)
        training = threading.Thread(target=train, args=(trainer, folder, stop))
        training.start()
        for _ in range(12):
            group = attempt(readers.spawn, WALKER, name="eval", restore=folder)
            if isinstance(group, Exception):
                looked_at(found, None, group)
                continue
            with group:
                looked_at(found, group, group.wait_ready())
                for _ in range(3):
                    looked_at(found, group, attempt(group.restore, folder))
        stop.set()
        training.join()
    verdict("all ranks are restored from one checkpoint", found["one"] and not found.keys() - {"one", "refused"}, found)


def shared_by_two(runtime, folder):
    with runtime.reserve(slots=2) as pool:
        one, other = pool[:1].spawn(WALKER, name="one", on_failure="restart"), pool[1:].spawn(WALKER, name="other")
        one.role("walker").go_to(1)
        one.checkpoint(folder, tag="one at 1")
        other.role("walker").go_to(99)
        other.checkpoint(folder, tag="other at 99")
        attempt(one.role("walker").crash)
        error = attempt(one.wait_ready, 60)
        why = " ".join(getattr(error, "__notes__", []))
        verdict("a group doesn't come back as another one", "now there is 'other at 99' of group 'other'" in why, error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, connect() as runtime:
        replaced_all_the_time(runtime, Path(place, "one"))
        if mode() not in ("threads", "strict"):
            shared_by_two(runtime, Path(place, "two"))
        names = sorted(os.listdir(place))
        verdict("nothing else is left", set(names) <= {"one", "two"}, names)
    end()
