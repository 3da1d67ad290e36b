"""`OfGroup`: a feature's half for one group, in the driver. The kernel calls each of these hooks at one place."""

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
    """The half of a feature that belongs to a group; exists from the first use until the group is closed.

    A feature's state for one worker lies in `worker.parts`, by the feature's name.
    """

    def __init__(self, worker_group: Any) -> None:
        """Args: worker_group: The group (`WorkerGroup`)."""

    # -- its start

    def builds(self) -> Mapping[str, Any]:
        """Return settings of roles for the workers' halves, by role. Called at each start, before roles are built."""
        return NOTHING

    def gives(self) -> Any:
        """Return settings for the workers' halves before roles are constructed, or None. Called at each start."""
        return None

    def starts(self) -> Any:
        """Return the roles' initial state for the workers' halves, or None. Called at each start, once workers run.

        Raises:
            ColocateError: The group can't start from this state.
        """
        return None

    def source(self) -> str | None:
        """Return the source of the roles' state after a restart, as "its checkpoint 3"; None if unknown here."""
        return None

    def tag(self) -> str | int | float | None:
        """Return the tag of the checkpoint that the roles were restored from; None for no checkpoint."""
        return None

    def renewed(self) -> None:
        """Handle a rebuild of the group: all workers are new."""

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
        """Handle the end of all workers, as the group has failed or is closed: nobody waits for answers any more."""

    def ending(self, grace: float) -> Sequence[BaseException]:
        """End background work in at most `grace` seconds, before the workers end; return the errors."""
        return ()

    def under_way(self) -> str | None:
        """Return a label of background work that prevents a change of drivers; None for no work."""
        return None

    # -- its calls

    def view_call(self, role: RoleInfo, spec: MethodSpec) -> Any:
        """Return the view's method for a spec that this feature runs (`MethodSpec.feature`)."""
        raise AssertionError(spec)

    def is_paused(self, role: str) -> bool:
        """Return whether calls of a role wait for a resume."""
        return False

    def stood(self, since: float) -> float:
        """Return the seconds since a time (of time.time()) that don't count for deadlines."""
        return 0.0

    def stopped(self) -> Mapping[int, str]:
        """Return why slots stand still for an unlimited time, as text by slot."""
        return NOTHING_STOPPED

    def sends(self, call: PendingCall) -> None:
        """Check a call on whole workers before sending. The order's lock is held.

        Raises:
            ColocateError: The call is refused.
        """

    def drafted(self, drafts: Sequence[Any]) -> Sequence[Any]:
        """Return the calls (`Draft`) about to be sent, with additional calls in front. The order's lock is held."""
        return drafts

    def ended(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Handle a worker half's report on an ended call (`OfWorker.finished`, `halts`). The order's lock is held."""

    # -- the hold after a failed call. The order's lock is held

    def halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Handle a rank's stop in a hold, with a report of the worker's half (`OfWorker.halts`, `back`), or None.

        Called when a call of the rank has failed, if one has, and again when the rank `is_back`: it runs nothing any
        more.
        """

    def all_back(self, hold: Hold) -> bool:
        """Start work before stopped ranks continue (`CallOrder.begin_phase`); return whether there is any.

        True also if this has failed the group.

        True also where it has failed the group.
        """
        return False

    # -- its workers, and what they say

    def greets(self, worker: Worker) -> None:
        """Send first messages to a new worker."""

    def gone(self, worker: Worker) -> None:
        """Handle the exit of a worker."""

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Handle one of the feature's messages."""
        raise AssertionError(message)

    def told(self, told: Mapping[str, Any]) -> None:
        """Handle the reports of a worker's half on roles, by role (`OfWorker.told`)."""

    # -- looks

    def shown(self, role: str) -> Mapping[str, Any]:
        """Return facts on a role for the graph."""
        return NOTHING

    def nodes(self, worker: Worker, role: str) -> Sequence[dict[str, Any]]:
        """Return nodes for the graph below a role of a worker."""
        return ()

    def memory(self) -> Mapping[str, Any]:
        """Return this feature's fields of `GroupMemory`."""
        return NOTHING

    # -- for later drivers

    def kept(self) -> Any:
        """Return plain data for later drivers; None for none."""
        return None

    def take(self, kept: Any) -> None:
        """Take over the data of an earlier driver's half."""
