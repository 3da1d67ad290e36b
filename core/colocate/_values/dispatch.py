"""Dispatch: how the arguments of a call reach the ranks."""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, overload

import attrs

from colocate._system.nearest import did_you_mean
from colocate._system.numbers import amount_problem
from colocate._values.batch import Deferred, is_deferred, resolve
from colocate._values.mesh import Ranks
from colocate._values.scatter import lay_out, own_parts
from colocate._values.tree import PLAIN
from colocate.errors import ConfigError, DispatchError

Arguments = Mapping[str, Any]


@attrs.frozen
class Parts(Sequence[Arguments]):
    """One mapping per rank, with the rows that each got where that is known."""

    items: Sequence[Arguments]
    valid: Sequence[int | None] | None = None
    """The real rows of each rank."""
    padded: Sequence[int | None] | None = None
    """The rows of each rank with padding, None where there is no padding."""

    @overload
    def __getitem__(self, index: int) -> Arguments: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Arguments]: ...
    def __getitem__(self, index: int | slice) -> Arguments | Sequence[Arguments]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


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

    def __repr__(self) -> str:
        return "Broadcast()"


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


@attrs.frozen(init=False)
class PerRank(Dispatch):
    """The named parameters are lists: item i goes to rank i (of the ranks that the call names, if it names some)."""

    accepts_deferred: ClassVar[bool] = True
    selectable: ClassVar[bool] = True

    parameters: tuple[str, ...]

    def __init__(self, *parameters: str) -> None:
        _check_names(type(self), parameters)
        self.__attrs_init__(parameters)  # pyright: ignore[reportAttributeAccessIssue]

    def declare(self, parameters: Sequence[str], method: str) -> None:
        """Check that the parameters exist."""
        _declare(self, self.parameters, parameters, method)

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """Item i of each list for rank i, everything else for all."""
        targets = range(ranks.world_size) if ranks.targets is None else ranks.targets
        lists = {name: arguments[name] for name in self.parameters if arguments.get(name) is not None}
        lists = {name: _items(name, value, len(targets)) for name, value in lists.items()}
        others = whole({name: value for name, value in arguments.items() if name not in lists})
        result: list[Arguments] = [others] * ranks.world_size
        for place, rank in enumerate(targets):
            own = {name: whole(items[place]) for name, items in lists.items()}
            result[rank] = {name: own[name] if name in own else others[name] for name in arguments}
        return result

    def __repr__(self) -> str:
        return f"PerRank({', '.join(map(repr, self.parameters))})"


@attrs.frozen(init=False)
class Scatter(Dispatch):
    """The rows of the named parameters are spread over an axis of the mesh and repeated along the others.

    Splits are contiguous and, when they have to be, uneven.

    Args:
        *parameters: The parameters with rows; those of the first one count.
        axis: The axis of the mesh to spread over.
        pad: True gives every rank as many rows by repeating the last one and takes that out of the result again.
            "masked" pads too and leaves it to the method to honour `ctx.valid_rows`.
        empty: What happens with fewer rows than ranks and without padding: "error", or "run" the method on none.
        mesh: The mesh, when the role has several.
        rows_of: How many rows stay together, such as the samples of one prompt: it is split at multiples of that.
    """

    accepts_deferred: ClassVar[bool] = True

    parameters: tuple[str, ...]
    axis: str
    pad: Literal[False, True, "masked"]
    empty: Literal["error", "run"]
    mesh: str | None
    rows_of: int

    def __init__(
        self,
        *parameters: str,
        axis: str = "dp",
        pad: Literal[False, True, "masked"] = False,
        empty: Literal["error", "run"] = "error",
        mesh: str | None = None,
        rows_of: int = 1,
    ) -> None:
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
        self.__attrs_init__(parameters, axis, pad, empty, mesh, rows_of)  # pyright: ignore[reportAttributeAccessIssue]

    def declare(self, parameters: Sequence[str], method: str) -> None:
        """Check that the parameters exist."""
        _declare(self, self.parameters, parameters, method)

    def split(self, arguments: Arguments, ranks: Ranks) -> Sequence[Arguments]:
        """The parts of the named parameters, everything else whole."""
        mesh = ranks.mesh(self.mesh)
        count = mesh.size(self.axis)
        if not self.pad and (own := self._own(arguments, count)) is not None:
            return [own] * ranks.world_size
        scattered = {name: arguments[name] for name in self.parameters if name in arguments}
        others = whole({name: value for name, value in arguments.items() if name not in scattered})
        base = {name: others.get(name) for name in arguments}  # in the order of the call, and so are its copies
        if not self.pad and (own := own_parts(scattered, self.axis, self.mesh, count, self.rows_of)) is not None:
            return [{**base, **own}] * ranks.world_size
        padding: Literal["none", "even"] = "even" if self.pad else "none"
        layout = lay_out(scattered, self.axis, self.mesh, count, padding, self.empty, self.rows_of)
        if (shared := layout.shared(scattered)) is not None:
            return [{**base, **shared}] * ranks.world_size
        parts = [{**base, **own} for own in layout.cut(scattered)]
        if count == ranks.world_size:
            places: Sequence[int] = range(count)
        else:
            places = [mesh.coordinate(rank, self.axis) for rank in range(ranks.world_size)]
        return Parts(
            [parts[place] for place in places],
            None if layout.sizes is None else [layout.sizes[place] for place in places],
            None if layout.each is None else [layout.each] * ranks.world_size,
        )

    def _own(self, arguments: Arguments, count: int) -> dict[str, Any] | None:
        """What `split` gives where it is seen without looking into anything, as of most calls of a step; else None.

        What is scattered lies in the ranks' own workers, and besides it there are numbers and the like.
        """
        found: dict[str, Any] = {}
        scattered = False
        for name, value in arguments.items():
            kind = type(value)
            if kind in PLAIN:
                if name in self.parameters:
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
        usual = {"axis": "dp", "pad": False, "empty": "error", "mesh": None, "rows_of": 1}
        said = [f"{name}={own!r}" for name, default in usual.items() if (own := getattr(self, name)) != default]
        return f"Scatter({', '.join([*map(repr, self.parameters), *said])})"


@attrs.frozen
class Plan:
    """A call's arguments, ready to be sent. All of it goes along `targets`."""

    arguments: Sequence[Arguments]
    targets: Sequence[int]
    valid: Sequence[int | None]
    """The real rows of each, None where nothing was scattered or only the workers know."""
    padded: Sequence[int | None]
    """The rows of each with padding, None where there is none or only the workers know."""


def plan(dispatch: Dispatch, arguments: Arguments, ranks: Ranks, select: Sequence[int] | None = None) -> Plan:
    """Work out what a call sends to whom.

    Args:
        dispatch: How.
        arguments: The arguments by parameter.
        ranks: The ranks of the role.
        select: The ranks that the call itself named, if it did.

    Raises:
        DispatchError: The arguments don't fit, or the dispatch gave something that can't be sent.
    """
    if select is not None:
        ranks = attrs.evolve(ranks, targets=_check_select(dispatch, select, ranks))
    if not dispatch.accepts_deferred:
        arguments = resolve(arguments, lambda leaf: leaf.fetch())
    made = dispatch.split(arguments, ranks)
    parts, valid, padded = (made.items, made.valid, made.padded) if isinstance(made, Parts) else (made, None, None)
    _check_parts(dispatch, parts, ranks)
    targets = dispatch.targets(ranks)
    if targets is None:
        targets = ranks.targets
    unknown: list[int | None] = [None] * len(parts)
    if targets is None:
        return Plan(parts, range(ranks.world_size), valid or unknown, padded or unknown)
    _check_targets(f"{dispatch!r}", targets, ranks)
    columns = [[column[rank] for rank in targets] for column in (valid or unknown, padded or unknown)]
    return Plan([parts[rank] for rank in targets], targets, *columns)


def whole(value: Any) -> Any:
    """The value with placeholders for what isn't on the driver."""
    return resolve(value, _whole)


def _whole(leaf: Deferred) -> Any:
    return leaf.whole()


def check_place(what: str, axis: str, mesh: str | None) -> None:
    """Check the axis and the mesh that a dispatch or collect was declared with.

    Raises:
        DispatchError: The axis can't be one.
        ConfigError: The mesh isn't a name.
    """
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


def _declare(dispatch: Dispatch, named: Sequence[str], parameters: Sequence[str], method: str) -> None:
    for name in named:
        if name not in parameters:
            known = ", ".join(map(repr, parameters)) or "none"
            raise DispatchError(
                f"{method}: {dispatch!r} names {name!r}, but the method has no such parameter"
                f"; its parameters: {known}{did_you_mean(name, parameters)}",
                method=method,
                parameter=name,
            )


def _items(name: str, value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, Deferred):
        placeholders = value.items(count, name)
        if placeholders is not None:
            return placeholders
        value = value.fetch()
    return check_items(name, value, count)


def check_items(name: str, value: Any, count: int) -> Sequence[Any]:
    """What a `PerRank` parameter was given, if it is a list of so many items.

    Raises:
        DispatchError: It isn't.
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


def _check_select(dispatch: Dispatch, select: Sequence[int], ranks: Ranks) -> Sequence[int]:
    if not dispatch.selectable:
        raise DispatchError(
            f"the call names its ranks, which {dispatch!r} has no place for; only Broadcast, PerRank and OnRank take "
            "options(ranks=...)"
        )
    _check_targets("options(ranks=...)", select, ranks)
    return select


def chosen_ranks(ranks: Iterable[int]) -> Sequence[int]:
    """The ranks that a call names, as plain numbers.

    Raises:
        DispatchError: It doesn't name any.
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


def _check_parts(dispatch: Dispatch, parts: Any, ranks: Ranks) -> None:
    if not isinstance(parts, (list, Sequence)) or len(parts) != ranks.world_size:  # nearly always a list, of dicts
        got = f"{len(parts)} mappings" if isinstance(parts, Sequence) else f"a {type(parts).__name__}"
        raise DispatchError(f"{dispatch!r}: split gave {got} for {ranks.world_size} ranks; it has to give one for each")
    for cls in {*map(type, parts)} - {dict}:
        if not issubclass(cls, (dict, Mapping)):
            raise DispatchError(
                f"{dispatch!r}: split gave a {cls.__name__} for a rank; it has to give a mapping from "
                "parameters to values"
            )
