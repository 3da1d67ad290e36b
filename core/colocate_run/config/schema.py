"""The config's schema: one frozen class per kind of entry. Keys are the field names (`with_` is written `with`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import attrs

from colocate.signatures import (
    Checked,
    Place,
    amount_problem,
    duration_problem,
    gpus_problem,
    labels_problem,
    resources_problem,
    size_problem,
    step_problem,
    together_problem,
    url_problem,
)
from colocate_run.config.variables import literal

Mesh = dict[str, int] | dict[str, dict[str, int]]

_GPUs = Annotated[int, Checked(gpus_problem)]
_CPUs = Annotated[float, Checked(amount_problem)]
_Seconds = Annotated[float, Checked(duration_problem)]
_Size = Annotated[int | str | None, Checked(size_problem)]


@attrs.frozen
class ExecutorConfig:
    """The executor, which runs the workers.

    Attributes:
        use: Its name: `local`, `ray`, `dask`, or another entry point of the group `colocate.executors`.
        with_: Options of `colocate.connect` for it.
    """

    use: str = "local"
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PoolConfig:
    """Slots reserved together; the fields are the parameters of `Runtime.reserve`.

    Attributes:
        slots: How many, all or none.
        gpus: GPUs of each slot.
        cpus: CPUs of each slot. Workers that are processes set torch's threads from it.
        host_memory: The host's memory of each slot, in bytes or as "8GiB", for what roles hold there, with what sleeps;
            reserved where the executor counts it.
        device_memory: How much of its device's memory the roles of each slot may hold, in bytes or as "40GiB".
        strategy: As few nodes as possible, or as many; strictly: all on one node, or each on a node of its own.
        timeout: Seconds to wait for slots that could fit but don't now.
        env: Environment variables, set in the worker before torch or a role is imported. With one that is read before
            that (`LD_*`, `PYTHON*`, `OMP_*`, `CUDA_*` ...) it gets an interpreter of its own. Needs processes.
        groups: How many groups may share it; each has workers of its own on the same slots.
        regrow_timeout: Seconds that a restart waits for slots in the place of lost ones.
        spares: Slots held besides, which take the place of lost ones.
        at_least: With how many a restart goes on, where it can't have all.
        labels: Labels of each slot's node, as in `{ray.io/accelerator-type: H100}`; `in(A100,H100)` for one of several,
            `"!H100"` for any other.
        resources: How much each has of what its node offers besides, as in `{tpu_host: 1}`.
        together: A label of which all their nodes have one value, as `ray.io/gpu-domain`.
        grow: Whether slots are waited for, up to `timeout`, for which the cluster has to grow; null where the cluster
            says that it does.
    """

    slots: int  # Checked later: a pool with a wrong number is dropped, and other mistakes in the pool would be hidden.
    gpus: _GPUs = 0
    cpus: _CPUs = 1
    host_memory: _Size = None
    device_memory: _Size = None
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    timeout: _Seconds = 60
    env: dict[str, str] = attrs.field(factory=dict)
    groups: int = 1  # checked later, like `slots`: else other mistakes follow
    regrow_timeout: _Seconds = 600
    spares: Annotated[int, Checked(partial(amount_problem, whole=True))] = 0
    at_least: Annotated[int | None, Checked(partial(amount_problem, whole=True, least=1))] = None
    labels: Annotated[dict[str, str], Checked(labels_problem)] = attrs.field(factory=dict)
    resources: Annotated[dict[str, float], Checked(resources_problem)] = attrs.field(factory=dict)
    together: Annotated[str | None, Checked(together_problem)] = None
    grow: bool | None = None


@attrs.frozen
class RoleConfig:
    """A role of a group.

    Attributes:
        use: A plugin's role as in `ppo.actor`, or `module:Class`.
        with_: Arguments of its constructor, checked against its signature.
        slots: Indices of the slots it lives on; null for all.
        mesh: Axes over its ranks, or several such by name.
        default_group: Whether torch's default process group, whose ranks are the group's slots, is there before it.
        env: `torchrun` for the environment variables that torchrun sets, for a library that reads them.
        device_memory: How much of the slot's device's memory it may hold, in bytes or as "20GiB".
        host_memory: How much of the host's, with what sleeps.
        reserve_activations: How much of `device_memory` stays free for what its methods compute with.
        sleep: `vmm` for a role of which the constructor's memory on a GPU keeps its addresses when it sleeps, for CUDA
            graphs.
        weights: `from sync` for a role that can't be called before `sync_weights` has brought it another one's weights.
        background: Whether its calls run on a thread of their own in each worker, beside those of the other roles.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)
    slots: list[int] | None = None
    mesh: Mesh | None = None
    default_group: bool = False
    env: Literal["torchrun"] | None = None
    device_memory: _Size = None
    host_memory: _Size = None
    reserve_activations: _Size = None
    sleep: Literal["vmm"] | None = None
    weights: Literal["from sync"] | None = None
    background: bool = False


@attrs.frozen
class GroupConfig:
    """Roles fused over the slots of a pool; the fields are the parameters of `Pool.spawn`.

    Attributes:
        pool: The name of its pool.
        roles: The roles, constructed in this order in each worker.
        mesh: Axes over the ranks, as in `{dp: 2, tp: 4}`, for roles that live on all slots and name no mesh.
        on_failure: Whether a group that fails ends with an error, or is rebuilt in its pool, and the job goes on from
            its last checkpoint.
        restarts: How often it is rebuilt without a new checkpoint in between.
        device_memory: How much of each slot's device's memory its roles may hold together, in bytes or as "40GiB".
        host_memory: How much of the host's, with what sleeps.
        residency: `swap` for roles that take turns: who isn't called sleeps, so that `device_memory` is kept.
        step: The roles in the order in which they are called again and again; by default who was called longest ago
            makes room.
        env: Environment variables of its workers, on top of the pool's.
    """

    pool: str
    roles: dict[str, RoleConfig]
    mesh: Mesh | None = None
    on_failure: Literal["fail", "restart"] = "fail"
    restarts: int = 3
    device_memory: _Size = None
    host_memory: _Size = None
    residency: Literal["swap"] | None = None
    step: list[str] | None = None
    env: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class JobConfig:
    """The function that does the work.

    Attributes:
        use: A plugin's job as in `ppo.train`, or `module:function`.
        with_: Its options, checked against the function's signature.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class ObserverConfig:
    """An observer of a run.

    Attributes:
        use: Its name: `tensorboard`, `wandb`, `mlflow`, `prometheus`, `opentelemetry`, another entry point of the group
            `colocate.observers`, or `module:Class`.
        with_: Its options, checked against its signature.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PluginsConfig:
    """Which plugins this config may use.

    Attributes:
        allow: Their names: executors, engines, observers, and namespaces of roles and jobs. Null for all that are
            installed; colocate's own may always be used.
    """

    allow: list[str] | None = None


@attrs.frozen
class Config:
    """A whole config, checked.

    Attributes:
        name: What the run is called; its folder is `runs/<name>`. Letters, digits, `-`, `_` and `.`. In a file, its
            stem if nothing is said.
        seed: The seed from which every `ctx.generator` is derived.
        call_timeout: Seconds after which a call is given up that names no deadline of its own; null for never.
        executor: What runs the workers.
        pools: Slots to reserve, by name, in this order.
        groups: Groups to spawn, by name, in this order. Names of pools and groups are as that of the run.
        job: What `colocate run` runs; null for a config that is only launched.
        plugins: Which plugins may be used.
        observe: Who is told of the run, as in `[tensorboard, {use: mlflow, with: {experiment: sums}}]`.
        trace: Whether the run's folder gets a `trace.json` for Perfetto; see `Runtime.trace`.
        record: The roles of which is kept what their calls give, in `recording` of the run's folder: names, or
            `group.role`; with `:inputs` behind it what they are given, too.
        record_limit: How much of it is written at most, in bytes or as "20GiB".
        replay: Recordings that answer the calls of roles, which aren't constructed: folders of runs, by role.
        replay_from: With which step of these, and of those under `compare`, to begin.
        replay_loose: Whether calls that differ from recorded ones are only told.
        compare: Recordings with which is compared what roles give: folders of runs, by role.
        tolerance: How far numbers may be from those that were recorded, absolutely and relatively.
        checkpoints: Where the run's checkpoints are kept besides, as `s3://bucket/folder`: `--resume` goes on from
            there on another machine. Extra `stores`.
        origins: File and line of each pool and group, and of the executor ("pools.main"), for the ownership graph; an
            option of the command line, with line 0, where that has made it.
        withheld: Values with a secret of the environment's (`${HF_TOKEN}`), by place, as they were written: they are
            in nothing that is written or shown.
    """

    name: str
    seed: int = 0
    call_timeout: Annotated[float | None, Checked(partial(duration_problem, positive=True))] = None
    executor: ExecutorConfig = attrs.field(factory=ExecutorConfig)
    pools: dict[str, PoolConfig] = attrs.field(factory=dict)
    groups: dict[str, GroupConfig] = attrs.field(factory=dict)
    job: JobConfig | None = None
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)
    observe: list[ObserverConfig] = attrs.field(factory=list)
    trace: bool = False
    record: list[str] = attrs.field(factory=list)
    record_limit: _Size = None
    replay: dict[str, str] = attrs.field(factory=dict)
    replay_from: Annotated[int | None, Checked(step_problem)] = None
    replay_loose: bool = False
    compare: dict[str, str] = attrs.field(factory=dict)
    tolerance: Annotated[float, Checked(amount_problem)] = 0.0
    checkpoints: Annotated[str | None, Checked(url_problem)] = None
    origins: Mapping[str, tuple[str, int]] = attrs.field(factory=dict, eq=False, repr=False, metadata={"key": False})
    withheld: Mapping[Place, str] = attrs.field(factory=dict, eq=False, repr=False, metadata={"key": False})

    def dump(self) -> str:
        """Return the config as YAML.

        Short forms and defaults are written out; `load_config` of the text gives an equal config.
        """
        from colocate_run.config.source import write_yaml

        return write_yaml(self.plain())

    def plain(self) -> dict[str, Any]:
        """Return the config as plain data."""
        found: dict[str, Any] = _plain(self, (), self.withheld)
        return found


@attrs.frozen
class Shape:
    """The source of a mapping's valid keys: the schema, the config's author, or a signature."""

    kind: type[attrs.AttrsInstance] | None = None  # the schema's class of the mapping; None outside of the schema
    # The class of the values, if the config's author names the entries.
    item: type[attrs.AttrsInstance] | None = None
    arguments: bool = False  # whether the keys are arguments of an executor, a role or a job
    named: bool = False  # whether the config's author names the entries

    @classmethod
    def of(cls, annotation: Any) -> Shape:
        """Return the shape of a mapping with this annotation."""
        found: type[attrs.AttrsInstance] | None = next(filter(attrs.has, (annotation, *get_args(annotation))), None)
        named = any(get_origin(each) is dict for each in (annotation, *get_args(annotation)))
        return cls(item=found, named=True) if named else cls(found)

    def below(self, key: str | int) -> Shape:
        """Return the shape of a key's value.

        Below an unknown key every shape is empty: the key itself is the mistake.
        """
        if isinstance(key, int):  # an index of a list: all items are alike
            return self
        if self.kind is None:
            return Shape(self.item) if self.item is not None else Shape(named=self.named or self.arguments)
        field = next((field.name for field in keys(self.kind) if key_of(field.name) == key), None)
        if field is None:
            return Shape()
        return Shape(arguments=True) if field == "with_" else Shape.of(get_type_hints(self.kind)[field])


def keys(cls: type[attrs.AttrsInstance]) -> list[attrs.Attribute[Any]]:
    """Return the fields of a schema class that are keys in YAML."""
    return [field for field in attrs.fields(cls) if field.metadata.get("key", True)]


def key_of(field: str) -> str:
    """Return the YAML key of a schema class's field."""
    return field.rstrip("_")


def _plain(value: Any, place: Place, withheld: Mapping[Place, str]) -> Any:
    """Return a value as plain data; texts with `${` are escaped, so that reading fills in nothing."""
    if attrs.has(type(value)):
        value = {key_of(field.name): getattr(value, field.name) for field in keys(type(value))}
    if isinstance(value, Mapping):
        return {key: _plain(each, (*place, key), withheld) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, (*place, index), withheld) for index, each in enumerate(value)]
    return withheld.get(place, literal(value)) if isinstance(value, str) else value
