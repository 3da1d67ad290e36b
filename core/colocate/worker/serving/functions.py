"""What concerns a whole worker: functions, checkpoints, sleep. A role without a name does it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from colocate._protocol import from_worker
from colocate._protocol.ledger import TAGS
from colocate._role.context import current
from colocate._role.method import method
from colocate._role.method_spec import MethodSpec
from colocate._values.mesh import one_axis
from colocate.features import CALLS
from colocate.worker.context import WorkerContext
from colocate.worker.memory.sleep import Outcome
from colocate.worker.process_wide import own_of
from colocate.worker.serving.build import context_in
from colocate.worker.serving.role_instance import RoleInstance


class Functions:
    """Does what concerns the roles of its worker."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context

    @method
    def sleep(self, role: str, tags: Sequence[str], discard: Sequence[str], why: str) -> Outcome:
        """Put memory of a role to sleep, and why."""
        start, before, had = time.time(), self._worker_context.sleeper.asleep.tags(role), self._asleep(role)
        outcome = self._worker_context.sleeper.sleep(role, tags, discard, current_slots())
        more = self._asleep(role) - had  # as a wake will tell, also where the device keeps some of them
        if more or self._worker_context.sleeper.asleep.tags(role) != before:
            self._tell(role, True, more, start, why, self._worker_context.sleeper.asleep.kept_awake(role, tags))
        return outcome

    @method
    def wake(self, role: str, tags: Sequence[str], why: str) -> Outcome:
        """Have it be there again, and why."""
        self._worker_context.residency.make_room(role)
        start, before = time.time(), self._worker_context.sleeper.asleep.tags(role)
        outcome = self._worker_context.sleeper.wake(role, tags, current_slots())
        if self._worker_context.sleeper.asleep.tags(role) != before:
            self._tell(role, False, outcome.nbytes, start, why)
        return outcome

    def _asleep(self, role: str) -> int:
        """The bytes of a role that sleep."""
        tags = self._worker_context.sleeper.asleep.tags(role)
        return self._worker_context.sleeper.asleep.coming(role, tags).size if tags else 0

    def _tell(
        self,
        role: str,
        asleep: bool,
        nbytes: int,
        start: float,
        why: str,
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Tell the driver, and who counts it, what sleeps now, or is awake."""
        self._worker_context.accounts.moved(role)
        whole = asleep and len(self._worker_context.sleeper.asleep.tags(role)) == len(TAGS)
        self._worker_context.say(
            from_worker.Moved(role, asleep, nbytes, start, time.time(), whole, why, kept_awake=dict(kept))
        )


def current_slots() -> int:
    """How many slots the group has, whose function this is."""
    ctx = current()
    assert ctx is not None
    return ctx.world_size


# What calls say: no name of a function can be the same.
SLEEP, WAKE = _OWN = "the sleep", "the wake"
FUNCTION = "a function"
"""The call that has the name of a function, which it runs."""
GROUP_WIDE_CALLS = frozenset((*_OWN, *CALLS)) - {FUNCTION}
_METHODS = {
    SLEEP: "sleep",
    WAKE: "wake",
}
SPECS: dict[str, MethodSpec] = {said: Functions.__dict__[name].spec for said, name in _METHODS.items()}
"""By what calls say."""


def hosted_functions(worker_context: WorkerContext, slots: int, seed: int, feature: str | None) -> RoleInstance:
    """Make what calls on whole workers run in: every slot of the group is a rank."""
    boot = worker_context.boot
    generation = worker_context.groups.default.generation
    ctx = context_in(worker_context, None, range(slots), one_axis(slots), boot.group, seed, generation)
    setting, own = worker_context.setting, own_of(seed, boot.group, None, boot.slot, generation)
    if feature is None:
        return RoleInstance(None, Functions(worker_context), SPECS, ctx, setting, own=own)
    part = worker_context.part(feature)
    return RoleInstance(None, part, part.calls, ctx, setting, own=own)
