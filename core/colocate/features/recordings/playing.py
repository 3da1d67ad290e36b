"""Replay and comparison in a worker: `Replaying` answers a role's calls, and `Comparing` checks a role's results."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from colocate._protocol.consequence import Poisoned
from colocate._role.context import running_call
from colocate._system.jobs import error_text, message_of
from colocate._system.limits import CAUSE_WITHIN_S
from colocate.errors import ReplayError
from colocate.features.recordings.differences import Cause, Compared, Difference, Raised, Teller, with_left
from colocate.features.recordings.digests import Digest, first_difference
from colocate.features.recordings.documents import Document, RankCall, RankCalls, in_order, recorded_value
from colocate.features.recordings.files import RowOrder, as_ended
from colocate.features.recordings.messages import Played
from colocate.features.recordings.taps import Player, Seen, Tap, have_defaults
from colocate.features.recordings.values import Find, finder, made_error, record_kind
from colocate.worker.context import WorkerContext
from colocate.worker.results import sources_of
from colocate.worker.serving.role_instance import RoleInstance

_AFTER_ALL = 1 << 40  # Rows that weren't recorded get turns from this number on, after all recorded rows.


class ReplayedRole:
    """A placeholder for the instance of a replayed role, which isn't constructed."""

    def __init__(self, role: str, folder: str) -> None:
        self.__dict__["_replayed"] = f"role {role!r} is replayed from {folder}: it wasn't constructed"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.__dict__['_replayed']}, and has no {name!r}")


def find_for(methods: Mapping[str, Any]) -> Find:
    """Return a function that finds classes in imported modules and in the globals of role code."""
    return finder(names=[getattr(spec.function, "__globals__", {}) for spec in methods.values()])


class Found:
    """The recorded calls of a role on all ranks, as seen by one rank."""

    def __init__(
        self, played: Played, context: WorkerContext, role: RoleInstance, find: Find, tell: Callable[[str], object]
    ) -> None:
        self.played, self.context, self.role, self.find, self.tell = played, context, role, find, tell
        self.own = self.of(role.ctx.rank)
        # The number of recorded calls before the first call that is replayed, by method.
        self.skipped: dict[str, int] = {}
        self.places = 0  # The number of calls so far.
        self.counts: Callable[[str], int] = lambda method: 0
        if played.after:
            self.skipped, self.places = self.own.skip(played.after)

    def of(self, rank: int) -> RankCalls:
        """Open the recording of a rank."""
        return RankCalls(Path(self.played.folder), rank)

    @cached_property
    def others(self) -> Mapping[int, RankCalls]:
        """The recorded calls of all ranks, including this rank."""
        return {
            rank: self.own if rank == self.role.ctx.rank else self.of(rank) for rank in range(self.role.ctx.world_size)
        }

    @cached_property
    def came(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """The order in which rows arrived at the driver, by call."""
        return RowOrder.read(Path(self.played.folder))

    def call(self, seen: Seen) -> RankCall | None:
        """Return the recorded call on this rank, or None if the call wasn't recorded."""
        return self.own.get(seen.method, seen.number + self.skipped.get(seen.method, 0))

    def has_failed(self, seen: Seen) -> bool:
        """Return whether the recorded call raised an error on any rank. Other ranks may not have started the call."""
        number = seen.number + self.skipped.get(seen.method, 0)
        for calls in self.others.values():
            call = calls.get(seen.method, number)
            if call is not None and call.raised is not None:
                return True
        return False

    def label(self, seen: Seen) -> str:
        """Return the label of a call for messages."""
        return f"{self.role.name}.{seen.method}, call {seen.number + self.skipped.get(seen.method, 0)}"

    def counted(self, method: str) -> int:
        """Return the number of calls of a method so far, including withdrawn and skipped calls."""
        return self.counts(method) + self.skipped.get(method, 0)

    def over(self, seen: Seen) -> None:
        """Forget the recorded documents of a call that has ended."""
        for calls in (self.own, *self.__dict__.get("others", {}).values()):
            calls.found.pop((seen.method, seen.number + self.skipped.get(seen.method, 0)), None)

    def value(self, document: Document) -> Any:
        """Return the value of a document, or raise the recorded error."""
        about = document.about
        if (why := about.get("missing")) is not None:
            raise ReplayError(f"{self.role.name}.{about['method']}, call {about['call']}: it wasn't recorded: {why}")
        value = document.value(self.find, self.context.boot.device)
        if about.get("defaults"):
            value, states = value
            if self.context.in_process:  # Only roles in one process share the default generators.
                have_defaults(states)
        if (error_entry := about.get("error")) is not None:
            raise self._rebuilt(error_entry, *value)
        return value

    def _rebuilt(self, told: Mapping[str, str], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
        module, _, name = told["class"].partition(":")
        kind = getattr(builtins, name, None) if module == "builtins" else self.find(module, name)
        if isinstance(kind, type) and record_kind(kind) == "error":
            error = made_error(kind, args, attributes)
        else:  # The class is unknown here, so a new class gets the recorded name.
            about = {"__module__": module, "__qualname__": name}
            error = type(name.rpartition(".")[2], (Exception,), about)(told["text"])
        error.add_note(f"as it was recorded:\n{told['trace'].rstrip()}")
        return error


class Replaying(Player):
    """Answers the calls of a role from the recording of the same rank."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._calls: dict[int, RankCall] = {}
        # The documents of rows with their turns, by call and row index.
        self._rows: dict[int, dict[int, list[tuple[int, Document]]]] = {}
        self._told: set[tuple[str, str]] = set()

    def begins(self, seen: Seen) -> None:
        """Find the recorded call, and check the order of calls and the arguments."""
        call = self._found.call(seen)
        if call is None:
            self._missing(seen)
        label = self._found.label(seen)
        if (other := self._passed_over(call)) is not None:
            self._differs(seen, "order", f"{label} comes where {other.method}, call {other.number}, was recorded")
        self._found.places = call.place + 1
        recorded: Digest = call.about["digest"]
        if (where := first_difference(recorded, seen.digest)) is not None:
            self._differs(seen, "arguments", f"{label}: argument {where}")
        self._calls[seen.seq] = call

    def value(self, seen: Seen) -> Any:
        """Return the recorded value of a call, or raise the recorded error."""
        document = self._calls[seen.seq].end
        assert document is not None
        return self._found.value(document)

    def row(self, seen: Seen, row: int, digest: Digest) -> Any:
        """Return the recorded value of a row, from any rank, or raise the recorded error."""
        call = self._calls[seen.seq]
        rows = self._rows.get(seen.seq)
        if rows is None:
            rows = self._rows[seen.seq] = {}
            for turn, document in enumerate(self._in_order(call, range(self._found.role.ctx.world_size))):
                rows.setdefault(document.about["row"], []).append((turn, document))
        state: Any = running_call.get()
        if not rows.get(row):
            # This row comes last, so that a caller that reads as far as in the recorded run never gets the row.
            state.turn = _AFTER_ALL + row
            raise ReplayError(f"{self._found.label(seen)}: row {row} wasn't recorded")
        # If the row was tried several times, each attempt gets the next recorded document.
        state.turn, document = rows[row].pop(0) if len(rows[row]) > 1 else rows[row][0]
        if (where := first_difference(document.about["digest"], digest)) is not None:
            self._differs(seen, "arguments", f"{self._found.label(seen)}, row {row}: argument {where}")
        return self._found.value(document)

    def rows(self, seen: Seen) -> Iterator[Any]:
        """Yield the rows of a call, and set the turn of each row in the recorded order of arrival."""
        call = self._calls[seen.seq]
        role, work = self._found.role, running_call.get()
        ranks = sources_of(role.methods[seen.method], role.ctx)
        documents = self._in_order(call, ranks) if role.ctx.rank in ranks else []
        turns = {(entry.path, entry.begin): turn for turn, entry in enumerate(documents)}
        for document in call.rows:
            if hasattr(work, "turn"):  # Rows that stay on the worker need no turn.
                work.turn = turns.get((document.path, document.begin))  # type: ignore[union-attr]
            yield self._found.value(document)
        assert call.end is not None
        if "error" in call.end.about:
            self._found.value(call.end)
        if call.end.about.get("cut"):
            raise ReplayError(f"{self._found.label(seen)}: its rows were read no further when it was recorded")

    def over(self, seen: Seen) -> None:
        """Forget a call that has ended."""
        self._calls.pop(seen.seq, None)
        self._rows.pop(seen.seq, None)
        self._found.over(seen)

    def _in_order(self, call: RankCall, ranks: Sequence[int]) -> list[Document]:
        """Return the rows of a call on some ranks, in the order of arrival at the driver."""
        calls = {rank: self._found.others[rank].get(call.method, call.number) for rank in ranks}
        rows = [(rank, row) for rank, rank_call in calls.items() if rank_call is not None for row in rank_call.rows]
        return [row for _, row in in_order(rows, self._found.came.get(call.about["seq"]))]

    def _differs(self, seen: Seen, what: str, words: str) -> None:
        played = self._found.played
        if not played.loose:
            raise ReplayError(f"{words} (recorded in {played.folder}; Replay(loose=True) only warns)")
        if (seen.method, what) not in self._told:
            self._told.add((seen.method, what))
            self._found.tell(f"{words}; it is answered as recorded, and other differences of the kind aren't told")

    def _passed_over(self, call: RankCall) -> RankCall | None:
        """Return the recorded call that should have come instead of this call, or None if the order is right.

        If this call comes too late, return this call. A call that was withdrawn because another call failed counts
        among the calls of its method.
        """
        role_calls = self._found
        if call.place < role_calls.places:
            return call
        between = sorted(
            (each for each in role_calls.own.found.values() if role_calls.places <= each.place < call.place),
            key=lambda each: each.place,
        )
        for each in between:
            if each.number >= role_calls.counted(each.method):
                return each
            del role_calls.own.found[each.method, each.number]
        return None

    def _is_over(self) -> bool:
        return self._found.context.why_not() is not None

    def _missing(self, seen: Seen) -> NoReturn:
        number = seen.number + self._found.skipped.get(seen.method, 0)
        if self._found.has_failed(seen):
            # Wait for the recorded error of another rank, because an error here could cancel that rank's call first.
            self._found.context.store.wait_for(self._is_over, CAUSE_WITHIN_S)
            raise Poisoned(f"{self._found.label(seen)} failed on another rank before it had begun here, when recorded")
        counts: dict[str, int] = {}
        for method, _ in self._found.of(self._found.role.ctx.rank).all():
            counts[method] = counts.get(method, 0) + 1
        where = self._found.played.folder
        if seen.method not in counts:
            has = ", ".join(f"{name} ({count})" for name, count in counts.items()) or "nothing"
            words = f"{self._found.role.name}.{seen.method} wasn't recorded in {where}: it has {has}"
        else:
            label = self._found.label(seen)
            words = f"{label} wasn't recorded in {where}: it ends with call {number - 1} of that method"
        raise ReplayError(f"{words}{as_ended(Path(where))}")


class Comparing(Tap):
    """Compares the results of a role with the recording of the same rank.

    Attributes:
        methods: The results so far, by method.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self.methods: dict[str, Compared] = {}
        self._teller = Teller(lambda words: found.tell(f"differs from {found.played.folder}: {words}"))
        self._weights: str | None = None  # The label of the first call with different weights.

    def table(self) -> dict[str, Compared]:
        """Return the results by method, with the number of recorded calls that haven't been made yet."""
        role_calls = self._found
        ended = [key for key, call in role_calls.own.all().items() if call.end is not None]
        # Recorded calls from before the restored checkpoint count as made, not as missing.
        return with_left(self.methods, [key for key in ended if key[1] >= role_calls.counted(key[0])])

    def gave(self, seen: Seen, value: Any) -> None:
        """Compare the value of a call with the recorded value."""
        self._look(seen, value, None)

    def gave_row(self, seen: Seen, row: int, value: Any, digest: Digest) -> None:
        """Compare the value of a row with the recorded row."""
        self._look(seen, value, row, digest)

    def raised(self, seen: Seen, error: BaseException, row: int | None = None, digest: Digest | None = None) -> None:
        """Compare the class and the text of an error with the recording."""
        self._look(seen, Raised(f"{type(error).__qualname__}: {message_of(error)}"), row, digest)

    def over(self, seen: Seen) -> None:
        """Compare the number of rows of an ended call with the recording."""
        self._look(seen, None, None)

    def _look(self, seen: Seen, value: Any, row: int | None, digest: Digest | None = None) -> None:
        try:
            self._compare(seen, value, row, digest)
        except Exception as error:  # A damaged recording or an error of a user's class must not fail the call.
            compared = self.methods.setdefault(seen.method, Compared())
            self._teller.add(compared.lack(self._label(seen, row), f"it can't be compared: {error_text(error)}"))
        finally:
            if row is None:
                self._found.over(seen)

    def _compare(self, seen: Seen, value: Any, row: int | None, digest: Digest | None) -> None:
        compared = self.methods.setdefault(seen.method, Compared())
        call = self._found.call(seen)
        document = None if call is None else call.end if row is None else self._row(call, row)
        compared.calls += row is None
        label = self._label(seen, row)
        if call is None and self._found.has_failed(seen):
            return
        if document is None or "missing" in document.about:
            why = f"it wasn't recorded{as_ended(Path(self._found.played.folder))}"
            self._teller.add(compared.lack(label, why))
            return
        recorded = document.about["digest"]
        where = first_difference(recorded, seen.digest if row is None else digest or recorded)
        compared.arguments += where is not None
        difference = Difference(self._found.played.tolerance)
        if row is None and "rows" in document.about:
            # If the driver sends rows to any free rank, compare the total number over all ranks.
            name = "rows" if self._found.role.methods[seen.method].rows is None else "valid"
            difference.add(document.about[name], {"rows": seen.rows, **seen.had}[name], " (the number of its rows)")
        else:
            difference.add(recorded_value(document, self._found.find), value)
        about = document.about if call is None else call.about
        if about.get("weights", seen.weights) == seen.weights:
            self._weights = None
        elif self._weights is None:
            self._weights = self._found.label(seen)
        told = compared.add(difference, label, Cause(where, self._weights), seen.seq, seen.begun)
        self._teller.add(told, difference.size)

    def _label(self, seen: Seen, row: int | None) -> str:
        return self._found.label(seen) + ("" if row is None else f", row {row}")

    def _row(self, call: RankCall, row: int) -> Document | None:
        rows = call.rows
        if not rows or rows[0].about["digest"]:  # Rows that the driver sends may have ended on another rank.
            calls = [calls.get(call.method, call.number) for calls in self._found.others.values()]
            rows = [document for other in calls if other is not None for document in other.rows]
        return next((document for document in rows if document.about["row"] == row), None)
