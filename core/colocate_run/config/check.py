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
    arguments_of,
    budgets,
    find_amount_problem,
    find_name_problem,
    find_variable_problem,
    fixed_problem,
    options_of,
    parse_meshes,
    path_text,
    torchrun_problem,
)
from colocate.texts import find_nearest
from colocate_run.config.schema import Config, GroupConfig, ObserverConfig, PoolConfig, RoleConfig
from colocate_run.config.source import Document
from colocate_run.config.trust import Trust
from colocate_run.recorded import find_mistakes

_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_][\w.]*")  # A text that a job could import: `module:object`.


def check_config(config: Config, document: Document, allow_import: bool = True) -> None:
    """Check the parts of a config against each other, and add mistakes to the `Document`."""
    with only_plugins(config.plugins.allow):
        _check_parts(config, document, Trust(allow_import))


def _check_parts(config: Config, document: Document, trust: Trust) -> None:
    _check_names(config, document)
    executor = _check_executor(config, trust, document)
    _check_variables(trust, document)
    for name, pool in config.pools.items():
        _check_pool(pool, executor, ("pools", name), document)
    classes = _check_groups(config, executor, trust, document)
    _check_job(config, classes, trust, document)
    for place, problem, near in find_mistakes(config):
        document.add_mistake(place, problem, near)
    for index, observer in enumerate(config.observe):
        _check_observer(observer, trust, ("observe", index), document)
    if config.groups:  # A config without groups is for code that spawns groups itself.
        used = {group.pool for group in config.groups.values()}
        for name in config.pools:
            if name not in used:
                document.add_warning(("pools", name), "no group uses this pool; it would be reserved all the same")


def _check_names(config: Config, document: Document) -> None:
    places = [*(("pools", name) for name in config.pools), *(("groups", name) for name in config.groups)]
    roles = [
        (*place, "roles", name)
        for place in places
        if place[0] == "groups"
        for name in config.groups[place[1]].roles
        if name.isidentifier()  # Invalid identifiers are reported with the role.
    ]
    for place, name in [(("name",), config.name), *((place, place[-1]) for place in (*places, *roles))]:
        if (problem := find_name_problem(name)) is not None:
            document.add_mistake(place, problem)


def _note_missing(error: PluginError, place: Place, document: Document) -> None:
    """Add a mistake for a missing plugin; report a missing module once, even if several plugins need the module."""
    # An error that was raised `from None` has the cause only in `__context__`.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ModuleNotFoundError) and cause.name and f"module {cause.name} " not in error.message:
        if cause.name in document.missing_modules:
            return
        document.missing_modules.add(cause.name)
    document.add_mistake(place, error.message)


def _check_trust(trust: Trust, use: str, place: Place, document: Document) -> bool:
    why = trust.import_objection(use)
    if why is not None:
        document.add_mistake(place, why)
    return why is None


def _check_executor(config: Config, trust: Trust, document: Document) -> type[Executor] | None:
    """Check the executor; return the class of the chosen variant, or None if the executor is unknown."""
    if not _check_trust(trust, config.executor.use, ("executor", "use"), document):
        return None
    try:
        executor = find_executor(config.executor.use)
    except PluginError as error:
        _note_missing(error, ("executor", "use"), document)
        return None
    arguments, options = _find_connect_arguments(executor), config.executor.with_
    _check_arguments(arguments, options, ("executor",), document)
    known_options = {name: value for name, value in options.items() if arguments.open or name in arguments.parameters}
    _check_options(trust, executor, known_options, ("executor",), document)
    kind = executor.variant(config.executor.with_)
    if config.executor.with_.get("spill_dir") is not None and not issubclass(kind, OwnProcess):
        document.add_mistake(("executor", "with", "spill_dir"), _sleep_problem(kind))
    return kind


def _check_options(trust: Trust, cls: type, given: Mapping[str, Any], place: Place, document: Document) -> None:
    for name, why in trust.option_objections(cls, given).items():
        if not document.is_from_caller(option := (*place, "with", name)):
            document.add_mistake(option, why)


def _find_connect_arguments(executor: type[Executor]) -> Arguments:
    """Return the options of an executor in a config: the parameters of `colocate.connect` and the executor's own."""
    from colocate.connecting import connect  # Imported here, because `connecting` imports all of core.

    executor_options = options_of(executor)
    general = arguments_of(connect, executor_options.owner)
    # These are no options of the executor, because a config has separate keys for them, or no use for them.
    reserved = ("executor", "seed", "call_timeout", "replace")
    parameters = {
        name: p for name, p in {**general.parameters, **executor_options.parameters}.items() if name not in reserved
    }
    return attrs.evolve(executor_options, parameters=parameters, hints={**general.hints, **executor_options.hints})


def _check_variables(trust: Trust, document: Document) -> None:
    """Check the environment variables in a config's data, also in entries with other mistakes."""
    for key in ("pools", "groups"):
        entries = document.data.get(key)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            env = entry.get("env") if isinstance(entry, dict) else None
            for variable in env if isinstance(env, dict) else ():
                if (why := trust.variable_objection(variable)) is not None:
                    document.add_mistake((key, name, "env", variable), why)


def _check_job(config: Config, classes: Mapping[tuple[str, str], type], trust: Trust, document: Document) -> None:
    if config.job is None or not _check_trust(trust, config.job.use, ("job", "use"), document):
        return
    try:
        function = find_job(config.job.use).load()
    except PluginError as error:
        _note_missing(error, ("job", "use"), document)
    else:
        arguments = arguments_of(function, f"job {config.job.use}", skip=1)
        for name, value in config.job.with_.items():
            option = ("job", "with", name)
            if isinstance(value, str) and _MODULE.fullmatch(value) and not document.is_from_caller(option):
                _check_trust(trust, value, option, document)
        if _check_arguments(arguments, config.job.with_, ("job",), document):
            groups = {
                name: {
                    role: attrs.evolve(spec, target=classes.get((name, role), spec.target))
                    for role, spec in _role_specs(group).items()
                }
                for name, group in config.groups.items()
            }
            _run_own_checks(function, arguments, config.job.with_, (groups,), ("job",), document)


def _check_observer(observer: ObserverConfig, trust: Trust, place: Place, document: Document) -> None:
    if not _check_trust(trust, observer.use, (*place, "use"), document):
        return
    try:
        factory = find_observer(observer.use).load()
    except PluginError as error:
        _note_missing(error, (*place, "use"), document)
        return
    _check_arguments(arguments_of(factory, observer.use), observer.with_, place, document)
    for name in observer.with_:
        option = (*place, "with", name)
        if (why := trust.observer_option_objection()) is not None and not document.is_from_caller(option):
            document.add_mistake(option, why)


def _check_pool(pool: PoolConfig, executor: type[Executor] | None, place: Place, document: Document) -> None:
    _check_environment(pool.env, executor, (*place, "env"), document)
    _check_labels(pool, executor, place, document)
    if (problem := find_amount_problem(pool.slots, whole=True, least=1)) is not None:
        document.add_mistake((*place, "slots"), problem)
    if pool.at_least is not None and pool.at_least > pool.slots:
        document.add_mistake((*place, "at_least"), f"is {pool.at_least}, and the pool has {pool.slots} slots")
    elif pool.at_least is not None and pool.groups != 1:
        document.add_mistake(
            (*place, "at_least"), "groups that share slots can't go on with fewer: leave out one of the two"
        )
    if (problem := find_amount_problem(pool.groups, whole=True, least=1)) is not None:
        document.add_mistake((*place, "groups"), problem)
    elif pool.groups > 1 and executor is not None:
        if not issubclass(executor, SharedSlots):
            document.add_mistake((*place, "groups"), f"executor {executor.name!r} can't let groups share slots")
        elif (pool.device_memory or pool.host_memory) and not issubclass(executor, OwnProcess):
            text = (
                f"slots of {executor.name!r} are threads of this process, whose memory groups share: leave out "
                "device_memory and host_memory of this pool, or use executor.with.processes=true"
            )
            document.add_mistake((*place, "groups"), text)


def _check_labels(pool: PoolConfig, executor: type[Executor] | None, place: Place, document: Document) -> None:
    if executor is not None and not issubclass(executor, Labelled):
        for name in ("labels", "resources", "together"):
            if getattr(pool, name):
                text = (
                    f"executor {executor.name!r} knows no labels of nodes, and no resources but CPUs, GPUs and memory"
                )
                document.add_mistake((*place, name), text)
    if pool.grow and executor is not None and not issubclass(executor, Growing):
        document.add_mistake(
            (*place, "grow"), f"executor {executor.name!r} has the nodes that it has: none are to come"
        )


def _sleep_problem(executor: type[Executor]) -> str:
    return (
        f"slots of {executor.name!r} are threads of this process, whose roles can't sleep: use "
        "executor.with.processes=true"
    )


def _check_environment(
    env: Mapping[str, str], executor: type[Executor] | None, place: Place, document: Document
) -> None:
    if env and executor is not None and not issubclass(executor, OwnProcess):
        text = (
            f"slots of {executor.name!r} are threads of this process, whose environment they share: set it where that "
            "is started, or use executor.with.processes=true"
        )
        document.add_mistake(place, text)
    for variable, value in env.items():
        if (why := find_variable_problem(variable, value)) is not None:
            document.add_mistake((*place, variable), why)


def _check_budgets(group: GroupConfig, pool: PoolConfig | None, place: Place, document: Document) -> None:
    if any(mistake.path.endswith(("_memory", "reserve_activations")) for mistake in document.mistakes):
        return
    try:
        budgets_of(group, pool)
    except ConfigError as error:
        document.add_mistake(place, error.message)


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
    slot = NO_BUDGET if pool is None else Budget.from_sizes(pool.device_memory, pool.host_memory)
    return budgets(slot, Budget.from_sizes(group.device_memory, group.host_memory), roles, group.residency, group.step)


def _check_groups(
    config: Config, executor: type[Executor] | None, trust: Trust, document: Document
) -> dict[tuple[str, str], type]:
    """Check all groups; return the importable classes of roles, by group and role."""
    classes: dict[tuple[str, str], type] = {}
    groups_by_pool: dict[str, list[str]] = {}
    for name, group in config.groups.items():
        place: Place = ("groups", name)
        occupants = groups_by_pool.setdefault(group.pool, [])
        _check_group_pool(group.pool, config.pools.get(group.pool), occupants, place, document)
        occupants.append(name)
        if not document.data["groups"][name]["roles"]:
            document.add_mistake((*place, "roles"), "a group needs at least one role")
        pool = config.pools.get(group.pool)
        if pool is not None:
            _check_mesh(group.mesh, pool.slots, (*place, "mesh"), document)
        _check_budgets(group, pool, place, document)
        if group.residency is not None and executor is not None and not issubclass(executor, OwnProcess):
            document.add_mistake((*place, "residency"), _sleep_problem(executor))
        _check_environment(group.env, executor, (*place, "env"), document)
        if (problem := find_amount_problem(group.restarts, whole=True, least=1)) is not None:
            document.add_mistake((*place, "restarts"), f"{problem}; a group that isn't restarted has on_failure: fail")
        for role_name, role in group.roles.items():
            below = (*place, "roles", role_name)
            least = None if pool is None or group.on_failure == "fail" else pool.at_least
            if least is not None and pool is not None and least < pool.slots:
                _check_resizable(role, group, least, below, document)
            cls = _check_role(role_name, role, group, pool, trust, below, document)
            if cls is not None:
                classes[name, role_name] = cls
            ranks = len(role.slots) if role.slots is not None else pool.slots if pool is not None else 1
            if (
                cls is not None
                and executor is not None
                and (why := lacks_processes(role_name, cls, role.default_group, role.env, ranks, executor))
            ):
                document.add_mistake(below, why)
            if pool is not None and (why := lacks_vmm(role_name, role.sleep, pool.gpus, executor)):
                document.add_mistake((*below, "sleep"), why)
    return classes


def _check_group_pool(
    pool: str, found: PoolConfig | None, others: Sequence[str], place: Place, document: Document
) -> None:
    declared = document.data.get("pools", {})
    if not isinstance(declared, dict):
        return  # `pools` is no mapping, which was reported before.
    if pool not in declared:
        hint = f"there are {', '.join(declared)}" if declared else "there is none"
        near = find_nearest(pool, declared)
        document.add_mistake((*place, "pool"), f"no pool is called {pool!r}; {hint}", near)
    elif found is not None and len(others) >= found.groups >= 1:
        names = " and ".join(map(repr, others[: found.groups]))
        holders = f"group {names}" if found.groups == 1 else f"groups {names}"
        rule = "one group" if found.groups == 1 else f"{found.groups} groups"
        text = f"pool {pool!r} has {holders} already: a slot takes {rule} at a time; pools.{pool}.groups says how many"
        document.add_mistake((*place, "pool"), text)


def _check_role(
    name: str,
    role: RoleConfig,
    group: GroupConfig,
    pool: PoolConfig | None,
    trust: Trust,
    place: Place,
    document: Document,
) -> type | None:
    if not name.isidentifier():
        document.add_mistake(place, f"{name!r} can't be a role's name: use letters, digits and _")
    if pool is not None and _check_slots(role, pool, place, document):
        count = pool.slots if role.slots is None else len(role.slots)
        _check_mesh(role.mesh, count, (*place, "mesh"), document)
    if not _check_trust(trust, role.use, (*place, "use"), document):
        return None
    try:
        cls = find_role(role.use).load()
    except PluginError as error:
        _note_missing(error, (*place, "use"), document)
        return None
    arguments = arguments_of(cls, role.use)
    _check_options(trust, cls, role.with_, place, document)
    if _check_arguments(arguments, role.with_, place, document):
        specs = _role_specs(group)
        before = dict(itertools.takewhile(lambda each: each[0] != name, specs.items()))
        _run_own_checks(cls, arguments, role.with_, (specs[name], before), place, document)
    return cls


def _check_resizable(role: RoleConfig, group: GroupConfig, least: int, place: Place, document: Document) -> None:
    if (why := fixed_problem(role.slots, role.mesh or group.mesh, least)) is not None:
        document.add_mistake((*place, why[0]), f"{why[1]} (at_least of pool {group.pool})")


def _role_specs(group: GroupConfig) -> dict[str, RoleSpec[Any]]:
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


def _run_own_checks(
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
        for at, problem in function({**defaults, **arguments.convert(given)}, *around):
            option = (*place, "with", *((at,) if isinstance(at, str) else at))
            if isinstance(problem, PluginError):
                _note_missing(problem, option, document)
            else:
                document.add_mistake(option, problem)
    except Exception as error:  # A plugin's code may raise any error.
        document.add_mistake((*place, "use"), f"what checks its options raised {type(error).__name__}: {error}")


def _check_slots(role: RoleConfig, pool: PoolConfig, place: Place, document: Document) -> bool:
    if role.slots is None:
        return True
    if not role.slots:
        document.add_mistake((*place, "slots"), "name at least one slot, or leave the key out for all")
        return False
    for i, slot in enumerate(role.slots):
        if not 0 <= slot < pool.slots:
            hint = f"the pool has {pool.slots}, counted from 0" if pool.slots > 1 else "the pool has one, slot 0"
            document.add_mistake((*place, "slots", i), f"there is no slot {slot}: {hint}")
            return False
    if len(set(role.slots)) < len(role.slots):
        document.add_mistake((*place, "slots"), f"{role.slots} names a slot twice")
        return False
    if role.env == "torchrun" and (why := torchrun_problem(len(role.slots), pool.slots)) is not None:
        document.add_mistake((*place, "env"), why)
    return True


def _check_mesh(mesh: Mapping[str, Any] | None, slots: int, place: Place, document: Document) -> None:
    try:
        parse_meshes(mesh, slots)
    except ConfigError as error:
        document.add_mistake(place, error.message)


def _check_arguments(arguments: Arguments, given: Mapping[str, Any], place: Place, document: Document) -> bool:
    """Check arguments against a signature, and add mistakes to the `Document`; return whether there were none."""
    before = len(document.mistakes)
    for problem in arguments.problems(given):
        at = (*place, "with", *problem.place) if problem.place else place
        document.add_mistake(at, problem.message, problem.nearest)
    if not arguments.open:
        return len(document.mistakes) == before
    founded = [name for name in given if (*place, "with", name) not in document.unfounded]
    for name in given:
        if name not in founded and name not in arguments.parameters:
            at = (*place, "with", name)
            near = find_nearest(name, [*arguments.parameters, *founded])
            text = f"{arguments.owner} takes any name, and the config doesn't give it this one; to add it, write a +"
            document.add_mistake(at, f"{text}: --set +{path_text(at)}=...", near)
    return len(document.mistakes) == before
