"""`Checkpoint`: a complete checkpoint in a folder. Also checks whether a checkpoint may be written to a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from colocate._role.role import RoleInfo
from colocate._system.files import read_json
from colocate._values.dispatch import Broadcast
from colocate.errors import ConfigError, Mistake
from colocate.features import FEATURES
from colocate.features.checkpoints.contents import explain_refusal, find_changed_sizes
from colocate.features.checkpoints.share import (
    RANK_FOLDER,
    RECORD,
    accepts_ranks,
    checkpoint_identity,
    find_hook,
    read_checkpoint,
)

Tag: TypeAlias = str | int | float | None


@attrs.frozen
class Checkpoint:
    """A complete checkpoint, stored in a folder."""

    folder: Path  # The absolute path.
    tag: Tag  # The user's label for the checkpoint.
    identity: str  # A unique id, because another checkpoint may replace this one in the folder.
    parts: dict[str, Any] = attrs.field(factory=dict)  # Data that features have saved, by feature name.

    @classmethod
    def from_folder(cls, folder: Path, roles: Mapping[str, RoleInfo]) -> Checkpoint:
        """Return the checkpoint in a folder, after a check that a group with `roles` can be restored from there.

        Raises:
            ConfigError: There is no checkpoint; or the checkpoint is of other roles, or of another number of ranks and
                not made for that; or a file is missing or has another size.
        """
        try:
            place, record = read_checkpoint(folder)
            saved, tag = {name: entry["ranks"] for name, entry in record["roles"].items()}, record["tag"]
            identity = checkpoint_identity(record)
            parts = {str(name): saved for name, saved in record.get("parts", {}).items() if name in FEATURES}
            files = {name: (int(size), str(digest)) for name, (size, digest) in record["files"].items()}
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
        if lacking := [name for name in record.get("stood in", ()) if name in roles and not roles[name].is_substituted]:
            raise ConfigError(
                f"the checkpoint in {folder} has nothing of role {lacking[0]!r}, which was replayed in the run that "
                "wrote it: restore one of another run, or replay the role here, too"
            )
        select_savable(
            {name: role for name, role in roles.items() if name in saved or role.is_substituted}, "be restored"
        )
        for name, ranks in saved.items():  # `ranks` is the number of ranks that wrote the checkpoint.
            role, slot_count = roles[name], len(roles[name].slots)
            if (
                ranks != slot_count
                and not role.is_substituted
                and not (accepts_other_ranks(role.cls, place / name) or has_empty_save(role.cls))
            ):
                raise ConfigError(
                    f"the checkpoint in {folder} is of {ranks} ranks of role {name!r}, which has "
                    f"{slot_count} here: restore "
                    f"it with {ranks}. Other numbers of ranks can go on from what save() writes by "
                    "torch.distributed.checkpoint, or from anything with restore(directory, ranks), which is told how "
                    "many ranks have saved"
                )
        if wrong := find_changed_sizes(place, files):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if (
                    checkpoint_identity(read_checkpoint(folder)[1]) != identity
                ):  # Another checkpoint has just replaced this one.
                    return cls.from_folder(folder, roles)
            raise ConfigError(explain_refusal(folder, wrong))
        return cls(folder, tag, identity, parts)


def find_checkpoints(folder: Path) -> dict[str, Path]:
    """Return the folder of each group's newest checkpoint below a folder, by group name."""
    places: dict[str, tuple[int, Path]] = {}
    for place, folders, files in os.walk(folder):
        if RECORD not in files:
            continue
        path = Path(place, RECORD)
        try:
            record = read_json(path)
            group, _ = str(record["group"]), record["roles"]
        except (ValueError, KeyError, TypeError):  # The file isn't a checkpoint's record.
            continue
        folders.clear()  # Skip the subfolders, which contain the roles' files and no other checkpoints.
        written = path.stat().st_mtime_ns
        if written >= places.get(group, (0, path))[0]:
            places[group] = written, Path(place)
    return {group: place for group, (_, place) in places.items()}


def accepts_other_ranks(cls: type, folder: Path) -> bool:
    """Return whether a role's saved state can be restored by a different number of ranks than saved it."""
    return accepts_ranks(cls) or any(folder.rglob(".metadata"))


def has_empty_save(cls: type) -> bool:
    """Return whether a role's `save` has an empty body, so that the role itself writes no files."""
    code = getattr(find_hook(cls, "save"), "__code__", None)
    return code is not None and not (code.co_names or code.co_freevars)


def select_savable(roles: Mapping[str, RoleInfo], what: str = "be checkpointed") -> dict[str, RoleInfo]:
    """Return the roles that have both `save` and `restore`.

    Raises:
        ConfigError: No role has both, or a role has only one of them, or one of them has another signature.
    """
    mistakes, saved = [], {}
    for name, info in roles.items():
        if info.is_substituted:  # A role that replays recorded calls has no state to save.
            continue
        has = {which: function for which in ("save", "restore") if (function := find_hook(info.cls, which)) is not None}
        where, cls = f"roles.{name}", info.cls.__qualname__
        if len(has) == 2:
            saved[name] = info
        elif has:
            (one,) = has
            other = "restore" if one == "save" else "save"
            mistakes.append(Mistake(where, None, f"{cls} has {one}() but no {other}()"))
        mistakes += [
            Mistake(where, None, f"{cls}.{hook_name} {why}")
            for hook_name in has
            if (why := _explain_unfit(info, hook_name))
        ]
    if not saved and not mistakes and not any(info.is_substituted for info in roles.values()):
        mistakes.append(Mistake("roles", None, "none has save(directory) and restore(directory)"))
    if mistakes:
        raise ConfigError(f"the group can't {what}:", mistakes=tuple(mistakes))
    return saved


def _explain_unfit(info: RoleInfo, which: str) -> str | None:
    """Return the reason why colocate can't call a `@method` as a role's `save` or `restore`; None if callable."""
    spec = info.methods.get(which)
    if spec is None:
        return None
    if not isinstance(spec.dispatch, Broadcast):
        return f"is a @method with {spec.dispatch!r}; in a checkpoint each rank calls it for itself: leave that out"
    try:
        spec.signature.bind("", **({"ranks": 0} if which == "restore" and accepts_ranks(info.cls) else {}))
    except TypeError:
        names = ", ".join(spec.signature.parameters)
        return f"is a @method with ({names}); it is called with (directory): give another thing another name"
    return None


def check_replaceable(folder: Path, roles: Collection[str]) -> None:
    """Raise an error if a folder has contents that a checkpoint of these roles may not replace.

    Raises:
        ConfigError: The folder is neither free, nor empty, nor an earlier checkpoint of these roles.
    """
    obstacle = _find_obstacle(folder, roles)
    if obstacle is not None:
        raise ConfigError(
            f"the checkpoint can't be written to {folder}: {obstacle}. It may replace an earlier checkpoint "
            f"of the same "
            "roles, or an empty folder, and nothing else; nothing was touched. Name a folder of its own"
        )


def _find_obstacle(folder: Path, roles: Collection[str]) -> str | None:
    """Return why no checkpoint may be written to a folder; None if the folder is free or may be replaced."""
    if not os.path.lexists(folder):
        parent = next(path for path in folder.parents if os.path.lexists(path))
        return None if parent.is_dir() else f"{parent}, in which it would lie, is no folder"
    if folder.is_symlink():
        return f"that is a symbolic link (to {os.readlink(folder)}), which a folder would take the place of"
    if not folder.is_dir():
        return "that is a file"
    if os.path.ismount(folder):
        return "a file system is mounted there"
    with contextlib.suppress(FileNotFoundError):  # The working directory may have been removed.
        if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
            return "the working directory is that folder, or lies in it"
    names = sorted(os.listdir(folder))
    if not names:
        return None
    if RECORD not in names:
        return f"that folder has other files ({_join_names(names)})"
    try:
        theirs = set(read_checkpoint(folder)[1]["roles"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {RECORD} isn't what group.checkpoint(...) writes"
    strange = [name for name in names if name not in (RECORD, RANK_FOLDER, *theirs)]
    if strange:
        return f"that folder has other files beside a checkpoint ({_join_names(strange)})"
    if theirs != set(roles):
        has, saved = ", ".join(sorted(theirs)), ", ".join(sorted(roles))
        return f"there is a checkpoint of a group with other roles: it has {has}, this one saves {saved}"
    return None


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
