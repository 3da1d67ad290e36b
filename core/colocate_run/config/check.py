"""Check a whole config: references, plugins, and arguments against signatures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from colocate.errors import ConfigError, PluginError
from colocate.executor import Executor, Growing, Labelled, OwnProcess, SharedSlots
from colocate.plugins import (
    RoleSpec,
    check_of,
    find_executor,
    find_job,
    find_observer,
    find_role,
    lacks_processes,
    lacks_vmm,
    only_plugins,
)
from colocate.signatures import (
    NO_BUDGET,
    Arguments,
    Budget,
    Budgets,
    Place,
    amount_problem,
    arguments_of,
    budgets,
    fixed_problem,
    name_problem,
    options_of,
    parse_meshes,
    path_text,
    torchrun_problem,
    variable_problem,
)
from colocate.texts import nearest
from colocate_run.config.schema import Config, GroupConfig, ObserverConfig, PoolConfig, RoleConfig
from colocate_run.config.source import Document
from colocate_run.config.trust import Trust
from colocate_run.recorded import mistakes

_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_][\w.]*")  # The form `module:object`, which a job could import.


def check(config: Config, document: Document, allow_import: bool = True) -> None:
    """Check the parts of a config against each other, and add mistakes to the document."""
    with only_plugins(config.plugins.allow):
        _check(config, document, Trust(allow_import))


def _check(config: Config, document: Document, trust: Trust) -> None:
    _names(config, document)
    executor = _executor(config, trust, document)
    _variables(trust, document)
    for name, pool in config.pools.items():
        _pool(pool, executor, ("pools", name), document)
    classes = _groups(config, executor, trust, document)
    _job(config, classes, trust, document)
    for place, problem, near in mistakes(config):
        document.wrong(place, problem, near)
    for index, observer in enumerate(config.observe):
        _observer(observer, trust, ("observe", index), document)
    if config.groups:  # A config without groups is for code that spawns groups itself.
        used = {group.pool for group in config.groups.values()}
        for name in config.pools:
            if name not in used:
                document.warn(("pools", name), "no group uses this pool; it would be reserved all the same")


def _names(config: Config, document: Document) -> None:
    places = [*(("pools", name) for name in config.pools), *(("groups", name) for name in config.groups)]
    roles = [
        (*place, "roles", name)
        for place in places
        if place[0] == "groups"
        for name in config.groups[place[1]].roles
        if name.isidentifier()  # Other names are reported with the role.
    ]
    for place, name in [(("name",), config.name), *((place, place[-1]) for place in (*places, *roles))]:
        if (problem := name_problem(name)) is not None:
            document.wrong(place, problem)


def _missing(error: PluginError, place: Place, document: Document) -> None:
    """Add a mistake for a missing plugin; report a missing module once, even if several plugins need the module."""
    # An error with a complete message has a hidden cause in `__context__`.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ModuleNotFoundError) and cause.name and f"module {cause.name} " not in error.message:
        if cause.name in document.lacking:
            return
        document.lacking.add(cause.name)
    document.wrong(place, error.message)


def _trusted(trust: Trust, use: str, place: Place, document: Document) -> bool:
    why = trust.objection(use)
    if why is not None:
        document.wrong(place, why)
    return why is None


def _executor(config: Config, trust: Trust, document: Document) -> type[Executor] | None:
    """Check the executor; return the class of the chosen variant, or None if the executor is unknown."""
    if not _trusted(trust, config.executor.use, ("executor", "use"), document):
        return None
    try:
        executor = find_executor(config.executor.use)
    except PluginError as error:
        _missing(error, ("executor", "use"), document)
        return None
    arguments, options = _connect_arguments(executor), config.executor.with_
    _with(arguments, options, ("executor",), document)
    known_options = {name: value for name, value in options.items() if arguments.open or name in arguments.parameters}
    _harmless(trust, executor, known_options, ("executor",), document)
    kind = executor.variant(config.executor.with_)
    if config.executor.with_.get("spill_dir") is not None and not issubclass(kind, OwnProcess):
        document.wrong(("executor", "with", "spill_dir"), _no_sleep(kind))
    return kind


def _harmless(trust: Trust, cls: type, given: Mapping[str, Any], place: Place, document: Document) -> None:
    for name, why in trust.objections_to_options(cls, given).items():
        if not document.is_callers(option := (*place, "with", name)):
            document.wrong(option, why)


def _connect_arguments(executor: type[Executor]) -> Arguments:
    """Return the options of an executor in a config: the parameters of `colocate.connect` and the executor's own."""
    from colocate.connecting import connect  # Imported here, because this module needs all of core.

    executor_options = options_of(executor)
    general = arguments_of(connect, executor_options.owner)
    reserved = ("executor", "seed", "call_timeout", "replace")  # A config has own keys for these, or no use.
    parameters = {
        name: p for name, p in {**general.parameters, **executor_options.parameters}.items() if name not in reserved
    }
    return attrs.evolve(executor_options, parameters=parameters, hints={**general.hints, **executor_options.hints})


def _variables(trust: Trust, document: Document) -> None:
    """Check the environment variables in a config's data, also in entries with other mistakes."""
    for key in ("pools", "groups"):
        entries = document.data.get(key)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            env = entry.get("env") if isinstance(entry, dict) else None
            for variable in env if isinstance(env, dict) else ():
                if (why := trust.objection_to_variable(variable)) is not None:
                    document.wrong((key, name, "env", variable), why)


def _job(config: Config, classes: Mapping[tuple[str, str], type], trust: Trust, document: Document) -> None:
    if config.job is None or not _trusted(trust, config.job.use, ("job", "use"), document):
        return
    try:
        function = find_job(config.job.use).load()
    except PluginError as error:
        _missing(error, ("job", "use"), document)
    else:
        arguments = arguments_of(function, f"job {config.job.use}", skip=1)
        for name, value in config.job.with_.items():
            option = ("job", "with", name)
            if isinstance(value, str) and _MODULE.fullmatch(value) and not document.is_callers(option):
                _trusted(trust, value, option, document)
        if _with(arguments, config.job.with_, ("job",), document):
            groups = {
                name: {
                    role: attrs.evolve(spec, target=classes.get((name, role), spec.target))
                    for role, spec in _specs(group).items()
                }
                for name, group in config.groups.items()
            }
            _own(function, arguments, config.job.with_, (groups,), ("job",), document)


def _observer(observer: ObserverConfig, trust: Trust, place: Place, document: Document) -> None:
    if not _trusted(trust, observer.use, (*place, "use"), document):
        return
    try:
        factory = find_observer(observer.use).load()
    except PluginError as error:
        _missing(error, (*place, "use"), document)
        return
    _with(arguments_of(factory, observer.use), observer.with_, place, document)
    for name in observer.with_:
        option = (*place, "with", name)
        if (why := trust.objection_to_observers_option()) is not None and not document.is_callers(option):
            document.wrong(option, why)


def _pool(pool: PoolConfig, executor: type[Executor] | None, place: Place, document: Document) -> None:
    _environment(pool.env, executor, (*place, "env"), document)
    _labelled(pool, executor, place, document)
    if (problem := amount_problem(pool.slots, whole=True, least=1)) is not None:
        document.wrong((*place, "slots"), problem)
    if pool.at_least is not None and pool.at_least > pool.slots:
        document.wrong((*place, "at_least"), f"is {pool.at_least}, and the pool has {pool.slots} slots")
    elif pool.at_least is not None and pool.groups != 1:
        document.wrong((*place, "at_least"), "groups that share slots can't go on with fewer: leave out one of the two")
    if (problem := amount_problem(pool.groups, whole=True, least=1)) is not None:
        document.wrong((*place, "groups"), problem)
    elif pool.groups > 1 and executor is not None:
        if not issubclass(executor, SharedSlots):
            document.wrong((*place, "groups"), f"executor {executor.name!r} can't let groups share slots")
        elif (pool.device_memory or pool.host_memory) and not issubclass(executor, OwnProcess):
            text = (
                f"slots of {executor.name!r} are threads of this process, whose memory groups share: leave out "
                "device_memory and host_memory of this pool, or use executor.with.processes=true"
            )
            document.wrong((*place, "groups"), text)


def _labelled(pool: PoolConfig, executor: type[Executor] | None, place: Place, document: Document) -> None:
    if executor is not None and not issubclass(executor, Labelled):
        for name in ("labels", "resources", "together"):
            if getattr(pool, name):
                text = (
                    f"executor {executor.name!r} knows no labels of nodes, and no resources but CPUs, GPUs and memory"
                )
                document.wrong((*place, name), text)
    if pool.grow and executor is not None and not issubclass(executor, Growing):
        document.wrong((*place, "grow"), f"executor {executor.name!r} has the nodes that it has: none are to come")


def _no_sleep(executor: type[Executor]) -> str:
    return (
        f"slots of {executor.name!r} are threads of this process, whose roles can't sleep: use "
        "executor.with.processes=true"
    )


def _environment(env: Mapping[str, str], executor: type[Executor] | None, place: Place, document: Document) -> None:
    if env and executor is not None and not issubclass(executor, OwnProcess):
        text = (
            f"slots of {executor.name!r} are threads of this process, whose environment they share: set it where that "
            "is started, or use executor.with.processes=true"
        )
        document.wrong(place, text)
    for variable, value in env.items():
        if (why := variable_problem(variable, value)) is not None:
            document.wrong((*place, variable), why)


def _budgets(group: GroupConfig, pool: PoolConfig | None, place: Place, document: Document) -> None:
    if any(mistake.path.endswith(("_memory", "reserve_activations")) for mistake in document.mistakes):
        return
    try:
        budgets_of(group, pool)
    except ConfigError as error:
        document.wrong(place, error.message)


def budgets_of(group: GroupConfig, pool: PoolConfig | None) -> Budgets:
    """Return the memory budgets of a group's slots and roles."""
    roles: dict[str, RoleSpec[Any]] = {
        name: RoleSpec(role.use).on(
            device_memory=role.device_memory,
            host_memory=role.host_memory,
            reserve_activations=role.reserve_activations,
            background=role.background,
        )
        for name, role in group.roles.items()
    }
    slot = NO_BUDGET if pool is None else Budget.of(pool.device_memory, pool.host_memory)
    return budgets(slot, Budget.of(group.device_memory, group.host_memory), roles, group.residency, group.step)


def _groups(
    config: Config, executor: type[Executor] | None, trust: Trust, document: Document
) -> dict[tuple[str, str], type]:
    """Check all groups; return the importable classes of roles, by group and role."""
    classes: dict[tuple[str, str], type] = {}
    groups_by_pool: dict[str, list[str]] = {}
    for name, group in config.groups.items():
        place: Place = ("groups", name)
        occupants = groups_by_pool.setdefault(group.pool, [])
        _pool_of(group.pool, config.pools.get(group.pool), occupants, place, document)
        occupants.append(name)
        if not document.data["groups"][name]["roles"]:
            document.wrong((*place, "roles"), "a group needs at least one role")
        pool = config.pools.get(group.pool)
        if pool is not None:
            _mesh(group.mesh, pool.slots, (*place, "mesh"), document)
        _budgets(group, pool, place, document)
        if group.residency is not None and executor is not None and not issubclass(executor, OwnProcess):
            document.wrong((*place, "residency"), _no_sleep(executor))
        _environment(group.env, executor, (*place, "env"), document)
        if (problem := amount_problem(group.restarts, whole=True, least=1)) is not None:
            document.wrong((*place, "restarts"), f"{problem}; a group that isn't restarted has on_failure: fail")
        for role_name, role in group.roles.items():
            below = (*place, "roles", role_name)
            least = None if pool is None or group.on_failure == "fail" else pool.at_least
            if least is not None and pool is not None and least < pool.slots:
                _resizable(role, group, least, below, document)
            cls = _role(role_name, role, group, pool, trust, below, document)
            if cls is not None:
                classes[name, role_name] = cls
            ranks = len(role.slots) if role.slots is not None else pool.slots if pool is not None else 1
            if (
                cls is not None
                and executor is not None
                and (why := lacks_processes(role_name, cls, role.default_group, role.env, ranks, executor))
            ):
                document.wrong(below, why)
            if pool is not None and (why := lacks_vmm(role_name, role.sleep, pool.gpus, executor)):
                document.wrong((*below, "sleep"), why)
    return classes


def _pool_of(pool: str, found: PoolConfig | None, others: Sequence[str], place: Place, document: Document) -> None:
    declared = document.data.get("pools", {})
    if not isinstance(declared, dict):
        return  # This mistake was reported before, and the pools' names are unknown.
    if pool not in declared:
        hint = f"there are {', '.join(declared)}" if declared else "there is none"
        near = nearest(pool, declared)
        document.wrong((*place, "pool"), f"no pool is called {pool!r}; {hint}", near)
    elif found is not None and len(others) >= found.groups >= 1:
        names = " and ".join(map(repr, others[: found.groups]))
        holders = f"group {names}" if found.groups == 1 else f"groups {names}"
        rule = "one group" if found.groups == 1 else f"{found.groups} groups"
        text = f"pool {pool!r} has {holders} already: a slot takes {rule} at a time; pools.{pool}.groups says how many"
        document.wrong((*place, "pool"), text)


def _role(
    name: str,
    role: RoleConfig,
    group: GroupConfig,
    pool: PoolConfig | None,
    trust: Trust,
    place: Place,
    document: Document,
) -> type | None:
    if not name.isidentifier():
        document.wrong(place, f"{name!r} can't be a role's name: use letters, digits and _")
    if pool is not None and _slots(role, pool, place, document):
        count = pool.slots if role.slots is None else len(role.slots)
        _mesh(role.mesh, count, (*place, "mesh"), document)
    if not _trusted(trust, role.use, (*place, "use"), document):
        return None
    try:
        cls = find_role(role.use).load()
    except PluginError as error:
        _missing(error, (*place, "use"), document)
        return None
    arguments = arguments_of(cls, role.use)
    _harmless(trust, cls, role.with_, place, document)
    if _with(arguments, role.with_, place, document):
        specs = _specs(group)
        before = dict(itertools.takewhile(lambda each: each[0] != name, specs.items()))
        _own(cls, arguments, role.with_, (specs[name], before), place, document)
    return cls


def _resizable(role: RoleConfig, group: GroupConfig, least: int, place: Place, document: Document) -> None:
    if (why := fixed_problem(role.slots, role.mesh or group.mesh, least)) is not None:
        document.wrong((*place, why[0]), f"{why[1]} (at_least of pool {group.pool})")


def _specs(group: GroupConfig) -> dict[str, RoleSpec[Any]]:
    """Return a group's roles as specs, which may be invalid."""
    return {
        name: RoleSpec(
            role.use,
            kwargs=role.with_,
            slots=None if role.slots is None else tuple(role.slots),
            mesh=role.mesh,
            default_group=role.default_group,
            env=role.env,
            sleep=role.sleep,
            weights=role.weights,
            background=role.background,
        )
        for name, role in group.roles.items()
    }


def _own(
    target: Callable[..., Any],
    arguments: Arguments,
    given: Mapping[str, Any],
    around: tuple[Any, ...],
    place: Place,
    document: Document,
) -> None:
    if (function := check_of(target)) is None:
        return
    defaults = {
        name: parameter.default
        for name, parameter in arguments.parameters.items()
        if parameter.default is not parameter.empty
    }
    try:
        for at, problem in function({**defaults, **arguments.built(given)}, *around):
            option = (*place, "with", *((at,) if isinstance(at, str) else at))
            if isinstance(problem, PluginError):
                _missing(problem, option, document)
            else:
                document.wrong(option, problem)
    except Exception as error:  # A plugin's code may raise any error.
        document.wrong((*place, "use"), f"what checks its options raised {type(error).__name__}: {error}")


def _slots(role: RoleConfig, pool: PoolConfig, place: Place, document: Document) -> bool:
    if role.slots is None:
        return True
    if not role.slots:
        document.wrong((*place, "slots"), "name at least one slot, or leave the key out for all")
        return False
    for i, slot in enumerate(role.slots):
        if not 0 <= slot < pool.slots:
            hint = f"the pool has {pool.slots}, counted from 0" if pool.slots > 1 else "the pool has one, slot 0"
            document.wrong((*place, "slots", i), f"there is no slot {slot}: {hint}")
            return False
    if len(set(role.slots)) < len(role.slots):
        document.wrong((*place, "slots"), f"{role.slots} names a slot twice")
        return False
    if role.env == "torchrun" and (why := torchrun_problem(len(role.slots), pool.slots)) is not None:
        document.wrong((*place, "env"), why)
    return True


def _mesh(mesh: Mapping[str, Any] | None, slots: int, place: Place, document: Document) -> None:
    try:
        parse_meshes(mesh, slots)
    except ConfigError as error:
        document.wrong(place, error.message)


def _with(arguments: Arguments, given: Mapping[str, Any], place: Place, document: Document) -> bool:
    """Check arguments against a signature, and add mistakes to the document; return whether there were none."""
    before = len(document.mistakes)
    for problem in arguments.problems(given):
        at = (*place, "with", *problem.place) if problem.place else place
        document.wrong(at, problem.message, problem.nearest)
    if not arguments.open:
        return len(document.mistakes) == before
    founded = [name for name in given if (*place, "with", name) not in document.unfounded]
    for name in given:
        if name not in founded and name not in arguments.parameters:
            at = (*place, "with", name)
            near = nearest(name, [*arguments.parameters, *founded])
            text = f"{arguments.owner} takes any name, and the config doesn't give it this one; to add it, write a +"
            document.wrong(at, f"{text}: --set +{path_text(at)}=...", near)
    return len(document.mistakes) == before
