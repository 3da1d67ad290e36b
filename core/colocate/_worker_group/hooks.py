"""The base class of a feature's driver-side code for one group (`OfGroup`). The core calls each hook at one place."""

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
    """Base class of a feature's driver-side code for one group.

    An object exists from the feature's first use until the group is closed. A feature's state for one worker is in
    `worker.parts`, by the feature's name.
    """

    def __init__(self, worker_group: Any) -> None:
        """Create the feature's object for a group.

        Args:
            worker_group: The group (`WorkerGroup`).
        """

    # -- its start

    def builds(self) -> Mapping[str, Any]:
        """Return the feature's settings for the workers, by role. Called at each start, before roles are built."""
        return NOTHING

    def gives(self) -> Any:
        """Return settings that workers need before roles are constructed, or None. Called at each start."""
        return None

    def starts(self) -> Any:
        """Return the roles' initial state for the workers, or None. Called at each start, once workers run.

        Raises:
            ColocateError: The group can't start from this state.
        """
        return None

    def source(self) -> str | None:
        """Return a text for the source of the roles' state after a restart, such as "its checkpoint 3", or None."""
        return None

    def tag(self) -> str | int | float | None:
        """Return the tag of the checkpoint that the roles were restored from; None without a checkpoint."""
        return None

    def renewed(self) -> None:
        """Handle a restart of the group, which has replaced all workers."""

    def saved(self) -> Any:
        """Return this feature's part of a checkpoint, as JSON data; None for no part.

        Called while the calls that take the roles' states are sent, with the order's lock held.
        """
        return None

    def restored(self, saved: Any) -> None:
        """Handle a restore of the group's roles from a checkpoint; `saved` is the feature's part of the checkpoint.

        Called for each feature that is loaded or has a part in the checkpoint.
        """

    def failed(self, error: ColocateError) -> None:
        """Handle the end of all workers after the group has failed or was closed."""

    def ending(self, grace: float) -> Sequence[BaseException]:
        """End background work in at most `grace` seconds, before the workers end; return the errors."""
        return ()

    def under_way(self) -> str | None:
        """Return a label of background work that prevents a change of drivers; None without such work."""
        return None

    # -- its calls

    def view_call(self, role: RoleInfo, spec: MethodSpec) -> Any:
        """Return the object by which a view calls a method that this feature runs (`MethodSpec.feature`)."""
        raise AssertionError(spec)

    def is_paused(self, role: str) -> bool:
        """Return whether a role is paused, so that calls wait until the role is resumed."""
        return False

    def stood(self, since: float) -> float:
        """Return how many of the seconds after `since` (in time.time()) don't count for deadlines."""
        return 0.0

    def stopped(self) -> Mapping[int, str]:
        """Return, by slot, the reason why a rank is stopped for an unlimited time."""
        return NOTHING_STOPPED

    def sends(self, call: PendingCall) -> None:
        """Check a call to workers as a whole (not to one role) before sending. The caller holds the order's lock.

        Raises:
            ColocateError: The call is refused.
        """

    def drafted(self, drafts: Sequence[Any]) -> Sequence[Any]:
        """Return the calls (`Draft`) to send, with any additional calls in front. The caller holds the order's lock."""
        return drafts

    def ended(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Handle the feature's report from a worker on a call that has ended. The caller holds the order's lock.

        `plain` is the result of `OfWorker.finished` or `OfWorker.halts`.
        """

    # -- the hold after a failed call. The order's lock is held

    def halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Handle a message that a rank has stopped in a hold, the barrier after a failed call.

        Called when a call of the rank has failed, if any, and again with `is_back` once the rank runs no call any more.
        `plain` is the result of `OfWorker.halts` or `OfWorker.back`, or None.
        """

    def all_back(self, hold: Hold) -> bool:
        """Start work to be done before stopped ranks continue (`CallOrder.begin_phase`); return whether there is any.

        Also return True after failing the group.
        """
        return False

    # -- its workers, and what they say

    def greets(self, worker: Worker) -> None:
        """Send the feature's first messages to a new worker."""

    def gone(self, worker: Worker) -> None:
        """Handle the exit of a worker."""

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a worker's message that belongs to this feature."""
        raise AssertionError(message)

    def told(self, told: Mapping[str, Any]) -> None:
        """Handle the feature's reports from a worker, by role name (`OfWorker.told`)."""

    # -- looks

    def shown(self, role: str) -> Mapping[str, Any]:
        """Return facts about a role, to be shown in the ownership graph."""
        return NOTHING

    def nodes(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return nodes to be shown in the ownership graph below a role of a worker."""
        return ()

    def memory(self) -> Mapping[str, Any]:
        """Return this feature's fields for the memory report of a group (`GroupMemory`)."""
        return NOTHING

    # -- for later drivers

    def kept(self) -> Any:
        """Return plain data for a later driver of the group; None without data."""
        return None

    def take(self, kept: Any) -> None:
        """Restore the data that `kept` returned in an earlier driver."""
