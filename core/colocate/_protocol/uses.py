"""Placeholders for residents in a call's arguments, and their replacement by values on the ranks.

A resident argument equals its collected value, but the whole value needn't exist anywhere: a rank takes the rows that
it needs from the parts that have these rows, its own part first.
"""

from __future__ import annotations

import functools
import pickle
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import cloudpickle

from colocate import features
from colocate._definitions.packed import PlainData
from colocate._protocol.taken import Receipt
from colocate._system.by_type import by_type
from colocate._system.numbers import format_count
from colocate._values import batch
from colocate._values.batch import AlignedRows, CutValue, check_sets
from colocate._values.collect import Collect, Concat, Gather
from colocate._values.dispatch import check_items
from colocate._values.kinds import Memo
from colocate._values.leaves import map_leaves
from colocate._values.leaving import Watch
from colocate._values.mesh import Ranks
from colocate._values.plain import PLAIN, Partition, split_evenly, split_padded
from colocate.errors import DispatchError

if TYPE_CHECKING:
    from colocate.worker.residents.peers import Peers

ResidentWrite: TypeAlias = tuple[int, str, str | None]
"""A resident's key, the method that returned the resident, and the call that wrote into it, if known."""


@attrs.frozen(eq=False)
class Origin:
    """The origin of a resident, shared by all residents of one method. An origin is small for groups of any size.

    Attributes:
        group: The group that keeps the resident.
        slots: The slots of the role, in order of rank.
        ranks: The ranks of the call that made the resident.
        collect: How the parts become the value.
        label: The resident's name in errors.
        generation: The group's generation; workers of another generation never had the resident.
        number: The group's number: a later group may have the same name.
    """

    group: str
    slots: tuple[int, ...] | range
    ranks: Ranks
    collect: Collect
    label: str
    generation: int = 0
    number: int = 0

    @functools.cached_property
    def _packed(self) -> bytes:
        packed: bytes = cloudpickle.dumps(attrs.astuple(self, recurse=False), protocol=5)
        return packed

    def __reduce__(self) -> Any:
        # Every call with a resident carries the origin, which is packed once, and unpacked once per worker.
        return _origin, (self._packed,)


@functools.lru_cache(maxsize=1024)
def _origin(packed: bytes) -> Origin:
    return Origin(*pickle.loads(packed))


@attrs.frozen(eq=False)
class Source:
    """A description of a resident for workers: where the parts are, and how the parts are joined to the value.

    Attributes:
        key: The resident's id, unique in the runtime.
        origin: How the resident was made.
        partition: The rows of the value that each rank has, for rows chosen by cost.
    """

    key: int
    origin: Origin
    partition: Partition | None = None

    @property
    def group(self) -> str:
        return self.origin.group

    @property
    def slots(self) -> tuple[int, ...] | range:
        return self.origin.slots

    @property
    def ranks(self) -> Ranks:
        ranks = self.origin.ranks
        return ranks if self.partition is None else attrs.evolve(ranks, partition=self.partition)

    @property
    def collect(self) -> Collect:
        return self.origin.collect

    @property
    def label(self) -> str:
        return self.origin.label

    @property
    def generation(self) -> int:
        return self.origin.generation

    def slot(self, rank: int) -> int:
        return self.slots[rank]

    @property
    def holders(self) -> Sequence[int]:
        """The ranks that have a part, in the order in which the parts are joined."""
        return range(self.ranks.world_size) if self.ranks.targets is None else self.ranks.targets

    def __reduce__(self) -> Any:
        return Source, (self.key, self.origin) if self.partition is None else (self.key, self.origin, self.partition)


@attrs.frozen(eq=False)
class Use(PlainData):
    """A placeholder among a call's arguments for a resident's value, or for some rows of the value."""

    source: Source


@attrs.frozen(eq=False)
class Part(Use):
    """A placeholder for part `index` of `count` even parts along an axis."""

    index: int
    count: int
    padding: bool
    companion: AlignedRows | None = None
    """Plain rows scattered along with this part. The worker compares the numbers of rows, as the driver couldn't."""
    from_values: int = 1
    """Number of rows that stay together."""


@attrs.frozen(eq=False)
class LocalPart(Use):
    """A placeholder for each worker's own part, if producer and consumer have the same partition.

    The placeholder is equal for all ranks, so that all ranks get the same message.
    """

    count: int
    of: int = 1
    """Number of rows that stay together."""


@attrs.frozen(eq=False)
class Item(Use):
    """A placeholder for item `index` of a list of `count` items, for the argument `parameter`."""

    index: int
    count: int
    parameter: str


@attrs.frozen(eq=False)
class Rows(Use):
    """A placeholder for the rows [start, stop) of a resident's value."""

    start: int
    stop: int


@attrs.frozen(eq=False)
class Pick(Use):
    """A placeholder for rows by number, in ascending order. `companion` checks the value's number of rows."""

    rows: Sequence[int]
    companion: AlignedRows


Over: TypeAlias = tuple[int, bool]
"""The key of an offered part, and whether the requester keeps the part, whose memory mustn't be overwritten then."""


@attrs.define(eq=False)
class Taking:
    """The state of a worker that receives offered parts one after the other.

    Attributes:
        areas: The last parts in reusable memory; these references keep the mapping alive.
        over: The previous part, reported with the next request; None for nothing to report.
    """

    areas: deque[Any]
    over: Over | None = None


@by_type
def _is_placeholder(kind: type) -> bool:
    return issubclass(kind, Use | CutValue)


@by_type
def _is_cut(kind: type) -> bool:
    return issubclass(kind, CutValue)


AskAligned: TypeAlias = Callable[[int, Sequence[int]], Collection[int]]


class Resolver:
    """Replaces the placeholders in a call's arguments, on the rank that runs the call."""

    def __init__(self, peers: Peers, own_group: str, own_slot: int, aligned: AskAligned, notes: bool = False) -> None:
        self._peers = peers
        self._group = own_group
        self._slot = own_slot
        self._ask_aligned = aligned
        self.receipts: list[Receipt] | None = [] if notes else None
        self.keys: list[int] = []  # Keys of the used residents, which are checked for writes after the call.
        self.valid: int | None = None  # Number of rows without padding in the first resolved part.
        self.total: int | None = None  # Number of rows of all parts together, if counted.
        self._first: tuple[Part | LocalPart, int] | None = None
        self._arguments: Mapping[str, Any] = {}
        self._aligned: Collection[int] | None = None
        self._memo = Memo()
        self._cut: dict[int, Any] = {}  # Joined values from which this rank cuts rows, by key of the resident.
        self._values: list[tuple[Source, Any]] = []
        self._watches: list[tuple[Source, Watch]] = []

    def resolve(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with values in place of placeholders."""
        self._arguments = arguments
        placed = dict(arguments)
        within = {name: value for name, value in placed.items() if type(value) not in PLAIN}
        # Most values are of type `LocalPart`, and have no nested values.
        walked = {name: value for name, value in within.items() if type(value) is not LocalPart}
        for value in walked.values():
            map_leaves(value, self._use_first, _is_cut)
        for name, value in within.items():
            placed[name] = (
                map_leaves(value, self._resolve_leaf, _is_placeholder) if name in walked else self._resolve_leaf(value)
            )
        return placed

    def _use_first(self, cut: CutValue) -> CutValue:
        """Resolve the part that comes with plain rows before all others, because it decides which rows a rank gets."""
        if self._first is None:
            self._resolve_first(cut.by)
        return cut

    def _resolve_leaf(self, item: Any) -> Any:
        if isinstance(item, CutValue):
            return self._resolve_cut(item)
        source = item.source
        self.keys.append(source.key)
        if isinstance(item, (Part, LocalPart)):
            value = self._resolve_part(item)
        elif isinstance(item, Rows):
            value = self._fetch_range(source, item.start, item.stop)
        elif isinstance(item, Pick):
            value = self._resolve_pick(item)
        elif isinstance(item, Item) and type(source.collect) is Gather:  # The item is the unchanged result of one rank.
            value = self._peers.fetch_part(source, source.holders[item.index], self.receipts)
        elif isinstance(item, Item):
            value = check_items(item.parameter, self._fetch_whole(source), item.count)[item.index]
        else:
            value = self._fetch_whole(source)
        self._values.append((source, value))
        return value

    def start_watching(self) -> None:
        """Start watching the received values for writes, including copies from other workers."""
        self._watches = [(source, Watch(value, contents=True)) for source, value in self._values]

    def find_written(self) -> list[Source]:
        """Return the residents whose received values the call has changed."""
        return [source for source, watch in self._watches if watch.was_written()]

    def _fetch_whole(self, source: Source) -> Any:
        ranks = source.ranks
        source_ranks = set(source.collect.sources(ranks))
        parts = [
            self._peers.fetch_part(source, rank, self.receipts) if rank in source_ranks else None
            for rank in source.holders
        ]
        if len(parts) > 1:
            rows = [self._peers.weight(source, rank) if rank in source_ranks else None for rank in source.holders]
            ranks = attrs.evolve(ranks, rows=rows)
        return source.collect.join(parts, ranks)

    def _resolve_cut(self, cut: CutValue) -> Any:
        assert self.valid is not None
        start, total = self._locate_rows(cut.by)
        cut.aligned_rows.check_rows(total)
        return map_leaves(
            batch.cut_leaf(cut.value, start, start + self.valid, self._memo), self._resolve_leaf, _is_placeholder
        )

    def _resolve_part(self, part: Part | LocalPart) -> Any:
        if isinstance(part, Part) and part.padding:
            return self._resolve_padded(part)
        if self._first is None:
            return self._resolve_first(part)
        # The first part decides which rows belong to this rank.
        first, rows = self._first
        if isinstance(part, LocalPart) and isinstance(first, LocalPart) and self._is_aligned(first, part):
            return self._fetch_own(part.source)[1]
        start, total = self._locate_rows(first)
        if (row_count := self._count_total(part.source)) != total:
            raise DispatchError(
                f"{part.source.label} has {format_count(row_count, 'row')}, but {first.source.label} has {total}: "
                "what is "
                "scattered together has as many rows"
            )
        return self._fetch_range(part.source, start, start + rows)

    def _resolve_first(self, part: Part | LocalPart) -> Any:
        if isinstance(part, LocalPart):
            rank, value = self._fetch_own(part.source)
            self.valid = self._peers.count_rows(part.source, rank)
            check_sets(f"rank {rank}'s part of {part.source.label}", self.valid, part.of)
            self._first = part, self.valid
            return value
        total = self._count_total(part.source)
        if part.companion is not None:
            part.companion.check_rows(total)
        check_sets(part.source.label, total, part.from_values)
        self.valid = split_evenly(total, part.count, part.from_values)[part.index]
        self._first = part, self.valid
        start, _ = self._locate_rows(part)
        return self._fetch_range(part.source, start, start + self.valid)

    def _fetch_own(self, source: Source) -> tuple[int, Any]:
        """Return rank and value of this worker's part; if the method returned None here, of another rank's part."""
        rank = source.slots.index(self._slot)
        if (value := self._peers.fetch_part(source, rank, self.receipts)) is None:
            rank = source.collect.sources(source.ranks)[self._own_index(source)]
            value = self._peers.fetch_part(source, rank, self.receipts)
        if source.partition is not None:
            parts = features.import_module_of("balance.parts")
            parts.check_aligned(source.partition[rank], self._peers.count_rows(source, rank), rank)
        return rank, value

    def _locate_rows(self, part: Part | LocalPart) -> tuple[int, int]:
        """Return the number of a part's first row, and the number of rows of the whole value."""
        if isinstance(part, Part):
            index, sizes = part.index, split_evenly(self._count_total(part.source), part.count, part.from_values)
        else:
            index, sizes = self._own_index(part.source), self._part_sizes(part.source)
        return sum(sizes[:index]), sum(sizes)

    def _is_aligned(self, first: LocalPart, part: LocalPart) -> bool:
        """Return whether two residents have the same partition on all ranks; equal sizes on this rank aren't enough."""
        key = first.source.key
        # A resident with rows chosen by cost only becomes a `LocalPart` if the first resident has the same partition.
        if part.count == 1 or part.source.key == key or part.source.partition is not None:
            return True
        if self._aligned is None:
            owned: dict[int, None] = {}  # Residents with a part on each rank, in order.

            def note(item: Any) -> Any:
                if isinstance(item, LocalPart):
                    owned[item.source.key] = None
                return item

            map_leaves(self._arguments, note, _is_placeholder)
            self._aligned = self._ask_aligned(key, [other_key for other_key in owned if other_key != key])
        return part.source.key in self._aligned

    def _resolve_padded(self, part: Part) -> Any:
        """Return a padded part, as if cut from the whole value, but without joining the whole value."""
        total = self.total = self._count_total(part.source)
        if part.companion is not None:
            part.companion.check_rows(total)
        width, sizes = split_padded(total, part.count)
        start = sum(sizes[: part.index])
        stop = start + sizes[part.index]
        if self.valid is None:
            self.valid = stop - start
        if not total:
            return self._fetch_range(part.source, 0, 0)
        # A part without own rows repeats the last row of the value.
        low = start if start < stop else total - 1
        return batch.pad_rows(self._fetch_range(part.source, low, max(stop, low + 1)), width)

    def _count_total(self, source: Source) -> int:
        if isinstance(source.collect, Concat):
            return sum(self._part_sizes(source))
        return batch.get_row_count(self._fetch_counted(source), source.label)

    def _fetch_counted(self, source: Source) -> Any:
        """Join the parts of a resident into the whole value, and cache the value for cutting rows."""
        if source.key not in self._cut:
            self._cut[source.key] = self._fetch_whole(source)
        return self._cut[source.key]

    def _part_sizes(self, source: Source) -> list[int]:
        return [self._peers.count_rows(source, rank) for rank in source.collect.sources(source.ranks)]

    def _fetch_range(self, source: Source, start: int, stop: int) -> Any:
        if not isinstance(source.collect, Concat) or source.partition is not None:
            return batch.slice_rows(self._fetch_counted(source), start, stop)
        pieces: list[Any] = []
        offset = 0
        holders, sizes = source.collect.sources(source.ranks), self._part_sizes(source)
        # An empty range is cut from the fullest part, because empty parts may have another shape.
        fullest = sizes.index(max(sizes))
        for index, (rank, size) in enumerate(zip(holders, sizes, strict=True)):
            low, high = (max(start, offset), min(stop, offset + size)) if start < stop else (offset, offset)
            if low < high or (start == stop and index == fullest):
                whole = low == offset and high == offset + size
                pieces.append(
                    self._peers.fetch_part(source, rank, self.receipts)
                    if whole
                    else self._peers.fetch_rows(source, rank, low - offset, high - offset, self.receipts)
                )
            offset += size
        return pieces[0] if len(pieces) == 1 else batch.concat(pieces, source.label)

    def _resolve_pick(self, pick: Pick) -> Any:
        """Collect picked rows from all parts. Each part sends the range from the first to the last picked row."""
        source, rows = pick.source, pick.rows
        pick.companion.check_rows(self._count_total(source))
        if not isinstance(source.collect, Concat) or source.partition is not None:
            return batch.take_rows(self._fetch_counted(source), rows)
        if not rows:
            return self._fetch_range(source, 0, 0)
        pieces: list[Any] = []
        first = 0
        for end in accumulate(self._part_sizes(source)):
            last = bisect_left(rows, end, first)
            if first < last:
                low, high = rows[first], rows[last - 1] + 1
                between = self._fetch_range(source, low, high)
                pieces.append(batch.take_rows(between, [row - low for row in rows[first:last]]))
            first = last
        return pieces[0] if len(pieces) == 1 else batch.concat(pieces, source.label)

    def _own_index(self, source: Source) -> int:
        assert isinstance(source.collect, Concat)
        return source.ranks.mesh(source.collect.mesh).coordinate(source.slots.index(self._slot), source.collect.axis)
