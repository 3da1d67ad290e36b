"""The decorator `@method`, which turns a function of a class into a role's method, typed for calls on the driver."""

from __future__ import annotations

import inspect
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from colocate import features
from colocate._role.context import current
from colocate._role.method_spec import MethodSpec
from colocate._values.collect import Collect, Concat, First, Gather, J_co, Reduce, check_collect as check_collect
from colocate._values.dispatch import Broadcast, Dispatch, OnRank, Scatter
from colocate.errors import ColocateError, DispatchError

if TYPE_CHECKING:
    from colocate._role.call import Call, Resident
    from colocate.features.rows.row_stream import RowStream

Tag: TypeAlias = Literal["weights", "grads", "optimizer", "cache"]
"""A kind of memory that can sleep: parameters and buffers; gradients; the state of optimizers; other tensors."""
TAGS: tuple[Tag, ...] = ("weights", "grads", "optimizer", "cache")
Discardable: TypeAlias = Literal["grads", "cache"]
"""Kinds of memory whose contents may be discarded. Weights and optimizer state are the role's learned state."""
DISCARDABLE: tuple[Discardable, ...] = ("grads", "cache")
P = ParamSpec("P")
T = TypeVar("T")
X = TypeVar("X")
V = TypeVar("V")
R_co = TypeVar("R_co", covariant=True)
C_co = TypeVar("C_co", covariant=True)


class RoleCall(Protocol[P, C_co]):
    """A role's method on the driver, which can be called, submitted, or called with the result kept in the workers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co:
        """Run the method on the ranks, wait, and return the collected value."""
        ...

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Call[C_co]:
        """Submit the call and return at once, with a `Call` as handle for the collected value."""
        ...

    def keep(self, *args: P.args, **kwargs: P.kwargs) -> Resident[C_co]:
        """Submit the call and return at once; the results stay in the workers."""
        ...

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> RoleCall[P, C_co]:
        """Return the same method with a timeout, or for some ranks only.

        Args:
            timeout: Seconds until the call is given up with `CallTimeout`; None keeps the previous setting.
            ranks: The ranks that run the call (with Broadcast, PerRank and OnRank only); None keeps the previous
                setting.
        """
        ...


class RowCall(RoleCall[P, list[V]], Protocol[P, V]):
    """A method with rows that finish one by one. A plain call waits for all rows, and returns the values in order."""

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> RowStream[V]:
        """Submit the call and return at once, with a stream that yields rows in the order in which rows finish."""
        ...

    @overload
    def options(
        self,
        *,
        on_error: Literal["return"],
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        retry: int | None = None,
        sticky: Callable[[Any], object] | None = None,
    ) -> RowCall[P, V | ColocateError]: ...
    @overload
    def options(
        self,
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        on_error: Literal["raise"] | None = None,
        retry: int | None = None,
        sticky: Callable[[Any], object] | None = None,
    ) -> RowCall[P, V]: ...
    def options(self, **options: Any) -> Any:  # noqa: D417 - that of the overloads
        """Return the same method with other options; None keeps the previous setting.

        Args:
            timeout: Seconds until the call is given up with `CallTimeout`.
            ranks: The ranks that run rows.
            on_error: The consequence of a row's error. "raise": running rows are cancelled, no others begin, and the
                error is raised when the call has ended. "return": the error takes the place of the row's value.
            retry: Number of retries of a row that has raised, or whose worker has died where the group restarts
                (`on_failure="restart"`): on another rank, if there is one.
            sticky: A function from a row to a key. Rows with equal keys go to one rank (for prefix caches).
        """
        ...


class RoleMethod(Generic[P, R_co, C_co]):
    """The class attribute that `@method` creates, typed by parameters, result on a rank, and result on the driver.

    On an instance, this is the plain bound method inside role code, and a `RoleCall` of one rank outside any worker.
    Called on the class, as in `Actor.step(self, loss)`, this is the function itself, typed as written.
    """

    def __init__(self, spec: MethodSpec) -> None:
        self.spec = spec
        self.__name__ = spec.name
        self.__doc__ = spec.function.__doc__
        self.__wrapped__ = spec.function
        self.__isabstractmethod__ = getattr(spec.function, "__isabstractmethod__", False)

    @overload
    def __get__(self, instance: None, owner: type, /) -> RoleMethod[P, R_co, C_co]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None, /) -> RoleCall[P, C_co]: ...
    def __get__(self, instance: object | None, owner: type | None = None, /) -> Any:
        if instance is None:
            return self
        if _in_role_code(instance):
            return types.MethodType(self.spec.function, instance)
        return features.standalone_class(self.spec.feature or "standalone")(instance, self.spec)

    def __call__(self, instance: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the plain function on this rank only.

        Args:
            instance: The role object, `self`.
            args: The method's arguments.
            kwargs: The method's arguments by name.

        Raises:
            TypeError: The caller isn't role code; there, call the method on a view or an object.
        """
        if not _in_role_code(instance):
            name = self.spec.function.__qualname__
            raise TypeError(
                f"{name}(...) on the class is the plain function, for a role's own code; "
                f"call {self.spec.name} on a view or an object of the role instead"
            )
        result: R_co = self.spec.function(instance, *args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<role method {self.spec.function.__qualname__}>"


if TYPE_CHECKING:

    class RowMethod(RoleMethod[P, R_co, list[V]], Generic[P, R_co, V]):
        """A method with rows that finish one by one. At run time, this is a `RoleMethod`."""

        @overload
        def __get__(self, instance: None, owner: type, /) -> RowMethod[P, R_co, V]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> RowCall[P, V]: ...
        def __get__(self, instance: object | None, owner: type | None = None, /) -> Any: ...


def _in_role_code(instance: object) -> bool:
    """Return whether the caller is role code in a worker, or code of a standalone role."""
    ctx = getattr(instance, "_colocate_ctx", None)
    return current() is not None or (ctx is not None and ctx.hosted)


# The result of an async function is typed Any on a rank, because two result types would make the overloads ambiguous.
class _Same(Protocol):
    """The type of a decorator for methods that collect a value of the method's own result type."""

    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /) -> RoleMethod[P, Any, T]: ...
    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], T], /) -> RoleMethod[P, T, T]: ...


class _List(Protocol):
    """The type of a decorator for methods that collect a list with one item per rank."""

    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /) -> RoleMethod[P, Any, list[T]]: ...
    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], T], /) -> RoleMethod[P, T, list[T]]: ...


# Type checkers lose the parameters of a function that returns Any, because Any fits several overloads.
class _ListOrRows(Protocol):
    """The type of a decorator for methods that collect a list, with an item per rank (or per row, if yielded)."""

    @overload
    def __call__(
        self, f: Callable[Concatenate[Any, P], Iterator[tuple[int, T]] | AsyncIterator[tuple[int, T]]], /
    ) -> RowMethod[P, Any, T]: ...
    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /) -> RoleMethod[P, Any, list[T]]: ...
    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], T], /) -> RoleMethod[P, T, list[T]]: ...


class _Rows(Protocol):
    """The type of a decorator for functions of one row. The driver passes a list, or another value with such rows."""

    def __call__(
        self, f: Callable[Concatenate[Any, X, P], Coroutine[Any, Any, T]], /
    ) -> RowMethod[Concatenate[Sequence[X] | X, P], Any, T]: ...


class _Custom(Protocol[J_co]):
    """The type of a decorator for methods with a user's `Collect`, which declares the type of the collected value."""

    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /) -> RoleMethod[P, Any, J_co]: ...
    @overload
    def __call__(self, f: Callable[Concatenate[Any, P], T], /) -> RoleMethod[P, T, J_co]: ...


class _Options(TypedDict, total=False):
    """The options of `@method` that every kind of method accepts."""

    concurrency: int
    host: Sequence[str]
    awake: Sequence[Tag] | None
    shares: bool
    revives: bool


@overload
def method(f: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /) -> RoleMethod[P, Any, list[T]]: ...
@overload
def method(f: Callable[Concatenate[Any, P], T], /) -> RoleMethod[P, T, list[T]]: ...
@overload
def method(*, rows: str, **options: Unpack[_Options]) -> _Rows: ...
# For a dispatch typed only as `Dispatch`, a list is assumed; the alternative would be Any for every custom dispatch.
@overload
def method(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    *, dispatch: OnRank, collect: None = ..., **options: Unpack[_Options]
) -> _Same: ...
@overload
def method(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    *, dispatch: Scatter, collect: None = ..., **options: Unpack[_Options]
) -> _ListOrRows: ...
@overload
def method(*, dispatch: Dispatch = ..., collect: Concat | First | Reduce, **options: Unpack[_Options]) -> _Same: ...
@overload
def method(*, dispatch: Dispatch = ..., collect: Gather | None = ..., **options: Unpack[_Options]) -> _List: ...
@overload
def method(*, dispatch: Dispatch = ..., collect: Collect[J_co], **options: Unpack[_Options]) -> _Custom[J_co]: ...
def method(
    f: Callable[..., Any] | None = None,
    /,
    *,
    dispatch: Dispatch | None = None,
    collect: Collect | None = None,
    rows: str | None = None,
    concurrency: int = 1,
    host: Sequence[str] = (),
    awake: Sequence[Tag] | None = None,
    shares: bool = False,
    revives: bool = False,
) -> Any:
    """Turn a function of a class into a method of the role.

    A method with `Scatter` may yield `(index, value)` once for each row of its rank, in any order. The rows then finish
    one by one, like the rows of a method with `rows=`, and `view.m.stream(...)` yields them.

    Args:
        f: The function, when used without parentheses. For mypy, write a function with `**kwargs` as `def name(self,
            /, **kwargs)`.
        dispatch: How the arguments reach the ranks (default: `Broadcast()`).
        collect: How the ranks' results become one value (default: `Gather()`, a list; with `OnRank`, that rank's).
        rows: The first parameter, of an `async def` method that takes one row. The driver gives all rows, and the
            method runs once per row: on any rank with a free place, `concurrency` at a time. Other arguments go to
            every row. Such a method has neither `dispatch` nor `collect`: its value is a list with the value of each
            row.
        concurrency: Number of calls of an `async def` method that may overlap, or of rows with `rows=` on each rank.
        host: Parameters whose tensors arrive on the host. Tensors of all others arrive on `ctx.device`.
        awake: Kinds of the role's memory that the method uses: "weights", "grads", "optimizer", "cache". A call
            wakes these, if asleep (`group.sleep`), and leaves the rest; () for none. None for all. Without "weights"
            the method also runs with stale weights (`colocate.sync_weights`).
        shares: For `load_weights` (`colocate.sync_weights`): the role gets the very tensors of the source, and only
            reads them.
        revives: Whether the method also runs with stale weights, and after a child of the role has ended by itself
            (`ctx.start`): to start the child again. Other methods fail then.

    Raises:
        DispatchError: A parameter name is unknown, or dispatch and collect don't go together.
    """
    if f is None:
        return partial(_declare_method, dispatch, collect, rows, concurrency, host, awake, shares, revives)
    return _declare_method(dispatch, collect, rows, concurrency, host, awake, shares, revives, f)


def _declare_method(
    dispatch: Dispatch | None,
    collect: Collect | None,
    rows: str | None,
    concurrency: int,
    host: Sequence[str],
    awake: Sequence[str] | None,
    shares: bool,
    revives: bool,
    function: Callable[..., Any],
) -> RoleMethod[..., Any, Any]:
    wrong = isinstance(function, RoleMethod | staticmethod | classmethod | property)
    if wrong or not (callable(function) and hasattr(function, "__qualname__")):
        raise DispatchError(
            f"{function!r} can't be made a role method: @method stands once, above a function `def name(self, ...)` "
            "and its other decorators"
        )
    where = function.__qualname__
    for option, kind in ((dispatch, Dispatch), (collect, Collect)):
        if option is not None and not isinstance(option, kind):
            raise DispatchError(f"{where}: {option!r} is not a {kind.__name__}; did you forget its parentheses?")
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if rows is not None:
        _check_rows(rows, function, dispatch, collect, where)
    elif yields:
        collect = _collect_yields(dispatch, collect, where)
    dispatch = dispatch if dispatch is not None else Broadcast()
    collect = collect if collect is not None else First() if isinstance(dispatch, OnRank) else Gather()
    full = inspect.signature(function)
    parameters = list(full.parameters.values())
    if not parameters:
        raise DispatchError(f"{where}: a role method's first parameter is self")
    signature = full.replace(parameters=parameters[1:])
    names = list(signature.parameters)
    dispatch.declare(names, where)
    check_collect(dispatch, collect, where)
    if isinstance(host, str):
        raise DispatchError(f"{where}: host={host!r} is a string; write host=({host!r},)")
    if unknown := [name for name in host if name not in names]:
        raise DispatchError(f"{where}: host names {unknown[0]!r}, but its parameters are {', '.join(names)}")
    if awake is not None and (isinstance(awake, str) or (unknown := [tag for tag in awake if tag not in TAGS])):
        problem = f"is a string; write awake=({awake!r},)" if isinstance(awake, str) else f"names {unknown[0]!r}"
        raise DispatchError(f"{where}: awake {problem}; a role's memory is of {', '.join(TAGS)}")
    if shares and function.__name__ != "load_weights":
        raise DispatchError(f"{where}: shares=True is for load_weights, which takes another role's weights")
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if not isinstance(concurrency, int) or concurrency < 1 or (concurrency > 1 and (yields or not is_async)):
        raise DispatchError(
            f"{where}: concurrency={concurrency!r}; it is at least 1, and above 1 for async methods only (no yield)"
        )
    spec = MethodSpec(
        name=function.__name__,
        function=function,
        dispatch=dispatch,
        collect=collect,
        signature=signature,
        is_async=is_async,
        concurrency=concurrency,
        host=tuple(host),
        awake=None if awake is None else tuple(awake),
        shares=shares,
        revives=revives,
        rows=rows,
        yields=yields,
    )
    return RoleMethod(spec)


def _check_rows(
    rows: object, function: Callable[..., Any], dispatch: Dispatch | None, collect: Collect | None, where: str
) -> None:
    if not inspect.iscoroutinefunction(function):
        raise DispatchError(
            f"{where}: rows={rows!r} is for an `async def` that takes one row and returns its value, many of which "
            'run at once. What works on a batch has dispatch=Scatter("batch"), and may yield (index, value)'
        )
    if dispatch is not None or collect is not None:
        raise DispatchError(
            f"{where}: with rows={rows!r} each row goes to one rank, and the value is a list with that of each: leave "
            "dispatch= and collect= out"
        )
    names = list(inspect.signature(function).parameters)[1:]
    if not names or rows != names[0]:
        first = repr(names[0]) if names else "missing"
        raise DispatchError(f"{where}: rows={rows!r} names the first parameter after self, which is {first}")


def _collect_yields(dispatch: Dispatch | None, collect: Collect | None, where: str) -> Collect:
    """Return the collect of a method that yields rows; raise a `DispatchError` if the dispatch doesn't fit."""
    if not isinstance(dispatch, Scatter) or dispatch.pad:
        dispatch_text = "no dispatch" if dispatch is None else repr(dispatch)
        raise DispatchError(
            f"{where}: it has a `yield`, which is for (index, value) of the rows that a rank has got, by a Scatter "
            f"without padding, and it has {dispatch_text}. A generator can't leave its worker: return a list"
        )
    if collect is not None:
        raise DispatchError(f"{where}: it yields its rows, whose values are collected in order: leave collect= out")
    return Concat(dispatch.axis, mesh=dispatch.mesh)
