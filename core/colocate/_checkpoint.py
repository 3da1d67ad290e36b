"""Checkpoints of a group: what its roles' `save` has written, whole or not there, and what `restore` needs of it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import colocate
from colocate._atomic import atomic_folder, settle
from colocate._dispatch import plan
from colocate._functions import everyone
from colocate._pending import PendingCall
from colocate._sending import submit
from colocate._view import RoleInfo, refuse_inside
from colocate.errors import ColocateError, ConfigError, Mistake
from colocate.worker.checkpoint import RECORD, role_folder
from colocate.worker.functions import CHECKPOINT, SAVE

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup

Tag = str | int | float | None


@attrs.frozen
class Checkpoint:
    """A complete one.

    Attributes:
        folder: Where it is (absolute).
        tag: What its writer called it.
    """

    folder: Path
    tag: Tag

    @classmethod
    def read(cls, folder: Path, roles: Mapping[str, RoleInfo]) -> Checkpoint:
        """The one in a folder, for a group with these roles.

        Raises:
            ConfigError: There is none, or it is of other roles.
        """
        settle(folder)
        try:
            record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            saved, tag = record["roles"], record["tag"]
        except OSError:
            raise ConfigError(
                f"there is no checkpoint in {folder}: one that is complete has a file {RECORD}, which "
                "group.checkpoint(...) writes last"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder / RECORD} isn't what group.checkpoint(...) writes ({type(error).__name__}: {error}): the "
                "checkpoint is damaged, or something else's; give another one"
            ) from error
        missing = [name for name in saved if name not in roles]
        if missing:
            raise ConfigError(
                f"the checkpoint in {folder} is of a group with other roles: it has {', '.join(missing)}, "
                f"this one has {', '.join(roles)}"
            )
        return cls(folder, tag)


def write(group: ColocatedGroup, folder: Path, tag: Tag) -> None:
    """Have every role of a group save itself, between its calls; a restart goes on from that.

    Raises:
        ConfigError: A role has only one of `save` and `restore`, or none has them.
        RoleError: A `save` raised; there is no checkpoint then.
    """
    saved = _saved(group.roles)
    refuse_inside("checkpoint", group)
    found = Checkpoint(folder.absolute(), tag)
    with atomic_folder(found.folder, _committing(group, found, group.generation)) as part:
        for name in saved:
            role_folder(part, name).mkdir()
        _submit(group, part).result()
        record = {
            "tag": tag,
            "group": group.name,
            "generation": group.generation,
            "roles": {name: {"class": info.cls.__qualname__, "ranks": len(info.slots)} for name, info in saved.items()},
            "colocate": colocate.__version__,
        }
        (part / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    group.pool.changed()


@contextlib.contextmanager
def _committing(group: ColocatedGroup, checkpoint: Checkpoint, generation: int) -> Iterator[None]:
    """A failed group is restored from the last checkpoint before: nothing may take its folder's name then."""
    with group.order.lock:
        group.check()
        if group.generation != generation:
            raise ColocateError(
                f"group {group.name!r} was restarted while its checkpoint {checkpoint.tag!r} was written: that is void"
            )
        yield
        group.restarts.committed(checkpoint)


def _saved(roles: Mapping[str, RoleInfo]) -> dict[str, RoleInfo]:
    """The roles that have a state to save."""
    mistakes, saved = [], {}
    for name, info in roles.items():
        has = [which for which in ("save", "restore") if callable(getattr(info.cls, which, None))]
        if len(has) == 2:
            saved[name] = info
        elif has:
            other = "restore" if has == ["save"] else "save"
            mistakes.append(Mistake(f"roles.{name}", None, f"{info.cls.__qualname__} has {has[0]}() but no {other}()"))
    if not saved and not mistakes:
        mistakes.append(Mistake("roles", None, "none has save(directory) and restore(directory)"))
    if mistakes:
        raise ConfigError("the group can't be checkpointed:", mistakes=tuple(mistakes))
    return saved


def _submit(group: ColocatedGroup, part: Path) -> PendingCall:
    role = everyone(group)
    planned = plan(SAVE.dispatch, {"directory": str(part)}, role.ranks)
    call = PendingCall(CHECKPOINT, "", CHECKPOINT, role.slots)
    return submit(group, call, role, SAVE, planned, [], math.inf, keep=False)  # large ones take long
