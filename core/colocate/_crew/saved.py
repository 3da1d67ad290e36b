"""`Checkpoint`: one that is complete, in a folder; and what may lie in a folder that one is written to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from colocate._role.info import RoleInfo
from colocate._role.method import RoleMethod
from colocate._system.atomic import settle
from colocate.errors import ConfigError, Mistake
from colocate.worker.checkpoint import OWN, RECORD, takes_ranks

Tag: TypeAlias = str | int | float | None


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
            ConfigError: There is none, or it is of other roles, or of other numbers of ranks and not made for that.
        """
        settle(folder)
        try:
            record = _record(folder)
            saved, tag = {name: entry["ranks"] for name, entry in record["roles"].items()}, record["tag"]
        except OSError:
            raise ConfigError(
                f"there is no checkpoint in {folder}: one that is complete has a file {RECORD}, which "
                "group.checkpoint(...) writes last"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
        for name, role in roles.items():
            if name in saved:
                _refuse_other_ranks(folder, role, saved[name])
        return cls(folder, tag)


def _refuse_other_ranks(folder: Path, role: RoleInfo, saved: int) -> None:
    """Refuse what each of so many ranks has written for itself, where there are more ranks now, or fewer."""
    here = len(role.slots)
    if saved == here or takes_ranks(role.cls) or any((folder / role.name).rglob(".metadata")):  # of any number of ranks
        return
    raise ConfigError(
        f"the checkpoint in {folder} is of {saved} ranks of role {role.name!r}, which has {here} here: restore it with "
        f"{saved}. Other numbers of ranks can go on from what save() writes by torch.distributed.checkpoint, or from "
        "anything with restore(directory, ranks), which is told how many ranks have saved"
    )


def savable(roles: Mapping[str, RoleInfo]) -> dict[str, RoleInfo]:
    """The roles that have a state to save."""
    mistakes, saved = [], {}
    for name, info in roles.items():
        found = {which: getattr(info.cls, which, None) for which in ("save", "restore")}
        has = [which for which, what in found.items() if callable(what) and not isinstance(what, RoleMethod)]
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


def refuse_others(folder: Path, roles: Collection[str]) -> None:
    """Refuse a folder whose contents a checkpoint of these roles may not replace.

    Raises:
        ConfigError: It is neither free nor empty nor an earlier checkpoint of theirs.
    """
    found = _in_the_way(folder, roles)
    if found is not None:
        raise ConfigError(
            f"the checkpoint can't be written to {folder}: {found}. It may replace an earlier checkpoint of the same "
            "roles, or an empty folder, and nothing else; nothing was touched. Name a folder of its own"
        )


def _in_the_way(folder: Path, roles: Collection[str]) -> str | None:
    """What lies there that isn't a checkpoint's to replace, in words; None when nothing does."""
    if not os.path.lexists(folder):
        parent = next(path for path in folder.parents if os.path.lexists(path))
        return None if parent.is_dir() else f"{parent}, in which it would lie, is no folder"
    if folder.is_symlink():
        return f"that is a symbolic link (to {os.readlink(folder)}), which a folder would take the place of"
    if not folder.is_dir():
        return "that is a file"
    if os.path.ismount(folder):
        return "a file system is mounted there"
    with contextlib.suppress(FileNotFoundError):  # somebody has removed the working directory
        if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
            return "the working directory is that folder, or lies in it"
    names = sorted(os.listdir(folder))
    if not names:
        return None
    if RECORD not in names:
        return f"that folder has other files ({_listed(names)})"
    try:
        theirs = set(_record(folder)["roles"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {RECORD} isn't what group.checkpoint(...) writes"
    strange = [name for name in names if name not in (RECORD, OWN, *theirs)]
    if strange:
        return f"that folder has other files beside a checkpoint ({_listed(strange)})"
    if theirs != set(roles):
        has, saved = ", ".join(sorted(theirs)), ", ".join(sorted(roles))
        return f"there is a checkpoint of a group with other roles: it has {has}, this one saves {saved}"
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _record(folder: Path) -> dict[str, Any]:
    """What the record of a checkpoint says."""
    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return record
