"""Constructs roles on the lane, from classes that the driver has sent.

Calls on a whole worker (functions, checkpoints, sleep) belong to a role without a name, one for each feature.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate import wire
from colocate._role.context import Context, MeshPlace, attach, derive_seed, reset_current, set_current
from colocate._role.role import check_role
from colocate._system.installed import get_version, get_version_line
from colocate._system.tracebacks import rebuilding
from colocate._values.leaving import move_to_device
from colocate._values.mesh import Mesh, get_default_meshes
from colocate.errors import PluginError
from colocate.features import CALLS
from colocate.worker.context import WorkerContext
from colocate.worker.process_wide import create_role_state
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code

FUNCTION = "a function"
"""Method name of calls that run a function."""
GROUP_WIDE_CALLS = frozenset(CALLS) - {FUNCTION}
"""Method names of calls on whole workers: no function's name can be the same."""


@attrs.frozen
class ShippedObject:
    """A class or function for a worker: a name, a pickled definition, or within one process the object itself."""

    name: str  # The form is "module:qualified.name".
    data: wire.Packed | None = None  # Pickled definition; None if only the name is sent.
    cls: Any = None  # The object itself, within one process or while the enclosing object is pickled.
    distribution: str | None = None  # Name of the distribution on the driver that has the class or function.
    version: str | None = None  # The distribution's version on the driver.

    def load_object(self) -> Any:
        """Import or unpickle the class or function in this process.

        Raises:
            PluginError: Another version of the distribution is installed here.
        """
        if self.cls is not None:
            return self.cls
        if self.data is not None:
            return wire.unpack(self.data)
        if self.distribution is not None:
            local_version = _get_local_version(self.distribution)
            if local_version != self.version:
                has = "doesn't have it" if local_version is None else f"has {local_version}"
                raise PluginError(
                    f"{self.name} comes from {self.distribution} {self.version} on the driver, but the worker "
                    f"({sys.executable}) {has}: install the same version in both",
                    name=self.name,
                    distribution=self.distribution,
                    hint=get_version_line(self.distribution, self.version),
                )
        module, _, path = self.name.partition(":")
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        return value


# The result is cached because the look-up is slow, and imported code doesn't change.
_get_local_version = functools.cache(get_version)


@attrs.frozen
class RoleBuild:
    """The driver's description of one role to construct."""

    name: str
    shipped: ShippedObject
    arguments: Any  # Packed constructor arguments (args, kwargs).
    slots: tuple[int, ...] | range
    meshes: Mapping[str, Mesh]
    group: str
    seed: int
    generation: int
    parts: Mapping[str, Any]  # Settings of the group's features for the role (`GroupFeature.role_configs`).


def create_context(
    worker_context: WorkerContext,
    role: str | None,
    slots: Sequence[int],
    meshes: Mapping[str, Mesh],
    group: str,
    seed: int,
    generation: int,
) -> Context:
    """Make the context for one of this worker's roles, or for a function. `seed` is the runtime's seed."""
    boot = worker_context.boot
    rank = slots.index(boot.slot)
    return Context(
        rank=rank,
        world_size=len(slots),
        slot=boot.slot,
        node=boot.node,
        role=role,
        group=group,
        generation=generation,
        seed=derive_seed(seed, group, role, rank),
        seed_of_rows=derive_seed(seed, group, role, -1),
        meshes={name: MeshPlace(mesh, rank) for name, mesh in meshes.items()},
        device=boot.device,
        siblings=worker_context.instances,
        reach=worker_context.wake_sibling,
        slots=slots,
        part=worker_context.get_feature,
        report=worker_context.report_progress,
        background=worker_context.background,
    )


@calls_role_code
def construct(build: RoleBuild, worker_context: WorkerContext) -> RoleInstance:
    """Construct a role's instance in this worker. Errors of the constructor propagate."""
    ctx = create_context(
        worker_context, build.name, build.slots, build.meshes, build.group, build.seed, build.generation
    )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    instance, is_substitute = None, False
    token = set_current(ctx)
    try:
        wide, role_state = worker_context.setting.process_state, None
        if wide is not None:
            role_state = create_role_state(build.seed, build.group, build.name, ctx.slot, build.generation)
            wide.switch_to(role_state)
        cls = build.shipped.load_object()
        worker_context.setting.choose_device()
        worker_context.setting.base = attrs.evolve(worker_context.setting.read_settings(), role_state=None)
        if wide is not None:
            wide.on_module_loaded()
        methods, parts = check_role(build.name, cls), build.parts
        for name, plain in parts.items():
            if (instance := worker_context.get_feature(name).substitute_role(build.name, cls, plain)) is not None:
                is_substitute, parts = True, {name: plain}
                break
        # Arguments are unpacked in host memory; the role itself moves data to the device.
        if build.arguments is not None and not is_substitute:
            with rebuilding("an argument"):
                args, kwargs = worker_context.codec.unpack(build.arguments, "cpu")
            if worker_context.moves_tensors:
                args, kwargs = move_to_device((args, kwargs), "cpu")
        if not is_substitute:
            with worker_context.around_constructor(build.name, parts):
                instance = cls(*args, **kwargs)
        attach(instance, ctx)
        settings = worker_context.setting.read_settings()
    finally:
        reset_current(token)
        worker_context.setting.apply_settings(worker_context.setting.base)
    setting = worker_context.setting
    # A background role uses a separate stream.
    if (background := worker_context.background.get(build.name)) is not None:
        setting, settings, role_state = background.setting, attrs.evolve(settings, stream=None, role_state=None), None
        setting.base = attrs.evolve(worker_context.setting.base, stream=None)
    role = RoleInstance(
        build.name, instance, methods, ctx, setting, settings, role_state=role_state, is_substitute=is_substitute
    )
    for name in {**worker_context.parts, **parts}:
        worker_context.get_feature(name).on_role_built(role, parts.get(name))
    return role


def create_function_host(worker_context: WorkerContext, slots: int, seed: int, feature: str) -> RoleInstance:
    """Make the nameless role that runs a feature's calls on whole workers. Each slot of the group is a rank."""
    boot = worker_context.boot
    generation = boot.generation
    ctx = create_context(worker_context, None, range(slots), get_default_meshes(slots), boot.group, seed, generation)
    setting, role_state = worker_context.setting, create_role_state(seed, boot.group, None, boot.slot, generation)
    part = worker_context.get_feature(feature)
    return RoleInstance(None, part, part.calls, ctx, setting, role_state=role_state)
