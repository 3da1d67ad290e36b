"""Views: the driver's name for one role of one group. A view owns nothing and has no methods but the role's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from colocate import _context
from colocate._by_type import by_type
from colocate._call import Call
from colocate._dispatch import Plan, plan
from colocate._mesh import Mesh, Ranks
from colocate._method import MethodSpec
from colocate._nesting import has_fields, hides, no_end, refuse_hidden
from colocate._numbers import limit
from colocate._order import PendingCall
from colocate._owned import Owned
from colocate._pipeline import recording
from colocate._resident import Consumer, Reference, Resident, check_same_runtime
from colocate._role import no_such_method
from colocate._sending import keep, ready, start, submit
from colocate._tree import map_leaves
from colocate.errors import ColocateError

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup

# A call's arguments may be millions of things, and on threads sending them costs nothing. What is so far inside them
# that this many others are nearer isn't refused there; a resident's reference still says what it is when it is used.
_LOOKS = 500


@attrs.frozen(eq=False)
class RoleInfo:
    """One role of a group, as the driver knows it.

    Attributes:
        name: Its name.
        cls: Its class.
        methods: Its methods by name.
        slots: Its slots in order of rank.
        meshes: Its meshes by name.
        origin: Where its class comes from.
    """

    name: str
    cls: type
    methods: Mapping[str, MethodSpec]
    slots: tuple[int, ...] | range
    meshes: Mapping[str, Mesh]
    origin: str
    key: Any = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True), kw_only=True)
    """What workers know it by."""
    ranks: Ranks = attrs.field(
        init=False, default=attrs.Factory(lambda self: Ranks(len(self.slots), self.meshes), takes_self=True)
    )


class RoleView:
    """The driver's name for one role of one group; `colocate.inspect(view)` tells more."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, group: ColocatedGroup, role: RoleInfo) -> None:
        self.__dict__["_colocate_view"] = group, role

    def __getattr__(self, name: str) -> ViewCall:
        group, role = self.__dict__["_colocate_view"]
        spec = role.methods.get(name)
        if spec is None:
            raise no_such_method(role.name, name, role.methods)
        call = ViewCall(group, role, spec)
        self.__dict__[name] = call  # found directly from now on
        return call

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a view can't be written to: role {self.__dict__['_colocate_view'][1].name!r} lives in workers"
        )

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_colocate_view"][1].methods)

    def __repr__(self) -> str:
        group, role = self.__dict__["_colocate_view"]
        return f"<view of role {role.name!r} ({role.cls.__qualname__}) of group {group.name!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent; in a worker use ctx.sibling(name, cls)")


@attrs.frozen
class Inspection:
    """What `colocate.inspect(view)` tells."""

    group: str
    role: str
    cls: type
    ranks: int
    slots: tuple[int, ...]
    meshes: Mapping[str, Mapping[str, int]]
    methods: Mapping[str, str]


def inspect(view: Any) -> Inspection:
    """Group, role, ranks, meshes and methods (with signatures) of a view."""
    found = getattr(view, "__dict__", {}).get("_colocate_view")
    if found is None:
        raise ColocateError(f"{view!r} is no view; views come from group.role(name)")
    group, role = found
    return Inspection(
        group=group.name,
        role=role.name,
        cls=role.cls,
        ranks=len(role.slots),
        slots=tuple(role.slots),
        meshes={name: mesh.shape for name, mesh in role.meshes.items()},
        methods={name: f"{name}{spec.signature}" for name, spec in sorted(role.methods.items())},
    )


class ViewCall:
    """One method of a role, on its ranks."""

    __slots__ = ("_consumer", "_group", "_label", "_ranks", "_role", "_spec", "_timeout")

    def __init__(
        self,
        group: ColocatedGroup,
        role: RoleInfo,
        spec: MethodSpec,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._group = group
        self._role = role
        self._spec = spec
        self._timeout = timeout
        self._ranks = ranks
        self._label = f"{role.name}.{spec.name}"
        self._consumer = Consumer(group.name, role.slots, role.ranks.mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the ranks, wait, and return the collected value."""
        if (pipeline := recording(self._group)) is not None:
            pipeline.refuse_call(self._label)
        return self._send(start, args, kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Call[Any]:
        """Send it and return at once."""
        call: PendingCall = self._send(submit, args, kwargs)
        return call

    def keep(self, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Send it and return at once; the results stay in the workers."""
        resident: Resident[Any] = self._send(keep, args, kwargs)
        return resident

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> ViewCall:
        """The same method with a deadline, or on some ranks only.

        Args:
            timeout: Seconds until the call is given up (`CallTimeout`), `math.inf` for never; None for what was said
                before, or else the runtime's `call_timeout`.
            ranks: The ranks to call, in order; None for those that were said before, or else all.
        """
        timeout = limit(timeout, "options(timeout)", positive=True)
        return ViewCall(
            self._group,
            self._role,
            self._spec,
            self._timeout if timeout is None else timeout,
            self._ranks if ranks is None else ranks,
        )

    def __repr__(self) -> str:
        return f"<{self._label}{self._spec.signature} of group {self._group.name!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent; in a worker use ctx.sibling(name, cls)")

    def _send(self, how: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send it: `start`, `submit` or `keep`."""
        group, spec = self._group, self._spec
        group.check()
        refuse_inside(self._label, group)
        arguments = spec.bind(args, kwargs)
        uses: list[Reference] = []
        try:
            if arguments:
                arguments = with_references(arguments, self._consumer, self._label, group.runtime, uses)
            planned = plan(spec.dispatch, arguments, self._role.ranks, self._ranks)
        except RecursionError:
            if (error := no_end(arguments, self._label)) is not None:
                raise error from None
            raise
        return how(ready(group, self._call(planned), self._role, spec, planned, uses, self._timeout))

    def _call(self, planned: Plan) -> PendingCall:
        slots = self._role.slots
        if isinstance(planned.targets, range):  # all ranks in order, as opposed to those that the call names
            targets: Sequence[int] = slots
        else:
            targets = [slots[rank] for rank in planned.targets]
        return PendingCall(self._label, self._role.name, self._spec.name, targets, planned.targets)


def refuse_inside(label: str, group: ColocatedGroup) -> None:
    """Refuse a call from role code."""
    if (inside := _context.current()) is not None and inside.hosted:
        who = f"role {inside.role!r}" if inside.role is not None else "a function of group.run"
        raise ColocateError(
            f"{who} called {label} of group {group.name!r} from inside a worker: it would wait for a lane that waits "
            "for it. Call it from the driver; a role of this slot is ctx.sibling(...)"
        )


def with_references(
    arguments: dict[str, Any], consumer: Consumer, label: str, runtime: object, uses: list[Reference]
) -> dict[str, Any]:
    """The arguments with references, bound to their consumer, in place of residents; `uses` gets them."""

    def look_inside(item: Any) -> None:
        if hides(item, _lives_on_driver):
            refuse_hidden(arguments, label, _lives_on_driver, _why_not_inside)

    def leaf(item: Any) -> Any:
        kind: type = type(item)
        if not _matters(kind):
            return item
        if not _lives_on_driver(kind):
            look_inside(item)
            return item
        if isinstance(item, Resident):
            item = item.ref
        if isinstance(item, Reference):
            item._kept.use()
            check_same_runtime(item._kept, runtime)
            item = item.bound(consumer)
            uses.append(item)
            return item
        raise TypeError(f"{label}: {item!r} lives on the driver and can't be an argument")

    made = {name: map_leaves(value, leaf, _matters, look_inside) for name, value in arguments.items()}
    refuse_hidden(arguments, label, _lives_on_driver, _why_not_inside, looks=_LOOKS)
    return made


def refuse_in_constructor(arguments: Mapping[str, Any], what: str) -> None:
    """Refuse what has no end, or lives on the driver, among the arguments of a role's constructor.

    Raises:
        SerializationError: There is such a thing, in whatever of its containers, sets and declared fields.
    """
    try:
        map_leaves(list(arguments.values()), lambda item: item, lambda kind: False)
    except RecursionError:
        if (error := no_end(arguments, what)) is not None:
            raise error from None
        raise
    refuse_hidden(arguments, what, _lives_on_driver, _why_not_in_constructor, holder=what)


def _why_not_inside(item: Any, holder: str) -> str:
    if isinstance(item, Resident | Reference):
        return (
            f"inside a {holder}, where nothing puts its value in its place. Residents are found in lists, tuples and "
            "the values of dicts: pass it so, or as an argument of its own"
        )
    return f"inside a {holder}, and lives on the driver. {_instead(item, 'Give its result() instead')}"


def _why_not_in_constructor(item: Any, holder: str) -> str:
    if isinstance(item, Resident | Reference):
        instead = "Give the constructor the value (.fetch()), or pass this to a method of the role"
    else:
        instead = _instead(item, "Give the constructor its result()")
    return f"which lives on the driver. {instead}"


def _instead(item: Any, of_call: str) -> str:
    return of_call if isinstance(item, Call) else "A role finds the others of its worker by ctx.sibling(name, cls)"


@by_type
def _matters(kind: type) -> bool:
    """Whether a value of this type is, or may hide, something that lives on the driver."""
    return _lives_on_driver(kind) or has_fields(kind)


@by_type
def _lives_on_driver(kind: type) -> bool:
    """Whether values of this type mean something on the driver only; of these, residents can be arguments."""
    return issubclass(kind, (Resident, Reference, RoleView, ViewCall, Call, Owned))
