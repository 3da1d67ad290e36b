"""`OfGroup`: what a feature does of a group, in the driver. Each method here is a place at which the kernel asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from colocate._calls.order import Hold
from colocate._calls.pending import PendingCall
from colocate._protocol.message import Message
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._worker_group.workforce import Worker
from colocate.errors import ColocateError

NOTHING: Mapping[str, Any] = MappingProxyType({})
NOTHING_STOPPED: Mapping[int, str] = MappingProxyType({})


class OfGroup:
    """The half of a feature that belongs to a group; it is there from its first use until the group is closed.

    What a feature keeps of one worker lies in `worker.parts`, by the feature's name.
    """

    def __init__(self, worker_group: Any) -> None:
        """Args: worker_group: The group (`WorkerGroup`)."""

    # -- its start

    def builds(self) -> Mapping[str, Any]:
        """Return, at each start, what the workers' halves are told of roles that are built, by role."""
        return NOTHING

    def gives(self) -> Any:
        """Return, at each start, what the workers' halves are told before any role is constructed; None for nothing."""
        return None

    def starts(self) -> Any:
        """Return, at each start when the workers run, what their halves are told of how roles begin; None for nothing.

        Raises:
            ColocateError: The group can't begin so.
        """
        return None

    def source(self) -> str | None:
        """Return what its roles are as of after a restart, as "its checkpoint 3"; None: not known to this feature."""
        return None

    def tag(self) -> str | int | float | None:
        """Return what somebody has called what its roles were restored from; None for nothing."""
        return None

    def renewed(self) -> None:
        """Hear that the group is rebuilt: its workers are new ones."""

    def saved(self) -> Any:
        """Return this feature's part of a checkpoint, as JSON data; None for no part.

        Called while the calls that take the roles' states are sent, with the order's lock held.
        """
        return None

    def restored(self, saved: Any) -> None:
        """Handle a restore of the group's roles from a checkpoint; `saved` is this feature's part, or None.

        Called for each feature that is loaded or has a part in the checkpoint.
        """

    def failed(self, error: ColocateError) -> None:
        """Hear that its workers are ended, as it has failed or is closed: nobody waits for their answers any more."""

    def ending(self, grace: float) -> Sequence[BaseException]:
        """End in so many seconds what goes on beside its calls, before its workers end; return what went wrong."""
        return ()

    def under_way(self) -> str | None:
        """Return what goes on beside its calls, for which it can't change its driver; None for nothing."""
        return None

    # -- its calls

    def view_call(self, role: RoleInfo, spec: MethodSpec) -> Any:
        """Return a method that this feature runs (`MethodSpec.feature`), as the view of its role has it."""
        raise AssertionError(spec)

    def is_paused(self, role: str) -> bool:
        """Return whether calls of a role wait until somebody has it go on."""
        return False

    def stood(self, since: float) -> float:
        """Return seconds since a time (of time.time()) that no deadline of the group counts."""
        return 0.0

    def stopped(self) -> Mapping[int, str]:
        """Return why slots stand still for as long as somebody wants, in words."""
        return NOTHING_STOPPED

    def sends(self, call: PendingCall) -> None:
        """Refuse a call on whole workers that is about to be sent. The order's lock is held.

        Raises:
            ColocateError: Why it can't.
        """

    def drafted(self, drafts: Sequence[Any]) -> Sequence[Any]:
        """Return calls (`Draft`) that are about to be sent, with others before them. The order's lock is held."""
        return drafts

    def ended(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Hear what a worker's half says as a call ends (`OfWorker.finished`, `halts`). The order's lock is held."""

    # -- a hold, which follows when a call has failed. The order's lock is held

    def halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Hear that a rank begins nothing more in a hold, and what its half says (`OfWorker.halts`, `back`), or None.

        First as its call fails, if one does, and then as the rank `is_back`: it runs nothing any more.
        """

    def all_back(self, hold: Hold) -> bool:
        """Have ranks that are all back do something before they go on (`CallOrder.begin_phase`); whether they do.

        True also where it has failed the group.
        """
        return False

    # -- its workers, and what they say

    def greets(self, worker: Worker) -> None:
        """Tell a new worker what it has to know before anything else."""

    def gone(self, worker: Worker) -> None:
        """Hear that a worker has ended."""

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Take one of the feature's messages."""
        raise AssertionError(message)

    def told(self, told: Mapping[str, Any]) -> None:
        """Take what a worker's half has told of roles, by role (`OfWorker.told`)."""

    # -- looks

    def shown(self, role: str) -> Mapping[str, Any]:
        """Return what the graph shows of a role."""
        return NOTHING

    def nodes(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return what the graph shows below a role of a worker."""
        return ()

    def memory(self) -> Mapping[str, Any]:
        """Return the fields of `GroupMemory` that this feature knows."""
        return NOTHING

    # -- for a driver after this one

    def kept(self) -> Any:
        """Return, as plain data, what a later driver has to know; None for nothing."""
        return None

    def take(self, kept: Any) -> None:
        """Take up what an earlier driver's half has kept."""
