"""What a config may say: one frozen class per kind of entry. Keys are the field names (`with_` is written `with`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

Mesh = dict[str, int] | dict[str, dict[str, int]]


@attrs.frozen
class ExecutorConfig:
    """The engine that runs the workers.

    Attributes:
        use: Its name: an entry point of the group `colocate.executors`.
        with_: Options of `colocate.connect`.
    """

    use: str = "local"
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PoolConfig:
    """Slots reserved together; the fields are the parameters of `Runtime.reserve`."""

    slots: int
    gpus: int = 0
    cpus: float = 1
    host_memory: int | str | None = None
    strategy: Literal["pack", "spread"] = "pack"
    timeout: float = 60
    env: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class RoleConfig:
    """A role of a group.

    Attributes:
        use: A plugin's role ("acme.reward"), or "module:Class".
        with_: Arguments of its constructor.
        slots: Indices of the slots it lives on; None for all.
        mesh: Axes over its ranks, or several such by name.
        default_group: Whether torch's default process group is this role's.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)
    slots: list[int] | None = None
    mesh: Mesh | None = None
    default_group: bool = False


@attrs.frozen
class GroupConfig:
    """Roles fused over the slots of a pool; the fields are the parameters of `Pool.spawn`."""

    pool: str
    roles: dict[str, RoleConfig]
    mesh: Mesh | None = None
    on_failure: Literal["fail", "restart"] = "fail"
    restarts: int = 3


@attrs.frozen
class JobConfig:
    """The function that does the work.

    Attributes:
        use: A plugin's job ("ppo.train"), or "module:function".
        with_: Its options.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PluginsConfig:
    """Which plugins this config may use.

    Attributes:
        allow: Their names: executors, and namespaces of roles and jobs. None for all that are installed; colocate's own
            may always be used.
    """

    allow: list[str] | None = None


@attrs.frozen
class Config:
    """A whole config, checked.

    Attributes:
        name: What the run is called; its folder is runs/<name>.
        seed: The runtime's seed.
        call_timeout: Seconds after which a call is given up; None for never.
        executor: The engine.
        pools: Slots to reserve, by name, in order.
        groups: Groups to spawn, by name, in order.
        job: What to run; None for a config that is only launched.
        plugins: Which plugins may be used.
        lines: File and line of each pool and group, and of the executor ("pools.main"), for the ownership graph.
    """

    name: str
    seed: int = 0
    call_timeout: float | None = None
    executor: ExecutorConfig = attrs.field(factory=ExecutorConfig)
    pools: dict[str, PoolConfig] = attrs.field(factory=dict)
    groups: dict[str, GroupConfig] = attrs.field(factory=dict)
    job: JobConfig | None = None
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)
    lines: Mapping[str, tuple[str, int]] = attrs.field(factory=dict, eq=False, repr=False, metadata={"key": False})

    def dump(self) -> str:
        """The config as YAML, every short form and default written out; `load_config` of it gives an equal one."""
        from colocate.config.source import write_yaml

        return write_yaml(_plain(self))


def keys(cls: type[attrs.AttrsInstance]) -> list[attrs.Attribute[Any]]:
    """The fields of one of these classes that are keys in YAML."""
    return [field for field in attrs.fields(cls) if field.metadata.get("key", True)]


def key_of(field: str) -> str:
    """The key in YAML of a field of these classes."""
    return field.rstrip("_")


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {key_of(field.name): _plain(getattr(value, field.name)) for field in keys(type(value))}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
