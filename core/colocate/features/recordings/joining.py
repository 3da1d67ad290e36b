"""Compares a role with a recording of another number of ranks, by the values that callers get.

This runs on the driver. The method's `collect` joins the results of the recorded ranks, and also the results of this
run's ranks (`ReportingTap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colocate._calls.pending import PendingCall
from colocate._role.role import RoleInfo
from colocate._system.jobs import JobThread, format_error, report_exception
from colocate._values.collect import Gather
from colocate._values.mesh import Mesh
from colocate.features.recordings.differences import Cause, Difference, DifferenceReporter, MethodComparison, add_left
from colocate.features.recordings.digests import find_difference
from colocate.features.recordings.documents import Document, RankCall, RankCalls, read_recorded
from colocate.features.recordings.files import RoleFolder, RowOrder, describe_end
from colocate.features.recordings.messages import ReplaySource
from colocate.features.recordings.playing import make_class_finder
from colocate.features.recordings.whole import JoinedCall, UnjoinableError


class JoinedComparison:
    """Compares a role's calls with a recording of another number of ranks.

    Attributes:
        methods: The results by method. Only the comparison's thread uses them.
    """

    def __init__(self, role: RoleInfo, played: ReplaySource, tell: Callable[[str], object]) -> None:
        self._role, self._source = role, played
        self._teller = DifferenceReporter(
            lambda words: tell(f"role {role.name!r}: differs from {played.folder}: {words}")
        )
        self._weights: str | None = None  # The label of the first call whose weights differ from the recorded ones.
        self._folder = RoleFolder.from_folder(Path(played.folder))
        self._meshes = {name: Mesh(shape) for name, shape in self._folder.meshes.items()}
        self._find = make_class_finder(role.methods)
        self._documents: dict[int, list[tuple[int, Any]]] = {}  # Each call's results, as pairs of rank and document.
        self._thread = JobThread(f"colocate-comparison-{role.name}", lambda error: report_exception())
        self._next: dict[str, int] = {}  # The number of each method's next call.
        self.methods: dict[str, MethodComparison] = {}
        self._start_comparison()

    def restart_comparison(self) -> None:
        """Read the recording from the start again, because calls may be repeated after a restore."""
        self._thread.call_soon(self._start_comparison)

    def _start_comparison(self) -> None:
        self._rank_calls = [RankCalls(self._folder.path, rank) for rank in range(self._folder.ranks)]
        self._partitions = RowOrder.read_rows(self._folder.path, "partition")
        self._skipped_counts: dict[str, int] = {}
        for calls in self._rank_calls if self._source.after else ():
            for method, count in calls.skip_until(self._source.after)[0].items():
                self._skipped_counts[method] = max(count, self._skipped_counts.get(method, 0))

    def on_document(self, call: PendingCall, rank: int, document: Any) -> None:
        """Store a rank's result until the call has ended. Callers must hold the group's `order.lock`."""
        if call.seq not in self._documents:
            if call.done():  # The call has already failed on another rank.
                return
            self._documents[call.seq] = []
            call._add_callback(self._on_call_ended)
        self._documents[call.seq].append((rank, document))

    def table(self) -> dict[str, MethodComparison]:
        """Return the results of all ended calls, by method."""
        self._thread.run(self._count_left)
        return self.methods

    def close(self) -> None:
        """Stop the comparison."""
        self._thread.close()

    def _on_call_ended(self, call: PendingCall) -> None:
        self._thread.call_soon(partial(self._compare_call, call, self._documents.pop(call.seq)))

    # -- on the comparison's thread

    def _count_left(self) -> None:
        ended = {key for calls in self._rank_calls for key, call in calls.read_all().items() if call.end is not None}
        # Recorded calls from before the restored checkpoint count as made, not as missing.
        add_left(self.methods, [key for key in ended if key[1] >= self._next.get(key[0], 0)])

    def _compare_call(self, call: PendingCall, told: Sequence[tuple[int, Any]]) -> None:
        assert call.link is not None
        assert call.spec is not None
        parts: dict[int, RankCall] = {}
        for rank, body in told:
            document = Document.from_bytes(call.link.unpack(body))
            parts.setdefault(rank, RankCall.from_metadata(document.about)).add_document(document)
        compared = self.methods.setdefault(call.method, MethodComparison())
        compared.calls += 1
        number = next(iter(parts.values())).number + self._skipped_counts.get(call.method, 0)
        label = f"{self._role.name}.{call.method}, call {number}"
        self._next[call.method] = number + 1
        ranks = self._role.ranks
        now = JoinedCall(parts, ranks.world_size, ranks.meshes, call.partition, call.spec, self._find)
        try:
            self._compare_values(compared, label, self._recorded_call(call, number, now), now)
        except Exception as error:  # A user's `collect` or class may raise any error.
            why = str(error) if isinstance(error, UnjoinableError) else f"it can't be joined: {format_error(error)}"
            self._teller.report(compared.add_missing(label, why))

    def _recorded_call(self, call: PendingCall, number: int, now: JoinedCall) -> JoinedCall:
        """Return the recorded call that corresponds to a call of this run (`now`).

        Raises:
            UnjoinableError: The call wasn't recorded, or the recorded or the present call is incomplete.
        """
        parts: dict[int, RankCall] = {}
        for rank, calls in enumerate(self._rank_calls):
            if calls.get(call.method, number) is not None:
                parts[rank] = calls.calls.pop((call.method, number))
        seqs = {part.about["seq"] for part in parts.values()}
        if len(seqs) > 1 or len({part.number for part in now.parts.values()}) > 1:
            raise UnjoinableError("calls of its method went to different ranks: which one it was isn't known")
        partition = self._partitions.get(next(iter(seqs), -1))
        before = JoinedCall(parts, self._folder.ranks, self._meshes, partition, now.spec, self._find)
        is_there = parts and (before.has_default_ranks or not now.has_default_ranks)
        if before.error_document is None and not is_there:
            some = f" on all ranks, of {self._folder.ranks}" if parts else ""
            raise UnjoinableError(f"it wasn't recorded{some}{describe_end(self._folder.path)}")
        ends = [part.end for part in now.parts.values()]
        has_ended = len(ends) == len(call.targets) and None not in ends
        if now.error_document is None and not has_ended:
            raise UnjoinableError("it has ended before all ranks gave what they give")
        return before

    def _compare_values(self, compared: MethodComparison, label: str, before: JoinedCall, now: JoinedCall) -> None:
        (arguments, split), (was, _) = now.shared_arguments(), before.shared_arguments()
        where = find_difference(was, arguments)
        compared.arguments += where is not None
        if before.weights_digest in ("", now.weights_digest):
            self._weights = None
        elif self._weights is None:
            self._weights = label
        besides = f", but for what is split, and isn't compared: {', '.join(split)}" if split else ""
        cause = Cause(where, self._weights, besides)
        difference = Difference(self._source.tolerance)
        if before.error_document is not None or now.error_document is not None:
            difference.compare_parts(before.error_text, now.error_text, " (the error)")
        elif now.spec.feature == "rows":
            self._compare_rows(compared, label, before.row_documents(), now.row_documents(), cause, now.start_key)
            return
        elif isinstance(now.spec.collect, Gather):
            self._compare_items(difference, before, now)
        else:
            difference.compare_parts(before.joined_value(), now.joined_value())
        self._teller.report(compared.add_difference(difference, label, cause, *now.start_key), difference.size)

    def _compare_items(self, difference: Difference, before: JoinedCall, now: JoinedCall) -> None:
        was, has = ([*item.rank_results(sorted(item.parts)).values()] for item in (before, now))
        among = Difference(self._source.tolerance)
        for item in was[1:]:
            among.compare_parts(was[0], item)
        if among.first is not None:
            raise UnjoinableError(
                f"{now.spec.name} is collected with {now.spec.collect!r}: that has an item for each rank, which differ "
                f"in the recording, of {len(was)} ranks, and here are {len(has)}"
            )
        for index, item in enumerate(has):
            difference.compare_parts(was[0], item, f"[{index}]")

    def _compare_rows(
        self,
        compared: MethodComparison,
        label: str,
        was: Mapping[int, Document],
        has: Mapping[int, Document],
        cause: Cause,
        began: tuple[int, float],
    ) -> None:
        for index in sorted({*was, *has}):
            row, one, other = f"{label}, row {index}", was.get(index), has.get(index)
            if one is None:
                self._teller.report(compared.add_missing(row, "it wasn't recorded"))
                continue
            if other is None:
                self._teller.report(compared.add_missing(row, "it was recorded, and hasn't ended here"))
                continue
            if other.about["digest"]:
                where = find_difference(one.about["digest"], other.about["digest"])
                compared.arguments += where is not None
                cause = Cause(where, self._weights)
            difference = Difference(self._source.tolerance)
            difference.compare_parts(self._read_row(one), self._read_row(other))
            self._teller.report(compared.add_difference(difference, row, cause, *began), difference.size)

    def _read_row(self, row: Document) -> Any:
        value = read_recorded(row, self._find)
        # If a method yields rows, each row is recorded as a pair of index and item, without a digest.
        return value if row.about["digest"] or "error" in row.about else value[1]
