"""Dispatch: how the arguments of a call reach the ranks, and which rows `Scatter` gives to whom."""

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
from colocate._system.numbers import amount_problem, plural
from colocate._values.batch import (
    Beside,
    Cut,
    Padding,
    check_sets,
    count_rows,
    is_deferred,
    leaf_splitter,
    same_rows,
)
from colocate._values.leaves import leaves, map_leaves, take_apart
from colocate._values.mesh import Ranks, one_axis
from colocate._values.nesting import kinds_inside
from colocate._values.plain import PLAIN, Partition, even_sizes, is_plain, padded_sizes
from colocate.errors import ConfigError, DispatchError

Arguments = Mapping[str, Any]


class Parts(list[Arguments]):
    """One mapping per rank, with the real rows that each got, those with padding, and which, where that is known."""

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
    """How arguments reach the ranks. Subclass it, with `split` alone, for a way of your own."""

    accepts_deferred: ClassVar[bool] = False
    """Whether `split` may be given `Deferred` leaves; each subclass says so itself, or gets values."""
    selectable: ClassVar[bool] = False
    """Whether a call may name its ranks (`options(ranks=...)`)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "accepts_deferred" not in cls.__dict__:
            cls.accepts_deferred = False

    @abc.abstractmethod
    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """The arguments of each rank.

        Args:
            arguments: What the call was given, by parameter. It must stay as it is.
            ranks: The ranks of the role.

        Returns:
            One mapping per rank, in order. Ranks with equal arguments should have the same mapping object, which is
            then encoded once.
        """

    def declare(self, parameters: Sequence[str], method: str) -> None:  # noqa: B027 - nothing to check by default
        """Check this dispatch against the parameters of its method, when the class is declared.

        Raises:
            DispatchError: It names something that isn't there.
        """

    def targets(self, ranks: Ranks) -> Sequence[int] | None:
        """The ranks that the call goes to; None for all."""
        return None


@attrs.frozen
class Broadcast(Dispatch):
    """Every rank gets all arguments."""

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """The same mapping for every rank."""
        return [whole(arguments)] * ranks.world_size


@attrs.frozen
class OnRank(Dispatch):
    """One rank alone gets the call; its value is the result."""

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    rank: int = 0

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0:
            raise ConfigError(f"OnRank({self.rank!r}): a rank is a whole number from 0 up")

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """The same mapping for every rank, of which `targets` takes one."""
        return [whole(arguments)] * ranks.world_size

    def targets(self, ranks: Ranks) -> Sequence[int] | None:
        """The one rank; the one that the call named, if it named one."""
        if ranks.targets is None:
            return [self.rank]
        if len(ranks.targets) != 1:
            raise DispatchError(f"{self!r} goes to one rank, but the call names {len(ranks.targets)}; name one")
        return ranks.targets

    def __repr__(self) -> str:
        return f"OnRank({self.rank})"


class _Named(Dispatch):
    """A dispatch that names parameters of its method."""

    parameters: tuple[str, ...]

    def declare(self, parameters: Sequence[str], method: str) -> None:
        """Check that the parameters exist."""
        for name in self.parameters:
            if name not in parameters:
                known = ", ".join(map(repr, parameters)) or "none"
                raise DispatchError(
                    f"{method}: {self!r} names {name!r}, but the method has no such parameter"
                    f"; its parameters: {known}{did_you_mean(name, parameters)}",
                    method=method,
                    parameter=name,
                )


@attrs.frozen(init=False)
class PerRank(_Named):
    """The named parameters are lists: item i goes to rank i (of the ranks that the call names, if it names some)."""

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    parameters: tuple[str, ...]

    def __init__(self, *parameters: str) -> None:
        _check_names(type(self), parameters)
        self.__attrs_init__(parameters)  # pyright: ignore[reportAttributeAccessIssue]

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Item i of each list for rank i, everything else for all."""
        targets = range(ranks.world_size) if ranks.targets is None else ranks.targets
        lists: dict[str, Sequence[Any]] = {}
        for name in self.parameters:
            value: Any = arguments.get(name)
            if is_deferred(type(value)):
                lists[name] = value.items(len(targets), name)
            elif value is not None:
                lists[name] = check_items(name, value, len(targets))
        others = whole({name: value for name, value in arguments.items() if name not in lists})
        result: list[Arguments] = [others] * ranks.world_size
        for place, rank in enumerate(targets):
            own = {name: whole(items[place]) for name, items in lists.items()}
            result[rank] = {name: own[name] if name in own else others[name] for name in arguments}
        return result

    def __repr__(self) -> str:
        return f"PerRank({', '.join(map(repr, self.parameters))})"


@attrs.frozen(init=False)
class Scatter(_Named):
    """The rows of the named parameters are spread over an axis of the mesh and repeated along the others.

    Splits are contiguous and, when they have to be, uneven; with `balance` they are nearly even in what rows cost, and
    `Concat` puts the rows back in order.

    Args:
        *parameters: The parameters with rows; those of the first one count.
        axis: The axis of the mesh to spread over.
        pad: True gives every rank as many rows by repeating the last one and takes that out of the result again.
            "masked" pads too and leaves it to the method to honour `ctx.valid_rows`.
        empty: What happens with fewer rows than ranks and without padding: "error", or "run" the method on none.
        mesh: The mesh, when the role has several.
        rows_of: How many rows stay together, such as the samples of one prompt: it is split at multiples of that.
        balance: A parameter that says what each row costs, such as its tokens: whole numbers, one for each row, or a
            mask `[rows, tokens]`. It is scattered as well, and the driver needs its value. None as an argument: by
            number, as without `balance`.
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
        if not isinstance(pad, bool) and pad != "masked":  # 1 and 0 would be padded, and not known as padding
            raise ConfigError(f"Scatter(pad={pad!r}): use False, True or 'masked'")
        if empty not in ("error", "run"):
            raise ConfigError(f"Scatter(empty={empty!r}): use 'error' or 'run'")
        check_place("Scatter", axis, mesh)
        if (problem := amount_problem(rows_of, whole=True, least=1)) is not None:
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
        """The parts of the named parameters, everything else whole."""
        if type(arguments.get(self.parameters[0])) is list and (plain := self._of_plain(arguments, ranks)) is not None:
            return plain
        mesh = ranks.mesh(self.mesh)
        count = mesh.size(self.axis)
        by_cost = self.balance is not None and arguments.get(self.balance) is not None
        if not (self.pad or by_cost) and (own := self._own(arguments, count)) is not None:
            return [own] * ranks.world_size
        scattered = {name: arguments[name] for name in self.parameters if name in arguments}
        by, partition = self._partition(scattered, count)
        others = whole({name: value for name, value in arguments.items() if name not in scattered})
        base = {name: others.get(name) for name in arguments}  # in the order of the call, and so are its copies
        if partition is None:
            parts, sizes, each = self._spread(scattered, count)
        else:
            parts = features.module("balance.parts").pick(self, scattered, by, partition)
            sizes, each = [*map(len, partition)], None
        made = [{**base, **own} for own in parts]
        if len(made) < count:
            return made * ranks.world_size
        if count == ranks.world_size:
            places: Sequence[int] = range(count)
        else:
            places = [mesh.coordinate(rank, self.axis) for rank in range(ranks.world_size)]
        return Parts(
            [made[place] for place in places],
            None if sizes is None else [sizes[place] for place in places],
            None if each is None else [each] * ranks.world_size,
            None if partition is None else [partition[place] for place in places],
        )

    def _of_plain(self, arguments: Arguments, ranks: Ranks) -> Parts | None:
        """Return what `split` gives where all is plain, and lists are spread over all ranks; otherwise None."""
        count, total = ranks.world_size, len(arguments[self.parameters[0]])
        if self.axis != "dp" or self.rows_of > 1 or self.pad or self.mesh or self.balance or total < count:
            return None
        lists = {name: arguments[name] for name in self.parameters if name in arguments}
        if any(type(each) is not list or len(each) != total for each in lists.values()):
            return None
        if ranks.meshes is not one_axis(count) or not all(map(is_plain, arguments.values())):
            return None
        sizes = even_sizes(total, count)
        cuts = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        return Parts([{**arguments, **{name: each[cut] for name, each in lists.items()}} for cut in cuts], sizes)

    def _partition(self, values: dict[str, Any], count: int) -> tuple[str, Partition | None]:
        """Return which rows each place gets where these were chosen, and the parameter that decides.

        It is the one that says what rows cost, which is fetched if it is a resident; or else the first one that lies in
        the workers, as for contiguous rows.
        """
        of = self.rows_of
        if self.balance is not None and values.get(self.balance) is not None:
            name = self.balance
            if is_deferred(type(values[name])):
                values[name] = values[name].fetch()
            return name, features.module("balance.parts").chosen(values[name], name, count, of)
        for name, value in () if self.pad else values.items():
            leaf = next((leaf for leaf in leaves(value) if is_deferred(type(leaf))), None)
            if leaf is not None:
                found: Partition | None = leaf.partition
                if found is None or leaf.own(self.axis, self.mesh, count, of, found) is None:
                    return name, None
                return name, found if of == 1 or features.module("balance.parts").keeps_sets(found, of) else None
        return "", None

    def _spread(self, values: Arguments, count: int) -> tuple[list[Any], Sequence[int] | None, int | None]:
        """Work out who gets which rows, of which each `rows_of` stay together.

        Values on the driver are spread evenly. Where values in the workers are among them, the partition of the first
        of those governs; where there are only such ones, or the rows of one aren't known yet, the workers see to it.

        Returns:
            The parts, or one for all ranks where each finds in its own worker what governs; their real rows, and the
            rows of each with padding, both None when only the workers will know.
        """
        axis, mesh, of = self.axis, self.mesh, self.rows_of
        padding: Padding = "even" if self.pad else "none"
        first, total = "", None  # the first parameter whose rows the driver knows, and these rows
        deferred: list[tuple[str, Any]] = []
        for name, value in values.items():
            try:
                known = count_rows(value, name)
            except DispatchError as error:
                error.parameter = name
                raise
            if total is None:
                first, total = name, known
            elif known is not None:
                same_rows(first, total, name, known)
            deferred += [(name, leaf) for leaf in leaves(value) if is_deferred(type(leaf))]
        owned: dict[int, Any] = {}  # what each rank has in its own worker already
        if not self.pad:
            owned = {id(leaf): leaf.own(axis, mesh, count, of) for _, leaf in deferred}
        sizes: Sequence[int] | None = None
        each: int | None = None
        beside: dict[int, Beside] = {}  # what leaves in the workers are compared with there, by the leaf's id
        by: Any = None  # the placeholder of the one whose partition governs, when that is its producer's
        if total is None:
            if deferred and not self.pad and None not in owned.values():
                return take_apart(values, 1, lambda leaf: [owned[id(leaf)]]), None, None
        else:
            check_sets(f"the parameter {first!r}", total, of, first)
            spread: Sequence[int] = even_sizes(total, count, of)
            if not all(leaf.known for _, leaf in deferred):
                beside = {id(leaf): Beside(first, total, owner) for owner, leaf in deferred}
                by = owned.get(id(deferred[0][1]))
            else:
                for place, (owner, leaf) in enumerate(deferred):
                    theirs = leaf.sizes(axis, mesh, count, of)
                    same_rows(first, total, owner, sum(theirs))
                    if place == 0:
                        spread = theirs
                        for size in theirs:
                            check_sets(f"a part of {owner!r}, as it lies in the workers,", size, of, owner)
            if self.pad and (total > 0 or self.empty == "error"):
                each, spread = padded_sizes(total, count)
            if self.empty == "error" and (total == 0 or (each is None and 0 in spread)):
                raise self.skipped(first, total, count)
            sizes = spread
        split = None if sizes is None else leaf_splitter(sizes, each)

        def parts_of(leaf: Any) -> Sequence[Any]:
            if not is_deferred(type(leaf)):
                leaf = whole(leaf) if isinstance(leaf, list) else leaf
                if by is not None:
                    return [Cut(leaf, by, next(iter(beside.values())))]
                assert split is not None, "without sizes there are no plain rows"
                return split(leaf)
            if by is not None:
                own = owned[id(leaf)]
                return [leaf.share(0, count, padding, beside[id(leaf)], of) if own is None else own]
            if beside:
                return [leaf.share(index, count, padding, beside[id(leaf)], of) for index in range(count)]
            if sizes is None or self.pad:
                return [leaf.part(index, count, axis, mesh, padding, of) for index in range(count)]
            return [leaf.slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]

        if by is not None:
            return take_apart(values, 1, parts_of), None, None
        return take_apart(values, count, parts_of), sizes, each

    def skipped(self, first: str, total: int, count: int) -> DispatchError:
        """Return what is said where a rank would have no rows."""
        axis, of = self.axis, self.rows_of
        if total < count * of:
            sets = f", in sets of {of}," if of > 1 else ""
            ranks = f"{plural(count, 'rank')} along {axis!r}"
            what = f"the parameter {first!r} has {plural(total, 'row')}{sets} for {ranks}"
        else:
            what = f"some of the {count} ranks along {axis!r} have none of the {total} rows of {first!r} "
            what += "where they lie now"
        pads = total and of == 1 and self.balance is None
        hint = "give more rows, or declare Scatter(empty='run')" + (" or pad=True" if pads else "")
        return DispatchError(f"{what}, and no rank is skipped: {hint}", parameter=first)

    def _own(self, arguments: Arguments, count: int) -> dict[str, Any] | None:
        """Return what `split` gives where nothing has to be looked into, as of most calls of a step; otherwise None.

        What is scattered lies in the ranks' own workers, and besides it there are numbers and the like.
        """
        found: dict[str, Any] = {}
        scattered = False
        for name, value in arguments.items():
            kind = type(value)
            if kind in PLAIN:
                if value is not None and name in self.parameters:
                    return None
                found[name] = value
            elif not is_deferred(kind):
                return None
            elif name not in self.parameters:
                found[name] = value.whole()
            elif (own := value.own(self.axis, self.mesh, count, self.rows_of)) is not None:
                found[name] = own
                scattered = True
            else:
                return None
        return found if scattered else None

    def __repr__(self) -> str:
        names = map(repr, self.parameters)
        return written(self, *names, axis="dp", pad=False, empty="error", mesh=None, rows_of=1, balance=None)


def written(value: Any, *positional: str, **usual: Any) -> str:
    """Return how a declaration was written: its options but for those that are as usual."""
    said = [f"{name}={own!r}" for name, default in usual.items() if (own := getattr(value, name)) != default]
    return f"{type(value).__name__}({', '.join([*positional, *said])})"


@attrs.frozen
class Plan:
    """A call's arguments, ready to be sent. All of it goes along `targets`."""

    arguments: Sequence[Arguments]
    targets: Sequence[int]
    valid: Sequence[int | None]
    """The real rows of each, None where nothing was scattered or only the workers know."""
    padded: Sequence[int | None]
    """The rows of each with padding, None where there is none or only the workers know."""
    partition: Partition | None = None
    """The numbers of the rows of each, where these were chosen by what they cost."""


@calls_users_code
def plan(dispatch: Dispatch, arguments: Arguments, ranks: Ranks, select: Sequence[int] | None = None) -> Plan:
    """Work out what a call sends to whom; `select` are the ranks that the call itself named, if it did."""
    if select is not None:
        if not dispatch.selectable:
            raise DispatchError(
                f"the call names its ranks, which {dispatch!r} has no place for; only Broadcast, PerRank and OnRank "
                "take options(ranks=...)"
            )
        _check_targets("options(ranks=...)", select, ranks)
        ranks = attrs.evolve(ranks, targets=select)
    if not dispatch.accepts_deferred:
        arguments = resolve(arguments, lambda leaf: leaf.fetch())
    parts: Any = dispatch.split(arguments, ranks)
    if not isinstance(parts, (list, Sequence)) or len(parts) != ranks.world_size:  # nearly always a list, of dicts
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


def resolve(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Replace every `Deferred` in a value by `leaf(it)`; without one it is the value itself, and cheaply."""
    if all(map(is_plain, value.values())) if type(value) is dict else is_plain(value):  # as those of many a call
        return value
    if not any(map(is_deferred, kinds_inside(value))):  # which a value without an end is asked, too
        return value
    return map_leaves(value, leaf, is_deferred)


def whole(value: Any) -> Any:
    """Return the value with placeholders for what isn't on the driver."""
    return resolve(value, lambda leaf: leaf.whole())


def check_place(what: str, axis: str, mesh: str | None) -> None:
    """Check the axis and the mesh that a dispatch or collect was declared with."""
    if not isinstance(axis, str) or not axis.isidentifier():
        raise DispatchError(f"{what}(axis={axis!r}): an axis is a word, such as 'dp'")
    if mesh is not None and not isinstance(mesh, str):
        raise ConfigError(f"{what}(mesh={mesh!r}): give the name of one of the role's meshes, or leave it out")


def _check_names(dispatch: type[Dispatch], parameters: tuple[Any, ...]) -> None:
    what = dispatch.__name__
    if not parameters or not all(isinstance(name, str) for name in parameters):
        shown = ", ".join(map(repr, parameters))
        raise ConfigError(f"{what}({shown}): name the method's parameters, such as {what}('batch')")
    if len(set(parameters)) != len(parameters):
        raise ConfigError(f"{what}({', '.join(map(repr, parameters))}): a parameter is named twice")


def check_items(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return what a `PerRank` parameter was given; a `DispatchError` unless it is a list of so many items."""
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


def chosen_ranks(ranks: Iterable[int]) -> Sequence[int]:
    """Return the ranks that a call names, as plain numbers."""
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
