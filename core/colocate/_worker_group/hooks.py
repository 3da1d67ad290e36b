"""The base class of a feature's driver-side code for one group (`GroupFeature`).

The core calls each hook at one place.
"""

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


class GroupFeature:
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

    def role_configs(self) -> Mapping[str, Any]:
        """Return the feature's settings for the workers, by role. Called at each start, before roles are built."""
        return NOTHING

    def worker_config(self) -> Any:
        """Return settings that workers need before roles are constructed, or None. Called at each start."""
        return None

    def ready_configs(self) -> Any:
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

    def on_restarted(self) -> None:
        """Handle a restart of the group, which has replaced all workers."""

    def save_state(self) -> Any:
        """Return this feature's part of a checkpoint, as JSON data; None for no part.

        Called while the calls that take the roles' states are sent, with `CallOrder.lock` held.
        """
        return None

    def load_state(self, saved: Any) -> None:
        """Handle a restore of the group's roles from a checkpoint; `saved` is the feature's part of the checkpoint.

        Called for each feature that is loaded or has a part in the checkpoint.
        """

    def on_failed(self, error: ColocateError) -> None:
        """Handle the end of all workers after the group has failed or was closed."""

    def finish_background(self, grace: float) -> Sequence[BaseException]:
        """End background work in at most `grace` seconds, before the workers end; return the errors."""
        return ()

    def background_work(self) -> str | None:
        """Return a label of background work that prevents a change of drivers; None without such work."""
        return None

    # -- its calls

    def view_call(self, role: RoleInfo, spec: MethodSpec) -> Any:
        """Return the object by which a view calls a method that this feature runs (`MethodSpec.feature`)."""
        raise AssertionError(spec)

    def is_paused(self, role: str) -> bool:
        """Return whether a role is paused, so that calls wait until the role is resumed."""
        return False

    def paused_seconds(self, since: float) -> float:
        """Return how many of the seconds after `since` (in time.time()) don't count for deadlines."""
        return 0.0

    def stopped_slots(self) -> Mapping[int, str]:
        """Return, by slot, the reason why a rank is stopped for an unlimited time."""
        return NOTHING_STOPPED

    def check_send(self, call: PendingCall) -> None:
        """Check a call to workers as a whole (not to one role) before sending. The caller holds `CallOrder.lock`.

        Raises:
            ColocateError: The call is refused.
        """

    def prepend_calls(self, drafts: Sequence[Any]) -> Sequence[Any]:
        """Return the calls (`Draft`) to send, with any additional calls in front. The caller holds `CallOrder.lock`."""
        return drafts

    def on_call_report(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Handle the feature's report from a worker on a call that has ended. The caller holds `CallOrder.lock`.

        `plain` is the result of `WorkerFeature.call_report` or `WorkerFeature.failure_report`.
        """

    # -- the hold after a failed call. The order's lock is held

    def on_rank_halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Handle a message that a rank has stopped in a hold, the barrier after a failed call.

        Called when a call of the rank has failed, if any, and again with `is_back` once the rank runs no call any more.
        `plain` is the result of `WorkerFeature.failure_report` or `WorkerFeature.hold_report`, or None.
        """

    def on_all_halted(self, hold: Hold) -> bool:
        """Start work to be done before stopped ranks continue (`CallOrder.start_phase`); return whether there is any.

        Also return True after failing the group.
        """
        return False

    # -- its workers, and what they say

    def on_worker_started(self, worker: Worker) -> None:
        """Send the feature's first messages to a new worker."""

    def on_worker_ended(self, worker: Worker) -> None:
        """Handle the exit of a worker."""

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle a worker's message that belongs to this feature."""
        raise AssertionError(message)

    def on_roles_described(self, told: Mapping[str, Any]) -> None:
        """Handle the feature's reports from a worker, by role name (`WorkerFeature.describe_role`)."""

    # -- looks

    def role_attributes(self, role: str) -> Mapping[str, Any]:
        """Return facts about a role, to be shown in the ownership graph."""
        return NOTHING

    def role_children(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return nodes to be shown in the ownership graph below a role of a worker."""
        return ()

    def memory_fields(self) -> Mapping[str, Any]:
        """Return this feature's fields for the memory report of a group (`GroupMemory`)."""
        return NOTHING

    # -- for later drivers

    def handover_state(self) -> Any:
        """Return plain data for a later driver of the group; None without data."""
        return None

    def resume_handover(self, kept: Any) -> None:
        """Restore the data that `handover_state` returned in an earlier driver."""
