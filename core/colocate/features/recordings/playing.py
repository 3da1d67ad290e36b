"""Replay and comparison in a worker: `ReplayPlayer` answers a role's calls, `ComparingTap` checks a role's results."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from colocate._protocol.consequence import PoisonedPart
from colocate._role.context import running_call
from colocate._system.jobs import format_error, get_message
from colocate._system.limits import CAUSE_WITHIN_S
from colocate.errors import ReplayError
from colocate.features.recordings.differences import (
    Cause,
    Difference,
    DifferenceReporter,
    ErrorText,
    MethodComparison,
    add_left,
)
from colocate.features.recordings.digests import Digest, find_difference
from colocate.features.recordings.documents import Document, RankCall, RankCalls, read_recorded, sort_rows
from colocate.features.recordings.files import RowOrder, describe_end
from colocate.features.recordings.messages import ReplaySource
from colocate.features.recordings.taps import Player, Tap, TappedCall, restore_generators
from colocate.features.recordings.values import Find, create_error, make_finder, record_kind
from colocate.worker.context import WorkerContext
from colocate.worker.results import list_sources
from colocate.worker.serving.role_instance import RoleInstance

_AFTER_ALL = 1 << 40  # Rows that weren't recorded get turns from this number on, after all recorded rows.


class ReplayedRole:
    """A placeholder for the instance of a replayed role, which isn't constructed."""

    def __init__(self, role: str, folder: str) -> None:
        self.__dict__["_replay_player"] = f"role {role!r} is replayed from {folder}: it wasn't constructed"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.__dict__['_replay_player']}, and has no {name!r}")


def make_class_finder(methods: Mapping[str, Any]) -> Find:
    """Return a function that finds classes in imported modules and in the globals of role code."""
    return make_finder(names=[getattr(spec.function, "__globals__", {}) for spec in methods.values()])


class RoleCalls:
    """The recorded calls of a role on all ranks, as seen by one rank."""

    def __init__(
        self,
        played: ReplaySource,
        context: WorkerContext,
        role: RoleInstance,
        find: Find,
        tell: Callable[[str], object],
    ) -> None:
        self.source, self.context, self.role, self.find, self.notify_user = played, context, role, find, tell
        self.own_calls = self.rank_calls(role.ctx.rank)
        # The number of recorded calls before the first call that is replayed, by method.
        self.skipped_counts: dict[str, int] = {}
        self.places = 0  # The number of calls so far.
        self.call_counter: Callable[[str], int] = lambda method: 0
        if played.after:
            self.skipped_counts, self.places = self.own_calls.skip_until(played.after)

    def rank_calls(self, rank: int) -> RankCalls:
        """Open the recording of a rank."""
        return RankCalls(Path(self.source.folder), rank)

    @cached_property
    def calls_by_rank(self) -> Mapping[int, RankCalls]:
        """The recorded calls of all ranks, including this rank."""
        return {
            rank: self.own_calls if rank == self.role.ctx.rank else self.rank_calls(rank)
            for rank in range(self.role.ctx.world_size)
        }

    @cached_property
    def row_arrivals(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """The order in which rows arrived at the driver, by call."""
        return RowOrder.read_rows(Path(self.source.folder))

    def find_call(self, seen: TappedCall) -> RankCall | None:
        """Return the recorded call on this rank, or None if the call wasn't recorded."""
        return self.own_calls.get(seen.method, seen.number + self.skipped_counts.get(seen.method, 0))

    def has_failed(self, seen: TappedCall) -> bool:
        """Return whether the recorded call raised an error on any rank. Other ranks may not have started the call."""
        number = seen.number + self.skipped_counts.get(seen.method, 0)
        for calls in self.calls_by_rank.values():
            call = calls.get(seen.method, number)
            if call is not None and call.error_document is not None:
                return True
        return False

    def call_label(self, seen: TappedCall) -> str:
        """Return the label of a call for messages."""
        return f"{self.role.name}.{seen.method}, call {seen.number + self.skipped_counts.get(seen.method, 0)}"

    def count_calls(self, method: str) -> int:
        """Return the number of calls of a method so far, including calls that were withdrawn or skipped."""
        return self.call_counter(method) + self.skipped_counts.get(method, 0)

    def drop_call(self, seen: TappedCall) -> None:
        """Forget the recorded documents of a call that has ended."""
        for calls in (self.own_calls, *self.__dict__.get("others", {}).values()):
            calls.calls.pop((seen.method, seen.number + self.skipped_counts.get(seen.method, 0)), None)

    def read_value(self, document: Document) -> Any:
        """Return the value of a document, or raise the recorded error."""
        about = document.about
        if (why := about.get("missing")) is not None:
            raise ReplayError(f"{self.role.name}.{about['method']}, call {about['call']}: it wasn't recorded: {why}")
        value = document.read_value(self.find, self.context.boot.device)
        if about.get("defaults"):
            value, states = value
            if self.context.in_process:  # Roles in one process share the default random generators.
                restore_generators(states)
        if (error_entry := about.get("error")) is not None:
            raise self._rebuild_error(error_entry, *value)
        return value

    def _rebuild_error(
        self, told: Mapping[str, str], args: tuple[Any, ...], attributes: dict[str, Any]
    ) -> BaseException:
        module, _, name = told["class"].partition(":")
        kind = getattr(builtins, name, None) if module == "builtins" else self.find(module, name)
        if isinstance(kind, type) and record_kind(kind) == "error":
            error = create_error(kind, args, attributes)
        else:  # The class is unknown here, so a new class gets the recorded name.
            about = {"__module__": module, "__qualname__": name}
            error = type(name.rpartition(".")[2], (Exception,), about)(told["text"])
        error.add_note(f"as it was recorded:\n{told['trace'].rstrip()}")
        return error


class ReplayPlayer(Player):
    """Answers the calls of a role from the recording of the same rank."""

    def __init__(self, found: RoleCalls) -> None:
        self._role_calls = found
        self._calls: dict[int, RankCall] = {}
        # The rows' documents with their turns (positions in the order of arrival), by call and row index.
        self._rows: dict[int, dict[int, list[tuple[int, Document]]]] = {}
        self._reported: set[tuple[str, str]] = set()

    def begin_call(self, seen: TappedCall) -> None:
        """Find the recorded call, and check the order of calls and the arguments."""
        call = self._role_calls.find_call(seen)
        if call is None:
            self._raise_missing(seen)
        label = self._role_calls.call_label(seen)
        if (other := self._find_skipped(call)) is not None:
            self._report_difference(
                seen, "order", f"{label} comes where {other.method}, call {other.number}, was recorded"
            )
        self._role_calls.places = call.place + 1
        recorded: Digest = call.about["digest"]
        if (where := find_difference(recorded, seen.digest)) is not None:
            self._report_difference(seen, "arguments", f"{label}: argument {where}")
        self._calls[seen.seq] = call

    def play_value(self, seen: TappedCall) -> Any:
        """Return the recorded value of a call, or raise the recorded error."""
        document = self._calls[seen.seq].end
        assert document is not None
        return self._role_calls.read_value(document)

    def play_row(self, seen: TappedCall, row: int, digest: Digest) -> Any:
        """Return the value of a row as recorded on any rank, or raise the recorded error."""
        call = self._calls[seen.seq]
        rows = self._rows.get(seen.seq)
        if rows is None:
            rows = self._rows[seen.seq] = {}
            for turn, document in enumerate(self._sort_rows(call, range(self._role_calls.role.ctx.world_size))):
                rows.setdefault(document.about["row"], []).append((turn, document))
        state: Any = running_call.get()
        if not rows.get(row):
            # This row comes last, so that a caller that reads as far as in the recorded run never gets the row.
            state.turn = _AFTER_ALL + row
            raise ReplayError(f"{self._role_calls.call_label(seen)}: row {row} wasn't recorded")
        # If the row was tried several times, each attempt gets the next recorded document.
        state.turn, document = rows[row].pop(0) if len(rows[row]) > 1 else rows[row][0]
        if (where := find_difference(document.about["digest"], digest)) is not None:
            self._report_difference(
                seen, "arguments", f"{self._role_calls.call_label(seen)}, row {row}: argument {where}"
            )
        return self._role_calls.read_value(document)

    def play_rows(self, seen: TappedCall) -> Iterator[Any]:
        """Yield the recorded rows of a call, and set each row's turn: its position in the recorded order of arrival."""
        call = self._calls[seen.seq]
        role, work = self._role_calls.role, running_call.get()
        ranks = list_sources(role.methods[seen.method], role.ctx)
        documents = self._sort_rows(call, ranks) if role.ctx.rank in ranks else []
        turns = {(entry.path, entry.begin): turn for turn, entry in enumerate(documents)}
        for document in call.rows:
            if hasattr(work, "turn"):  # Rows that stay on the worker need no turn.
                work.turn = turns.get((document.path, document.begin))  # type: ignore[union-attr]
            yield self._role_calls.read_value(document)
        assert call.end is not None
        if "error" in call.end.about:
            self._role_calls.read_value(call.end)
        if call.end.about.get("cut"):
            raise ReplayError(
                f"{self._role_calls.call_label(seen)}: its rows were read no further when it was recorded"
            )

    def end_call(self, seen: TappedCall) -> None:
        """Forget a call that has ended."""
        self._calls.pop(seen.seq, None)
        self._rows.pop(seen.seq, None)
        self._role_calls.drop_call(seen)

    def _sort_rows(self, call: RankCall, ranks: Sequence[int]) -> list[Document]:
        """Return the rows of a call on these ranks, in the order of arrival at the driver."""
        calls = {rank: self._role_calls.calls_by_rank[rank].get(call.method, call.number) for rank in ranks}
        rows = [(rank, row) for rank, rank_call in calls.items() if rank_call is not None for row in rank_call.rows]
        return [row for _, row in sort_rows(rows, self._role_calls.row_arrivals.get(call.about["seq"]))]

    def _report_difference(self, seen: TappedCall, what: str, words: str) -> None:
        played = self._role_calls.source
        if not played.loose:
            raise ReplayError(f"{words} (recorded in {played.folder}; Replay(loose=True) only warns)")
        if (seen.method, what) not in self._reported:
            self._reported.add((seen.method, what))
            self._role_calls.notify_user(
                f"{words}; it is answered as recorded, and other differences of the kind aren't told"
            )

    def _find_skipped(self, call: RankCall) -> RankCall | None:
        """Return the recorded call that should have come instead of this call, or None if the order is right.

        If this call comes too late, return this call. A call that was withdrawn because another call failed counts
        among the calls of its method.
        """
        role_calls = self._role_calls
        if call.place < role_calls.places:
            return call
        between = sorted(
            (each for each in role_calls.own_calls.calls.values() if role_calls.places <= each.place < call.place),
            key=lambda each: each.place,
        )
        for each in between:
            if each.number >= role_calls.count_calls(each.method):
                return each
            del role_calls.own_calls.calls[each.method, each.number]
        return None

    def _is_over(self) -> bool:
        return self._role_calls.context.get_wait_refusal() is not None

    def _raise_missing(self, seen: TappedCall) -> NoReturn:
        number = seen.number + self._role_calls.skipped_counts.get(seen.method, 0)
        if self._role_calls.has_failed(seen):
            # Wait for the recorded error of another rank, because an error here could cancel that rank's call first.
            self._role_calls.context.store.wait_for(self._is_over, CAUSE_WITHIN_S)
            raise PoisonedPart(
                f"{self._role_calls.call_label(seen)} failed on another rank before it had begun here, when recorded"
            )
        counts: dict[str, int] = {}
        for method, _ in self._role_calls.rank_calls(self._role_calls.role.ctx.rank).read_all():
            counts[method] = counts.get(method, 0) + 1
        where = self._role_calls.source.folder
        if seen.method not in counts:
            has = ", ".join(f"{name} ({count})" for name, count in counts.items()) or "nothing"
            words = f"{self._role_calls.role.name}.{seen.method} wasn't recorded in {where}: it has {has}"
        else:
            label = self._role_calls.call_label(seen)
            words = f"{label} wasn't recorded in {where}: it ends with call {number - 1} of that method"
        raise ReplayError(f"{words}{describe_end(Path(where))}")


class ComparingTap(Tap):
    """Compares the results of a role with the recording of the same rank.

    Attributes:
        methods: The results so far, by method.
    """

    def __init__(self, found: RoleCalls) -> None:
        self._role_calls = found
        self.methods: dict[str, MethodComparison] = {}
        self._teller = DifferenceReporter(
            lambda words: found.notify_user(f"differs from {found.source.folder}: {words}")
        )
        self._weights: str | None = None  # The label of the first call whose weights differ from the recorded ones.

    def table(self) -> dict[str, MethodComparison]:
        """Return the results by method, with the number of recorded calls that haven't been made yet."""
        role_calls = self._role_calls
        ended = [key for key, call in role_calls.own_calls.read_all().items() if call.end is not None]
        # Recorded calls from before the restored checkpoint count as made, not as missing.
        return add_left(self.methods, [key for key in ended if key[1] >= role_calls.count_calls(key[0])])

    def on_value(self, seen: TappedCall, value: Any) -> None:
        """Compare the value of a call with the recorded value."""
        self._compare_safely(seen, value, None)

    def on_row(self, seen: TappedCall, row: int, value: Any, digest: Digest) -> None:
        """Compare the value of a row with the recorded row."""
        self._compare_safely(seen, value, row, digest)

    def on_error(
        self, seen: TappedCall, error: BaseException, row: int | None = None, digest: Digest | None = None
    ) -> None:
        """Compare the class and the text of an error with the recording."""
        self._compare_safely(seen, ErrorText(f"{type(error).__qualname__}: {get_message(error)}"), row, digest)

    def on_rows_ended(self, seen: TappedCall) -> None:
        """Compare the number of rows of an ended call with the recording."""
        self._compare_safely(seen, None, None)

    def _compare_safely(self, seen: TappedCall, value: Any, row: int | None, digest: Digest | None = None) -> None:
        try:
            self._compare_result(seen, value, row, digest)
        except Exception as error:  # A damaged recording or an error of a user's class must not fail the call.
            compared = self.methods.setdefault(seen.method, MethodComparison())
            self._teller.report(
                compared.add_missing(self._label(seen, row), f"it can't be compared: {format_error(error)}")
            )
        finally:
            if row is None:
                self._role_calls.drop_call(seen)

    def _compare_result(self, seen: TappedCall, value: Any, row: int | None, digest: Digest | None) -> None:
        compared = self.methods.setdefault(seen.method, MethodComparison())
        call = self._role_calls.find_call(seen)
        document = None if call is None else call.end if row is None else self._find_row(call, row)
        compared.calls += row is None
        label = self._label(seen, row)
        if call is None and self._role_calls.has_failed(seen):
            return
        if document is None or "missing" in document.about:
            why = f"it wasn't recorded{describe_end(Path(self._role_calls.source.folder))}"
            self._teller.report(compared.add_missing(label, why))
            return
        recorded = document.about["digest"]
        where = find_difference(recorded, seen.digest if row is None else digest or recorded)
        compared.arguments += where is not None
        difference = Difference(self._role_calls.source.tolerance)
        if row is None and "rows" in document.about:
            # If the driver sends rows to any free rank, compare the total number over all ranks.
            name = "rows" if self._role_calls.role.methods[seen.method].rows is None else "valid"
            difference.compare_parts(
                document.about[name], {"rows": seen.rows, **seen.row_counts}[name], " (the number of its rows)"
            )
        else:
            difference.compare_parts(read_recorded(document, self._role_calls.find), value)
        about = document.about if call is None else call.about
        if about.get("weights", seen.weights) == seen.weights:
            self._weights = None
        elif self._weights is None:
            self._weights = self._role_calls.call_label(seen)
        told = compared.add_difference(difference, label, Cause(where, self._weights), seen.seq, seen.begun)
        self._teller.report(told, difference.size)

    def _label(self, seen: TappedCall, row: int | None) -> str:
        return self._role_calls.call_label(seen) + ("" if row is None else f", row {row}")

    def _find_row(self, call: RankCall, row: int) -> Document | None:
        rows = call.rows
        if not rows or rows[0].about["digest"]:  # Rows that the driver distributes may be recorded on another rank.
            calls = [calls.get(call.method, call.number) for calls in self._role_calls.calls_by_rank.values()]
            rows = [document for other in calls if other is not None for document in other.rows]
        return next((document for document in rows if document.about["row"] == row), None)
