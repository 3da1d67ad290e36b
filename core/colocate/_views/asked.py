"""`Asked`: what is asked of a method whose rows end one by one, of which a call is made, or another after a restart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs

from colocate._calls.rows import Flow, GivenRows, RowsCall, YieldedRows
from colocate._definitions.packed import packed_bytes
from colocate._kept.handles import Consumer, Reference
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._role.rows import OnError
from colocate._signals.deferred import run_deferred
from colocate._values.dispatch import plan
from colocate._views.references import with_references
from colocate._views.sending import Messages, ready, send_rows
from colocate._worker_group.worker_group import WorkerGroup

_OUT = 2  # rows that are given and not read, at most, for each that can run at once


@attrs.frozen
class RowOptions:
    """With what such a method is called; see `RowCall.options`."""

    timeout: float | None = None
    ranks: Sequence[int] | None = None
    on_error: OnError = "raise"
    retry: int = 0
    sticky: Callable[[Any], object] | None = None


@attrs.define(eq=False)
class Asked:
    """What was asked for, of which a call is made, and perhaps another one when the group has been restarted."""

    worker_group: WorkerGroup
    role: RoleInfo
    spec: MethodSpec
    label: str
    options: RowOptions
    consumer: Consumer
    arguments: Mapping[str, Any]  # without the rows that are given one by one
    count: int = 0  # how many rows there are; of those that ranks get at once it is known when they are split
    bodies: dict[int, Any] = attrs.field(factory=dict)
    keys: Mapping[int, Hashable] | None = None
    tries: dict[int, int] = attrs.field(factory=dict)
    at: Any = None  # the line that has asked

    def begin(
        self,
        rows: Sequence[int],
        is_ahead: bool,
        prepare: Callable[[RowsCall], object] = lambda call: None,
        is_again: bool = False,
    ) -> RowsCall:
        """Send a call of some of the rows.

        Args:
            rows: Those that are given one by one.
            is_ahead: Whether they are read one by one, and as many run ahead of that.
            prepare: Is told of the call before it is sent.
            is_again: Whether an earlier one has ended with the group's restart, of which others are to be told yet.
        """
        worker_group, role, spec = self.worker_group, self.role, self.spec
        uses: list[Reference] = []
        arguments = with_references(dict(self.arguments), worker_group, self.consumer, self.label, uses)
        planned = plan(spec.dispatch, arguments, role.ranks, self.options.ranks)
        targets: Sequence[int] = role.slots
        if not isinstance(planned.targets, range):
            targets = [targets[rank] for rank in planned.targets]
        order = worker_group.order
        where = self.label, role.name, spec.name, targets, planned.targets, order, self.options.on_error
        call: RowsCall
        if spec.rows is not None:
            ahead = _OUT * spec.concurrency * len(targets) if is_ahead else None
            flow = Flow(rows, targets, spec.concurrency, ahead, self.keys, self.tries)
            call = GivenRows(*where, self.count, flow=flow, bodies=self.bodies)
        else:
            places: dict[int, Sequence[int]] = {}
            self.count = 0
            for rank in spec.collect.sources(role.ranks):
                size = planned.valid[rank] or 0
                own = range(self.count, self.count + size) if planned.partition is None else planned.partition[rank]
                places[role.slots[rank]] = own
                self.count += size
            is_cancelled = spec.is_async and len(places) == len(role.slots)  # others mustn't leave their common steps
            call = YieldedRows(*where, self.count, places=places, is_ahead=is_ahead, is_cancelled=is_cancelled)
        prepare(call)
        draft = ready(worker_group, call, role, spec, planned, uses, self.options.timeout)
        self.at = call.at = self.at or call.at
        if worker_group.services.observers and not worker_group.services.executor.in_process:
            call.sent += sum(packed_bytes(self.bodies[row]) for row in rows) if spec.rows is not None else 0
        messages = Messages((draft,))
        run_deferred(lambda: send_rows(messages, call.begin, is_again), call.withdraw, waits_s=None)
        return call
