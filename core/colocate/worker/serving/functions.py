"""What concerns a whole worker: functions, checkpoints, sleep. A role without a name does it, which is of a feature."""

from __future__ import annotations

from colocate._role.context import current
from colocate._values.mesh import one_axis
from colocate.features import CALLS
from colocate.worker.context import WorkerContext
from colocate.worker.process_wide import own_of
from colocate.worker.serving.build import context_in
from colocate.worker.serving.role_instance import RoleInstance

FUNCTION = "a function"
"""The call that has the name of a function, which it runs."""
GROUP_WIDE_CALLS = frozenset(CALLS) - {FUNCTION}
"""What calls say: no name of a function can be the same."""


def current_slots() -> int:
    """How many slots the group has, whose function this is."""
    ctx = current()
    assert ctx is not None
    return ctx.world_size


def hosted_functions(worker_context: WorkerContext, slots: int, seed: int, feature: str) -> RoleInstance:
    """Make what calls of a feature on whole workers run in: every slot of the group is a rank."""
    boot = worker_context.boot
    generation = worker_context.groups.default.generation
    ctx = context_in(worker_context, None, range(slots), one_axis(slots), boot.group, seed, generation)
    setting, own = worker_context.setting, own_of(seed, boot.group, None, boot.slot, generation)
    part = worker_context.part(feature)
    return RoleInstance(None, part, part.calls, ctx, setting, own=own)
