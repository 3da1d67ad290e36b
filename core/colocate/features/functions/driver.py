"""Implements `group.run`, which runs a plain function on every worker, as a method of a nameless role on all slots."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from colocate._calls.handles import Consumer, Reference
from colocate._calls.pending import PendingCall
from colocate._calls.sending import make_group_role, prepare_draft, refuse_here, send_blocking
from colocate._calls.view import with_references
from colocate._definitions.names import find_import_path
from colocate._signals.in_framework import check_may_wait
from colocate._values.dispatch import plan_call
from colocate._values.nesting import find_nesting_error
from colocate._worker_group.spawn import ship
from colocate._worker_group.worker_group import WorkerGroup
from colocate.features.functions.worker import FunctionsOfWorker
from colocate.worker.serving.build import FUNCTION, ShippedObject


def submit_function(
    worker_group: WorkerGroup, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PendingCall:
    """Submit a function to every worker of a group, and return the pending call."""
    if not callable(function):
        raise TypeError(f"group.run runs a function of the worker's context, not {function!r}")
    name = getattr(function, "__name__", type(function).__name__)
    label = f"function {name}"
    _check_fits(function, name, args, kwargs)
    refuse_here(worker_group, label)
    check_may_wait(label)
    role, spec = make_group_role(worker_group), FunctionsOfWorker.calls[FUNCTION]
    uses: list[Reference] = []
    consumer = Consumer(worker_group.name, role.slots, role.ranks.mesh)
    parameters = {"args": args, "kwargs": dict(kwargs)}
    shipped = _pack_function(function, name, worker_group.services.executor.in_process)
    try:
        parameters = with_references(parameters, worker_group, consumer, label, uses)
        planned = plan_call(spec.dispatch, {"function": shipped, **parameters}, role.ranks)
    except RecursionError:
        raise find_nesting_error(label) from None
    call = PendingCall(label, "", name, role.slots)
    return send_blocking(prepare_draft(worker_group, call, role, spec, planned, uses, None))


def _check_fits(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some C functions have no signature; the workers check the arguments.
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}; its first argument is the worker's context") from None


def _pack_function(function: Callable[..., Any], name: str, in_process: bool) -> ShippedObject:
    """Pack a function for the workers. It is sent by name only if importing that name yields the function."""
    by_name = not in_process and find_import_path(function) is not None
    return ship(function, name, in_process=False) if by_name else ShippedObject(name, cls=function)
