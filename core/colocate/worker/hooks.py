"""`WorkerFeature` is the worker's half of a feature. Its methods are hooks that the worker's core calls.

A half is created when the worker first needs it, and exists until the worker ends. Hooks that concern every call run
only in halves that override them (`WorkerContext.get_feature`), so that a call without such hooks costs only a truth
test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from colocate._protocol.message import Message
from colocate._role.context import Context, RowState
from colocate._role.method_spec import MethodSpec
from colocate.worker.lane import Work
from colocate.worker.serving.role_instance import RoleInstance

if TYPE_CHECKING:
    import torch

NO_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType({})
NO_CALLS: Mapping[str, str] = MappingProxyType({})
NO_BYTES: Mapping[str, int] = MappingProxyType({})


class WorkerFeature:
    """Base class of a feature's half in a worker.

    A feature keeps the state of one role in `role.parts`, by the feature's name.

    Attributes:
        calls: The feature's calls on whole workers, by their names in messages; `self` of these methods is this half.
    """

    calls: ClassVar[Mapping[str, MethodSpec]] = MappingProxyType({})

    def __init_subclass__(cls, calls: Mapping[str, str] = NO_CALLS) -> None:
        """Args: calls: Maps the feature's calls on whole workers to methods."""
        cls.calls = {said: cls.__dict__[name].spec for said, name in calls.items()}

    def __init__(self, worker_context: Any) -> None:
        """Args: worker_context: The worker's `WorkerContext`."""

    def on_message(self, message: Message, body: Any) -> None:
        """Handle a message for the feature. Runs on the receiving thread, so it must neither wait nor run role code."""
        raise AssertionError(message)

    def configure(self, plain: Any) -> None:
        """Apply the settings of the driver half (`GroupFeature.worker_config`), before any role is constructed.

        Runs on the lane.

        Raises:
            ColocateError: This worker can't comply.
        """

    # -- roles

    def substitute_role(self, role: str, cls: type, plain: Any) -> object | None:
        """Return a substitute for a role, so that the role isn't constructed; None for no substitute.

        Called for halves with settings for the role (`GroupFeature.role_configs`), passed as `plain`. Other halves get
        no settings of a substituted role.

        Raises:
            ColocateError: No substitute is possible.
        """
        return None

    def around_construction(self, role: str) -> AbstractContextManager[object]:
        """Return a context manager that is active while a role's arguments are unpacked and the role is constructed."""
        return nullcontext()

    def around_constructor(self, role: str, plain: Any) -> AbstractContextManager[object]:
        """Return a context manager that is active only during a role's constructor.

        `plain` is the same as in `on_role_built`.
        """
        return nullcontext()

    def on_role_built(self, role: RoleInstance, plain: Any) -> None:
        """Handle a newly constructed role.

        `plain` has the driver half's settings for the role (`GroupFeature.role_configs`).
        """

    def on_roles_ready(self, role: RoleInstance, plain: Any) -> None:
        """Start a role with the driver half's settings (`GroupFeature.ready_configs`), after all constructors."""

    def on_role_closed(self, role: str) -> None:
        """Release this feature's state for a role that was closed."""

    def save_state(self, role: RoleInstance) -> str | None:
        """Return this feature's state of a role for a checkpoint; None for no state."""
        return None

    def load_state(self, role: RoleInstance, told: str | None, by_role: bool) -> None:
        """Restore this feature's state of a role. `by_role` says whether the role has restored its own state already.

        `told` is the result of `save_state`, or None if the checkpoint has none. All existing halves are called, and
        halves with state in the checkpoint.
        """

    def wrap_weights(
        self, role: RoleInstance, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Wrap the iterator of a sync's weights for `load_weights`."""
        return weights

    def keep_awake(self, role: RoleInstance, why: str) -> AbstractContextManager[object]:
        """Return a context manager in which all memory of a role is awake (on the device).

        The role's tensors may change.
        """
        return nullcontext()

    def wake_memory(self, role: str, tags: Sequence[str]) -> None:
        """Wake parts of a role's memory until the running call is over.

        Raises:
            ColocateError: The memory isn't available.
        """

    def on_holdings_changed(self, role: str | None) -> None:
        """Handle a possible change of a role's memory, or of any role's memory if `role` is None."""

    # -- calls of methods that this feature runs (`MethodSpec.feature`)

    def create_work(self, *arguments: Any) -> Work:
        """Return the lane's work item for a call. Args: arguments: The arguments of `Work`."""
        raise AssertionError(arguments)

    def get_runner(self, work: Work, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Return a function that runs a call instead of the role's method. This hook runs on the lane."""
        raise AssertionError(work)

    # -- all calls; only overriding halves are called

    def before_call(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Prepare a call, or raise to refuse the call. Runs first; `after_call` always follows.

        Raises:
            ColocateError: The call is refused.
        """

    def after_call(self, seq: int) -> None:
        """Clean up after a call, successful or not."""

    def check_result(self, role: str | None, label: str, kept: Mapping[str, Any] | None) -> None:
        """Check the result of a constructor or a successful call.

        `kept` maps the label of a stored result to its value.

        Raises:
            ColocateError: The result is refused.
        """

    def check_begin(
        self, role: RoleInstance, tags: Collection[str] | None, label: str, row: RowState | None = None
    ) -> None:
        """Check whether a call, or one row of a call, can run.

        Args:
            role: The called role.
            tags: Parts of the role's memory that the call uses; None for all.
            label: The call's label in errors.
            row: The row, if rows end one by one.

        Raises:
            ColocateError: The call is refused.
        """

    def check_sibling(self, asking: Context, role: RoleInstance, tags: Collection[str]) -> None:
        """Check whether role code may get a sibling role's object, or raise an error, as `check_begin` does."""

    def check_end(self, role: RoleInstance, began: float, row: RowState | None = None) -> None:
        """Check a successful call, or a row, for failures since the beginning at `began`, a value of time.time().

        Raises:
            ColocateError: The call has failed, for this reason.
        """

    def explain_failure(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Return the cause of a failure in role code, which is the error itself or another error."""
        return error

    def awaits_cause(
        self, error: BaseException, role: str | None, row: RowState | None, waited_s: float, is_alone: bool
    ) -> bool:
        """Return whether information about a failure's cause may still arrive after `waited_s` seconds.

        Args:
            error: The error, as in `explain_failure`.
            role: The role's name.
            row: The row.
            waited_s: Seconds since the first question.
            is_alone: Whether nothing else runs, or can begin, meanwhile.
        """
        return False

    def fails_other_rows(self, role: RoleInstance) -> bool:
        """Return whether other rows of a role will fail like the row that has just failed."""
        return False

    def breakpoint(self, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        """Return the function that `breakpoint()` in a frame of role code calls. May run on any thread."""
        raise AssertionError(frame)

    # -- reports about calls to `GroupFeature.on_call_report` and `on_rank_halted`, as plain data; None for nothing

    def call_report(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return this feature's report on a successful call. Only called if overridden.

        Raises:
            ColocateError: This feature knows that the call has failed.
        """
        return None

    def failure_report(self, error: BaseException, work: Work | None) -> Any:
        """Return a report on a failure on the main lane. `work` is None if a constructor failed."""
        return None

    def hold_report(self, hold: int) -> Any:
        """Return a report once the main lane has reached a hold's barrier. Runs on the lane, and may wait."""
        return None

    def is_consequence(self) -> bool:
        """Return whether a failure on the main lane may follow from another rank's failure."""
        return False

    # -- the end of calls and workers, on the receiving thread

    def unblock_lane(self, waits: Callable[[], bool]) -> None:
        """Unblock the main lane's wait for other ranks if `waits()` is true. May run on any thread."""

    def on_call_cancelled(self, seq: int) -> None:
        """Handle the cancellation of a call for which nobody waits any more."""

    def on_group_closing(self) -> None:
        """Handle the notice that the group will close. No call begins any more; running calls have a grace period."""

    def wait_for_writers(self) -> None:
        """Wait for the unfinished writes of calls into roles' memory. Runs on the lane.

        Raises:
            Consequence: A peer of the transfer has failed.
            ValueError: The timeout has passed.
        """

    # -- inspections, on any thread

    def offloaded_storages(self) -> Collection[int]:
        """Return the ids (torch's `_cdata`) of storages that have no memory at present."""
        return ()

    def on_residents_freed(self) -> None:
        """Handle the release of residents. Runs on the receiving thread."""

    def describe_role(self, role: RoleInstance) -> Any:
        """Return a report on a role for the driver's inspection (`GroupFeature.on_roles_described`), or None."""
        return None

    def external_bytes(self) -> Mapping[str, Mapping[str, int]]:
        """Return how many bytes roles use outside of the process, by role and by the name of the child process."""
        return NO_SIZES

    def device_bytes(self) -> Mapping[str, int]:
        """Return the bytes on the slot's device that don't belong to roles' tensors, by purpose."""
        return NO_BYTES

    # -- the worker

    def on_module_imported(self) -> None:
        """Handle the import of a module that the feature follows (`Feature.follows`), in a worker process."""

    def on_driver_changed(self) -> None:
        """Handle the change to another driver, which knows nothing of this feature's state."""

    def close(self) -> None:
        """Release everything at the worker's end. Runs on the thread that ends the worker."""

    def kill(self) -> None:
        """Release everything without waiting, because the worker was abandoned."""
