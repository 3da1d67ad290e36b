"""Requirements of role classes, checked before a group starts."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

from colocate._definitions.names import MAINS, is_installed_file
from colocate._definitions.sources import is_shipped_with_python, list_shadowing
from colocate._plugins.plugins import abouts
from colocate._role.role import RoleInfo, RoleSpec
from colocate.errors import CapabilityError, ConfigError, PluginError
from colocate.executor import Executor
from colocate.gpus import KIND, KINDS
from colocate.worker.birth.template import LONG

C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

OptionProblems: TypeAlias = Iterable[tuple[str | Sequence[str | int], str | PluginError]]
"""Problems of options: the name of each option, or the keys to a nested value, and a text or an error."""

NEEDS = "__colocate_needs__"
_CHECK = "__colocate_check__"
_KNOWN = ("process_group", "process")


def needs(*what: Literal["process_group", "process"]) -> Callable[[C], C]:
    """Declare requirements of a role class; subclasses inherit the declaration.

    `colocate check`, `colocate doctor` and `pool.spawn` refuse a group on an executor without these.

    Args:
        *what: "process_group": if the role has several ranks, these make process groups (`ctx.process_group()`), for
            which each rank needs a process. "process": the role changes state of the whole process (the environment,
            patched modules, an engine of which a process has one), so each rank needs a process of its own, and a
            slot holds at most one such role of a group.
    """
    unknown = [kind for kind in what if kind not in _KNOWN]
    if unknown or not what:
        raise ConfigError(f"@colocate.needs({', '.join(map(repr, what))}): what can be needed is {', '.join(_KNOWN)}")

    def declare(cls: C) -> C:
        setattr(cls, NEEDS, needed_by(cls) | {*what})
        return cls

    return declare


def needed_by(cls: type) -> frozenset[str]:
    declared_needs: frozenset[str] = getattr(cls, NEEDS, frozenset())
    return declared_needs


def checks(function: Callable[..., OptionProblems]) -> Callable[[F], F]:
    """Return a decorator that adds a check of options, beyond the signature's, to a role class or a job.

    `colocate check`, and other readers of a config, call the function on options that fit the signature, and report
    each problem with the option's line. `pool.spawn` doesn't: a constructor refuses unsuitable arguments itself.
    Subclasses inherit the check together with the constructor; a subclass with its own constructor has other
    options.

    Args:
        function: Yields `(option, problem)`; the option may be a sequence of keys to a nested value, and the problem
            a `PluginError`, if the option names an unavailable plugin. For a role, the arguments are a mapping of
            the constructor's arguments, the role's own `RoleSpec`, and a mapping of the roles declared before in the
            same group; for a job, a mapping of its arguments, and a mapping of groups, each a mapping of `RoleSpec`s
            with classes as targets, if available. Arguments that the config doesn't give have their defaults.
    """

    def declare(target: F) -> F:
        setattr(target, _CHECK, function)
        return target

    return declare


def check_of(target: Callable[..., Any]) -> Callable[..., OptionProblems] | None:
    """Return the check of a role class's or job's options; None if there is none."""
    check: Callable[..., OptionProblems] | None = getattr(target, _CHECK, None)
    if check is None or not isinstance(target, type):
        return check
    declared = next(base for base in target.__mro__ if _CHECK in vars(base))
    return check if inspect.getattr_static(target, "__init__") is inspect.getattr_static(declared, "__init__") else None


def require(executor: type[Executor], capability: type, what: str) -> None:
    """Raise `CapabilityError` if an executor lacks a capability. The error names executors that have it."""
    if not issubclass(executor, capability):
        # Read only the descriptions of the installed executors, without importing an executor.
        having = tuple(
            about.capabilities[capability.__name__]
            for info, about in abouts()
            if capability.__name__ in about.capabilities
            and None not in info.engine().values()  # Skip executors that lack a distribution such as ray.
        )
        raise CapabilityError(
            f"executor {executor.name!r} can't {what}: it lacks {capability.__name__}; "
            f"these have it: {', '.join(having) or 'no installed one'}",
            capability=capability.__name__,
            executors=having,
        )


def lacks_processes(
    role: str, cls: type, default_group: bool, env: str | None, ranks: int, executor: type[Executor]
) -> str | None:
    """Return why an executor can't give a role's ranks the needed processes; None if the executor can."""
    if env is not None and executor.in_process:
        return (
            f"role {role!r} wants the environment of {env}, which is its whole process's, but slots of "
            f"{executor.name!r} are threads of one: use connect('local', processes=True), in a config "
            "executor.with.processes=true"
        )
    if "process" in needed_by(cls) and executor.in_process:
        return (
            f"role {role!r} needs a process for each rank (@needs('process')), but slots of {executor.name!r} are "
            "threads of the driver's: use connect('local', processes=True), in a config executor.with.processes=true"
        )
    if ranks < 2 or not executor.in_process or not (default_group or "process_group" in needed_by(cls)):
        return None
    return (
        f"role {role!r} makes process groups of its {ranks} ranks, which need a process each, but slots of "
        f"{executor.name!r} are threads of one: use connect('local', processes=True), in a config "
        "executor.with.processes=true"
    )


def check_needs(role: str, cls: type, spec: RoleSpec[Any], ranks: int, gpus: int, executor: type[Executor]) -> None:
    """Raise CapabilityError if the executor or the slots don't meet a role's requirements."""
    if (why := lacks_processes(role, cls, spec.default_group, spec.env, ranks, executor)) is not None:
        raise CapabilityError(why, capability="OwnProcess", executors=("local with processes=True",), role=role)
    if (why := lacks_vmm(role, spec.sleep, gpus, executor)) is not None:
        raise CapabilityError(why, role=role)


def check_alone(roles: Mapping[str, RoleInfo]) -> None:
    """Raise ConfigError if two roles that each need a process share a slot."""
    alone = {name: info for name, info in roles.items() if "process" in needed_by(info.cls)}
    for (one, one_info), (other, other_info) in itertools.combinations(alone.items(), 2):
        if both := sorted(set(one_info.slots) & set(other_info.slots)):
            raise ConfigError(
                f"roles {one!r} and {other!r} each need a process of their own (@needs('process')), and share that of "
                f"slot {both[0]}: have them on other slots (.on(slots=...)), or in other groups"
            )


def lacks_vmm(role: str, sleep: str | None, gpus: int, executor: type[Executor] | None) -> str | None:
    """Return why a role can't use `sleep="vmm"` on slots with GPUs; None if the role can."""
    if sleep != "vmm" or not gpus:
        return None
    if not KIND.vmm:
        able = " or ".join(name for name, kind in KINDS.items() if kind.vmm)
        own_kind = next(name for name, kind in KINDS.items() if kind is KIND)
        return (
            f'role {role!r} says sleep="vmm", which is for GPUs of {able}: colocate has no way to take memory of those '
            f"of {own_kind} from its addresses. Leave it out: then memory has other addresses after a sleep"
        )
    if executor is not None and executor.in_process:
        return (
            f'role {role!r} says sleep="vmm", but slots of {executor.name!r} are threads of the driver\'s, where no '
            "role sleeps: use connect('local', processes=True), in a config executor.with.processes=true"
        )
    return None


def imports_of(classes: Iterable[type]) -> tuple[str, ...] | None:
    """Return the slow imports that role classes need (`Boot.imports`); None if files shadow Python's modules."""
    if list_shadowing():
        return None
    classes = list(classes)
    visited: set[str] = set()
    todo = [base.__module__ for cls in classes for base in cls.__mro__]
    tops = {name.partition(".")[0] for name in todo}
    own_modules = {cls.__module__ for cls in classes}
    while todo:
        name = todo.pop()
        if name in visited or (is_shipped_with_python(name) and name not in MAINS and name not in own_modules):
            continue
        visited.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is not None and (name.partition(".")[0] in tops or not file or not is_installed_file(file)):
            todo += _used_by(module)
    return tuple(name for name in LONG if any(module_name.partition(".")[0] == name for module_name in visited))


def _used_by(module: ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a module imports, or imports functions and classes from."""
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, FunctionType) or type(value) is type:
            yield str(value.__module__)
