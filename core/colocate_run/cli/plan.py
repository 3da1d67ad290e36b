"""`colocate plan`: predict the memory of a config's roles without allocating this memory.

Each role's first rank is constructed on torch's meta device, which has shapes and no memory. Every optimizer then makes
a step there, so that gradients and optimizer state have their real sizes. Activations aren't known. A class whose
constructor can't run on the meta device declares its memory by a class method `plan`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
from rich.text import Text

from colocate.errors import ColocateError, ConfigError
from colocate.hosting import (
    Context,
    MeshPlace,
    Purpose,
    Storages,
    attach,
    count_by_purpose,
    derive_seed,
    find_holdings,
    find_optimizers,
    find_own_method,
    hosted,
    need_torch,
)
from colocate.placement import describe_placement
from colocate.plugins import find_role
from colocate.signatures import Budgets, Limit, arguments_of, methods_of, parse_meshes
from colocate.texts import format_count, format_error, format_size, join_words
from colocate_run.cli.output import load_command_config, print_json, report_errors
from colocate_run.config.check import budgets_of
from colocate_run.config.schema import Config, GroupConfig
from colocate_run.screen import console, show_table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_KINDS = tuple(purpose.word for purpose in Purpose if purpose is not Purpose.RESIDENTS)
_ADVICE = {  # Advice for torch's errors on the meta device.
    "meta tensor": "tensors have no values there: ask for them in a method, or only of tensors that aren't `is_meta`",
    "META device": "it has no generator: take `self.ctx.generator`",
    "compiled with CUDA": "put it on `self.ctx.device`, wherever that is",
}


@report_errors
def show_memory(
    file: Path, executor: str | None, changes: Iterable[str], *, json: bool, allow_import: bool = True
) -> int:
    """Print the predicted memory; return exit status 1 if a role can't fit or a role's memory isn't known."""
    # Set this before torch is imported, because torch would warn of process groups with missing ranks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = load_command_config(file, executor, changes, allow_import=allow_import)
    # A constructor's prints must not mix with the JSON that a script reads.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        groups = plan_groups(config)
    if json:
        print_json([group.to_json() for group in groups])
    else:
        _print_text(f"{config.name}: what roles will hold (torch took no memory for it, and nothing was started)")
        for group in groups:
            _print_group(group)
    unknown = any(role.unknown is not None for group in groups for role in group.roles)
    return 1 if unknown or any(fit.misfits for group in groups for fit in group.check_budgets()) else 0


@attrs.define(eq=False)
class RolePlan:
    """The predicted memory of one rank of a role, in bytes."""

    role: str
    slots: tuple[int, ...]
    ctx: Context
    instance: Any = None  # The role on the meta device; None if the constructor raised.
    unknown: str | None = None  # The reason why the memory isn't fully known.
    kinds: dict[str, int] = attrs.field(factory=dict)  # Bytes by kind. Shared storages count for the first role.
    alone: int = 0  # Bytes of all kinds, including shared storages.

    @property
    def total(self) -> int:
        """The bytes of all kinds of memory."""
        return sum(self.kinds.values())

    @contextlib.contextmanager
    def record_failure(self, what: str) -> Iterator[None]:
        """A context manager that runs role code, and records an error as `unknown`."""
        try:
            with hosted(self.ctx):
                yield
        except Exception as error:
            advice = next((f" ({hint})" for text, hint in _ADVICE.items() if text in str(error)), "")
            self.unknown = f"{what} raised on the meta device: {format_error(error)}{advice}"


@attrs.frozen
class Fit:
    """The answer to whether roles fit into one budget, for slots with the same roles."""

    limit: Limit
    slots: tuple[int, ...]
    needs: int  # Bytes that all roles need together.
    free: int  # The part of `needs` that is for one role's activations.
    takers: tuple[str, ...] = ()  # Roles that must take turns if the smallest roles stay awake.
    misfits: tuple[str, ...] = ()


@attrs.frozen
class GroupPlan:
    """The predicted memory of a group's roles, on the slots of a pool."""

    group: str
    slots: int
    roles: Sequence[RolePlan]
    budgets: Budgets
    where: str  # Constraints on the slots' nodes, as text.
    on_host: bool  # Whether slots have no GPUs, so that roles' memory is host memory.

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        fields = ("role", "slots", "kinds", "alone", "unknown", "total")
        roles = [{name: getattr(role, name) for name in fields} for role in self.roles]
        place = {"where": self.where} if self.where else {}
        return {
            "group": self.group,
            **place,
            "roles": roles,
            "budgets": [attrs.asdict(fit) for fit in self.check_budgets()],
        }

    def roles_on(self, slot: int) -> list[RolePlan]:
        """Return the roles of a slot."""
        return [role for role in self.roles if slot in role.slots]

    def check_budgets(self) -> Iterator[Fit]:
        """Yield whether roles fit into each budget, once for all slots with the same roles."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for slot in range(self.slots):
            alike.setdefault(tuple(role.role for role in self.roles_on(slot)), []).append(slot)
        for limit in self.budgets.limits:
            for slots in alike.values() if limit.device or self.on_host else ():
                if roles := [member for member in self.roles_on(slots[0]) if limit.role in (None, member.role)]:
                    yield self._check_budget(limit, tuple(slots), roles)

    def _check_budget(self, limit: Limit, slots: tuple[int, ...], roles: Sequence[RolePlan]) -> Fit:
        sizes = {role.role: role.total for role in roles}
        free = {role: self.budgets.activations.get(role, 0) if limit.device else 0 for role in sizes}

        def fit(awake: Collection[str]) -> bool:
            return sum(sizes[role] for role in awake) + max(free[role] for role in awake) <= limit.nbytes

        outcome = Fit(limit, slots, sum(sizes.values()) + max(free.values()), max(free.values()))
        if fit(sizes):
            return outcome
        if misfits := [
            member.role for member in roles if not limit.device or member.alone + free[member.role] > limit.nbytes
        ]:
            return attrs.evolve(outcome, misfits=tuple(misfits))
        awake, rest = list[str](), sorted(sizes, key=lambda role: sizes[role])
        while rest and all(fit({*awake, rest[0], other}) for other in rest):
            awake.append(rest.pop(0))
        return attrs.evolve(outcome, takers=tuple(role for role in sizes if role not in awake))


# -- finding out


def plan_groups(config: Config) -> list[GroupPlan]:
    """Predict the memory of all roles of a config's groups."""
    try:
        need_torch("colocate plan")
    except ImportError as error:
        raise ConfigError(str(error)) from error
    import torch

    pools = {name: config.pools[group.pool] for name, group in config.groups.items()}
    with (
        _pretend_first_rank(max((pool.slots for pool in pools.values()), default=1)),
        _skip_pretrained_weights(),
        torch.device("meta"),
    ):
        plans = {
            name: _construct_roles(name, group, pools[name].slots, config) for name, group in config.groups.items()
        }
        instances = {
            name: {entry.role: entry.instance for entry in roles if entry.unknown is None}
            for name, roles in plans.items()
        }
        for name, roles in plans.items():
            siblings = {
                role: entry for group_instances in instances.values() for role, entry in group_instances.items()
            } | instances[name]
            for entry in roles:
                if entry.instance is not None:
                    _plan_training(entry, siblings)
            _measure_roles(roles)
    return [
        GroupPlan(
            name,
            pools[name].slots,
            roles,
            budgets_of(config.groups[name], pools[name]),
            describe_placement(pools[name]),
            not pools[name].gpus,
        )
        for name, roles in plans.items()
    ]


def _construct_roles(name: str, group: GroupConfig, slots: int, config: Config) -> list[RolePlan]:
    import torch

    plans: list[RolePlan] = []
    siblings: dict[str, object] = {}
    for role, entry in group.roles.items():
        where = tuple(range(slots) if entry.slots is None else entry.slots)
        meshes = parse_meshes(entry.mesh or (group.mesh if entry.slots is None else None), len(where))
        ctx = Context(
            rank=0,
            world_size=len(where),
            slot=where[0],
            node="localhost",
            role=role,
            group=name,
            generation=0,
            seed=derive_seed(config.seed, name, role, 0),
            meshes={key: MeshPlace(mesh, 0) for key, mesh in meshes.items()},
            device="meta",
            siblings=siblings,
            slots=range(len(where)),
            part=_PlannedGroups().feature,
            background={key: None for key, config_ in group.roles.items() if config_.background},
        )
        ctx._generator = torch.Generator("cpu").manual_seed(ctx.seed)  # The meta device has no generator.
        plans.append(RolePlan(role, where, ctx))
        cls: Any = find_role(entry.use).load()
        options = arguments_of(cls, entry.use).convert(entry.with_)
        if isinstance(inspect.getattr_static(cls, "plan", None), classmethod | staticmethod):
            with plans[-1].record_failure("its plan()"):
                counts = count_by_purpose(role, cls.plan(**options), "plan()")
                plans[-1].kinds = {purpose.word: size for purpose, size in counts.items() if size}
                plans[-1].alone = plans[-1].total
            continue
        with plans[-1].record_failure("its constructor"):
            plans[-1].instance = siblings[role] = cls(**options)
            attach(siblings[role], ctx)
    return plans


def _plan_training(made: RolePlan, roles: Mapping[str, Any]) -> None:
    """Run a role's `plan`, then one optimizer step with zero gradients, which creates the optimizer state."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Ones(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__) and args[0].is_meta:
                args = (torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu"),)
            return func(*args, **(kwargs or {}))

    planned = find_own_method(made.instance, "plan")
    # A method `plan` that drivers call (`@method`) doesn't plan memory.
    if planned is not None and "plan" not in methods_of(type(made.instance)):
        with made.record_failure("its plan()"):
            planned(roles)
    siblings = [role for role in roles.values() if role is not made.instance]
    with made.record_failure("a step of its optimizer"):
        for optimizer in find_optimizers(made.instance, siblings):
            for group in optimizer.param_groups:  # Turn off options that the meta device lacks.
                group.update({name: False for name in ("fused", "capturable") if group.get(name)})
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
            with torch.device("cpu"), Ones():
                optimizer.step()


def _measure_roles(made: Sequence[RolePlan]) -> None:
    counted: set[tuple[str, int]] = set()
    for role_plan in made:
        if role_plan.instance is None:
            continue
        declares = find_own_method(role_plan.instance, "device_state", takes_nothing=True)
        declared: Any = None
        if declares is not None and "device_state" not in methods_of(type(role_plan.instance)):
            with role_plan.record_failure("its device_state()"):
                declared = declares()
        siblings = [other.instance for other in made if other is not role_plan and other.instance is not None]
        held, _ = find_holdings(role_plan.instance, [declared], siblings, _Planned)
        for purpose in Purpose:
            for device, pieces in held.get(purpose, {}).items():
                role_plan.alone += sum(pieces.values())
                new = sum(nbytes for address, nbytes in pieces.items() if (device, address) not in counted)
                if new:
                    role_plan.kinds[purpose.word] = role_plan.kinds.get(purpose.word, 0) + new
                counted |= {(device, address) for address in pieces}


class _Planned(Storages):
    """Storages of a role, including storages on the meta device, which have no address."""

    def add_tensor(self, item: Any, torch: Any) -> None:
        if item.is_meta and item.layout is torch.strided and not hasattr(item, "__tensor_flatten__"):
            storage = item.untyped_storage()
            self.setdefault("meta", {})[storage._cdata] = storage.nbytes()
        else:
            super().add_tensor(item, torch)


@contextlib.contextmanager
def _pretend_first_rank(ranks: int) -> Iterator[None]:
    """A context manager that simulates rank 0 of `ranks` ranks with a fake process group."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as wrapper

    # Torch has no public fake process group, so use a class of torch's own tests.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    construct: Any = wrapper.__init__

    def constructed(self: Any, module: Any, _ids: Any = None, _out: Any = None, *args: Any, **named: Any) -> None:
        # Don't compare parameters with other ranks, and pass no device index, because the meta device has none.
        options = {key: value for key, value in named.items() if key not in ("device_ids", "output_device")}
        construct(self, module, None, None, *args, **options | {"init_sync": False})

    hook = sys.excepthook
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=ranks)
    setattr(wrapper, "__init__", constructed)  # noqa: B010 - to type checkers a method is no attribute
    try:
        yield
    finally:
        setattr(wrapper, "__init__", construct)  # noqa: B010
        dist.destroy_process_group()
        sys.excepthook = hook  # Undo torch's replacement of the hook.


@attrs.define(eq=False)
class _PlannedGroups:
    """The process groups of one role, which don't communicate. `Context` explains the methods."""

    _mesh: dict[str, DeviceMesh] = attrs.field(factory=dict, init=False)

    def feature(self, feature: str) -> Any:
        """Return the worker's part of the feature `process_groups`.

        Raises:
            ColocateError: The feature isn't `process_groups`.
        """
        if feature != "process_groups":
            raise ColocateError(f"what is only planned has no {feature}")
        return SimpleNamespace(groups=self)

    def get(self, ctx: Context, axis: str | None) -> ProcessGroup:
        import torch.distributed as dist

        if axis is None:
            group: Any = dist.new_group(list(range(ctx.world_size)))
            return group  # type: ignore[no-any-return]
        mesh, _, name = axis.rpartition(".")
        holding = mesh or next(key for key, place in ctx.meshes.items() if name in place.shape)
        return self.mesh(ctx, holding).get_group(name)

    def mesh(self, ctx: Context, name: str | None) -> DeviceMesh:
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        which = next(iter(ctx.meshes)) if name is None else name
        if which not in self._mesh:
            shape = ctx.meshes[which].shape
            with torch.device("cpu"):  # The default device is the meta device here.
                ranks = torch.arange(ctx.world_size).reshape([*shape.values()])
                self._mesh[which] = DeviceMesh("cpu", ranks, mesh_dim_names=(*shape,))
        return self._mesh[which]

    def rendezvous(self) -> tuple[str, int]:
        raise ColocateError("ctx.rendezvous: nobody is there to meet where memory is only planned")

    def make_again(self, ctx: Context) -> None:
        """Do nothing, because no process group is ever dropped here."""


@contextlib.contextmanager
def _skip_pretrained_weights() -> Iterator[None]:
    """A context manager that lets transformers' `from_pretrained` build models without reading weights."""
    try:
        from transformers import PreTrainedModel
    except Exception:  # If transformers is missing, only a role that needs transformers gets the error.
        yield
        return

    plain = vars(PreTrainedModel)["from_pretrained"]
    setattr(PreTrainedModel, "from_pretrained", classmethod(_model_from_config))  # noqa: B010 - as above
    try:
        with warnings.catch_warnings():  # Hide torch's warnings about weights from a file.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter in the checkpoint")
            yield
    finally:
        setattr(PreTrainedModel, "from_pretrained", plain)  # noqa: B010


def _model_from_config(cls: Any, /, name: Any, *_: Any, config: Any = None, **options: Any) -> Any:
    import torch

    informs = options.pop("output_loading_info", False)
    dtype = options.pop("torch_dtype", None) or options.pop("dtype", None)
    if config is None or isinstance(config, str):
        config, options = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **options)
    if options.get("quantization_config") or getattr(config, "quantization_config", None) or options.get("gguf_file"):
        raise ValueError(f"how much {cls.__name__} holds of quantized weights isn't known without them")
    dtype = getattr(config, "dtype", None) if dtype in (None, "auto") else dtype
    chosen = {key: options[key] for key in ("attn_implementation",) if key in options}
    model = cls._from_config(config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, **chosen)
    return (model.eval(), {}) if informs else model.eval()


# -- showing it


def _print_group(group: GroupPlan) -> None:
    kinds = [kind for kind in _KINDS if any(kind in role.kinds for role in group.roles)]
    rows = []
    for role in group.roles:
        total = format_size(role.total)
        if role.unknown is not None:
            total = f"at least {total}" if role.total else "?"
        sizes = {kind: format_size(role.kinds[kind]) if kind in role.kinds else "" for kind in kinds}
        where = "all" if len(role.slots) == group.slots else ", ".join(map(str, role.slots))
        rows.append({"role": role.role, "slots": where, **sizes, "total": total})
    show_table(f"group {group.group}: each rank of a role", rows, console())
    for role in group.roles:
        if role.unknown is not None:
            _print_text(f"{role.role} isn't known: {role.unknown}")
    fullest = max(sum(role.total for role in group.roles_on(slot)) for slot in range(group.slots))
    fused, least = format_count(group.slots, "worker"), _sum_prefix(group, range(group.slots))
    fused += f" ({group.where})" if group.where else ""
    _print_text(f"\nfused: {fused}, and the fullest holds {least}{format_size(fullest)}")
    processes = sum(len(role.slots) for role in group.roles)
    separate = format_size(sum(role.alone * len(role.slots) for role in group.roles))
    holds, in_all, prefix = ("holds", "", "") if processes == 1 else ("hold", " in all", "each ")
    overhead = f"{prefix}with its own Python, torch and, on a GPU, context"
    _print_text(f"separate: {format_count(processes, 'process')}, which {holds} {least}{separate}{in_all}, {overhead}")
    for fit in group.check_budgets():
        _print_text(_describe_fit(fit, group))


def _sum_prefix(group: GroupPlan, slots: Iterable[int]) -> str:
    return "at least " if any(role.unknown is not None for slot in slots for role in group.roles_on(slot)) else ""


def _describe_fit(fit: Fit, group: GroupPlan) -> str:
    limit, least = fit.limit, _sum_prefix(group, fit.slots)
    where = "" if len(fit.slots) == group.slots else f", on slot {', '.join(map(str, fit.slots))}"
    text = f"{limit.owner} may have {format_size(limit.nbytes)} of {limit.word}{where}"
    needs = f"{least}{format_size(fit.needs)}" + (f", with {format_size(fit.free)} to stay free" if fit.free else "")
    if fit.misfits:
        sleeping = "" if limit.device else ", also for what sleeps"
        return f"{text}{sleeping}: {join_words(fit.misfits)} can't fit (they need {needs})"
    if not fit.takers:
        return f"{text}: {'the roles that are known' if least else 'all roles'} fit together ({needs})"
    text = f"{text}, and they need {needs}: {join_words(fit.takers)} must take turns"
    return text if group.budgets.swap else f"{text}; say residency: swap"


def _print_text(text: str) -> None:
    console().print(Text(text), soft_wrap=True)
