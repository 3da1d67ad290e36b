"""`OfWorker`: what a feature does of a worker. Each method here is a place at which the kernel asks the features.

A half is made when the worker first needs it, and is there until the worker ends. The kernel asks per call only those
that override what it asks (`WorkerContext.part`): where there are none, that costs a truth test.
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


class OfWorker:
    """The half of a feature that belongs to a worker.

    What a feature keeps of one role lies in `role.parts`, by the feature's name.

    Attributes:
        calls: The feature's calls on whole workers, by what these say; `self` of their functions is this half.
    """

    calls: ClassVar[Mapping[str, MethodSpec]] = MappingProxyType({})

    def __init_subclass__(cls, calls: Mapping[str, str] = NO_CALLS) -> None:
        """Args: calls: Which method each of the feature's calls on whole workers runs."""
        cls.calls = {said: cls.__dict__[name].spec for said, name in calls.items()}

    def __init__(self, worker_context: Any) -> None:
        """Args: worker_context: The worker (`WorkerContext`)."""

    def heard(self, message: Message, body: Any) -> None:
        """Take one of the feature's messages. On the receiving thread: nothing waits here, nor runs role code."""
        raise AssertionError(message)

    def given(self, plain: Any) -> None:
        """Hear, before any role is constructed, what the group's half says (`OfGroup.gives`). On the lane.

        Raises:
            ColocateError: This worker can't do it.
        """

    # -- roles

    def stands_in(self, role: str, cls: type, plain: Any) -> object | None:
        """Return an object that stands in for a role's, which isn't constructed then; None where nothing does.

        Asked of those halves that are told something of the role (`OfGroup.builds`): that is `plain`. Of such a role no
        other half is told anything.

        Raises:
            ColocateError: Nothing can.
        """
        return None

    def constructing(self, role: str) -> AbstractContextManager[object]:
        """Return a block in which a role is constructed, from the arguments on."""
        return nullcontext()

    def making(self, role: str, plain: Any) -> AbstractContextManager[object]:
        """Return a block in which a role's constructor runs, and nothing else; `plain` as of `built`."""
        return nullcontext()

    def built(self, role: RoleInstance, plain: Any) -> None:
        """Hear that a role was constructed; `plain` is what the group's half said of it (`OfGroup.builds`)."""

    def starts(self, role: RoleInstance, plain: Any) -> None:
        """Have a role begin as the group's half says (`OfGroup.starts`), when all of its worker are constructed."""

    def closed(self, role: str) -> None:
        """Hear that a role has closed: end what it has of this feature."""

    def saved(self, role: RoleInstance) -> str | None:
        """Return what a checkpoint keeps of a role; None for nothing."""
        return None

    def restored(self, role: RoleInstance, told: str | None, by_role: bool) -> None:
        """Have a role go on from what `saved` had returned; `by_role`: whether it has restored its own state.

        Asked of all halves that are there, and of those of which the checkpoint has something: else `told` is None.
        """

    def arriving(
        self, role: RoleInstance, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Wrap the iterator of a sync's weights for `load_weights`."""
        return weights

    def awake(self, role: RoleInstance, why: str) -> AbstractContextManager[object]:
        """Return a block in which all memory of a role is there; what it holds may change."""
        return nullcontext()

    def have_awake(self, role: str, tags: Sequence[str]) -> None:
        """Have such memory of a role be there until what runs is over.

        Raises:
            ColocateError: It can't be.
        """

    def changed(self, role: str | None) -> None:
        """Hear that what a role holds may have changed; None for any of them."""

    # -- calls of methods that this feature runs (`MethodSpec.feature`)

    def work(self, *arguments: Any) -> Work:
        """Return what a lane has to do for a call. Args: arguments: Those of `Work`."""
        raise AssertionError(arguments)

    def runs(self, work: Work, role: RoleInstance) -> Callable[[object, dict[str, Any]], Any]:
        """Return what runs a call, given role's object and arguments, in the place of the method. On its lane."""
        raise AssertionError(work)

    # -- all calls; each is asked only of those that override it

    def enters(self, seq: int, role: RoleInstance, spec: MethodSpec) -> None:
        """Have what a call needs be there, or refuse the call, before anything else; `leaves` follows.

        Raises:
            ColocateError: It can't be.
        """

    def leaves(self, seq: int) -> None:
        """Hear that a call is over, however it has ended."""

    def ran(self, role: str | None, label: str, kept: Mapping[str, Any] | None) -> None:
        """Look at what role code has made, a constructor or a call that went well; `kept`: what it keeps, by its label.

        Raises:
            ColocateError: It mustn't be.
        """

    def begins(self, role: RoleInstance, tags: Collection[str] | None, label: str, row: RowState | None = None) -> None:
        """Refuse a call, or a row of one, that can't run.

        Args:
            role: Whose call.
            tags: What of the role's memory it uses; None for all.
            label: What errors call it.
            row: The row, where it is one that ends by itself.

        Raises:
            ColocateError: It can't.
        """

    def reached(self, asking: Context, role: RoleInstance, tags: Collection[str]) -> None:
        """Refuse to hand out a role's object to role code that asks for it. Args, errors: as of `begins`."""

    def ended(self, role: RoleInstance, began: float, row: RowState | None = None) -> None:
        """Fail a call, or a row, that went well, for what has happened since it began (seconds of time.time()).

        Raises:
            ColocateError: Why.
        """

    def blamed(self, error: BaseException, role: str | None, row: RowState | None = None) -> BaseException:
        """Return what is the cause of a failure in role code: the error itself, or another one."""
        return error

    def awaits_cause(
        self, error: BaseException, role: str | None, row: RowState | None, waited_s: float, is_alone: bool
    ) -> bool:
        """Return whether news that `blamed` needs may still come after `waited_s` seconds.

        Args:
            error: As of `blamed`, and the next two.
            role: The role's name.
            row: The row.
            waited_s: For how long this has been asked.
            is_alone: Whether nothing else runs, or can begin, meanwhile.
        """
        return False

    def is_bereft(self, role: RoleInstance) -> bool:
        """Return whether other rows of a role will fail here as one has failed just now."""
        return False

    def breakpoint(self, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        """Return what `breakpoint()` does, as the last thing, in a frame of role code. On any thread of a process."""
        raise AssertionError(frame)

    # -- what the driver hears of calls (`OfGroup.ended`, `halted`), as plain data; None for nothing

    def finished(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return what is told with a call that went well, under the feature's name. Asked only where overridden.

        Raises:
            ColocateError: It hasn't, as this feature knows.
        """
        return None

    def halts(self, error: BaseException, work: Work | None) -> Any:
        """Return what is told with a failure on the main lane; `work` is None for that of a constructor."""
        return None

    def back(self, hold: int) -> Any:
        """Return what is told as the main lane runs nothing, in a hold. On the lane, where it may wait."""
        return None

    def is_consequence(self) -> bool:
        """Return whether what fails on the main lane now may be the consequence of another rank's failure."""
        return False

    # -- what ends them, on the receiving thread

    def frees(self, waits: Callable[[], bool]) -> None:
        """Free the main lane where it waits for other ranks, if it is so that it `waits`. On any thread."""

    def unwanted(self, seq: int) -> None:
        """Hear that nobody waits for a call any more."""

    def stops(self) -> None:
        """Hear that the group is about to close: nothing begins any more, and what runs has its grace."""

    def settles(self) -> None:
        """Wait, on the lane, until nothing writes what roles hold that their calls have begun.

        Raises:
            Consequence: A peer of that has failed.
            ValueError: It isn't done in time.
        """

    # -- looks, on any thread

    def away(self) -> Collection[int]:
        """Return the storages, as torch calls them (`_cdata`), that have no memory now; others follow in it."""
        return ()

    def freed(self) -> None:
        """Hear that residents were freed. On the receiving thread."""

    def told(self, role: RoleInstance) -> Any:
        """Return what the driver gets to know of a role when it looks (`OfGroup.told`); None for nothing."""
        return None

    def nbytes(self) -> Mapping[str, Mapping[str, int]]:
        """Return the bytes that roles have outside of their process, by role and name."""
        return NO_SIZES

    def of_device(self) -> Mapping[str, int]:
        """Return bytes of the slot's device that no role's tensors are, by what they are for."""
        return NO_BYTES

    # -- the worker

    def came(self) -> None:
        """Hear, in a process of its own, that a module is there which the feature follows (`Feature.follows`)."""

    def adopted(self) -> None:
        """Hear that another driver commands the worker from now on, which knows nothing of this feature's."""

    def close(self) -> None:
        """End all: the worker ends. On the thread that ends it."""

    def kill(self) -> None:
        """End all without waiting: the worker was given up."""
