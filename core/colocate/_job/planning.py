"""What the roles of a config will hold, without building them.

Each role is constructed on torch's meta device, which has shapes and no memory, as the first of its ranks; then every
optimizer makes a step there, so that gradients and its state are known from what it really makes. What is computed with
in between isn't known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import Any

import attrs

from colocate._plugins.entry_points import listed
from colocate._plugins.plugins import find_role
from colocate._protocol.ledger import Purpose
from colocate._role.budget import Budgets, Limit
from colocate._role.context import Context, MeshPlace, attach, derive_seed, need_torch, reset_current, set_current
from colocate._role.planned_groups import PlannedGroups, planned_world
from colocate._role.role import methods_of
from colocate._signatures.annotations import arguments_of
from colocate._system.jobs import error_text
from colocate._values.mesh import parse_meshes
from colocate.config.check import budgets_of
from colocate.config.schema import Config, GroupConfig
from colocate.errors import ConfigError
from colocate.worker.holdings import Holdings, held_by, optimizers_of
from colocate.worker.storages import Storages
from colocate.worker.swapping import Room, State, Use, cost

_ON_META = " on the meta device"
KINDS = tuple(purpose.word for purpose in Purpose if purpose is not Purpose.RESIDENTS)


@attrs.frozen
class RolePlan:
    """What one rank of a role will hold, in bytes.

    Attributes:
        role: Its name.
        slots: Where it lives.
        kinds: Bytes by kind, see `RoleMemory.device`.
        unknown: Why that, or a part of it, isn't known; None when it is.
        shared: Bytes that it holds besides, and that count with another role: they are awake when it is.
    """

    role: str
    slots: tuple[int, ...]
    kinds: Mapping[str, int]
    unknown: str | None
    shared: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kinds.values())


@attrs.frozen
class Turns:
    """What a budget of all roles of a slot means.

    Attributes:
        limit: The budget.
        slots: The slots, which have the same roles.
        needs: Bytes that these need together.
        free: Of that, what is to stay free for what one of them computes with.
        takers: Roles that can't be awake all the time, where the smallest are; none where all fit.
        apart: Whether no two of the takers fit together. Otherwise who sleeps is a choice, and may be another role.
        misfits: Roles that don't fit: those that are too much alone, or all of them where turns are of no use, since
            what sleeps counts, too.
        copies: Bytes that a step copies at most, once they take turns; None where no step was declared.
    """

    limit: Limit
    slots: tuple[int, ...]
    needs: int
    free: int
    takers: tuple[str, ...]
    apart: bool
    misfits: tuple[str, ...]
    copies: int | None


@attrs.frozen
class GroupPlan:
    """What the roles of a group will hold.

    Attributes:
        group: Its name.
        slots: How many slots its pool has.
        roles: Its roles.
        budgets: What they may hold.
        on_host: Whether its slots' devices are the host itself.
    """

    group: str
    slots: int
    roles: tuple[RolePlan, ...]
    budgets: Budgets
    on_host: bool

    def on(self, slot: int) -> tuple[RolePlan, ...]:
        """The roles of a slot."""
        return tuple(role for role in self.roles if slot in role.slots)

    @property
    def fullest(self) -> int:
        """The slot whose roles hold most."""
        return max(range(self.slots), key=lambda slot: sum(role.total for role in self.on(slot)))

    @property
    def fused(self) -> int:
        """Bytes there."""
        return sum(role.total for role in self.on(self.fullest))

    @property
    def processes(self) -> int:
        """How many there would be if each rank of each role had one."""
        return sum(len(role.slots) for role in self.roles)

    @property
    def separate(self) -> int:
        """Bytes of all of these together: nothing is shared then."""
        return sum((role.total + role.shared) * len(role.slots) for role in self.roles)

    def turns(self) -> Iterator[Turns]:
        """What each budget of all roles together means, for slots with the same roles at a time."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for slot in range(self.slots):
            alike.setdefault(tuple(role.role for role in self.on(slot)), []).append(slot)
        for limit in self._limits():
            for roles, slots in alike.items():
                if roles and limit.role is None:
                    yield self._turns(limit, tuple(slots), {role.role: role.total for role in self.on(slots[0])})

    def _turns(self, limit: Limit, slots: tuple[int, ...], sizes: Mapping[str, int]) -> Turns:
        if not limit.device:
            needs = sum(sizes.values())
            return Turns(limit, slots, needs, 0, (), False, tuple(sizes) if needs > limit.nbytes else (), None)
        room = Room(limit.nbytes, sizes, {role: self.budgets.activations.get(role, 0) for role in sizes})
        takers = tuple(_takers(room))
        shared = {role.role: role.shared for role in self.roles}
        misfits = tuple(role for role in sizes if room.over({role}, role) + shared[role] > 0)
        free = max(room.needs.values())
        apart = bool(takers) and not any(_fit(room, pair) for pair in combinations(takers, 2))
        needs, copies = sum(sizes.values()) + free, None if misfits else self._copies(room)
        return Turns(limit, slots, needs, free, takers, apart, misfits, copies)

    def _limits(self) -> list[Limit]:
        """Those that what is known here counts for: beside a GPU it isn't the host's."""
        return [limit for limit in self.budgets.limits if limit.device or self.on_host]

    def misfits(self) -> Iterator[tuple[RolePlan, Limit]]:
        """Roles that hold more than they may themselves."""
        for role in self.roles:
            for limit in self._limits():
                free = self.budgets.activations.get(role.role, 0) if limit.device else 0
                if limit.role == role.role and role.total + free > limit.nbytes:
                    yield role, limit

    def _copies(self, room: Room) -> int | None:
        """What a step copies when it is one of many: what the third adds to two."""
        written = {role.role for role in self.roles if role.kinds.get(Purpose.OPTIMIZER.word)}
        step = [Use(role, role in written) for role in self.budgets.step if role in room.sizes]
        nobody = State(frozenset(), frozenset())
        two, three = cost(step * 2, room, nobody), cost(step * 3, room, nobody)
        return None if not step or two is None or three is None else three - two


def _fit(room: Room, roles: Collection[str]) -> bool:
    """Whether there is room for these together, whichever of them runs."""
    return all(room.over(roles, role) <= 0 for role in roles)


def _takers(room: Room) -> Iterator[str]:
    """Who can't be awake all the time: the smallest are, as long as there is room for the others one by one."""
    rest = sorted(room.sizes, key=lambda role: room.sizes[role])
    if _fit(room, rest):
        return
    awake: list[str] = []
    while rest and all(_fit(room, {*awake, rest[0], other}) for other in rest):
        awake.append(rest.pop(0))
    yield from (role for role in room.sizes if role in rest)


def plan(config: Config) -> list[GroupPlan]:
    """What the roles of a config's groups will hold.

    Raises:
        ConfigError: torch isn't installed.
    """
    try:
        need_torch("colocate plan")
    except ImportError as error:
        raise ConfigError(str(error)) from error
    from colocate._job.meta_device import meta_device
    from colocate._job.without_weights import without_weights

    slots = {name: config.pools[group.pool].slots for name, group in config.groups.items()}
    with planned_world(max(slots.values(), default=1)), meta_device(), without_weights():
        made = {name: _construct(name, group, slots[name], config) for name, group in config.groups.items()}
        found = []
        for name, group in config.groups.items():
            roles = _instances(*(made[other] for other in made if other != name), made[name])  # its own count first
            unknown = [role for each in made.values() for role in each if role not in roles]
            for each in made[name].values():
                each.go_on(roles, unknown)
            plans, pool = tuple(_read(made[name], group, slots[name])), config.pools[group.pool]
            found.append(GroupPlan(name, slots[name], plans, budgets_of(group, pool), not pool.gpus))
    return found


@attrs.define(eq=False)
class _Made:
    """A role on the meta device.

    Attributes:
        role: Its name.
        ctx: Its context.
        instance: It itself; None where its constructor raised.
        unknown: What went wrong.
    """

    role: str
    ctx: Context
    instance: Any = None
    unknown: str | None = None

    @contextlib.contextmanager
    def _running(self, what: str, where: str = "") -> Iterator[None]:
        token = set_current(self.ctx)
        try:
            yield
        except SystemExit as ended:  # the command goes on for the other roles
            self.unknown = f"{what} called sys.exit({ended.code!r})"
        except Exception as error:
            from colocate._job.meta_device import advice

            self.unknown = f"{what} raised{where}: {error_text(error)}{advice(error)}"
        finally:
            reset_current(token)

    def construct(self, cls: type, options: Mapping[str, Any]) -> None:
        """Have its constructor run."""
        with self._running("its constructor", _ON_META):
            self.instance = cls(**options)
            attach(self.instance, self.ctx)

    def go_on(self, roles: Mapping[str, Any], unknown: Collection[str]) -> None:
        """Have it get what calls will give to it, and make a step of each of its optimizers.

        Args:
            roles: The roles by name.
            unknown: Roles that could not be constructed.
        """
        planned = getattr(self.instance, "plan", None)
        if callable(planned) and "plan" not in methods_of(type(self.instance)):  # a role method of that name is another
            with self._running("its plan()"):
                planned(roles)
            if self.unknown is not None and unknown:
                it, is_not, was_not = ("it", "isn't", "wasn't") if len(unknown) == 1 else ("they", "aren't", "weren't")
                self.unknown += f" ({listed(unknown)} {is_not} known, so {it} {was_not} given)"
        if self.instance is not None:
            from colocate._job.meta_device import step

            others = [each for each in roles.values() if each is not self.instance]
            with self._running("a step of its optimizer", _ON_META):
                for optimizer in optimizers_of(self.instance, others):
                    step(optimizer)

    def declared(self) -> list[Any]:
        """What it says that it holds besides."""
        found: list[Any] = []
        declares: Any = getattr(self.instance, "device_state", None)
        if callable(declares):
            with self._running("its device_state()"):
                state: Any = declares()
                found += state.values()
        return found


def _instances(*groups: Mapping[str, _Made]) -> dict[str, Any]:
    """The roles by name, of those groups' that could be constructed."""
    return {name: each.instance for group in groups for name, each in group.items() if each.instance is not None}


def _construct(name: str, group: GroupConfig, slots: int, config: Config) -> dict[str, _Made]:
    import torch

    made: dict[str, _Made] = {}
    siblings: dict[str, object] = {}
    for role, entry in group.roles.items():
        ranks = range(slots if entry.slots is None else len(entry.slots))
        meshes = parse_meshes(entry.mesh or (group.mesh if entry.slots is None else None), len(ranks))
        ctx = Context(
            rank=0,
            world_size=len(ranks),
            slot=0 if entry.slots is None else entry.slots[0],
            node="localhost",
            role=role,
            group=name,
            generation=0,
            seed=derive_seed(config.seed, name, role, 0),
            meshes={key: MeshPlace(mesh, 0) for key, mesh in meshes.items()},
            device="meta",
            siblings=siblings,
            slots=ranks,
            groups=PlannedGroups(),
        )
        ctx._generator = torch.Generator("cpu").manual_seed(ctx.seed)  # there is none for the meta device
        made[role] = _Made(role, ctx)
        cls = find_role(entry.use).load()
        made[role].construct(cls, arguments_of(cls, entry.use).built(entry.with_))
        if made[role].instance is not None:
            siblings[role] = made[role].instance
    return made


def _read(made: Mapping[str, _Made], group: GroupConfig, slots: int) -> Iterator[RolePlan]:
    counted: set[tuple[str, int]] = set()
    for role, each in made.items():
        kinds: dict[str, int] = {}
        shared = 0
        where = group.roles[role].slots
        if each.instance is not None:
            others = [other for other in _instances(made).values() if other is not each.instance]
            held, _ = held_by(each.instance, each.declared(), others, _Planned)
            whole = sum(nbytes for _, nbytes in _sizes(held, set()))
            kinds = {word: nbytes for word, nbytes in _sizes(held, counted) if nbytes}
            shared = whole - sum(kinds.values())
        yield RolePlan(role, tuple(range(slots)) if where is None else tuple(where), kinds, each.unknown, shared)


def _sizes(held: Holdings, counted: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The bytes of each kind that haven't been counted yet."""
    for purpose in Purpose:
        total = 0
        for device, pieces in held.get(purpose, {}).items():
            total += sum(nbytes for address, nbytes in pieces.items() if (device, address) not in counted)
            counted |= {(device, address) for address in pieces}
        yield purpose.word, total


class _Planned(Storages):
    """Also storages of the meta device, which have no address."""

    def add_tensor(self, item: Any, torch: Any) -> None:
        """Note that of a tensor."""
        if item.is_meta and item.layout is torch.strided and not hasattr(item, "__tensor_flatten__"):
            storage = item.untyped_storage()
            self.setdefault("meta", {})[storage._cdata] = storage.nbytes()
        else:
            super().add_tensor(item, torch)
