"""What observers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from colocate._protocol.taken import MANY
from colocate._system.nearest import did_you_mean
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from colocate._protocol.taken import Taken


@attrs.frozen
class TransferRecord:
    """A kept result, or some of its rows, that a call got from another worker.

    Attributes:
        rank: The rank that got it.
        group: Name of the group that had made it.
        role: Name of the role that had.
        method: Name of the method.
        source: The rank of that role from whose worker it came; None where it came from many.
        nbytes: How many bytes.
        start: When it could begin, in seconds of time.time() on the worker that got it: it was asked for, and made.
        end: When it was there.
        lent: How many of the bytes went from GPU to GPU (CUDA IPC), and not by the host.
        refusal: Why others didn't, though both are on one machine; "" where nothing was in the way.
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
"""What observers of a runtime are told."""

OF_RUNS = (
    "colocate_run_started",
    "colocate_run_logged",
    "colocate_run_checkpointed",
    "colocate_run_leaving",
    "colocate_run_finished",
)
"""What those of a run are told besides."""


@attrs.frozen
class CallRecord:
    """One finished call.

    Attributes:
        group: Name of the group.
        role: Name of the role; empty for what a whole group does: a function, a checkpoint, a sleep or a wake.
        method: Name of the method.
        ranks: The ranks that it ran on, as far as they had answered when it ended: a failed one ends with its cause.
        submitted: When it was submitted, in seconds of time.time().
        finished: When its last answer came; of a failed one, when its error was known.
        spans: For each of these: rank, start and end in the worker.
        kept: Whether the result stayed in the workers.
        error: The error's first line; None when it went well.
        ready: When it could have run, if its slots had been its own: it was submitted, and all kept results that it
            uses were there.
        sent: Bytes of its arguments, as they went to all its ranks; 0 where the driver's process has the ranks.
        received: Bytes of its results, as they came back; kept ones stay in the workers.
        transfers: What its ranks got of kept results from other workers; where it failed, as far as that had been told
            when the call ended.
        handed_over: Bytes of tensors and arrays in kept results of other roles that its ranks found in their very
            workers, by reference; by the role that had made them.
        raised: The ranks on which it has raised.
        unfinished: For ranks that ran it yet when its error was known: rank, and since when, as far as the driver
            knows: since it was submitted, and the slot's last call was over.
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
        """The `spans`, with what is known of `unfinished` ones: until the call's error was known."""
        return (*self.spans, *((rank, since, self.finished) for rank, since in self.unfinished))


@attrs.frozen
class FetchRecord:
    """A kept result that has come to the driver's process.

    Attributes:
        group: Name of the group.
        role: Name of the role that had made it.
        method: Name of the method.
        ranks: The ranks whose parts have come.
        nbytes: How many bytes, all together.
        start: When they were asked for, in seconds of time.time().
        end: When they were there.
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
    """Memory of a role that has gone to sleep, or was woken: by `group.sleep` and `group.wake`, or to take turns.

    Attributes:
        group: Name of the group.
        role: Name of the role.
        rank: The rank.
        kind: "sleep" or "wake".
        nbytes: How many bytes; also those that a GPU keeps until more beside them sleeps (`sleep="vmm"`).
        start: When it began, in seconds of time.time() on the worker.
        end: When it was done.
        asleep: Whether all of it sleeps now, and not only a part.
        why: What for, to be read: "asked for", "room for role 'critic'", "needed by actor.step" ...
        in_call: Whether a call waited for that: it is a part of its time.
        kept_awake: The bytes that were to sleep, too, and stay in memory, by why, as in `RoleMemory`.
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
    """A checkpoint of a group that is complete.

    Attributes:
        group: Name of the group.
        tag: What its writer calls it.
        directory: Where it lies (absolute). One that belongs to a run's lies elsewhere when that is complete.
        nbytes: How many bytes its files have.
        start: When it was begun, in seconds of time.time().
        taken: When all roles had taken their states, and calls went on.
        end: When it was complete.
    """

    group: str
    tag: str | int | float
    directory: Path
    nbytes: int
    start: float
    taken: float
    end: float


class Ended(NamedTuple):
    """What is to be told of a call that has ended. It holds nothing that hangs on the call, such as its result."""

    group: str
    role: str
    method: str
    ranks: Sequence[int]
    answers: Sequence[tuple[int, float, float]]
    raised: Sequence[int]
    left: Sequence[tuple[int, float]]
    submitted: float
    failed: float | None  # when that was known
    kept: bool
    error: str | None
    ready: float
    sent: int
    received: int
    taken: Mapping[int, Sequence[Taken]]
    makers: Mapping[int, tuple[str, str, str]]  # group, role and method of the residents that it used, by key

    def record(self) -> CallRecord:
        """The same as observers know it."""
        spans = tuple(sorted([(self.ranks[index], start, end) for index, start, end in self.answers]))
        last = max((end for _, _, end in spans), default=self.submitted)
        finished = last if self.failed is None else max(last, self.failed)
        ran_on = tuple(rank for rank, _, _ in spans)
        transfers: list[TransferRecord] = []
        handed_over: dict[str, int] = {}
        for index, taken in self.taken.items():
            for key, source, nbytes, start, end, lent, refusal in taken:
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
            self.kept,
            self.error,
            self.ready,
            self.sent,
            self.received,
            tuple(transfers),
            handed_over,
            tuple(sorted([self.ranks[index] for index in self.raised])),
            tuple(sorted([(self.ranks[index], since) for index, since in self.left])),
        )


def check_observer(observer: object, where: str) -> None:
    """Raise unless an object is one that can be told something.

    Args:
        observer: The object.
        where: Where it was given, for the error.

    Raises:
        ConfigError: It has no hooks, or one that doesn't exist.
    """
    if isinstance(observer, type):
        raise ConfigError(
            f"{where} is given the class {observer.__name__}: give it an object, {observer.__name__}(...)"
        )
    known = (*HOOKS, *OF_RUNS)
    named = [name for name in dir(observer) if name.startswith("colocate_") and callable(getattr(observer, name, None))]
    for name in named:
        if name not in known:
            kind = type(observer).__name__
            raise ConfigError(f"{where}: {kind} has a hook {name!r}, which doesn't exist{did_you_mean(name, known)}")
    if not named and not hasattr(type(observer), "__getattr__"):
        raise ConfigError(f"{where} is given {observer!r}, which has none of an observer's hooks: {', '.join(known)}")


class Observers(list[Any]):
    """Plugins that are told what happens: `append` and `remove` them. Costs nothing while there is none."""

    def tell_call(self, call: Ended) -> None:
        """Tell of a finished call."""
        self.tell(CALL_FINISHED, call.record())

    def tell(self, hook: str, *args: Any) -> None:
        """Call a hook of every plugin that has it. What one raises comes when all have been told."""
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
