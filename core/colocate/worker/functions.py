"""What concerns a whole worker: functions of `group.run`, and checkpoints. A role without a name does it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from colocate._role.context import Context, MeshPlace, current, derive_seed
from colocate._role.method import RoleMethod, method
from colocate._role.method_spec import MethodSpec
from colocate._role.standalone import awaited
from colocate._values.mesh import Mesh
from colocate.worker import checkpoint
from colocate.worker.build import Shipped
from colocate.worker.hosted import HostedRole
from colocate.worker.site import Site


class Functions:
    """What runs the functions, and has the roles of its worker saved."""

    def __init__(self, roles: Mapping[Any, HostedRole]) -> None:
        self._roles = roles

    @method
    def run(self, function: Shipped, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function with the worker's context; one that is async is run to its end."""
        result = function.load()(current(), *args, **kwargs)
        return awaited(result) if inspect.iscoroutine(result) else result

    @method
    def save(self, directory: str) -> None:
        """Have the roles write their states into a folder."""
        checkpoint.save([role for role in self._roles.values() if role.name is not None], directory)


CHECKPOINT = "the checkpoint"  # no name of a function can be the same
_run: RoleMethod[..., Any, Any] = Functions.__dict__["run"]
_save: RoleMethod[..., Any, Any] = Functions.__dict__["save"]
RUN: MethodSpec = _run.spec
SAVE: MethodSpec = _save.spec


def hosted_functions(site: Site, slots: int, seed: int) -> HostedRole:
    """What functions run in: every slot of the group is a rank.

    Args:
        site: The worker.
        slots: How many slots the group has.
        seed: The runtime's.
    """
    boot = site.boot
    ctx = Context(
        rank=boot.slot,
        world_size=slots,
        slot=boot.slot,
        node=boot.node,
        role=None,
        group=boot.group,
        generation=site.groups.generation,
        seed=derive_seed(seed, boot.group, None, boot.slot),
        meshes={"": MeshPlace(Mesh({"dp": slots}), boot.slot)},
        device=boot.device,
        siblings=site.instances,
        slots=range(slots),
        groups=site.groups,
        report=site.report,
    )
    return HostedRole(None, Functions(site.roles), {RUN.name: RUN, CHECKPOINT: SAVE}, ctx)
