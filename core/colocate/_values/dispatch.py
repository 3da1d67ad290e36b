"""Dispatch the arguments of a call to ranks: to all ranks, to one rank, item by item, or split by rows."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import attrs

from colocate import features
from colocate._signals.guard import calls_users_code
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import find_amount_problem, format_count
from colocate._values.batch import (
    AlignedRows,
    CutValue,
    Padding,
    check_same_rows,
    check_sets,
    count_rows,
    create_leaf_splitter,
    is_deferred,
)
from colocate._values.leaves import list_leaves, map_leaves, split_structure
from colocate._values.mesh import Ranks, get_default_meshes
from colocate._values.nesting import collect_kinds
from colocate._values.plain import PLAIN, Partition, is_plain, split_evenly, split_padded
from colocate.errors import ConfigError, DispatchError

Arguments = Mapping[str, Any]


class Parts(list[Arguments]):
    """The arguments of each rank, with the numbers of real and padded rows and the row indices, if known."""

    def __init__(
        self,
        items: Iterable[Arguments],
        valid: Sequence[int | None] | None = None,
        padded: Sequence[int | None] | None = None,
        partition: Partition | None = None,
    ) -> None:
        super().__init__(items)
        self.valid = valid
        self.padded = padded
        self.partition = partition


class Dispatch(abc.ABC):
    """A rule that maps a call's arguments to ranks. Subclasses only need to define `split`."""

    accepts_deferred: ClassVar[bool] = False
    """Whether `split` handles `Deferred` leaves; each subclass must declare so, or gets plain values."""
    selectable: ClassVar[bool] = False
    """Whether a call may name its ranks (`options(ranks=...)`)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "accepts_deferred" not in cls.__dict__:
            cls.accepts_deferred = False

    @abc.abstractmethod
    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Return the arguments of each rank.

        Args:
            arguments: The call's arguments, by parameter. Must not be changed.
            ranks: The ranks of the role.

        Returns:
            One mapping per rank, in order. Ranks with equal arguments should share one mapping object, which is
                then encoded once.
        """

    def declare(self, parameters: Sequence[str], method: str) -> None:  # noqa: B027 - nothing to check by default
        """Check this dispatch against the method's parameters when the role's class is declared.

        Raises:
            DispatchError: A named parameter doesn't exist.
        """

    def targets(self, ranks: Ranks) -> Sequence[int] | None:
        """Return the ranks to call; None for all ranks."""
        return None


@attrs.frozen
class Broadcast(Dispatch):
    """Gives all arguments to every rank."""

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Return the same mapping, with all arguments, for every rank."""
        return [use_placeholders(arguments)] * ranks.world_size


@attrs.frozen
class OnRank(Dispatch):
    """Calls one rank only, and returns that rank's value."""

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    rank: int = 0

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0:
            raise ConfigError(f"OnRank({self.rank!r}): a rank is a whole number from 0 up")

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Return the same mapping for every rank; `targets` chooses the rank that is called."""
        return [use_placeholders(arguments)] * ranks.world_size

    def targets(self, ranks: Ranks) -> Sequence[int] | None:
        """Return the rank to call, which is the rank that the call names, or else the declared rank."""
        if ranks.targets is None:
            return [self.rank]
        if len(ranks.targets) != 1:
            raise DispatchError(f"{self!r} goes to one rank, but the call names {len(ranks.targets)}; name one")
        return ranks.targets

    def __repr__(self) -> str:
        return f"OnRank({self.rank})"


class _Named(Dispatch):
    """Base class of dispatches that name some of the method's parameters."""

    parameters: tuple[str, ...]

    def declare(self, parameters: Sequence[str], method: str) -> None:
        for name in self.parameters:
            if name not in parameters:
                names = ", ".join(map(repr, parameters)) or "none"
                raise DispatchError(
                    f"{method}: {self!r} names {name!r}, but the method has no such parameter"
                    f"; its parameters: {names}{did_you_mean(name, parameters)}",
                    method=method,
                    parameter=name,
                )


@attrs.frozen(init=False)
class PerRank(_Named):
    """Gives item i of each named parameter, which must be a list, to rank i.

    If the call names ranks, item i goes to the i-th named rank.
    """

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    parameters: tuple[str, ...]

    def __init__(self, *parameters: str) -> None:
        _check_names(type(self), parameters)
        self.__attrs_init__(parameters)  # pyright: ignore[reportAttributeAccessIssue]

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Return item i of each list for rank i, and all other arguments unchanged."""
        targets = range(ranks.world_size) if ranks.targets is None else ranks.targets
        lists: dict[str, Sequence[Any]] = {}
        for name in self.parameters:
            value: Any = arguments.get(name)
            if is_deferred(type(value)):
                lists[name] = value.items(len(targets), name)
            elif value is not None:
                lists[name] = check_items(name, value, len(targets))
        common = use_placeholders({name: value for name, value in arguments.items() if name not in lists})
        result: list[Arguments] = [common] * ranks.world_size
        for place, rank in enumerate(targets):
            rank_values = {name: use_placeholders(items[place]) for name, items in lists.items()}
            result[rank] = {name: rank_values[name] if name in rank_values else common[name] for name in arguments}
        return result

    def __repr__(self) -> str:
        return f"PerRank({', '.join(map(repr, self.parameters))})"


@attrs.frozen(init=False)
class Scatter(_Named):
    """Splits the rows of the named parameters along one mesh axis. Ranks along other axes get the same rows.

    Splits are contiguous and, if necessary, uneven; with `balance` they have nearly equal costs, and `Concat` restores
    the order of rows.

    Args:
        *parameters: The parameters with rows; the first one determines the number.
        axis: The axis of the mesh to split along.
        pad: True repeats the last row to give every rank equal numbers, and removes the padding from the result.
            "masked" pads, too, and leaves it to the method to honour `ctx.valid_rows`.
        empty: With fewer rows than ranks and no padding: "error", or "run" the method on no rows.
        mesh: The mesh, if the role has several.
        rows_of: The number of rows that stay together, such as the samples of one prompt.
        balance: A parameter with the cost of each row, such as the number of tokens: integers, one per row, or a mask
            `[rows, tokens]`. The parameter is scattered, too, and the driver needs the value. None as an argument
            means equal costs.
    """

    accepts_deferred: ClassVar[bool] = True

    parameters: tuple[str, ...]
    axis: str
    pad: Literal[False, True, "masked"]
    empty: Literal["error", "run"]
    mesh: str | None
    rows_of: int
    balance: str | None

    def __init__(
        self,
        *parameters: str,
        axis: str = "dp",
        pad: Literal[False, True, "masked"] = False,
        empty: Literal["error", "run"] = "error",
        mesh: str | None = None,
        rows_of: int = 1,
        balance: str | None = None,
    ) -> None:
        if balance is not None and balance not in parameters:
            parameters = *parameters, balance
        _check_names(type(self), parameters)
        # Refuse the number 1, which would pad rows without being recognised as True later.
        if not isinstance(pad, bool) and pad != "masked":
            raise ConfigError(f"Scatter(pad={pad!r}): use False, True or 'masked'")
        if empty not in ("error", "run"):
            raise ConfigError(f"Scatter(empty={empty!r}): use 'error' or 'run'")
        check_place("Scatter", axis, mesh)
        if (problem := find_amount_problem(rows_of, whole=True, least=1)) is not None:
            raise ConfigError(f"Scatter(rows_of) {problem}")
        if pad and rows_of > 1:
            raise ConfigError(
                f"Scatter(rows_of={rows_of}, pad={pad!r}): what is padded is split anywhere; leave one out"
            )
        if pad and balance is not None:
            raise ConfigError(
                f"Scatter(balance={balance!r}, pad={pad!r}): padding makes parts of equally many rows, balance parts "
                "that cost the same; leave one out"
            )
        self.__attrs_init__(  # pyright: ignore[reportAttributeAccessIssue]
            parameters, axis, pad, empty, mesh, rows_of, balance
        )

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Return each rank's part of the named parameters, and all other arguments unchanged."""
        if (
            type(arguments.get(self.parameters[0])) is list
            and (plain := self._split_plain(arguments, ranks)) is not None
        ):
            return plain
        mesh = ranks.mesh(self.mesh)
        count = mesh.size(self.axis)
        by_cost = self.balance is not None and arguments.get(self.balance) is not None
        if not (self.pad or by_cost) and (rank_values := self._split_own(arguments, count)) is not None:
            return [rank_values] * ranks.world_size
        scattered = {name: arguments[name] for name in self.parameters if name in arguments}
        by, partition = self._choose_partition(scattered, count)
        common = use_placeholders({name: value for name, value in arguments.items() if name not in scattered})
        base = {name: common.get(name) for name in arguments}  # Keeps the order of the arguments.
        if partition is None:
            parts, sizes, padded_size = self._spread_rows(scattered, count)
        else:
            parts = features.import_module_of("balance.parts").pick_parts(self, scattered, by, partition)
            sizes, padded_size = [*map(len, partition)], None
        mappings = [{**base, **rank_values} for rank_values in parts]
        if len(mappings) < count:
            return mappings * ranks.world_size
        if count == ranks.world_size:
            places: Sequence[int] = range(count)
        else:
            places = [mesh.coordinate(rank, self.axis) for rank in range(ranks.world_size)]
        return Parts(
            [mappings[place] for place in places],
            None if sizes is None else [sizes[place] for place in places],
            None if padded_size is None else [padded_size] * ranks.world_size,
            None if partition is None else [partition[place] for place in places],
        )

    def _split_plain(self, arguments: Arguments, ranks: Ranks) -> Parts | None:
        """Return the result of `split` for plain values if lists are split over all ranks; None in other cases."""
        count, total = ranks.world_size, len(arguments[self.parameters[0]])
        if self.axis != "dp" or self.rows_of > 1 or self.pad or self.mesh or self.balance or total < count:
            return None
        lists = {name: arguments[name] for name in self.parameters if name in arguments}
        if any(type(items) is not list or len(items) != total for items in lists.values()):
            return None
        if ranks.meshes is not get_default_meshes(count) or not all(map(is_plain, arguments.values())):
            return None
        sizes = split_evenly(total, count)
        cuts = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        return Parts([{**arguments, **{name: items[cut] for name, items in lists.items()}} for cut in cuts], sizes)

    def _choose_partition(self, values: dict[str, Any], count: int) -> tuple[str, Partition | None]:
        """Return the parameter that determines how rows are split, and the parts' row indices if chosen by cost.

        This is the parameter with the costs (fetched if it is a resident), or else the first resident.
        """
        of = self.rows_of
        if self.balance is not None and values.get(self.balance) is not None:
            name = self.balance
            if is_deferred(type(values[name])):
                values[name] = values[name].fetch()
            return name, features.import_module_of("balance.parts").choose_partition(values[name], name, count, of)
        for name, value in () if self.pad else values.items():
            leaf = next((leaf for leaf in list_leaves(value) if is_deferred(type(leaf))), None)
            if leaf is not None:
                partition: Partition | None = leaf.partition
                if partition is None or leaf.own(self.axis, self.mesh, count, of, partition) is None:
                    return name, None
                return name, partition if of == 1 or features.import_module_of("balance.parts").has_whole_sets(
                    partition, of
                ) else None
        return "", None

    def _spread_rows(self, values: Arguments, count: int) -> tuple[list[Any], Sequence[int] | None, int | None]:
        """Split the values by rows over the positions on the axis, in sets of `rows_of` rows.

        Values on the driver are split evenly. With residents, the partition of the first resident applies. With only
        residents, or with an unknown number of rows, the workers split.

        Returns:
            The parts (or one part for all ranks, if each rank takes rows in the worker); each rank's number of real
                rows, and of padded rows. Both numbers are None if only the workers will know.
        """
        axis, mesh, of = self.axis, self.mesh, self.rows_of
        padding: Padding = "even" if self.pad else "none"
        first, total = "", None  # `total` is the number of rows of the parameter `first`, if known.
        deferred: list[tuple[str, Any]] = []
        for name, value in values.items():
            try:
                row_count = count_rows(value, name)
            except DispatchError as error:
                error.parameter = name
                raise
            if total is None:
                first, total = name, row_count
            elif row_count is not None:
                check_same_rows(first, total, name, row_count)
            deferred += [(name, leaf) for leaf in list_leaves(value) if is_deferred(type(leaf))]
        owned: dict[int, Any] = {}  # Maps a leaf's id to the part of a resident that each rank already has.
        if not self.pad:
            owned = {id(leaf): leaf.own(axis, mesh, count, of) for _, leaf in deferred}
        sizes: Sequence[int] | None = None
        padded_size: int | None = None
        aligned: dict[int, AlignedRows] = {}  # Maps a leaf's id to a check of the resident's rows by the workers.
        by: Any = None  # The partition of this resident determines the split.
        if total is None:
            if deferred and not self.pad and None not in owned.values():
                return split_structure(values, 1, lambda leaf: [owned[id(leaf)]]), None, None
        else:
            check_sets(f"the parameter {first!r}", total, of, first)
            spread: Sequence[int] = split_evenly(total, count, of)
            if not all(leaf.known for _, leaf in deferred):
                aligned = {id(leaf): AlignedRows(first, total, owner) for owner, leaf in deferred}
                by = owned.get(id(deferred[0][1]))
            else:
                for place, (owner, leaf) in enumerate(deferred):
                    owner_sizes = leaf.sizes(axis, mesh, count, of)
                    check_same_rows(first, total, owner, sum(owner_sizes))
                    if place == 0:
                        spread = owner_sizes
                        for size in owner_sizes:
                            check_sets(f"a part of {owner!r}, as it lies in the workers,", size, of, owner)
            if self.pad and (total > 0 or self.empty == "error"):
                padded_size, spread = split_padded(total, count)
            if self.empty == "error" and (total == 0 or (padded_size is None and 0 in spread)):
                raise self.make_skipped_error(first, total, count)
            sizes = spread
        split = None if sizes is None else create_leaf_splitter(sizes, padded_size)

        def parts_of(leaf: Any) -> Sequence[Any]:
            if not is_deferred(type(leaf)):
                leaf = use_placeholders(leaf) if isinstance(leaf, list) else leaf
                if by is not None:
                    return [CutValue(leaf, by, next(iter(aligned.values())))]
                assert split is not None, "without sizes there are no plain rows"
                return split(leaf)
            if by is not None:
                own_part = owned[id(leaf)]
                return [leaf.share(0, count, padding, aligned[id(leaf)], of) if own_part is None else own_part]
            if aligned:
                return [leaf.share(index, count, padding, aligned[id(leaf)], of) for index in range(count)]
            if sizes is None or self.pad:
                return [leaf.part(index, count, axis, mesh, padding, of) for index in range(count)]
            return [leaf.slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]

        if by is not None:
            return split_structure(values, 1, parts_of), None, None
        return split_structure(values, count, parts_of), sizes, padded_size

    def make_skipped_error(self, first: str, total: int, count: int) -> DispatchError:
        """Return the error for a call in which a rank would get no rows."""
        axis, of = self.axis, self.rows_of
        if total < count * of:
            sets = f", in sets of {of}," if of > 1 else ""
            ranks = f"{format_count(count, 'rank')} along {axis!r}"
            reason = f"the parameter {first!r} has {format_count(total, 'row')}{sets} for {ranks}"
        else:
            reason = f"some of the {count} ranks along {axis!r} hold none of the {total} rows of {first!r}"
        pads = total and of == 1 and self.balance is None
        hint = "give more rows, or declare Scatter(empty='run')" + (" or pad=True" if pads else "")
        return DispatchError(f"{reason}, and each rank needs at least one row: {hint}", parameter=first)

    def _split_own(self, arguments: Arguments, count: int) -> dict[str, Any] | None:
        """Return one mapping for all ranks if all scattered arguments are residents split alike; None otherwise.

        This is the usual case. The other arguments are plain values, such as numbers, or residents.
        """
        mapping: dict[str, Any] = {}
        scattered = False
        for name, value in arguments.items():
            kind = type(value)
            if kind in PLAIN:
                if value is not None and name in self.parameters:
                    return None
                mapping[name] = value
            elif not is_deferred(kind):
                return None
            elif name not in self.parameters:
                mapping[name] = value.whole()
            elif (own_part := value.own(self.axis, self.mesh, count, self.rows_of)) is not None:
                mapping[name] = own_part
                scattered = True
            else:
                return None
        return mapping if scattered else None

    def __repr__(self) -> str:
        names = map(repr, self.parameters)
        return format_declaration(self, *names, axis="dp", pad=False, empty="error", mesh=None, rows_of=1, balance=None)


def format_declaration(value: Any, *positional: str, **usual: Any) -> str:
    """Return the repr of a declaration, without options that have default values."""
    options = [f"{name}={option!r}" for name, default in usual.items() if (option := getattr(value, name)) != default]
    return f"{type(value).__name__}({', '.join([*positional, *options])})"


@attrs.frozen
class Plan:
    """The arguments of a call, ready to be sent. All sequences follow the order of `targets`."""

    arguments: Sequence[Arguments]
    targets: Sequence[int]
    valid: Sequence[int | None]
    """The real rows of each target, None if nothing was scattered or only the workers know."""
    padded: Sequence[int | None]
    """The rows of each target with padding, None without padding or if only the workers know."""
    partition: Partition | None = None
    """The row indices of each target, if rows were chosen by cost."""


@calls_users_code
def plan_call(dispatch: Dispatch, arguments: Arguments, ranks: Ranks, select: Sequence[int] | None = None) -> Plan:
    """Compute the arguments of each rank. `select` has the ranks that the call names, or is None."""
    if select is not None:
        if not dispatch.selectable:
            raise DispatchError(
                f"the call names its ranks, which {dispatch!r} has no place for; only Broadcast, PerRank and OnRank "
                "take options(ranks=...)"
            )
        _check_targets("options(ranks=...)", select, ranks)
        ranks = attrs.evolve(ranks, targets=select)
    if not dispatch.accepts_deferred:
        arguments = resolve_deferred(arguments, lambda leaf: leaf.fetch())
    parts: Any = dispatch.split(arguments, ranks)
    if not isinstance(parts, (list, Sequence)) or len(parts) != ranks.world_size:
        got = f"{len(parts)} mappings" if isinstance(parts, Sequence) else f"a {type(parts).__name__}"
        raise DispatchError(f"{dispatch!r}: split gave {got} for {ranks.world_size} ranks; it has to give one for each")
    for cls in {*map(type, parts)} - {dict}:
        if not issubclass(cls, (dict, Mapping)):
            raise DispatchError(
                f"{dispatch!r}: split gave a {cls.__name__} for a rank; it has to give a mapping from "
                "parameters to values"
            )
    valid, padded, partition = None, None, None
    if isinstance(parts, Parts):
        valid, padded, partition = parts.valid, parts.padded, parts.partition
    targets = dispatch.targets(ranks)
    if targets is None:
        targets = ranks.targets
    unknown: list[int | None] = [None] * len(parts)
    if targets is None:
        return Plan(parts, range(ranks.world_size), valid or unknown, padded or unknown, partition)
    _check_targets(f"{dispatch!r}", targets, ranks)
    columns = [[column[rank] for rank in targets] for column in (valid or unknown, padded or unknown)]
    return Plan([parts[rank] for rank in targets], targets, columns[0], columns[1])


def resolve_deferred(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Replace every `Deferred` leaf of a value by the result of `leaf`. A value without any is returned unchanged."""
    # Plain values, the arguments of most calls, are returned without a search.
    if all(map(is_plain, value.values())) if type(value) is dict else is_plain(value):
        return value
    if not any(map(is_deferred, collect_kinds(value))):  # This check terminates even if a value contains itself.
        return value
    return map_leaves(value, leaf, is_deferred)


def use_placeholders(value: Any) -> Any:
    """Return a value with placeholders in place of residents."""
    return resolve_deferred(value, lambda leaf: leaf.whole())


def check_place(what: str, axis: str, mesh: str | None) -> None:
    """Raise an error if a dispatch or collect names an invalid axis or mesh."""
    if not isinstance(axis, str) or not axis.isidentifier():
        raise DispatchError(f"{what}(axis={axis!r}): an axis is a word, such as 'dp'")
    if mesh is not None and not isinstance(mesh, str):
        raise ConfigError(f"{what}(mesh={mesh!r}): give the name of one of the role's meshes, or leave it out")


def _check_names(dispatch: type[Dispatch], parameters: tuple[Any, ...]) -> None:
    label = dispatch.__name__
    if not parameters or not all(isinstance(name, str) for name in parameters):
        shown = ", ".join(map(repr, parameters))
        raise ConfigError(f"{label}({shown}): name the method's parameters, such as {label}('batch')")
    if len(set(parameters)) != len(parameters):
        raise ConfigError(f"{label}({', '.join(map(repr, parameters))}): a parameter is named twice")


def check_items(name: str, value: Any, count: int) -> Sequence[Any]:
    """Check the argument of a `PerRank` parameter, and return the list.

    Raises:
        DispatchError: The argument is no list of `count` items.
    """
    if not isinstance(value, (list, tuple)):
        raise DispatchError(
            f"the parameter {name!r} is dispatched PerRank, so it has to be a list with one item for each of the "
            f"{count} ranks, not a {type(value).__name__}",
            parameter=name,
        )
    if len(value) != count:
        raise DispatchError(
            f"the parameter {name!r} is dispatched PerRank and has {len(value)} items for {count} ranks; give one each",
            parameter=name,
        )
    return value


def parse_ranks(ranks: Iterable[int]) -> Sequence[int]:
    """Return the ranks that a call names, as a tuple of integers.

    Raises:
        DispatchError: The value is no list of ranks.
    """
    try:
        return tuple(map(operator.index, ranks))
    except TypeError:
        raise DispatchError(f"options(ranks={ranks!r}): give a list of ranks, which are numbers from 0 up") from None


def _check_targets(what: str, targets: Sequence[int], ranks: Ranks) -> None:
    if not targets or len(set(targets)) != len(targets):
        raise DispatchError(f"{what} goes to the ranks {list(targets)}: name at least one, and none twice")
    for rank in targets:
        if not isinstance(rank, int) or not 0 <= rank < ranks.world_size:
            raise DispatchError(
                f"{what} goes to rank {rank!r}, but the role has {ranks.world_size}, from 0 to {ranks.world_size - 1}"
            )
