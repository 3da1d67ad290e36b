"""Views: the driver's handles of roles. A view owns nothing, and has no methods but the role's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import attrs

from colocate._calls.handles import Consumer, Reference
from colocate._calls.pending import PendingCall
from colocate._calls.sending import (
    OPEN,
    Draft,
    current_recorder,
    keep,
    prepare_draft,
    refuse_inside,
    send_blocking,
    submit,
)
from colocate._role import context
from colocate._role.call import Call, DriverObject, Resident, lives_on_driver
from colocate._role.method_spec import MethodSpec, no_such_attribute
from colocate._role.role import RoleInfo, no_such_method
from colocate._signals.in_framework import check_may_wait
from colocate._system.numbers import parse_limit
from colocate._values.dispatch import Broadcast, parse_ranks, plan_call
from colocate._values.leaves import map_leaves
from colocate._values.nesting import find_nesting_error
from colocate._values.plain import is_plain
from colocate.errors import ColocateError, ConfigError

if TYPE_CHECKING:
    from colocate._worker_group.worker_group import WorkerGroup


class RoleView(DriverObject):
    """The driver's handle of one role of one group; `colocate.inspect(view)` has more facts."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, worker_group: WorkerGroup, role: RoleInfo) -> None:
        self.__dict__["_colocate_view"] = worker_group, role

    def __getattr__(self, name: str) -> Any:
        worker_group, role = self.__dict__["_colocate_view"]
        spec = role.methods.get(name)
        if spec is None:
            raise no_such_method(role.name, name, role.methods)
        call = (
            ViewCall(worker_group, role, spec)
            if spec.feature is None
            else worker_group.get_part(spec.feature).view_call(role, spec)
        )
        self.__dict__[name] = call  # Later attribute accesses find the call directly.
        return call

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a view can't be written to: role {self.__dict__['_colocate_view'][1].name!r} lives in workers"
        )

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_colocate_view"][1].methods)

    def __repr__(self) -> str:
        worker_group, role = self.__dict__["_colocate_view"]
        return f"<view of role {role.name!r} ({role.cls.__qualname__}) of group {worker_group.name!r}>"


@attrs.frozen
class Inspection:
    """Facts about a view's role, from `colocate.inspect(view)`."""

    group: str
    role: str
    cls: type
    ranks: int
    slots: tuple[int, ...]
    meshes: Mapping[str, Mapping[str, int]]
    methods: Mapping[str, str]


def viewed(view: Any, given: str) -> tuple[WorkerGroup, RoleInfo]:
    """Return a view's group and role; `given` is the text of the user's call, for the error.

    Raises:
        ConfigError: The object is no view.
    """
    found = getattr(view, "__dict__", {}).get("_colocate_view")
    if found is None:
        raise ConfigError(f"{given}={view!r}): it is a view, as group.role(name) gives it")
    return cast("tuple[WorkerGroup, RoleInfo]", found)


def inspect(view: Any) -> Inspection:
    """Return group, role, ranks, meshes and methods (with signatures) of a view."""
    worker_group, role = viewed(view, "inspect(view")
    return Inspection(
        group=worker_group.name,
        role=role.name,
        cls=role.cls,
        ranks=len(role.slots),
        slots=tuple(role.slots),
        meshes={name: mesh.shape for name, mesh in role.meshes.items()},
        methods={name: f"{name}{spec.signature}" for name, spec in sorted(role.methods.items())},
    )


class ViewCall(DriverObject):
    """The driver's callable for one method of a role, on the role's ranks."""

    __slots__ = (
        *("_consumer", "_label", "_nothing", "_of", "_packed", "_ranks", "_role", "_spec", "_timeout", "_worker_group"),
    )

    def __init__(
        self,
        worker_group: WorkerGroup,
        role: RoleInfo,
        spec: MethodSpec,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._worker_group = worker_group
        self._role = role
        self._spec = spec
        self._timeout = timeout
        self._ranks = ranks
        self._label = f"{role.name}.{spec.name}"
        self._refresh_ranks()

    def _refresh_ranks(self) -> None:
        role, spec = self._role, self._spec
        self._of = role.ranks
        self._consumer = Consumer(self._worker_group.name, role.slots, role.ranks.mesh)
        # All calls without arguments share one plan, if the dispatch allows.
        is_plain = type(spec.dispatch) is Broadcast and self._ranks is None and not spec.required
        self._nothing = plan_call(spec.dispatch, {}, role.ranks) if is_plain else None
        self._packed: list[Any] | None = [None] * len(role.slots)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method on the ranks, wait, and return the collected value."""
        if OPEN.get() is not None and (recorder := current_recorder(self._worker_group)) is not None:
            recorder.refuse_call(self._label, "use .submit(...) or .keep(...), or ")
        check_may_wait(self._label)
        return send_blocking(self._draft(args, kwargs)).result()

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Submit the call and return at once."""
        return Call(submit(self._draft(args, kwargs)))

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Submit the call and return at once; the results stay in the workers."""
        return keep(self._draft(args, kwargs))

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> ViewCall:
        """Return the same method with a timeout, or for some ranks only.

        Args:
            timeout: Seconds until the call is given up (`CallTimeout`), `math.inf` for never; None for the previous
                setting, or else the runtime's `call_timeout`.
            ranks: The ranks to call, in order; None for the previous setting, or else all.
        """
        timeout = parse_limit(timeout, "options(timeout)", positive=True)
        return ViewCall(
            self._worker_group,
            self._role,
            self._spec,
            self._timeout if timeout is None else timeout,
            self._ranks if ranks is None else parse_ranks(ranks),
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise no_such_attribute(self._label, name)

    def __repr__(self) -> str:
        return f"<{self._label}{self._spec.signature} of group {self._worker_group.name!r}>"

    def _draft(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        worker_group, role, spec, label = self._worker_group, self._role, self._spec, self._label
        if not worker_group.life.is_usable:
            worker_group.check_usable()
        if context.current() is not None:
            refuse_inside(label, worker_group.name)
        if role.ranks is not self._of:
            self._refresh_ranks()
        uses: list[Reference] = []
        packed, planned = self._packed, self._nothing
        if planned is None or args or kwargs:
            packed = None
            arguments = spec.bind(args, kwargs)
            try:
                if arguments:
                    arguments = with_references(arguments, worker_group, self._consumer, label, uses)
                planned = plan_call(spec.dispatch, arguments, role.ranks, self._ranks)
            except RecursionError:
                raise find_nesting_error(label) from None
        targets: Sequence[int] = role.slots
        if not isinstance(planned.targets, range):  # The call names ranks, and doesn't use all ranks in order.
            targets = [targets[rank] for rank in planned.targets]
        call = PendingCall(label, role.name, spec.name, targets, planned.targets)
        if planned.partition is not None:
            call.partition = planned.partition
        return prepare_draft(worker_group, call, role, spec, planned, uses, self._timeout, packed)


def with_references(
    arguments: dict[str, Any], worker_group: WorkerGroup, consumer: Consumer, label: str, uses: list[Reference]
) -> dict[str, Any]:
    """Return the arguments with references in place of residents; append the references to `uses`.

    Residents are found as arguments, and in lists, tuples and the values of dicts.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, Resident):
            item = item.ref
        if not isinstance(item, Reference):
            raise TypeError(f"{label}: {item!r} lives on the driver and can't be an argument")
        residents = item._residents
        residents.mark_used(item._kept, worker_group)
        if residents.link.services is not worker_group.services:
            raise ColocateError(
                f"resident of {item._kept.source.label} belongs to another runtime; fetch() it and pass the value"
            )
        bound = item.bind_consumer(consumer)
        uses.append(bound)
        return bound

    return {
        name: value if is_plain(value) else map_leaves(value, leaf, lives_on_driver)
        for name, value in arguments.items()
    }
