"""Roles as data: the `Role` base class and `colocate.role(...)`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, get_origin, overload

import attrs

from colocate import features
from colocate._role.budget import NO_BUDGET, Budget
from colocate._role.context import Context, current, standalone_context
from colocate._role.method import RoleMethod
from colocate._role.method_spec import MethodSpec
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import parse_bytes
from colocate._values.mesh import Mesh, Ranks
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from colocate.features.recordings.given import Compare, Replay

P = ParamSpec("P")
R = TypeVar("R")


class Role:
    """Base of role classes: adds a typed `self.ctx`. A plain class works too (with `colocate.context()`)."""

    _colocate_ctx: Context

    @property
    def ctx(self) -> Context:
        """This role's context, there in the constructor already."""
        found: Context | None = self.__dict__.get("_colocate_ctx")
        if found is None:
            # Made inside role code: it belongs to that role. Made outside any worker: it is rank 0 of 1.
            found = current() or standalone_context(type(self).__name__)
            self.__dict__["_colocate_ctx"] = found
        return found


def methods_of(cls: type) -> Mapping[str, MethodSpec]:
    """Return the role methods of a class, inherited ones included, by name."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            if isinstance(attribute, RoleMethod):
                # Its function may be called otherwise: another decorator's, a lambda, or one with a second name.
                spec = attribute.spec
                found[name] = spec if spec.name == name else attrs.evolve(spec, name=name)
            else:
                found.pop(name, None)  # overridden by something that is no role method
    return found


def own_method(instance: object, name: str, *, takes_nothing: bool = False) -> Any:
    """Return a method that a role object has for a purpose of colocate's; None where it has none.

    An attribute or property of that name, whatever it holds, and what `__getattr__` makes up, is the role's own.

    Args:
        instance: The role object.
        name: The method's.
        takes_nothing: Whether it is one only if it needs no argument: what needs some is for another purpose.
    """
    found = inspect.getattr_static(instance, name, None)
    if not (inspect.isroutine(found) or isinstance(found, functools.partial)):
        return None
    if isinstance(found, functools.cached_property) or not callable(bound := getattr(instance, name)):
        return None
    if takes_nothing:
        try:
            inspect.signature(bound).bind()
        except (TypeError, ValueError):
            return None
    return bound


@attrs.frozen(eq=False)
class RoleSpec(Generic[R]):
    """A role to be spawned: its class (or a plugin's name), constructor arguments and place.

    Attributes:
        target: The class, a plugin's name ("acme.reward"), or "module:Class".
        args: Positional constructor arguments.
        kwargs: Keyword constructor arguments.
        slots: Indices of the slots it lives on; None for all.
        mesh: Axes over its ranks, or several by name; None for one axis, dp.
        default_group: Whether torch's default process group, whose ranks are the group's slots, is there before it.
        env: "torchrun": so are the environment variables that torchrun sets.
        budget: How much memory it may have on each slot.
        activations: How many bytes of that stay free for what its methods compute with.
        sleep: "vmm": what its constructor makes on a GPU keeps its addresses when it sleeps.
        weights: "from sync": it can't be called before it has got weights from another role.
        background: Whether its calls run on a thread of their own in each worker, beside those of the other roles.
        replay: The recording that answers its calls (`colocate.Replay`); None for the role itself.
        compare: The recording with which what it gives is compared (`colocate.Compare`); None for none.
    """

    target: type[R] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    slots: tuple[int, ...] | None = None
    mesh: Mapping[str, Any] | None = None
    default_group: bool = False
    env: Literal["torchrun"] | None = None
    budget: Budget = NO_BUDGET
    activations: int = 0
    sleep: Literal["vmm"] | None = None
    weights: Literal["from sync"] | None = None
    background: bool = False
    replay: Any = None
    compare: Any = None

    def on(
        self,
        *,
        slots: Sequence[int] | None = None,
        mesh: Mapping[str, int] | Mapping[str, Mapping[str, int]] | None = None,
        default_group: bool | None = None,
        env: Literal["torchrun"] | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        reserve_activations: str | int | None = None,
        sleep: Literal["vmm"] | None = None,
        weights: Literal["from sync"] | None = None,
        background: bool | None = None,
        replay: str | PathLike[str] | Replay | None = None,
        compare: str | PathLike[str] | Compare | None = None,
    ) -> RoleSpec[R]:
        """Return the same role, placed, and how much memory it may have on each of its slots.

        When it holds more than that as it is constructed or after one of its methods, that fails with a
        `MemoryBudgetError`. What is counted is what `group.memory()` says: the role's state and its residents.

        Args:
            slots: Indices of the slots it lives on (default: all of the group's).
            mesh: Axes over its ranks, row-major, the last axis fastest; or several such by name.
            default_group: Whether torch's default process group is there before the role is constructed, for a
                library that asks for it. Its ranks are the slots of the group.
            env: "torchrun": the environment variables that torchrun sets are there too (`MASTER_ADDR`, `MASTER_PORT`,
                `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`), for a library that reads them. They are the
                worker's, and as the default group has them.
            device_memory: The memory of the slot's device that it may have, as "20GiB" or in bytes.
            host_memory: The host's, with what sleeps.
            reserve_activations: How much of `device_memory`, and of the group's, stays free while its methods run: for
                activations, which nobody can know beforehand.
            sleep: "vmm": what its constructor makes on a GPU of NVIDIA's keeps its addresses when it sleeps
                (`group.sleep`), for CUDA graphs that were captured before. Workers compile what they need for it with
                `cc`. What is made later has other addresses afterwards, as everything has without.
            weights: "from sync": the weights that its constructor makes are of no use. Until `colocate.sync_weights`
                has brought it those of another role, its calls are refused (`StaleWeightsError`).
            background: Whether its calls run on a second thread of the worker, in order among themselves, while the
                group's other roles compute (see "Background roles").
            replay: The folder of a run, or of a recording, that answers its calls: the role isn't constructed. A
                `colocate.Replay` says more than the folder.
            compare: The folder of one with which is compared what it gives; likewise a `colocate.Compare`.
        """
        changes: dict[str, Any] = {}
        if slots is not None:
            chosen = changes["slots"] = tuple(slots)
            if not chosen or len(set(chosen)) != len(chosen) or any(slot < 0 for slot in chosen):
                raise ConfigError(f"slots={list(slots)}: name at least one slot, each once, counted from 0")
        if mesh is not None:
            changes["mesh"] = dict(mesh)
        if default_group is not None:
            changes["default_group"] = default_group
        if env is not None:
            if env != "torchrun":
                raise ConfigError(f'env={env!r}: it is "torchrun", or None for no variables')
            changes["env"] = env
        if device_memory is not None or host_memory is not None:
            given = Budget.of(device_memory, host_memory, "on() ")
            changes["budget"] = Budget(
                self.budget.device if given.device is None else given.device,
                self.budget.host if given.host is None else given.host,
            )
        if reserve_activations is not None:
            changes["activations"] = parse_bytes(reserve_activations, "on() reserve_activations")
        if sleep is not None:
            features.needed("memory")
            if sleep != "vmm":
                raise ConfigError(f'sleep={sleep!r}: it is "vmm", or None for other addresses after a sleep')
            changes["sleep"] = sleep
        if weights is not None:
            features.needed("weights")
            if weights != "from sync":
                raise ConfigError(f'weights={weights!r}: it is "from sync", or None for those of the constructor')
            changes["weights"] = weights
        if background is not None:
            if not isinstance(background, bool):
                raise ConfigError(f"background={background!r}: it is true or false")
            changes["background"] = background
        for name, recording in (("replay", replay), ("compare", compare)):
            if recording is not None:
                changes[name] = features.module("recordings.given").given(name, recording)
        return attrs.evolve(self, **changes)

    @property
    def label(self) -> str:
        """Return what errors and the graph call it."""
        return self.target if isinstance(self.target, str) else self.target.__qualname__


@attrs.define(eq=False)
class RoleInfo:
    """One role of a group, as the driver knows it: its slots in order of rank, and where its class comes from.

    `slots`, `meshes` and `ranks` become others when the group goes on with another number of slots; views look.
    """

    name: str
    cls: type
    methods: Mapping[str, MethodSpec]
    slots: tuple[int, ...] | range
    meshes: Mapping[str, Mesh]
    origin: str
    key: Any = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True), kw_only=True)
    """What workers know it by."""
    stands_in: bool = attrs.field(default=False, kw_only=True)
    """Whether something stands in for its objects, which aren't constructed."""
    ranks: Ranks = attrs.field(
        init=False, default=attrs.Factory(lambda self: Ranks(len(self.slots), self.meshes), takes_self=True)
    )

    def resize(self, slots: range, meshes: Mapping[str, Mesh]) -> None:
        """Have other slots from now on."""
        self.slots, self.meshes, self.ranks = slots, meshes, Ranks(len(slots), meshes)


def torchrun_problem(ranks: int, slots: int) -> str | None:
    """Return why a role of so many ranks can't have torchrun's environment among so many slots; None where it can."""
    if ranks == slots:
        return None
    return (
        f"torchrun's environment is of all {slots} slots of the group (WORLD_SIZE), and the role is on {ranks} of them"
        ": a library would wait for ranks that aren't there. Give the role all slots, or a group of its own"
    )


def fixed_problem(slots: Sequence[int] | None, mesh: Any, least: int) -> tuple[str, str] | None:
    """Return why a role can't go on with fewer slots: of which key, and in words; None where it can.

    Args:
        slots: Those that it names; None for all.
        mesh: Its own or its group's.
        least: How many there may be.
    """
    if slots is not None:
        lost = max(slots) >= least
        return ("slots", f"has slot {max(slots)}, which may be lost: there may be {least}") if lost else None
    if mesh is not None:
        return "mesh", f"is {dict(mesh)}, which is of one number of ranks: leave it out (one axis, dp)"
    return None


@overload
def role(target: str, /, **kwargs: Any) -> RoleSpec[Any]: ...
@overload
def role(target: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RoleSpec[R]: ...
def role(target: Any, /, *args: Any, **kwargs: Any) -> RoleSpec[Any]:
    """Declare a role: its class, or the name of a plugin's, with constructor arguments (type-checked).

    Args:
        target: A class, "plugin.role", or "module:Class".
        *args: Arguments of its constructor.
        **kwargs: Arguments of its constructor.
    """
    target = written_class(target)
    if not isinstance(target, type | str):
        raise ConfigError(
            f"a role is a class or a plugin's name, not {target!r}; pass the class and its arguments apart"
        )
    return RoleSpec(target, args, kwargs)


def written_class(cls: Any) -> Any:
    """Return the class as it was written, of one with type arguments: those are for type checkers."""
    origin = get_origin(cls)
    return origin if isinstance(origin, type) and origin is not UnionType else cls  # a union is no class


def check_role(name: str, cls: type) -> Mapping[str, MethodSpec]:
    """Return the role's methods, or raise an error if it has none."""
    methods = methods_of(cls)
    if not methods:
        raise ConfigError(
            f"role {name!r}: {cls.__module__}.{cls.__qualname__} has no role methods; decorate one with "
            "@colocate.method"
        )
    return methods


def no_such_method(role: str, name: str, methods: Mapping[str, MethodSpec]) -> AttributeError:
    """Return the error for a method that a role doesn't have, with those it has."""
    hint = did_you_mean(name, methods) or "; only methods decorated with @method can be called on a view"
    # With an `obj` of ours Python adds no hint of its own.
    return AttributeError(f"role {role!r} has no method {name!r}: it has {', '.join(sorted(methods))}{hint}", obj=role)
