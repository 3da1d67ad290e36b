"""The record of a detached pool: what the drivers after the one that made it need to take it up, starting nothing."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Iterable
from typing import Any

import attrs

import colocate
from colocate._api.slots import Slots
from colocate._crew.crew import Crew
from colocate._crew.saved import Checkpoint, Tag
from colocate._crew.spawn import Declared
from colocate._definitions.bundles import pack_whole, unpack_whole
from colocate._role.budget import Budget
from colocate._role.info import RoleInfo
from colocate._role.role import check_role
from colocate.errors import ColocateError
from colocate.executor import Request

_FORM = 7  # goes up when what is pickled in a record has moved or changed, and the version of colocate hasn't


@attrs.frozen
class GroupRecord:
    """One group.

    Attributes:
        name: Its name.
        roles: Its roles, pickled; classes that no installed distribution has are in it by value.
        slots: The slots of the pool that it has.
        tokens: By which its workers are taken up, by slot.
        pids: Of its workers.
        generation: How often it has been restarted.
        seed: That of the runtime that made it.
        line: The line that made it.
        created: When.
        restarts: How often it is rebuilt at most.
        checkpoint: What it is rebuilt from, if there is something.
        restored: The tag of what its roles were restored from.
        script: The process whose script the workers have, as ids have it.
        modules: The modules that its workers have got from a driver: file and digest, by name.
        until_woken: The tags of memory that calls leave asleep, by role.
    """

    name: str
    roles: bytes = attrs.field(repr=False)
    slots: tuple[int, ...]
    tokens: tuple[bytes, ...] = attrs.field(repr=False)
    pids: tuple[int | None, ...]
    generation: int
    seed: int
    line: tuple[str, int]
    created: float
    restarts: int
    checkpoint: Checkpoint | None
    restored: Tag
    script: int
    modules: dict[str, tuple[str, str]]
    until_woken: dict[str, list[str]]

    def declared(self) -> Declared:
        """Its roles.

        Raises:
            ColocateError: They can't be imported here.
        """
        try:
            (default_group, torchrun, distributions, budgets, roles), definitions = unpack_whole(self.roles)
        except ColocateError as error:
            raise ColocateError(f"group {self.name!r} can't be taken up here: {error.message}") from error
        except Exception as error:  # a module or class that isn't there; anything that its import raises
            raise ColocateError(
                f"the roles of group {self.name!r} can't be imported here: {type(error).__name__}: {error}; install "
                "what they come from (colocate close NAME works without)"
            ) from error
        infos = {
            name: RoleInfo(name, cls, check_role(name, cls), slots, meshes, origin)
            for name, (cls, _, slots, meshes, origin) in roles.items()
        }
        return Declared(
            infos,
            {name: spec for name, (_, spec, *_) in roles.items()},
            distributions,
            default_group,
            torchrun,
            definitions,
            budgets,
        )


@attrs.frozen
class PoolRecord:
    """A pool and its groups."""

    name: str
    request: Request
    budget: Budget
    line: tuple[str, int]
    created: float
    ttl: float
    groups: tuple[GroupRecord, ...]


def record_of(pool: Slots, groups: Iterable[Crew], ttl: float) -> bytes:
    """The record of a pool.

    Raises:
        SerializationError: A role can't be pickled.
    """
    groups_found = tuple(_group(pool, each) for each in groups)
    found = PoolRecord(pool.name, pool.request, pool.budget, pool.line, pool.created, ttl, groups_found)
    return pickle.dumps((_versions(), pickle.dumps(found)))


def load(record: bytes, name: str) -> PoolRecord:
    """What a record says.

    Raises:
        ColocateError: Other versions have made it.
    """
    there, body = pickle.loads(record)
    if there != (here := _versions()):
        raise ColocateError(
            f"pool {name!r} was detached by a driver with {_words(*there)}, and this one has {_words(*here)}: "
            "attach with the same versions (colocate close NAME works with any)"
        )
    found: PoolRecord = pickle.loads(body)
    return found


def about(pool: Slots, groups: Iterable[Crew]) -> dict[str, Any]:
    """What listings show of a pool."""
    return {
        "pool": pool.name,
        "slots": len(pool.places),
        "nodes": sorted({place.node for place in pool.places}),
        "groups": {group.name: list(group.roles) for group in groups},
    }


def _group(pool: Slots, group: Crew) -> GroupRecord:
    declared = group.declared
    roles = {
        name: (info.cls, declared.specs[name], info.slots, info.meshes, info.origin)
        for name, info in declared.infos.items()
    }
    whole = declared.default_group, declared.torchrun, dict(declared.distributions), declared.budgets, roles
    what = f"what the roles of group {group.name!r} are made of"
    pickled = pack_whole(whole, what)
    workers = group.workforce.workers
    return GroupRecord(
        group.name,
        pickled,
        tuple(group.indices),
        tuple(worker.host.token for worker in workers),
        tuple(worker.pid for worker in workers),
        group.generation,
        group.seed,
        group.line,
        group.created,
        group.restarts.limit,
        group.restarts.checkpoint,
        group.restarts.restored,
        group.taught.script,
        dict(group.taught.given.contents),
        group.sleepers.until_woken,
    )


def _versions() -> tuple[str, str, int]:
    return colocate.__version__, platform.python_version().rpartition(".")[0], _FORM


def _words(version: str, python: str, form: int = 1) -> str:
    return f"colocate {version} (records of form {form}) and Python {python}"
