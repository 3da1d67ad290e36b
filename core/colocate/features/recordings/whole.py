"""Joins the recorded results of all ranks into the value that the caller got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate._role.method_spec import MethodSpec
from colocate._values.collect import Collect, Concat, First, Gather, Reduce
from colocate._values.dispatch import Broadcast, OnRank, PerRank, Scatter
from colocate._values.mesh import Mesh, Ranks
from colocate.features.recordings.differences import ErrorText
from colocate.features.recordings.digests import Digest
from colocate.features.recordings.documents import Document, RankCall, read_recorded
from colocate.features.recordings.values import Find


class UnjoinableError(Exception):
    """Raised if the value that the caller got is unknown or depends on the number of ranks."""


@attrs.frozen
class JoinedCall:
    """A call with the results of all ranks, from a recording or from this run.

    Attributes:
        parts: The documents of the call, by rank.
        world_size: The number of ranks of the role.
        meshes: The meshes over these ranks.
        partition: The rows of each rank, if the driver chose the partition.
        spec: The method, or the recorded properties of the method.
        find: Finds the classes of values.
    """

    parts: Mapping[int, RankCall]
    world_size: int
    meshes: Mapping[str, Mesh]
    partition: Sequence[Sequence[int]] | None
    spec: Any
    find: Find

    @property
    def error_document(self) -> Document | None:
        """The document of the first error, which the caller got; None without errors."""
        raised = [part.error_document for part in self.parts.values()]
        return min(filter(None, raised), key=_end_time, default=None)

    @property
    def error_text(self) -> Any:
        """The class and the text of the first error."""
        return ErrorText("none") if self.error_document is None else read_recorded(self.error_document, self.find)

    @property
    def weights_digest(self) -> str:
        """A digest of the weights of the ranks, or "" if unknown."""
        return next((part.about["weights"] for part in self.parts.values() if "weights" in part.about), "")

    @property
    def start_key(self) -> tuple[int, float]:
        """The sequence number of the call, and the earliest start time on a rank."""
        abouts = [part.about for part in self.parts.values()]
        return abouts[0]["seq"], min(about["begun"] for about in abouts)

    @property
    def has_default_ranks(self) -> bool:
        """Whether the call was sent to the method's default ranks."""
        targets = self.spec.dispatch.targets(Ranks(self.world_size, self.meshes))
        return self.parts.keys() == {*(range(self.world_size) if targets is None else targets)}

    @property
    def join_ranks(self) -> Ranks:
        """The description of the ranks for `Collect.join`."""
        rows, padded = self._row_counts("valid"), self._row_counts("padded")
        if len(self.parts) == self.world_size:
            return Ranks(self.world_size, self.meshes, rows, padded, partition=self.partition)
        return Ranks(self.world_size, self.meshes, rows, padded, sorted(self.parts))

    def _row_counts(self, name: str) -> Sequence[int | None] | None:
        counts = [self.parts[rank].about.get(name) for rank in sorted(self.parts)]
        return counts if any(row_count is not None for row_count in counts) else None

    def shared_arguments(self) -> tuple[Digest, Sequence[str]]:
        """Return the digests of arguments that are equal on all ranks, and the names of arguments that were split."""
        dispatch = self.spec.dispatch
        digest: Digest = next(part for part in self.parts.values() if part.end is not None).about["digest"]
        split: Sequence[str] = () if isinstance(dispatch, Broadcast | OnRank) else [*digest]
        if isinstance(dispatch, Scatter | PerRank):
            split = [name for name in digest if name in dispatch.parameters]
        return {name: leaves for name, leaves in digest.items() if name not in split}, split

    def rank_results(self, sources: Sequence[int]) -> Mapping[int, Any]:
        """Return the results of the ranks `sources`, by rank.

        Raises:
            UnjoinableError: A result wasn't recorded.
        """
        values = {}
        for rank in sources:
            end = self.parts[rank].end if rank in self.parts else None
            if end is None:
                raise UnjoinableError(f"what rank {rank} gave isn't there")
            if "missing" in end.about:
                raise UnjoinableError(f"what rank {rank} gave wasn't recorded: {end.about['missing']}")
            values[rank] = read_recorded(end, self.find)
        return values

    def joined_value(self) -> Any:
        """Join the results of the ranks, and return the value that the caller got."""
        ranks, collect = self.join_ranks, self.spec.collect
        results = self.rank_results(collect.sources(ranks))
        return collect.join([results.get(rank) for rank in sorted(self.parts)], ranks)

    def rows_by_rank(self) -> dict[int, Sequence[int]]:
        """Return the indices of each rank's rows in the caller's batch, without ranks that have copies of rows."""
        rows_by_rank: dict[int, Sequence[int]] = {}
        begin = 0
        for rank in self.spec.collect.sources(Ranks(self.world_size, self.meshes)):
            if self.partition is not None:
                rows_by_rank[rank] = self.partition[rank]
            elif rank in self.parts and (count := self.parts[rank].about.get("valid")) is not None:
                rows_by_rank[rank] = range(begin, begin := begin + count)
            else:  # Stop here, because the offset of the next rank is unknown.
                break
        return rows_by_rank

    def row_documents(self) -> dict[int, Document]:
        """Return the documents of rows by their index in the caller's batch."""
        if self.spec.rows is not None:
            ended = sorted((row for part in self.parts.values() for row in part.rows), key=_end_time)
            return {row.about["row"]: row for row in ended}  # If a row was tried again, the last attempt counts.
        return {
            numbers[row.about["row"]]: row
            for rank, numbers in self.rows_by_rank().items()
            if rank in self.parts
            for row in self.parts[rank].rows
        }


@attrs.frozen
class RecordedMethod:
    """The properties of a method as stored in a recording.

    Attributes:
        collect: The collect that joins the results.
        rows: The parameter with rows that the method receives one by one.
        ends_in_rows: Whether the method's rows end one by one.
    """

    collect: Collect
    rows: str | None
    ends_in_rows: bool


_COLLECTS: Mapping[str, Any] = {kind.__name__: kind for kind in (Concat, First, Gather, Reduce)}


def describe_method(spec: MethodSpec) -> dict[str, Any]:
    """Return the properties of a method as plain data for a recording."""
    collect: Any = spec.collect
    kind = type(collect)
    plain = [kind.__qualname__, attrs.asdict(collect) if kind in _COLLECTS.values() else None]
    return {"collect": plain, "rows": spec.rows, "ends_in_rows": spec.feature == "rows"}


def parse_method(plain: Mapping[str, Any]) -> RecordedMethod:
    """Rebuild the properties of a method from the plain data of a recording.

    Raises:
        UnjoinableError: The collect is a user's class.
        Exception: The data wasn't written by colocate.
    """
    name, options = plain["collect"]
    if options is None:
        raise UnjoinableError(f"its collect, {name}, is a class of yours")
    return RecordedMethod(_COLLECTS[name](**options), plain["rows"], plain["ends_in_rows"])


def _end_time(row: Document) -> float:
    ended: float = row.about["ended"]
    return ended
