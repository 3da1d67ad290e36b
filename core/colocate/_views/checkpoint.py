"""Checkpoints of a group: what its roles' `save` has written, whole or not there, and going on from that."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import colocate
from colocate._calls.pending import PendingCall
from colocate._crew.crew import Crew
from colocate._crew.saved import Checkpoint, Tag, refuse_others, savable
from colocate._system.files import atomic_folder, nobody_renames
from colocate._system.numbers import FOREVER_S, shown
from colocate._values.dispatch import plan
from colocate._views.sending import everyone, ready, refuse_inside, start
from colocate.errors import ColocateError, ConfigError
from colocate.worker.serving.checkpoint import RECORD
from colocate.worker.serving.functions import CHECKPOINT, RESTORE, SPECS


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
    found = Checkpoint(folder, tag, uuid.uuid4().hex)
    with crew.restarts.writing:
        _refuse_forgotten(crew)
        with nobody_renames(folder):
            refuse_others(folder, saved)
        crew.residents.raise_untold()
        with atomic_folder(folder, _committing(crew, found, crew.generation, saved)) as part:
            for name in saved:
                (part / name).mkdir()
            _submit(crew, part).result()
            crew.residents.raise_untold()
            record = {
                "id": found.identity,
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


def restore(crew: Crew, folder: Path) -> Tag:
    """Have the roles of a group go on from a checkpoint, between its calls; a restart goes on from that, too.

    Raises:
        ConfigError: There is none for this group.
        RoleError: A `restore` raised, or another checkpoint took the place of this one meanwhile. Some roles may be as
            they were, others not.
    """
    refuse_inside("restore", crew.name)
    with crew.restarts.writing:
        found, generation = Checkpoint.read(folder.absolute(), crew.roles), crew.generation
        _submit(crew, found.folder, RESTORE, identity=found.identity).result()
        with crew.order.lock:
            crew.check()
            if crew.generation != generation:
                raise ColocateError(f"group {crew.name!r} was restarted while {found.tag!r} was restored: that is void")
            crew.restarts.began_from(found)
    crew.home.changed()
    return found.tag


def _refuse_forgotten(crew: Crew) -> None:
    """A run goes on, and has a checkpoint of this group, which nobody has restored: what is saved now is another's."""
    left = crew.services.resumed.get(crew.name)
    if left is not None and crew.restarts.checkpoint is None:
        raise ConfigError(
            f"group {crew.name!r} has begun anew, though the run was resumed and has a checkpoint of it in {left}: "
            f"call group.restore(folder) with that folder (it lies in run.resumed), or pass spawn(restore=folder). A "
            "group that is meant to begin anew needs another name"
        )


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


def _submit(crew: Crew, folder: Path, what: str = CHECKPOINT, **more: str) -> PendingCall:
    role, spec = everyone(crew), SPECS[what]
    planned = plan(spec.dispatch, {"directory": str(folder), **more}, role.ranks)
    call = PendingCall(what, "", what, role.slots)
    return start(ready(crew, call, role, spec, planned, [], FOREVER_S))  # large ones take long
