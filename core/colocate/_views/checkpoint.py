"""Checkpoints of a group: what its roles' `save` has written, whole or not there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

import colocate
from colocate._calls.pending import PendingCall
from colocate._crew.crew import Crew
from colocate._crew.saved import Checkpoint, Tag, refuse_others, savable
from colocate._system.atomic import atomic_folder
from colocate._system.numbers import FOREVER_S, shown
from colocate._values.dispatch import plan
from colocate._views.sending import ready, refuse_inside, start
from colocate._views.waking import everyone
from colocate.errors import ColocateError, ConfigError
from colocate.worker.checkpoint import RECORD, role_folder
from colocate.worker.functions import CHECKPOINT, SPECS


def write(crew: Crew, folder: Path, tag: Tag) -> None:
    """Have every role of a group save itself, between its calls; a restart goes on from that.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or none has them; or the folder is something else's,
            or the tag nothing to write down.
        RoleError: A `save` raised, or a kept call before it whose resident nobody has used or can use any more: there
            is no checkpoint then.
    """
    if not isinstance(tag, str | int | float):
        raise ConfigError(f"checkpoint(tag) must be text, a number or None, not {shown(tag)}")
    saved = savable(crew.roles)
    refuse_inside("checkpoint", crew.name)
    folder = folder.resolve() if folder.name in ("", "..") else folder.absolute()  # it gets its name by a rename
    found = Checkpoint(folder, tag)
    with crew.restarts.writing:
        refuse_others(folder, saved)
        crew.residents.raise_untold()
        with atomic_folder(folder, _committing(crew, found, crew.generation, saved)) as part:
            for name in saved:
                role_folder(part, name).mkdir()
            _submit(crew, part).result()
            crew.residents.raise_untold()
            record = {
                "tag": tag,
                "group": crew.name,
                "generation": crew.generation,
                "roles": {
                    name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()
                },
                "colocate": colocate.__version__,
            }
            (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    crew.home.changed()


@contextlib.contextmanager
def _committing(crew: Crew, checkpoint: Checkpoint, generation: int, saved: Collection[str]) -> Iterator[None]:
    """A failed group is restored from the last checkpoint before: nothing may take its folder's name then."""
    with crew.order.lock:
        crew.check()
        if crew.generation != generation:
            raise ColocateError(
                f"group {crew.name!r} was restarted while its checkpoint {checkpoint.tag!r} was written: that is void"
            )
        refuse_others(checkpoint.folder, saved)  # it may have been filled meanwhile
        yield
        crew.restarts.committed(checkpoint)


def _submit(crew: Crew, part: Path) -> PendingCall:
    role, spec = everyone(crew), SPECS[CHECKPOINT]
    planned = plan(spec.dispatch, {"directory": str(part)}, role.ranks)
    call = PendingCall(CHECKPOINT, "", CHECKPOINT, role.slots)
    return start(ready(crew, call, role, spec, planned, [], FOREVER_S))  # large ones take long
