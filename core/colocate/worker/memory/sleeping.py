"""Memory of roles that sleeps: a role's tensors go from a device to the host's memory, and from there to a file.

Both are done by all ranks of the role or by none: each does what may fail, then they meet at the driver, and only when
all are ready it is made so. What goes and comes is found, and noted, on the lane (`asleep.py`); where it goes, and how,
is in `offload.py`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import attrs

from colocate._protocol import questions
from colocate._protocol.consequence import Consequence, PutBack
from colocate._protocol.ledger import TAGS
from colocate._role.context import running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.jobs import error_text, message_of
from colocate._system.libc import trim
from colocate._system.numbers import size_text
from colocate._system.room import free_memory
from colocate._system.tracebacks import frames_of_users, told
from colocate.errors import ColocateError, ConfigError, SleepingError
from colocate.worker.memory.asleep import Asleep, Coming, Going
from colocate.worker.memory.holdings import leads_to
from colocate.worker.memory.offload import Offload, Offloading
from colocate.worker.memory.site import Worker
from colocate.worker.serving.failure import is_out_of_memory
from colocate.worker.serving.hosted import HostedRole
from colocate.worker.torch_groups.waits import finish_works

_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def lacks_room(error: BaseException) -> bool:
    """Whether memory couldn't move as there is no room where it would go."""
    return isinstance(error, MemoryError) or getattr(error, "errno", 0) in _NO_ROOM or is_out_of_memory(error)


def reason(error: Exception) -> tuple[str, str | None]:
    """Why memory couldn't move, and a traceback; None where colocate or the system refuse: they say it in words."""
    if isinstance(error, ColocateError):
        cause = error.__cause__ or error
        return error.message, told(cause, whole=False) if frames_of_users(cause) else None
    if isinstance(error, (OSError, MemoryError, ValueError)) and not frames_of_users(error):
        return message_of(error) or error_text(error), None
    return error_text(error), told(error, whole=False)


@attrs.frozen
class Outcome:
    """What has become of it on one rank.

    Attributes:
        refusal: Why a rank could not do it, so that none has; None when all have.
        own: Whether that was this rank.
        fits: Whether there was room for it here.
        nbytes: The bytes that have gone, or come back, here.
        left: What of the role isn't as it was here, though none has done it.
        trace: The traceback of what the role's own hook has raised here.
    """

    refusal: str | None = None
    own: bool = False
    fits: bool = True
    nbytes: int = 0
    left: str | None = None
    trace: str | None = None


class Sleeper:
    """Puts memory of a worker's roles to sleep and wakes it, on the lane.

    Attributes:
        asleep: What sleeps.
        offload: Where that is.
        free: How much of the host's memory is free.
        refuse_more: Raises when a budget has no room for so many more bytes of a role, of the device or the host, that
            sleeps or wakes.
    """

    def __init__(self, site: Worker) -> None:
        self._site = site
        self.offload = Offload(site.boot.device, lambda: self._share(), lambda: site.spill_dir)
        self._beside = 1  # how many workers of the group lie here, which may sleep or wake at once
        self.asleep = Asleep(site, self.offload)
        self.free: Callable[[], int] = free_memory
        self.refuse_more: Callable[[str, int, bool, bool], None] = lambda role, nbytes, device, wakes: None

    def begin(self, in_turns: bool) -> None:
        """No role is constructed yet. That there is no place for what sleeps isn't to show hours later.

        Args:
            in_turns: Whether roles take turns, so that they will sleep.

        Raises:
            ConfigError: There is none in the folder that was named, or none where memory of the host will go to one.
        """
        if self._site.spill_dir is not None or (in_turns and self._site.boot.device == "cpu"):
            try:
                self.offload.file()
            except ValueError as error:
                named = "" if self._site.spill_dir is None else f"spill_dir={self._site.spill_dir!r}: "
                raise ConfigError(f"{named}{error} (on node {self._site.boot.node})") from None

    def check(self, role: HostedRole, spec: MethodSpec) -> None:
        """Raise when a method's role isn't as awake as the method needs it, or another one that it keeps.

        Raises:
            SleepingError: It isn't.
        """
        if not self.asleep:
            return
        asleep = [tag for tag in self.asleep.tags(role.name) if spec.awake is None or tag in spec.awake]
        if asleep:
            why = self.asleep.why.get(role.name or "")
            how = f", and that could not be woken: {why}" if why else f": group.wake({role.name!r}) has it be there"
            raise SleepingError(
                f"{role.label(spec.name)} needs memory of its role that sleeps ({', '.join(asleep)}){how}"
            )
        if spec.awake == () or role.name is None:  # functions keep nothing
            return
        for name in sorted(role.ctx._asked & self._site.roles.keys()):
            asleep = list(self.asleep.tags(name))
            if asleep and leads_to(role.instance, self._site.roles[name].instance):
                raise SleepingError(
                    f"{role.label(spec.name)} might use role {name!r}, of which memory sleeps ({', '.join(asleep)}): "
                    f"role {role.name!r} keeps the object that it has got by ctx.sibling(). Wake it with "
                    f"group.wake({name!r}), or keep none, and ask for it in the methods that use it"
                )

    def refuse(self, role: str) -> None:
        """Raise when somebody wants a role's object while memory of it sleeps.

        Raises:
            SleepingError: It does.
        """
        if asleep := self.asleep.tags(role):
            raise SleepingError(
                f"memory of role {role!r} sleeps ({', '.join(asleep)}): wake it with group.wake({role!r}), or call one "
                "of its methods, before something in its workers uses it"
            )

    def sleep(
        self,
        name: str,
        tags: Sequence[str],
        discard: Collection[str],
        members: int,
        beside: Mapping[str, int] = MappingProxyType({}),
    ) -> Outcome:
        """Put memory of a role to sleep, if all ranks can.

        Args:
            name: The role.
            tags: What of it; what sleeps already stays so, and what the role has come to hold since goes, too.
            discard: Those of which the contents are let go of, also of what sleeps already.
            members: How many workers take part.
            beside: How many of these lie on each node.
        """
        self._beside = beside.get(self._site.boot.node, 1)
        role = self._site.roles.get(name)
        if role is None:
            return Outcome(self._agree(members, None))
        wanted = [tag for tag in TAGS if tag in tags]
        new = [tag for tag in wanted if tag not in self.asleep.tags(name)]
        seen: list[Going] = []

        def begin() -> Callable[[], int]:
            going, offloading = self._copied(name, role, wanted, discard)
            seen.append(going)
            return lambda: self._put_away(going, offloading)

        def undo() -> None:
            self._undo(role, new)

        outcome = self._all_or_none(role, members, begin, undo)
        if outcome.refusal is None:
            self.asleep.add(name, seen[0])
            trim()  # who has a role sleep wants memory: also what was freed before, in pieces that `malloc` keeps
        elif not set(new).isdisjoint(self.asleep.tags(name)):
            raised = f"wake() on {_rank(role)} has raised {self.asleep.why[name]}"
            return attrs.evolve(outcome, left=f"{raised}, and is called again when the role is woken")
        return outcome

    def wake(self, name: str, tags: Sequence[str], members: int, beside: Mapping[str, int]) -> Outcome:
        """Have memory of a role be there again, if it is so on all ranks.

        Args:
            name: The role.
            tags: What of it.
            members: How many workers take part.
            beside: How many of these lie on each node.
        """
        role = self._site.roles.get(name)
        asleep = [tag for tag in self.asleep.tags(name) if tag in tags]
        if role is None or not asleep:
            return Outcome(self._agree(members, None))
        coming = self.asleep.coming(name, asleep)
        self._beside = beside.get(self._site.boot.node, 1)
        share = self._share(coming.on_host)

        def begin() -> Callable[[], int]:
            self.refuse_more(name, coming.on_device, True, True)
            self.refuse_more(name, coming.anew, False, True)
            if coming.on_host > share:
                raise MemoryError(f"{size_text(coming.on_host)} are needed, and {size_text(share)} free for this rank")
            self.offload.bring_back(coming.pieces)
            return lambda: coming.size

        def undo() -> None:
            self.offload.undo(coming.pieces)

        outcome = self._all_or_none(role, members, begin, undo)
        if outcome.refusal is None:
            self.has_come(coming, trains=True)
            self.asleep.remove(name, coming)
            self._tell_woken(role, asleep)
        else:
            self.asleep.why[name] = outcome.refusal
        return outcome

    def sleep_alone(self, name: str, tags: Sequence[str] = tuple(TAGS), only: Coming | None = None) -> int:
        """Put a role to sleep on this rank, whatever others do: it is awake again before anything uses it.

        Args:
            name: The role.
            tags: What of it.
            only: What may go, as it had come; None for all.

        Returns:
            The bytes that sleep now, also those that a device keeps.

        Raises:
            OSError: There is no room where it would go.
            MemoryError: Nor there.
            ValueError: It can't be put away here.
        """
        role = self._site.roles[name]
        new = [tag for tag in tags if tag not in self.asleep.tags(name)]
        found, offloading = self._copied(name, role, tags, again=True, only=only)
        try:
            self._put_away(found, offloading)
        except BaseException as error:
            self._undo(role, new, error)
            raise
        self.asleep.add(name, found)
        if found.to_host < found.size or (new and role.hook("sleep") is not None):
            trim()
        return found.size

    def wake_alone(self, role: HostedRole, tags: Sequence[str] = tuple(TAGS)) -> int:
        """Have memory of a role be there again on this rank, whatever others do.

        Args:
            role: The role.
            tags: What of it.

        Returns:
            The bytes that have come back.
        """
        asleep = [tag for tag in self.asleep.tags(role.name) if tag in tags]
        if not asleep:
            return 0
        assert role.name is not None
        coming = self.asleep.coming(role.name, asleep)
        self._share(coming.on_host)
        self.offload.bring_back(coming.pieces)
        self.has_come(coming)
        self.asleep.remove(role.name, coming)
        self._tell_woken(role, asleep)
        return coming.size

    def has_come(self, coming: Coming, trains: bool = False) -> None:
        """It is in memory for good. Where the role trains from now on, copies of what changes by that aren't kept."""
        self.offload.let_go({*coming.trained, *coming.emptied} if trains else coming.emptied)

    def size(self, name: str, tags: Sequence[str]) -> int:
        """The bytes of the device that a role will need when memory of such tags, which sleeps, is woken."""
        asleep = [tag for tag in self.asleep.tags(name) if tag in tags]
        return self.asleep.coming(name, asleep).on_device if asleep else 0

    def _share(self, wanted: int = 0) -> int:
        """What of the host's free memory is this rank's, where others may want as much just now.

        Where that is less than is wanted, what `malloc` holds and nobody uses is given back first.
        """
        if (share := self.free() // self._beside) >= wanted:
            return share
        trim()
        return self.free() // self._beside

    # -- all ranks or none

    def _all_or_none(
        self, role: HostedRole, members: int, begin: Callable[[], Callable[[], int]], undo: Callable[[], object]
    ) -> Outcome:
        """Begin, and end it when all ranks have begun, which tells the bytes that were moved; otherwise undo it.

        Raises:
            PutBack: An earlier call has failed on another rank, which will begin this one after that; it is undone.
        """
        refusal: str | None = None
        end: Callable[[], int] | None = None
        fits, moved, trace = True, 0, None
        try:
            end = begin()
        except Consequence as error:  # of a peer's failure, for which this rank has waited in vain
            raise PutBack(error.message) from error
        except Exception as error:  # also of the role's own hook: it isn't done then, and that is told to all
            fits = not lacks_room(error)
            why, trace = reason(error)
            refusal = f"{_rank(role)}: {why}"
        try:
            refusal = self._agree(members, refusal)
        except PutBack:
            if end is not None:
                undo()
            raise
        if refusal is None and end is not None:
            moved = end()
        elif end is not None:
            undo()
        return Outcome(refusal, end is None, fits, moved, trace=trace)

    def _agree(self, members: int, refusal: str | None) -> str | None:
        """What a rank has against it; None when all are ready."""
        call = running_call.get()
        assert call is not None
        try:
            board = f"sleep {call.seq} {self._site.lane.resumed}"
            self._site.ask(questions.Meet(board, members, None, False, refusal))
        except Consequence as error:
            raise PutBack(error.message) from error
        except ColocateError as error:
            return error.message
        return None

    # -- what sleeps

    def _copied(
        self,
        name: str,
        role: HostedRole,
        tags: Sequence[str],
        discard: Collection[str] = (),
        again: bool = False,
        only: Coming | None = None,
    ) -> tuple[Going, Offloading]:
        """What of a role is to sleep, copied to where it goes. `again`: copies of what trains may serve again."""
        finish_works()
        new = [tag for tag in tags if tag not in self.asleep.tags(name)]
        self._tell(role, "sleep", new)  # first: where memory was that it frees, somebody else's may be afterwards
        try:
            going = self.going(name, tags, discard, only)
            return going, self.offload.write(going.storages, going.emptied, () if again else going.trained)
        except BaseException as error:
            self._undo(role, new, error)
            raise

    def _put_away(self, going: Going, offloading: Offloading) -> int:
        """Have what was copied be elsewhere only. The bytes that have gone."""
        left = offloading.put_away()
        going.are_rewritten()
        return going.size - left

    def _undo(self, role: HostedRole, tags: Sequence[str], error: BaseException | None = None) -> None:
        """Have a role take back what it has put away by its own means, as it doesn't sleep.

        Args:
            role: The role.
            tags: Of what.
            error: Why it doesn't.
        """
        try:
            self._tell_woken(role, tags)
        except Exception as second:
            if error is not None:
                error.add_note(f"then its wake() raised {error_text(second)}")

    def _tell(self, role: HostedRole, hook: str, tags: Sequence[str]) -> None:
        """Have a role put away, or take back, by its own means what colocate can't find."""
        if tags:
            role.call_hook(hook, tuple(tags))

    def _tell_woken(self, role: HostedRole, tags: Sequence[str]) -> None:
        """The same for a wake. One that raises has it not back: it is told again when that is wanted the next time."""
        try:
            self._tell(role, "wake", tags)
        except BaseException as error:
            assert role.name is not None
            self.asleep.add_own(role.name, tags, error_text(error))
            raise

    def going(self, name: str, tags: Sequence[str], discard: Collection[str] = (), only: Coming | None = None) -> Going:
        """What of a role is to sleep.

        Args:
            name: The role.
            tags: What of it.
            discard: Tags of which the contents are let go of; those that sleep already, too.
            only: What may go, as it had come; None for all.

        Raises:
            MemoryBudgetError: There is no room where it goes.
            ColocateError: Not everything can be looked at, where that matters.
        """
        going = self.asleep.going(name, tags, discard, only)
        self.refuse_more(name, going.to_host, False, False)
        return going


def _rank(role: HostedRole) -> str:
    return f"rank {role.ctx.rank} (node {role.ctx.node})"
