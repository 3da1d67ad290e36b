"""Check the declared roles of a group before a start, and compose the build message for the workers."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from colocate import wire
from colocate._definitions.bundles import check_shared_parameters
from colocate._definitions.names import find_import_path, is_installed
from colocate._definitions.sources import list_rebound
from colocate._plugins.plugins import find_role
from colocate._role.budget import NO_BUDGETS, Budgets
from colocate._role.call import refuse_in_constructor
from colocate._role.role import RoleInfo, RoleSpec, check_role, fixed_problem, torchrun_problem
from colocate._system.installed import get_version
from colocate._system.numbers import find_name_problem
from colocate._values.collect import check_meshes
from colocate._values.mesh import get_default_meshes, parse_meshes
from colocate.errors import ColocateError, ConfigError, Mistake, RoleError, RoleStartError
from colocate.worker.serving.build import RoleBuild, ShippedObject

if TYPE_CHECKING:
    from colocate._definitions.bundles import ReceivedDefinitions
    from colocate._values.codec import Codec


@attrs.frozen
class Declared:
    """The checked declaration of a group's roles. `definitions` keeps unpacked definitions alive."""

    infos: Mapping[str, RoleInfo]
    specs: Mapping[str, RoleSpec[Any]]
    distributions: Mapping[str, tuple[str | None, str | None]]
    default_group: bool
    torchrun: bool
    definitions: ReceivedDefinitions | None = None
    budgets: Budgets = NO_BUDGETS
    env: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def background(self) -> Sequence[str]:
        return tuple(name for name, spec in self.specs.items() if spec.background)


def declare(roles: Mapping[str, RoleSpec[Any]], slots: int, mesh: Mapping[str, Any] | None) -> Declared:
    """Check the declared roles of a group against the group's slots.

    Raises:
        ConfigError: The declaration has mistakes; the error lists all.
        PluginError: A role's plugin is missing or broken.
    """
    if not roles:
        raise ConfigError("a group needs at least one role: pool.spawn({'actor': colocate.role(Actor)})")
    if not isinstance(roles, Mapping):
        kind = type(roles).__name__
        raise ConfigError(f"a group's roles are a dict, by name: {{'actor': colocate.role(Actor)}}, not a {kind}")
    mistakes: list[Mistake] = []
    infos: dict[str, RoleInfo] = {}
    distributions: dict[str, tuple[str | None, str | None]] = {}
    for name, spec in roles.items():
        if not isinstance(spec, RoleSpec):
            mistakes.append(Mistake(f"roles.{name}", None, f"is {spec!r}; wrap the class: colocate.role(...)"))
            continue
        try:
            infos[name], distributions[name] = _declare_one(name, spec, slots, mesh)
        except ConfigError as error:
            mistakes.append(Mistake(f"roles.{name}", None, error.message))
    if mistakes:
        raise ConfigError("the group can't be spawned:", mistakes=tuple(mistakes))
    torchrun = any(spec.env == "torchrun" for spec in roles.values())
    default_group = torchrun or any(spec.default_group for spec in roles.values())
    return Declared(infos, dict(roles), distributions, default_group, torchrun)


def _declare_one(
    name: str, spec: RoleSpec[Any], slots: int, mesh: Mapping[str, Any] | None
) -> tuple[RoleInfo, tuple[str | None, str | None]]:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"{name!r} can't be a role's name: use letters, digits and _")
    if (problem := find_name_problem(name)) is not None:
        raise ConfigError(problem)
    cls: type
    if isinstance(spec.target, str):
        role_plugin = find_role(spec.target)
        cls, origin = role_plugin.load(), role_plugin.origin
        distribution = role_plugin.distribution, role_plugin.version
    else:
        cls, origin, distribution = spec.target, spec.target.__module__, (None, None)
    methods = check_role(name, cls)
    if spec.slots is not None and max(spec.slots) >= slots:
        raise ConfigError(f"slot {max(spec.slots)} is named, but the group has {slots} (from 0)")
    places = range(slots) if spec.slots is None else _compact_slots(spec.slots)
    if spec.env == "torchrun" and (why := torchrun_problem(len(places), slots)) is not None:
        raise ConfigError(why)
    declared = spec.mesh if spec.mesh is not None else mesh if places == range(slots) else None
    meshes = get_default_meshes(len(places)) if declared is None else parse_meshes(declared, len(places))
    info = RoleInfo(name, cls, methods, places, meshes, origin, is_substituted=spec.replay is not None)
    for method, declaration in methods.items():
        check_meshes(declaration.dispatch, declaration.collect, info.ranks, f"{info.name}.{method}")
    return info, distribution


def check_can_shrink(specs: Mapping[str, RoleSpec[Any]], mesh: Mapping[str, Any] | None, least: int, most: int) -> None:
    """Refuse roles that can't continue with fewer slots.

    Raises:
        ConfigError: The declaration has mistakes; the error lists all.
    """
    problems = {name: fixed_problem(spec.slots, spec.mesh or mesh, least) for name, spec in specs.items()}
    mistakes = [
        Mistake(f"roles.{name}.{problem[0]}", None, problem[1])
        for name, problem in problems.items()
        if problem is not None
    ]
    if mistakes:
        words = f"the group can't be spawned on {least} to {most} slots, with any number of which it may go on:"
        raise ConfigError(words, mistakes=tuple(mistakes))


def resize_roles(declared: Declared, slots: int) -> None:
    """Set the new number of slots of all roles that aren't bound to certain slots."""
    for name, info in declared.infos.items():
        if declared.specs[name].slots is None:
            info.resize(range(slots), get_default_meshes(slots))


def _compact_slots(slots: tuple[int, ...]) -> tuple[int, ...] | range:
    """Return evenly spaced slots as a range, because messages contain the slots, and a range is always small."""
    first, last = slots[0], slots[-1]
    step = slots[1] - first if len(slots) > 1 else 1
    even = range(first, last + step, step)
    return even if tuple(even) == slots else slots


def ship(
    thing: Any, name: str, *, in_process: bool, distribution: str | None = None, version: str | None = None
) -> ShippedObject:
    """Return the wire format of a class or function.

    Raises:
        Exception: Pickling failed; this only happens to objects that are neither classes nor functions.
    """
    if in_process:
        return ShippedObject(name, cls=thing)
    path = find_import_path(thing)
    if path is None:
        return ShippedObject(name, data=wire.pack(thing))
    if distribution is None and is_installed(sys.modules[path[0]]):
        distribution, version = _distribution(path[0].partition(".")[0])
    return ShippedObject(":".join(path), distribution=distribution, version=version)


@functools.cache
def _distribution(package: str) -> tuple[str | None, str | None]:
    """Return the name and version of the distribution that provides an import package; None for an unknown one."""
    if (version := get_version(package)) is not None:
        return package, version
    try:
        names = importlib.metadata.packages_distributions().get(package) or [""]
    except FileNotFoundError:  # importlib.metadata raises this if a distribution has no metadata.
        return None, None
    return (names[0], get_version(names[0])) if names[0] else (None, None)


def pack_builds(
    declared: Declared,
    codec: Codec,
    group: str,
    seed: int,
    generation: int,
    in_process: bool,
    parts: Mapping[str, Mapping[str, Any]],
) -> Any:
    """Return the body of the build message, which describes all roles and goes to all workers.

    Raises:
        SerializationError: A class or a constructor argument can't be sent.
    """
    role_builds = []
    for name, info in declared.infos.items():
        spec = declared.specs[name]
        arguments = None
        if spec.args or spec.kwargs:
            named_arguments = {**{f"argument {index}": value for index, value in enumerate(spec.args)}, **spec.kwargs}
            label = f"the constructor of role {name!r}"
            refuse_in_constructor(named_arguments, label)
            try:
                arguments = codec.pack((spec.args, dict(spec.kwargs)))
            except Exception:
                codec.pack_arguments(named_arguments, label)  # This raises an error that names the bad argument.
                raise
            if getattr(arguments, "has_trained", False):
                check_shared_parameters(named_arguments, (*arguments.needs, *wire.pack(info.cls).needs), label)
        distribution, version = declared.distributions[name]
        name_here = f"{info.cls.__module__}:{info.cls.__qualname__}"
        shipped = ship(info.cls, name_here, in_process=in_process, distribution=distribution, version=version)
        of_role = parts.get(name, {})
        role_builds.append(
            RoleBuild(name, shipped, arguments, info.slots, info.meshes, group, seed, generation, of_role)
        )
    try:
        body = codec.pack(role_builds)
    except Exception:
        # This call raises an error that names the class.
        codec.pack_arguments({build.shipped.name: build.shipped for build in role_builds}, "a role's class")
        raise
    inner = (
        packed
        for build in role_builds
        for packed in (build.shipped.data, build.arguments)
        if isinstance(packed, wire.Packed)
    )
    needs = tuple(need for packed in inner for need in packed.needs)
    return body._replace(needs=(*body.needs, *needs)) if needs else body


def warn_of_rebound(declared: Declared, group: str, line: tuple[str, int]) -> None:
    """Warn of names in the roles' modules that the driver has rebound, because workers lack the new values."""
    names = list_rebound(info.cls for info in declared.infos.values())
    if names:
        text = (
            f"the workers of group {group!r} import the modules of its roles, and don't get values that the driver has "
            f"set after its own import: {'; '.join(names)}. Pass such a value to the role's constructor, or set it in "
            "the module's source"
        )
        warnings.warn_explicit(text, RuntimeWarning, *line)


def start_error(group: str, errors: Mapping[int, ColocateError]) -> RoleStartError:
    """Return the error of a failed start. Errors that only follow from another rank's error are left out."""
    causes = {rank: error for rank, error in sorted(errors.items()) if not error._is_consequence}
    shown_errors = causes or dict(sorted(errors.items()))
    rank, first = next(iter(shown_errors.items()))
    lines = [f"  rank {rank}: {error.message}" for rank, error in shown_errors.items()]
    failed = f"{len(lines)} ranks" if len(lines) > 1 else "1 rank"
    failure = RoleStartError(
        f"group {group!r} could not start: {failed} failed\n" + "\n".join(lines),
        errors=shown_errors,
        group=group,
        role=first.role,
        method=first.method,
        rank=rank,
        node=first.node,
        pid=first.pid,
        remote_traceback=first.remote_traceback,
    )
    failure.__cause__ = first.__cause__ if isinstance(first, RoleError) else first
    return failure
