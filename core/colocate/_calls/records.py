"""Records and hook names for observers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from colocate._protocol.taken import MANY
from colocate._system.nearest import did_you_mean
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from colocate._protocol.taken import Receipt


@attrs.frozen
class TransferRecord:
    """The transfer of a kept result, or of some of its rows, to a call on another worker.

    Attributes:
        rank: The receiving rank.
        group: Name of the group that made the result.
        role: Name of the role that made the result.
        method: Name of the method.
        source: The rank of that role that sent the result; None for many ranks.
        nbytes: Number of bytes.
        start: The earliest possible begin, in seconds of time.time() on the receiving worker: the result was
            requested, and made.
        end: Time of the arrival.
        lent: Bytes that went from GPU to GPU (CUDA IPC), and not by the host.
        refusal: Why other bytes from the same machine went by the host; "" if nothing prevented lending.
    """

    rank: int
    group: str
    role: str
    method: str
    source: int | None
    nbytes: int
    start: float
    end: float
    lent: int = 0
    refusal: str = ""


CALL_FINISHED = "colocate_call_finished"
HOOKS = (
    "colocate_group_spawned",
    "colocate_group_changed",
    "colocate_group_closed",
    "colocate_worker_died",
    CALL_FINISHED,
    "colocate_result_fetched",
    "colocate_memory_moved",
    "colocate_group_checkpointed",
    "colocate_devices_sampled",
)
"""Hooks of a runtime's observers."""

OF_RUNS = (
    "colocate_run_started",
    "colocate_run_logged",
    "colocate_run_checkpointed",
    "colocate_run_leaving",
    "colocate_run_finished",
)
"""Additional hooks of a run's observers."""


@attrs.frozen
class CallRecord:
    """A record of one finished call.

    Attributes:
        group: Name of the group.
        role: Name of the role; empty for a call of the whole group: a function, a checkpoint, a sleep or a wake.
        method: Name of the method.
        ranks: The ranks that had answered when the call ended: a failed call ends with its cause.
        submitted: Time of the submission, in seconds of time.time().
        finished: Time of the last answer; for a failed call, the time when its error was known.
        spans: For each of these ranks: rank, start and end in the worker.
        kept: Whether the result stayed in the workers.
        error: The error's first line; None for a successful call.
        ready: When the call could have run with slots of its own: submitted, and all used kept results were made.
        sent: Bytes of the arguments, over all ranks; 0 if the ranks are in the driver's process.
        received: Bytes of the results; kept ones stay in the workers.
        transfers: Kept results that the ranks received from other workers; for a failed call, those reported by its
            end.
        handed_over: Bytes of tensors and arrays in kept results of other roles that the ranks found in their own
            workers, by reference; by the role that made them.
        raised: The ranks on which the call raised.
        unfinished: Ranks that were still running the call when its error was known: rank, and begin, as far as the
            driver knows: after the submission, and after the slot's last call.
    """

    group: str
    role: str
    method: str
    ranks: tuple[int, ...]
    submitted: float
    finished: float
    spans: tuple[tuple[int, float, float], ...]
    kept: bool
    error: str | None
    ready: float
    sent: int = 0
    received: int = 0
    transfers: tuple[TransferRecord, ...] = ()
    handed_over: Mapping[str, int] = attrs.field(factory=dict)
    raised: tuple[int, ...] = ()
    unfinished: tuple[tuple[int, float], ...] = ()

    @property
    def ran(self) -> tuple[tuple[int, float, float], ...]:
        """The finished spans, and the unfinished spans up to the time of the call's error."""
        return (*self.spans, *((rank, since, self.finished) for rank, since in self.unfinished))


@attrs.frozen
class FetchRecord:
    """A kept result that the driver's process received.

    Attributes:
        group: Name of the group.
        role: Name of the role that made the result.
        method: Name of the method.
        ranks: The ranks whose parts were received.
        nbytes: Number of bytes in total.
        start: Time of the request, in seconds of time.time().
        end: Time of the arrival.
    """

    group: str
    role: str
    method: str
    ranks: tuple[int, ...]
    nbytes: int
    start: float
    end: float


@attrs.frozen
class MoveRecord:
    """A sleep or wake of a role's memory, by `group.sleep` and `group.wake`, or because roles take turns.

    Attributes:
        group: Name of the group.
        role: Name of the role.
        rank: The rank.
        kind: "sleep" or "wake".
        nbytes: Number of bytes; includes bytes that a GPU keeps until more memory beside them sleeps
            (`sleep="vmm"`).
        start: Time of the begin, in seconds of time.time() on the worker.
        end: Time of the end.
        asleep: Whether all of the role's memory sleeps now.
        why: The reason, in words: "asked for", "room for role 'critic'", "needed by actor.step" ...
        in_call: Whether a call waited: the move is a part of the call's time.
        kept_awake: Bytes that should have slept, too, and stay in memory, by reason, as in `RoleMemory`.
    """

    group: str
    role: str
    rank: int
    kind: str
    nbytes: int
    start: float
    end: float
    asleep: bool
    why: str
    in_call: bool = False
    kept_awake: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen
class CheckpointRecord:
    """A complete checkpoint of a group.

    Attributes:
        group: Name of the group.
        tag: The writer's tag.
        directory: The checkpoint's folder (absolute). A checkpoint within a run's is moved when the run's is
            complete.
        nbytes: Size of all files in bytes.
        start: Time of the begin, in seconds of time.time().
        taken: Time when all roles had copied their states, and calls went on.
        end: Time of the completion.
    """

    group: str
    tag: str | int | float
    directory: Path
    nbytes: int
    start: float
    taken: float
    end: float


class EndedCall(NamedTuple):
    """The facts of an ended call for observers, without references to the call's results."""

    group: str
    role: str
    method: str
    ranks: Sequence[int]
    answers: Sequence[tuple[int, float, float]]
    raised: Sequence[int]
    stragglers: Sequence[tuple[int, float]]
    submitted: float
    failed: float | None  # Time of the failure, in seconds of time.time().
    is_kept: bool
    error: str | None
    ready: float
    sent: int
    received: int
    receipts: Mapping[int, Sequence[Receipt]]
    makers: Mapping[int, tuple[str, str, str]]  # Group, role and method of each used resident, by key.

    def to_record(self) -> CallRecord:
        spans = tuple(sorted([(self.ranks[index], start, end) for index, start, end in self.answers]))
        last = max((end for _, _, end in spans), default=self.submitted)
        finished = last if self.failed is None else max(last, self.failed)
        ran_on = tuple(rank for rank, _, _ in spans)
        transfers: list[TransferRecord] = []
        handed_over: dict[str, int] = {}
        for index, receipts in self.receipts.items():
            for key, source, nbytes, start, end, lent, refusal in receipts:
                group, role, method = self.makers[key]
                if end:
                    one = None if source == MANY else source
                    rank = self.ranks[index]
                    transfers.append(TransferRecord(rank, group, role, method, one, nbytes, start, end, lent, refusal))
                elif nbytes and role != self.role:
                    handed_over[role] = handed_over.get(role, 0) + nbytes
        return CallRecord(
            self.group,
            self.role,
            self.method,
            ran_on,
            self.submitted,
            finished,
            spans,
            self.is_kept,
            self.error,
            self.ready,
            self.sent,
            self.received,
            tuple(transfers),
            handed_over,
            tuple(sorted([self.ranks[index] for index in self.raised])),
            tuple(sorted([(self.ranks[index], since) for index, since in self.stragglers])),
        )


def check_observer(observer: object, where: str) -> None:
    """Raise an error unless an object is a valid observer.

    Args:
        observer: The object.
        where: The name of the call, for the error.

    Raises:
        ConfigError: The object has no hook, or an unknown one.
    """
    if isinstance(observer, type):
        raise ConfigError(
            f"{where} is given the class {observer.__name__}: give it an object, {observer.__name__}(...)"
        )
    hooks = (*HOOKS, *OF_RUNS)
    named = [name for name in dir(observer) if name.startswith("colocate_") and callable(getattr(observer, name, None))]
    for name in named:
        if name not in hooks:
            kind = type(observer).__name__
            raise ConfigError(f"{where}: {kind} has a hook {name!r}, which doesn't exist{did_you_mean(name, hooks)}")
    if not named and not hasattr(type(observer), "__getattr__"):
        raise ConfigError(f"{where} is given {observer!r}, which has none of an observer's hooks: {', '.join(hooks)}")


class Observers(list[Any]):
    """The list of registered observers, changed by `append` and `remove`. Without observers, events cost nothing."""

    def notify_call(self, call: EndedCall) -> None:
        self.notify(CALL_FINISHED, call.to_record())

    def notify(self, hook: str, *args: Any) -> None:
        """Call a hook of all observers that have this hook. Errors are raised after the last observer."""
        errors: list[BaseException] = []
        for plugin in list(self):
            function = getattr(plugin, hook, None)
            if function is not None:
                try:
                    function(*args)
                except BaseException as error:
                    errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} observers raised in {hook}", errors)
