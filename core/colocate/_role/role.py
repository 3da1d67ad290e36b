"""Declare roles: the base class `Role`, and the function `colocate.role`."""

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
    """Base class of roles, with a typed `self.ctx`. A plain class works, too (with `colocate.context()`)."""

    _colocate_ctx: Context

    @property
    def ctx(self) -> Context:
        """The context of the role, already available in the constructor."""
        ctx: Context | None = self.__dict__.get("_colocate_ctx")
        if ctx is None:
            # An object made in role code belongs to that role; an object outside any worker is rank 0 of 1.
            ctx = current() or standalone_context(type(self).__name__)
            self.__dict__["_colocate_ctx"] = ctx
        return ctx


def methods_of(cls: type) -> Mapping[str, MethodSpec]:
    """Return the role methods of a class, inherited ones included, by name."""
    methods: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            if isinstance(attribute, RoleMethod):
                # The attribute's name differs from the function's, for example for a lambda or an alias.
                spec = attribute.spec
                methods[name] = spec if spec.name == name else attrs.evolve(spec, name=name)
            else:
                methods.pop(name, None)  # A plain attribute overrides an inherited role method.
    return methods


def find_own_method(instance: object, name: str, *, takes_nothing: bool = False) -> Any:
    """Return a method that a role object defines for colocate, such as `save`; None if there is none.

    Attributes and properties of that name, and names made up by `__getattr__`, belong to the role and don't count.

    Args:
        instance: The role object.
        name: The method's name.
        takes_nothing: Whether only a method without required arguments counts; others have another purpose.
    """
    attribute = inspect.getattr_static(instance, name, None)
    if not (inspect.isroutine(attribute) or isinstance(attribute, functools.partial)):
        return None
    if isinstance(attribute, functools.cached_property) or not callable(bound := getattr(instance, name)):
        return None
    if takes_nothing:
        try:
            inspect.signature(bound).bind()
        except (TypeError, ValueError):
            return None
    return bound


@attrs.frozen(eq=False)
class RoleSpec(Generic[R]):
    """The declaration of a role: the class (or a plugin's name), constructor arguments, slots and options.

    Attributes:
        target: The class, a plugin's name ("acme.reward"), or "module:Class".
        args: Positional constructor arguments.
        kwargs: Keyword constructor arguments.
        slots: Indices of the role's slots; None for all.
        mesh: Axes over the ranks, or several meshes by name; None for one axis, dp.
        default_group: Whether torch's default process group, whose ranks are the group's slots, exists before the
            role.
        env: "torchrun": the environment variables of torchrun are set, too.
        budget: Limit of the role's memory on each slot.
        activations: Bytes of the budget reserved for computation in methods.
        sleep: "vmm": GPU memory from the constructor keeps its addresses across sleeps.
        weights: "from sync": the role refuses calls until it has received weights from another role.
        background: Whether the role's calls run on a thread of their own in each worker, beside the other roles.
        replay: The recording that answers the role's calls (`colocate.Replay`); None for the role itself.
        compare: The recording with which the role's results are compared (`colocate.Compare`); None for none.
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
        """Return the same role with other options, such as slots and memory limits.

        A role that exceeds a limit after its construction or one of its methods fails with a `MemoryBudgetError`.
        The numbers are those of `group.memory()`: the role's state and residents.

        Args:
            slots: Indices of the role's slots (default: all of the group's).
            mesh: Axes over the ranks, row-major, the last axis fastest; or several meshes by name.
            default_group: Whether torch's default process group exists before the role is constructed, for a library
                that asks for it. The ranks are the slots of the group.
            env: "torchrun": set the environment variables of torchrun, too (`MASTER_ADDR`, `MASTER_PORT`, `RANK`,
                `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`), for a library that reads them. They belong to the
                worker, with the values of the default group.
            device_memory: Limit on the slot's device, as "20GiB" or in bytes.
            host_memory: Limit on the host, sleeping memory included.
            reserve_activations: The amount of `device_memory`, and of the group's, to keep free while methods run:
                for activations, whose size is unknown beforehand.
            sleep: "vmm": memory that the constructor makes on a GPU of NVIDIA's keeps its addresses across sleeps
                (`group.sleep`), for CUDA graphs captured before. Workers compile a helper with `cc`. Later memory
                gets other addresses after a sleep, as all memory does without this option.
            weights: "from sync": the weights of the constructor are unusable. The role refuses calls until
                `colocate.sync_weights` has brought those of another role (`StaleWeightsError`).
            background: Whether the role's calls run on a second thread of the worker, in order among themselves,
                while the group's other roles compute (see "Background roles").
            replay: The folder of a run, or of a recording, that answers the role's calls: the role isn't
                constructed. A `colocate.Replay` has more options.
            compare: The folder of a run, or of a recording, with which the role's results are compared; or a
                `colocate.Compare`.
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
            new_budget = Budget.from_sizes(device_memory, host_memory, "on() ")
            changes["budget"] = Budget(
                self.budget.device if new_budget.device is None else new_budget.device,
                self.budget.host if new_budget.host is None else new_budget.host,
            )
        if reserve_activations is not None:
            changes["activations"] = parse_bytes(reserve_activations, "on() reserve_activations")
        if sleep is not None:
            features.get_feature("memory")
            if sleep != "vmm":
                raise ConfigError(f'sleep={sleep!r}: it is "vmm", or None for other addresses after a sleep')
            changes["sleep"] = sleep
        if weights is not None:
            features.get_feature("weights")
            if weights != "from sync":
                raise ConfigError(f'weights={weights!r}: it is "from sync", or None for those of the constructor')
            changes["weights"] = weights
        if background is not None:
            if not isinstance(background, bool):
                raise ConfigError(f"background={background!r}: it is true or false")
            changes["background"] = background
        for name, recording in (("replay", replay), ("compare", compare)):
            if recording is not None:
                changes[name] = features.import_module_of("recordings.given").check_option(name, recording)
        return attrs.evolve(self, **changes)

    @property
    def label(self) -> str:
        """The role's name in errors and in the ownership graph."""
        return self.target if isinstance(self.target, str) else self.target.__qualname__


@attrs.define(eq=False)
class RoleInfo:
    """The driver's record of one role of a group, with the slots in order of rank.

    `slots`, `meshes` and `ranks` change when the group continues with another number of slots; views read them on
    each use.
    """

    name: str
    cls: type
    methods: Mapping[str, MethodSpec]
    slots: tuple[int, ...] | range
    meshes: Mapping[str, Mesh]
    origin: str
    key: Any = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True), kw_only=True)
    """The key under which workers know the role."""
    is_substituted: bool = attrs.field(default=False, kw_only=True)
    """Whether a substitute answers for the role, which isn't constructed."""
    ranks: Ranks = attrs.field(
        init=False, default=attrs.Factory(lambda self: Ranks(len(self.slots), self.meshes), takes_self=True)
    )

    def resize(self, slots: range, meshes: Mapping[str, Mesh]) -> None:
        self.slots, self.meshes, self.ranks = slots, meshes, Ranks(len(slots), meshes)


def torchrun_problem(ranks: int, slots: int) -> str | None:
    """Return the reason why a role on only some slots can't have torchrun's environment; None for a role on all."""
    if ranks == slots:
        return None
    return (
        f"torchrun's environment is of all {slots} slots of the group (WORLD_SIZE), and the role is on {ranks} of them"
        ": a library would wait for ranks that aren't there. Give the role all slots, or a group of its own"
    )


def fixed_problem(slots: Sequence[int] | None, mesh: Any, least: int) -> tuple[str, str] | None:
    """Return the option and the reason that prevent a role from continuing with fewer slots; None for other roles.

    Args:
        slots: The slots that the role names; None for all.
        mesh: The role's own mesh, or the group's.
        least: The least number of slots.
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
    """Declare a role by a class, or the name of a plugin's role, with (type-checked) constructor arguments.

    Args:
        target: A class, "plugin.role", or "module:Class".
        *args: Positional arguments of the constructor.
        **kwargs: Keyword arguments of the constructor.
    """
    target = strip_type_arguments(target)
    if not isinstance(target, type | str):
        raise ConfigError(
            f"a role is a class or a plugin's name, not {target!r}; pass the class and its arguments apart"
        )
    return RoleSpec(target, args, kwargs)


def strip_type_arguments(cls: Any) -> Any:
    """Return a class without type arguments, which only type checkers need."""
    origin = get_origin(cls)
    return origin if isinstance(origin, type) and origin is not UnionType else cls  # A union isn't a class.


def check_role(name: str, cls: type) -> Mapping[str, MethodSpec]:
    """Return the methods of a role's class; raise a `ConfigError` if there are none."""
    methods = methods_of(cls)
    if not methods:
        raise ConfigError(
            f"role {name!r}: {cls.__module__}.{cls.__qualname__} has no role methods; decorate one with "
            "@colocate.method"
        )
    return methods


def no_such_method(role: str, name: str, methods: Mapping[str, MethodSpec]) -> AttributeError:
    """Return the error for an unknown method of a role, which lists the known methods."""
    hint = did_you_mean(name, methods) or "; only methods decorated with @method can be called on a view"
    # Python would add a hint to the text if `obj` weren't set.
    return AttributeError(f"role {role!r} has no method {name!r}: it has {', '.join(sorted(methods))}{hint}", obj=role)
