"""The schema of configs: a frozen class for each kind of entry. Keys are the field names (`with_` means `with`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import attrs

from colocate.signatures import (
    Checked,
    Place,
    find_amount_problem,
    find_duration_problem,
    find_gpus_problem,
    find_labels_problem,
    find_resources_problem,
    find_size_problem,
    find_step_problem,
    find_together_problem,
    find_url_problem,
)
from colocate_run.config.variables import escape_text

Mesh = dict[str, int] | dict[str, dict[str, int]]

_GPUs = Annotated[int, Checked(find_gpus_problem)]
_CPUs = Annotated[float, Checked(find_amount_problem)]
_Seconds = Annotated[float, Checked(find_duration_problem)]
_Size = Annotated[int | str | None, Checked(find_size_problem)]


@attrs.frozen
class ExecutorConfig:
    """The config entry of the executor, which runs the workers.

    Attributes:
        use: The executor's name: `local`, `ray`, `dask`, or another entry point of the group `colocate.executors`.
        with_: Options of `colocate.connect` for the executor.
    """

    use: str = "local"
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PoolConfig:
    """The config entry of a pool of slots. The fields are the parameters of `Runtime.reserve`.

    Attributes:
        slots: The number of slots, all or none.
        gpus: GPUs of each slot.
        cpus: CPUs of each slot. In worker processes also the number of torch's threads.
        host_memory: Host memory of each slot, in bytes or as "8GiB", for awake and sleeping memory of roles; reserved
            if the executor counts memory.
        device_memory: Limit of device memory for the roles of each slot, in bytes or as "40GiB".
        strategy: As few nodes as possible, or as many; strictly: all slots on one node, or each on a different node.
        timeout: Seconds to wait for slots that the cluster has, but not at present.
        env: Environment variables, set in the worker before torch or a role is imported. A worker with variables that
            are read even earlier (`LD_*`, `PYTHON*`, `OMP_*`, `CUDA_*` ...) gets a new interpreter. Needs processes.
        groups: Number of groups that may share the pool; each has workers of its own on the same slots.
        regrow_timeout: Seconds that a restart waits for slots in place of lost ones.
        spares: Additional slots, which replace lost ones.
        at_least: The minimum number of slots with which a restart continues if not all are available.
        labels: Labels of each slot's node, as in `{ray.io/accelerator-type: H100}`; `in(A100,H100)` for one of several,
            `"!H100"` for any other.
        resources: Amounts of other node resources for each slot, as in `{tpu_host: 1}`.
        together: A label with one value on all nodes of the pool, such as `ray.io/gpu-domain`.
        grow: Whether to wait, up to `timeout`, for slots that the cluster has to grow for; null to ask the cluster.
    """

    slots: int  # Checked later, because a refused value here would hide other mistakes in the pool.
    gpus: _GPUs = 0
    cpus: _CPUs = 1
    host_memory: _Size = None
    device_memory: _Size = None
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    timeout: _Seconds = 60
    env: dict[str, str] = attrs.field(factory=dict)
    groups: int = 1  # Checked later, because refusing a value here would cause follow-up mistakes.
    regrow_timeout: _Seconds = 600
    spares: Annotated[int, Checked(partial(find_amount_problem, whole=True))] = 0
    at_least: Annotated[int | None, Checked(partial(find_amount_problem, whole=True, least=1))] = None
    labels: Annotated[dict[str, str], Checked(find_labels_problem)] = attrs.field(factory=dict)
    resources: Annotated[dict[str, float], Checked(find_resources_problem)] = attrs.field(factory=dict)
    together: Annotated[str | None, Checked(find_together_problem)] = None
    grow: bool | None = None


@attrs.frozen
class RoleConfig:
    """The config entry of a role in a group.

    Attributes:
        use: A plugin's role, as in `ppo.actor`, or `module:Class`.
        with_: Arguments of the constructor, checked against the signature.
        slots: Indices of the role's slots; null for all.
        mesh: Axes over the ranks, or several meshes by name.
        default_group: Whether torch's default process group, over the group's slots, exists before the constructor
            runs.
        env: `torchrun` to set the environment variables of torchrun, for a library that reads these.
        device_memory: Limit of device memory on each slot, in bytes or as "20GiB".
        host_memory: Limit of host memory on each slot, including sleeping memory.
        reserve_activations: The part of `device_memory` to keep free for the methods' computations.
        sleep: `vmm` to keep the addresses of the constructor's GPU memory during sleep, for CUDA graphs.
        weights: `from sync` to refuse calls before `sync_weights` has copied another role's weights here.
        background: Whether calls run on a separate thread in each worker, beside calls of the other roles.
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
    """The config entry of a group of roles. The fields are the parameters of `Pool.spawn`.

    Attributes:
        pool: The name of the group's pool.
        roles: The roles, constructed in this order in each worker.
        mesh: Axes over the ranks, as in `{dp: 2, tp: 4}`, for roles on all slots without a mesh of their own.
        on_failure: Whether a failed group ends with an error, or restarts in the pool, with the job from the last
            checkpoint.
        restarts: The number of restarts without a new checkpoint in between.
        device_memory: Limit of device memory on each slot for all roles together, in bytes or as "40GiB".
        host_memory: Limit of host memory on each slot for all roles together, including sleeping memory.
        residency: `swap` for roles that take turns: idle roles sleep, to stay within `device_memory`.
        step: The roles in the order of calls in a step; by default the role that was called longest ago makes room.
        env: Environment variables of the workers, in addition to the pool's.
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
    """The config entry of the job, which is the function that does the work.

    Attributes:
        use: A plugin's job, as in `ppo.train`, or `module:function`.
        with_: Options of the job, checked against the function's signature.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class ObserverConfig:
    """The config entry of an observer.

    Attributes:
        use: The observer's name: `tensorboard`, `wandb`, `mlflow`, `prometheus`, `opentelemetry`, another entry point
            of the group `colocate.observers`, or `module:Class`.
        with_: Options of the observer, checked against the signature.
    """

    use: str
    with_: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PluginsConfig:
    """The plugins that a config may use.

    Attributes:
        allow: Names of executors, engines, observers, and of namespaces of roles and jobs. Null for all installed
            plugins; colocate's own may always be used.
    """

    allow: list[str] | None = None


@attrs.frozen
class Config:
    """A complete config that has been checked.

    Attributes:
        name: The name of the run, with the folder `runs/<name>`. Letters, digits, `-`, `_` and `.`. In a file, the stem
            by default.
        seed: The seed of every `ctx.generator`.
        call_timeout: Default deadline of calls, in seconds; null for none.
        executor: The executor, which runs the workers.
        pools: Slots to reserve, by name, in this order.
        groups: Groups to spawn, by name, in this order. Names of pools and groups follow the rule for the run's.
        job: The job of `colocate run`; null for a config that is only launched.
        plugins: The plugins that this config may use.
        observe: Observers of the run, as in `[tensorboard, {use: mlflow, with: {experiment: sums}}]`.
        trace: Whether to write a `trace.json` for Perfetto into the run's folder; see `Runtime.trace`.
        record: Roles to record: the results of calls are kept in `recording` of the run's folder. Names, or
            `group.role`; with `:inputs` appended the inputs, too.
        record_limit: Maximum size of the recording, in bytes or as "20GiB".
        replay: Folders of recorded runs, by role; the recordings answer the role's calls, and the role isn't
            constructed.
        replay_from: The first step to replay, or to compare under `compare`.
        replay_loose: Whether calls that differ from recorded ones only cause a warning.
        compare: Folders of recorded runs, by role, to compare the role's results with.
        tolerance: Allowed difference of compared numbers, absolute and relative.
        checkpoints: A store for copies of the run's checkpoints, as `s3://bucket/folder`: `--resume` continues from
            there on another machine. Extra `stores`.
        origins: File and line of the executor and of each pool and group ("pools.main"), for the ownership graph; an
            option of the command line, with line 0, if that has set the entry.
        withheld: Values with a secret of the environment (`${HF_TOKEN}`), by place, as written: secrets are never
            written or shown.
    """

    name: str
    seed: int = 0
    call_timeout: Annotated[float | None, Checked(partial(find_duration_problem, positive=True))] = None
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
    replay_from: Annotated[int | None, Checked(find_step_problem)] = None
    replay_loose: bool = False
    compare: dict[str, str] = attrs.field(factory=dict)
    tolerance: Annotated[float, Checked(find_amount_problem)] = 0.0
    checkpoints: Annotated[str | None, Checked(find_url_problem)] = None
    origins: Mapping[str, tuple[str, int]] = attrs.field(factory=dict, eq=False, repr=False, metadata={"key": False})
    withheld: Mapping[Place, str] = attrs.field(factory=dict, eq=False, repr=False, metadata={"key": False})

    def dump(self) -> str:
        """Return the config as YAML.

        Short forms and defaults are written out; `load_config` of the text gives an equal config.
        """
        from colocate_run.config.source import write_yaml

        return write_yaml(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data."""
        data: dict[str, Any] = _to_plain(self, (), self.withheld)
        return data


@attrs.frozen
class Shape:
    """The source of a mapping's valid keys: the schema, the config's author, or a signature."""

    kind: type[attrs.AttrsInstance] | None = None  # The schema's class of the mapping; None outside of the schema.
    # The class of the values, if the config's author names the entries.
    item: type[attrs.AttrsInstance] | None = None
    arguments: bool = False  # Whether the keys are arguments of an executor, a role or a job.
    has_user_keys: bool = False  # Whether the config's author names the entries.

    @classmethod
    def from_annotation(cls, annotation: Any) -> Shape:
        """Return the `Shape` of a mapping with the given type annotation."""
        attrs_class: type[attrs.AttrsInstance] | None = next(
            filter(attrs.has, (annotation, *get_args(annotation))), None
        )
        named = any(get_origin(part) is dict for part in (annotation, *get_args(annotation)))
        return cls(item=attrs_class, has_user_keys=True) if named else cls(attrs_class)

    def child_shape(self, key: str | int) -> Shape:
        """Return the `Shape` of a key's value.

        Below an unknown key every shape is empty, because the key itself is the mistake.
        """
        if isinstance(key, int):  # All items of a list have the same shape.
            return self
        if self.kind is None:
            return (
                Shape(self.item) if self.item is not None else Shape(has_user_keys=self.has_user_keys or self.arguments)
            )
        field = next((field.name for field in yaml_fields(self.kind) if yaml_key(field.name) == key), None)
        if field is None:
            return Shape()
        return Shape(arguments=True) if field == "with_" else Shape.from_annotation(get_type_hints(self.kind)[field])


def yaml_fields(cls: type[attrs.AttrsInstance]) -> list[attrs.Attribute[Any]]:
    """Return the fields of a schema class that are keys in YAML."""
    return [field for field in attrs.fields(cls) if field.metadata.get("key", True)]


def yaml_key(field: str) -> str:
    """Return the YAML key of a schema class's field."""
    return field.rstrip("_")


def _to_plain(value: Any, place: Place, withheld: Mapping[Place, str]) -> Any:
    """Convert a value to plain data. `${` in texts is escaped, so that reading the data fills in no variables."""
    if attrs.has(type(value)):
        value = {yaml_key(field.name): getattr(value, field.name) for field in yaml_fields(type(value))}
    if isinstance(value, Mapping):
        return {key: _to_plain(item, (*place, key), withheld) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_plain(item, (*place, index), withheld) for index, item in enumerate(value)]
    return withheld.get(place, escape_text(value)) if isinstance(value, str) else value
