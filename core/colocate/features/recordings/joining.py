"""Compares a role with a recording of another number of ranks, by the values that callers get.

This runs on the driver. The method's `collect` joins the results of the recorded ranks, and also the results of this
run's ranks (`TellingTap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colocate._calls.pending import PendingCall
from colocate._role.role import RoleInfo
from colocate._system.jobs import JobThread, error_text, report_exception
from colocate._values.collect import Gather
from colocate._values.mesh import Mesh
from colocate.features.recordings.differences import Cause, Compared, Difference, Teller, with_left
from colocate.features.recordings.digests import first_difference
from colocate.features.recordings.documents import Document, RankCall, RankCalls, recorded_value
from colocate.features.recordings.files import RoleFolder, RowOrder, as_ended
from colocate.features.recordings.messages import Played
from colocate.features.recordings.playing import find_for
from colocate.features.recordings.whole import CannotJoin, Whole


class Joining:
    """Compares a role's calls with a recording of another number of ranks.

    Attributes:
        methods: The results by method. Only the comparison's thread uses them.
    """

    def __init__(self, role: RoleInfo, played: Played, tell: Callable[[str], object]) -> None:
        self._role, self._played = role, played
        self._teller = Teller(lambda words: tell(f"role {role.name!r}: differs from {played.folder}: {words}"))
        self._weights: str | None = None  # The label of the first call with different weights.
        self._folder = RoleFolder.read(Path(played.folder))
        self._meshes = {name: Mesh(shape) for name, shape in self._folder.meshes.items()}
        self._find = find_for(role.methods)
        self._told: dict[int, list[tuple[int, Any]]] = {}  # The documents from ranks, by call.
        self._thread = JobThread(f"colocate-comparison-{role.name}", lambda error: report_exception())
        self._next: dict[str, int] = {}  # The number of each method's next call.
        self.methods: dict[str, Compared] = {}
        self._begin()

    def begin_anew(self) -> None:
        """Read the recording from the start again, because calls may be repeated after a restore."""
        self._thread.soon(self._begin)

    def _begin(self) -> None:
        self._recorded = [RankCalls(self._folder.path, rank) for rank in range(self._folder.ranks)]
        self._partitions = RowOrder.read(self._folder.path, "partition")
        self._skipped: dict[str, int] = {}
        for calls in self._recorded if self._played.after else ():
            for method, count in calls.skip(self._played.after)[0].items():
                self._skipped[method] = max(count, self._skipped.get(method, 0))

    def heard(self, call: PendingCall, rank: int, document: Any) -> None:
        """Store a rank's result until the call has ended. The caller holds the lock of the group's order."""
        if call.seq not in self._told:
            if call.done():  # The call has already failed on another rank.
                return
            self._told[call.seq] = []
            call._then(self._over)
        self._told[call.seq].append((rank, document))

    def table(self) -> dict[str, Compared]:
        """Return the results of all ended calls, by method."""
        self._thread.run(self._count_left)
        return self.methods

    def close(self) -> None:
        """Stop the comparison."""
        self._thread.close()

    def _over(self, call: PendingCall) -> None:
        self._thread.soon(partial(self._look, call, self._told.pop(call.seq)))

    # -- on the comparison's thread

    def _count_left(self) -> None:
        ended = {key for calls in self._recorded for key, call in calls.all().items() if call.end is not None}
        # Recorded calls from before the restored checkpoint count as made, not as missing.
        with_left(self.methods, [key for key in ended if key[1] >= self._next.get(key[0], 0)])

    def _look(self, call: PendingCall, told: Sequence[tuple[int, Any]]) -> None:
        assert call.link is not None
        assert call.spec is not None
        parts: dict[int, RankCall] = {}
        for rank, body in told:
            document = Document.heard(call.link.unpack(body))
            parts.setdefault(rank, RankCall.of(document.about)).add(document)
        compared = self.methods.setdefault(call.method, Compared())
        compared.calls += 1
        number = next(iter(parts.values())).number + self._skipped.get(call.method, 0)
        label = f"{self._role.name}.{call.method}, call {number}"
        self._next[call.method] = number + 1
        ranks = self._role.ranks
        now = Whole(parts, ranks.world_size, ranks.meshes, call.partition, call.spec, self._find)
        try:
            self._compare(compared, label, self._before(call, number, now), now)
        except Exception as error:  # A user's `collect` or class may raise any error.
            why = str(error) if isinstance(error, CannotJoin) else f"it can't be joined: {error_text(error)}"
            self._teller.add(compared.lack(label, why))

    def _before(self, call: PendingCall, number: int, now: Whole) -> Whole:
        """Return the recorded call for a call of this run (`now`).

        Raises:
            CannotJoin: The call wasn't recorded, or the recorded or the present call is incomplete.
        """
        parts: dict[int, RankCall] = {}
        for rank, calls in enumerate(self._recorded):
            if calls.get(call.method, number) is not None:
                parts[rank] = calls.found.pop((call.method, number))
        seqs = {part.about["seq"] for part in parts.values()}
        if len(seqs) > 1 or len({part.number for part in now.parts.values()}) > 1:
            raise CannotJoin("calls of its method went to different ranks: which one it was isn't known")
        partition = self._partitions.get(next(iter(seqs), -1))
        before = Whole(parts, self._folder.ranks, self._meshes, partition, now.spec, self._find)
        is_there = parts and (before.is_usual or not now.is_usual)
        if before.raised is None and not is_there:
            some = f" on all ranks, of {self._folder.ranks}" if parts else ""
            raise CannotJoin(f"it wasn't recorded{some}{as_ended(self._folder.path)}")
        ends = [part.end for part in now.parts.values()]
        has_ended = len(ends) == len(call.targets) and None not in ends
        if now.raised is None and not has_ended:
            raise CannotJoin("it has ended before all ranks gave what they give")
        return before

    def _compare(self, compared: Compared, label: str, before: Whole, now: Whole) -> None:
        (arguments, split), (was, _) = now.arguments(), before.arguments()
        where = first_difference(was, arguments)
        compared.arguments += where is not None
        if before.weights in ("", now.weights):
            self._weights = None
        elif self._weights is None:
            self._weights = label
        besides = f", but for what is split, and isn't compared: {', '.join(split)}" if split else ""
        cause = Cause(where, self._weights, besides)
        difference = Difference(self._played.tolerance)
        if before.raised is not None or now.raised is not None:
            difference.add(before.error, now.error, " (the error)")
        elif now.spec.feature == "rows":
            self._compare_rows(compared, label, before.rows(), now.rows(), cause, now.began)
            return
        elif isinstance(now.spec.collect, Gather):
            self._compare_items(difference, before, now)
        else:
            difference.add(before.value(), now.value())
        self._teller.add(compared.add(difference, label, cause, *now.began), difference.size)

    def _compare_items(self, difference: Difference, before: Whole, now: Whole) -> None:
        was, has = ([*item.results(sorted(item.parts)).values()] for item in (before, now))
        among = Difference(self._played.tolerance)
        for item in was[1:]:
            among.add(was[0], item)
        if among.first is not None:
            raise CannotJoin(
                f"{now.spec.name} is collected with {now.spec.collect!r}: that has an item for each rank, which differ "
                f"in the recording, of {len(was)} ranks, and here are {len(has)}"
            )
        for index, item in enumerate(has):
            difference.add(was[0], item, f"[{index}]")

    def _compare_rows(
        self,
        compared: Compared,
        label: str,
        was: Mapping[int, Document],
        has: Mapping[int, Document],
        cause: Cause,
        began: tuple[int, float],
    ) -> None:
        for index in sorted({*was, *has}):
            row, one, other = f"{label}, row {index}", was.get(index), has.get(index)
            if one is None:
                self._teller.add(compared.lack(row, "it wasn't recorded"))
                continue
            if other is None:
                self._teller.add(compared.lack(row, "it was recorded, and hasn't ended here"))
                continue
            if other.about["digest"]:
                where = first_difference(one.about["digest"], other.about["digest"])
                compared.arguments += where is not None
                cause = Cause(where, self._weights)
            difference = Difference(self._played.tolerance)
            difference.add(self._row(one), self._row(other))
            self._teller.add(compared.add(difference, row, cause, *began), difference.size)

    def _row(self, row: Document) -> Any:
        value = recorded_value(row, self._find)
        # If a method yields rows, each row is recorded as a pair of index and item, without a digest.
        return value if row.about["digest"] or "error" in row.about else value[1]
