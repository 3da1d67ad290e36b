"""The driver's view of methods with rows that end one by one: streams, and lists of all results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from colocate._calls.handles import Consumer, Reference
from colocate._calls.order import Hold
from colocate._calls.sending import refuse_here
from colocate._calls.view import ViewCall, with_references
from colocate._protocol.message import Message
from colocate._role.call import Call, DriverObject, Resident
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import check_may_wait
from colocate._system.numbers import parse_limit
from colocate._values.batch import split_rows
from colocate._values.dispatch import parse_ranks, resolve_deferred
from colocate._values.nesting import find_nesting_error
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ConfigError
from colocate.features.rows.calls import CallNumbers, RowOptions, RowsCall, RowsRequest
from colocate.features.rows.messages import RowEnded
from colocate.features.rows.row_stream import OnError, RowStream, check_row_options, refuse_keep
from colocate.features.rows.stream import Stream


class RowsOfGroup(GroupFeature):
    """The calls of a group with rows that end one by one.

    Attributes:
        listeners: Called for each recorded row, with the call, the slot, and the row's index on the slot. The order's
            lock is held.
        numbers: The counter of calls of each method.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.numbers = CallNumbers()
        self.listeners: tuple[Callable[[RowsCall, int, int], object], ...] = ()

    def view_call(self, role: RoleInfo, spec: MethodSpec) -> RowsViewCall:
        """Return the object that a view offers for a method with rows that end one by one."""
        return (_YieldsViewCall if spec.yields else RowsViewCall)(self._worker_group, role, spec)

    def on_restarted(self) -> None:
        """Reset the numbers of calls, because the roles are new objects. `load_state` may then set other numbers."""
        self.numbers.reset_counts({})

    def save_state(self) -> dict[str, int]:
        """Return the number of calls of each method, for a checkpoint."""
        return self.numbers.counts()

    def load_state(self, saved: dict[str, int] | None) -> None:
        """Set the number of calls of each method from a checkpoint."""
        self.numbers.reset_counts(saved or {})

    def on_rank_halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Raise the numbers of calls to a rank's counts, which include calls of an earlier driver."""
        self.numbers.raise_counts(plain or {})

    def on_message(self, worker: Worker, message: Message, body: Any) -> None:
        """Record the end of a row of a running call."""
        assert isinstance(message, RowEnded)
        order = self._worker_group.order
        with order.lock:
            call = order.pending.get(message.seq)
            if isinstance(call, RowsCall):  # A call that has failed isn't pending any more.
                for slot, row_message in call.take_row(worker.slot, message, body):
                    for listener in self.listeners:
                        listener(call, slot, row_message.row)


class RowsViewCall(DriverObject):
    """The object that a view offers for a method with rows that end one by one."""

    __slots__ = ("_label", "_options", "_role", "_spec", "_worker_group")

    def __init__(
        self, worker_group: WorkerGroup, role: RoleInfo, spec: MethodSpec, options: RowOptions | None = None
    ) -> None:
        self._worker_group = worker_group
        self._role = role
        self._spec = spec
        self._options = RowOptions() if options is None else options
        self._label = f"{role.name}.{spec.name}"

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run all rows, wait until all have ended, and return the values in order."""
        with Stream(self._prepare_request(args, kwargs), is_ahead=False) as rows:  # An interrupt closes the stream.
            ended = dict(rows)
        return [ended[row] for row in range(len(ended))]

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[list[Any]]:
        """Send the call and return at once. A failure becomes the error of the returned `Call`.

        A restart of the group ends the call.
        """
        refused = None
        if self._options.retry and self._worker_group.restarts.limit:
            refused = "retry=... in a group that restarts", "is given to its new workers"
        elif self._options.on_error == "return" and self._options.timeout is not None:
            refused = "timeout=... with on_error='return'", "has that error"
        if refused is not None:
            raise ConfigError(
                f"{self._label}.submit(...) with options({refused[0]}): a row that has not ended {refused[1]} only "
                "where rows are read as they end: call it, on a thread of your own perhaps, or read its .stream(...)"
            )
        request = self._prepare_request(args, kwargs)
        return Call(request.send_call(range(request.count), is_ahead=False))

    def stream(self, /, *args: Any, **kwargs: Any) -> RowStream[Any]:
        """Send the call and return at once. The returned stream yields the rows in the order of their ends."""
        return Stream(self._prepare_request(args, kwargs), is_ahead=True)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Raise an error, because rows can't stay in the workers."""
        refuse_keep(self._label)

    def options(
        self,
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        on_error: OnError | None = None,
        retry: int | None = None,
        sticky: Callable[[Any], object] | None = None,
    ) -> RowsViewCall:
        """Return the method with changed options; see `RowCall.options`."""
        check_row_options(self._spec, self._label, on_error, retry, sticky)
        arguments: dict[str, Any] = {
            "timeout": parse_limit(timeout, "options(timeout)", positive=True),
            "ranks": None if ranks is None else parse_ranks(ranks),
            "on_error": on_error,
            "retry": retry,
            "sticky": sticky,
        }
        changed = {name: value for name, value in arguments.items() if value is not None}
        return type(self)(self._worker_group, self._role, self._spec, attrs.evolve(self._options, **changed))

    def __repr__(self) -> str:
        return f"<{self._label}{self._spec.signature} of group {self._worker_group.name!r}>"

    def _prepare_request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowsRequest:
        """Prepare a request and pack all rows, so that an error is raised before any row is sent.

        Residents among the rows are fetched, because the driver assigns the rows to ranks.
        """
        worker_group, role, spec, label = self._worker_group, self._role, self._spec, self._label
        refuse_here(worker_group, label)
        check_may_wait(label)
        arguments = spec.bind(args, kwargs)
        named = (spec.rows,) if spec.rows is not None else getattr(spec.dispatch, "parameters", ())
        with_rows = {name: arguments[name] for name in named if name in arguments}
        consumer, fetched = Consumer(worker_group.name, role.slots, role.ranks.mesh), list[Reference]()
        try:
            with_rows = with_references(with_rows, worker_group, consumer, label, fetched)
            if fetched:
                with_rows = resolve_deferred(with_rows, lambda leaf: leaf.fetch())
            arguments |= with_rows
            if spec.rows is None:
                return RowsRequest(worker_group, role, spec, label, self._options, consumer, arguments)
            rows = split_rows(arguments.pop(spec.rows), spec.rows)
        except RecursionError:
            raise find_nesting_error(label) from None
        sticky, codec = self._options.sticky, worker_group.services.executor.codec
        keys = None if sticky is None else {index: _hash_key(sticky(row), label) for index, row in enumerate(rows)}
        bodies = {
            index: codec.pack_arguments({spec.rows: row}, f"{label}, row {index}") for index, row in enumerate(rows)
        }
        request = RowsRequest(
            worker_group, role, spec, label, self._options, consumer, arguments, len(rows), bodies, keys
        )
        request.tries.update(dict.fromkeys(bodies, self._options.retry + 1))
        return request


class _YieldsViewCall(RowsViewCall):
    """A batched method that yields rows. With `keep` the rows stay in the workers that made these rows."""

    __slots__ = ()

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        options = self._options
        return ViewCall(self._worker_group, self._role, self._spec, options.timeout, options.ranks).keep(
            *args, **kwargs
        )


def _hash_key(key: Any, label: str) -> Hashable:
    try:
        hash(key)
    except TypeError:
        raise TypeError(f"{label}: options(sticky=...) has made the key {key!r}, which has no hash") from None
    hashable: Hashable = key
    return hashable
