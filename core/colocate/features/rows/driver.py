"""Calls whose rows end one by one: streams, and all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from colocate._calls.handles import Consumer, Reference
from colocate._calls.order import Hold
from colocate._calls.sending import refuse_here
from colocate._calls.view import ViewCall, with_references
from colocate._protocol.message import Message
from colocate._role.call import Call, OnDriver, Resident
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.numbers import limit
from colocate._values.batch import each_row
from colocate._values.dispatch import chosen_ranks, resolve
from colocate._values.nesting import no_end
from colocate._worker_group.hooks import OfGroup
from colocate._worker_group.worker_group import WorkerGroup
from colocate._worker_group.workforce import Worker
from colocate.errors import ConfigError
from colocate.features.rows.calls import Asked, CallNumbers, RowOptions, RowsCall
from colocate.features.rows.messages import RowEnded
from colocate.features.rows.row_stream import OnError, RowStream, check_row_options, no_keep
from colocate.features.rows.stream import Stream


class RowsOfGroup(OfGroup):
    """The calls of a group's methods whose rows end one by one.

    Attributes:
        listeners: Told of each row that is taken: its call, the slot on which it has ended, and its index there. With
            the order's lock held.
        numbers: Those of its calls.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.numbers = CallNumbers()
        self.listeners: tuple[Callable[[RowsCall, int, int], object], ...] = ()

    def view_call(self, role: RoleInfo, spec: MethodSpec) -> RowsViewCall:
        """Return such a method of a role, as its view has it."""
        return (_YieldsViewCall if spec.yields else RowsViewCall)(self._worker_group, role, spec)

    def renewed(self) -> None:
        """Count calls from the beginning: the roles are as constructed, until `restored`."""
        self.numbers.reset({})

    def saved(self) -> dict[str, int]:
        """Return how many calls methods have had."""
        return self.numbers.counts()

    def restored(self, saved: dict[str, int] | None) -> None:
        """Count calls from those on that a checkpoint has."""
        self.numbers.reset(saved or {})

    def halted(self, hold: Hold, slot: int, plain: Any, is_back: bool) -> None:
        """Count calls of a driver before this one, which a rank knows."""
        self.numbers.raise_to(plain or {})

    def heard(self, worker: Worker, message: Message, body: Any) -> None:
        """Hear that a rank has ended a row of a call that goes on."""
        assert isinstance(message, RowEnded)
        order = self._worker_group.order
        with order.lock:
            call = order.pending.get(message.seq)
            if isinstance(call, RowsCall):  # otherwise it has failed
                for slot, told in call.take(worker.slot, message, body):
                    for listener in self.listeners:
                        listener(call, slot, told.row)


class RowsViewCall(OnDriver):
    """One method of a role whose rows end one by one, on its ranks."""

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
        """Run all rows, wait, and return their values in order."""
        with Stream(self._asked(args, kwargs), is_ahead=False) as rows:  # one that is interrupted is read no more
            ended = dict(rows)
        return [ended[row] for row in range(len(ended))]

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[list[Any]]:
        """Send it and return at once. A failure of the call is its error, and the group's restart ends it."""
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
        asked = self._asked(args, kwargs)
        return Call(asked.begin(range(asked.count), is_ahead=False))

    def stream(self, /, *args: Any, **kwargs: Any) -> RowStream[Any]:
        """Send it and return at once: the rows come from the stream as they end."""
        return Stream(self._asked(args, kwargs), is_ahead=True)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Refuse it."""
        no_keep(self._label)

    def options(
        self,
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        on_error: OnError | None = None,
        retry: int | None = None,
        sticky: Callable[[Any], object] | None = None,
    ) -> RowsViewCall:
        """The same method with other options; see `RowCall.options`."""
        check_row_options(self._spec, self._label, on_error, retry, sticky)
        given: dict[str, Any] = {
            "timeout": limit(timeout, "options(timeout)", positive=True),
            "ranks": None if ranks is None else chosen_ranks(ranks),
            "on_error": on_error,
            "retry": retry,
            "sticky": sticky,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        return type(self)(self._worker_group, self._role, self._spec, attrs.evolve(self._options, **changed))

    def __repr__(self) -> str:
        return f"<{self._label}{self._spec.signature} of group {self._worker_group.name!r}>"

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        """Have everything found out that can't be sent, before anything is.

        Residents among the rows are fetched: it is the driver that gives rows to ranks, and knows which are whose.
        """
        worker_group, role, spec, label = self._worker_group, self._role, self._spec, self._label
        refuse_here(worker_group, label)
        refuse_to_wait(label)
        arguments = spec.bind(args, kwargs)
        named = (spec.rows,) if spec.rows is not None else getattr(spec.dispatch, "parameters", ())
        with_rows = {name: arguments[name] for name in named if name in arguments}
        consumer, fetched = Consumer(worker_group.name, role.slots, role.ranks.mesh), list[Reference]()
        try:
            with_rows = with_references(with_rows, worker_group, consumer, label, fetched)
            if fetched:
                with_rows = resolve(with_rows, lambda leaf: leaf.fetch())
            arguments |= with_rows
            if spec.rows is None:
                return Asked(worker_group, role, spec, label, self._options, consumer, arguments)
            rows = each_row(arguments.pop(spec.rows), spec.rows)
        except RecursionError:
            raise no_end(label) from None
        sticky, codec = self._options.sticky, worker_group.services.executor.codec
        keys = None if sticky is None else {index: _key(sticky(row), label) for index, row in enumerate(rows)}
        bodies = {
            index: codec.pack_arguments({spec.rows: row}, f"{label}, row {index}") for index, row in enumerate(rows)
        }
        asked = Asked(worker_group, role, spec, label, self._options, consumer, arguments, len(rows), bodies, keys)
        asked.tries.update(dict.fromkeys(bodies, self._options.retry + 1))
        return asked


class _YieldsViewCall(RowsViewCall):
    """A batched method that yields its rows. Those that are kept stay in the workers, where they are made."""

    __slots__ = ()

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Send it and return at once; the results stay in the workers."""
        options = self._options
        return ViewCall(self._worker_group, self._role, self._spec, options.timeout, options.ranks).keep(
            *args, **kwargs
        )


def _key(key: Any, label: str) -> Hashable:
    try:
        hash(key)
    except TypeError:
        raise TypeError(f"{label}: options(sticky=...) has made the key {key!r}, which has no hash") from None
    found: Hashable = key
    return found
