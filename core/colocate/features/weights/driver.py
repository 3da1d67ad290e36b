"""Copy all weights of a role to another role, as one step in the order of calls (`sync_weights`)."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import attrs

from colocate._calls.pending import PendingCall
from colocate._calls.sending import Draft, for_all, refuse_here, send_now, submit
from colocate._calls.view import viewed
from colocate._display import weights_age
from colocate._protocol.uses import Origin, Source
from colocate._role.call import Call
from colocate._role.method import RoleMethod
from colocate._role.role import RoleInfo
from colocate._signals.in_framework import check_may_wait, is_in_framework
from colocate._system.nearest import did_you_mean
from colocate._system.numbers import format_count, parse_bytes, parse_limit
from colocate._values.collect import Gather
from colocate._worker_group.hooks import GroupFeature
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import CallCancelled, ColocateError, ConfigError, SleepingError
from colocate.features.weights.messages import BUCKETS, SYNC, SyncPlan
from colocate.features.weights.updates import SourceUpdates
from colocate.features.weights.weights import needed_tags
from colocate.features.weights.worker import WeightsOfWorker

if TYPE_CHECKING:
    import torch

    from colocate.features.weights.weights import WeightSync

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("colocate")
_DTYPES = ("float32", "float16", "bfloat16", "float64")


_wait_call: ContextVar[bool] = ContextVar("colocate_waits", default=False)
"""Whether the sender waits at once: a call that would wait forever isn't sent then."""


class WeightsOfGroup(GroupFeature):
    """The driver's record of synced weights of a group's roles.

    Attributes:
        synced: By role, the number of syncs, and the time of the last one; 0.0 if unknown here.
        stale: Roles with stale weights, as far as is known here, with the reasons.
        described: Roles with `named_weights` known to all ranks (names, shapes and dtypes).
        updates: By target, the updates of the source since the last sync.
        behind: By role, the maximal lag of rows in updates since the last `pop_behind`.
        last_behind: By role, the lag of the last rows.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._kept_pairs: set[str] = set()
        self.synced: dict[str, tuple[int, float]] = {}
        self.stale: dict[str, str] = {}
        self.described: set[str] = set()
        self.updates: dict[str, SourceUpdates] = {}
        self.behind: dict[str, int] = {}
        self.last_behind: dict[str, int] = {}
        # Lists the counters of each source role's updates.
        self._given_updates: dict[str, list[weakref.ref[SourceUpdates]]] = {}
        self._warned_roles: set[str] = set()

    def on_call_report(self, call: PendingCall, slot: int, plain: Any) -> None:
        """Record a worker's report on a sync, a source's update, or a target's rows."""
        kind, at = plain
        if kind == "sync":
            sync: StartedSync | None = call.parts.get("weights")
            if sync is None:
                return
            if sync.source is not None and slot == self._worker_group.roles[sync.source].slots[0]:
                refs = [ref for ref in self._given_updates.get(sync.source, ()) if ref() is not None]
                self._given_updates[sync.source] = [*refs, weakref.ref(sync.updates)]
            if sync.target is not None:
                self.updates[sync.target] = sync.updates
        elif kind == "update" and slot == self._worker_group.roles[call.role].slots[0]:
            for ref in self._given_updates.get(call.role, ()):
                if (updates := ref()) is not None:
                    updates.times.append(at)
        elif kind == "rows" and (source_updates := self.updates.get(call.role)) is not None:
            count = source_updates.count_before(at)
            self.last_behind[call.role] = count
            self.behind[call.role] = max(count, self.behind.get(call.role, 0))
            if count > source_updates.staleness and call.role not in self._warned_roles:
                self._warned_roles.add(call.role)
                words = (
                    f"rows of {call.label} (group {self._worker_group.name!r}) were computed with weights that are "
                    f"{format_count(count, 'update')} of {source_updates.source} behind, with "
                    f"{source_updates.staleness} allowed: call colocate.sync_weights after each update, or allow more "
                    "by sync_weights(staleness=...). The metric weights_behind has the number for each step"
                )
                self._worker_group.services.printer.call_soon(lambda: _log.warning("%s", words))

    def pop_behind(self) -> dict[str, int]:
        """Return the maximal lags of rows since the last call (`behind`), and reset the record."""
        behind, self.behind = self.behind, {}
        return behind

    def role_configs(self) -> Mapping[str, tuple[int, str]]:
        """Return, for each role that needs a sync, the number of syncs so far and the reason for staleness."""
        versions = {
            name: (0, "the role has no weights before the first sync (weights='from sync')")
            for name, spec in self._worker_group.declared.specs.items()
            if spec.weights is not None
        }
        versions |= {name: (version, "the group was restarted since") for name, (version, _) in self.synced.items()}
        self.stale = {name: why for name, (_, why) in versions.items()}
        return versions

    def warn_kept(self, taker: str, giver: str) -> None:
        """Log once that a target keeps the current weights, because the source is replayed from a recording."""
        if taker not in self._kept_pairs:
            self._kept_pairs.add(taker)
            words = (
                f"group {self._worker_group.name!r}: role {taker!r} keeps its weights, as role {giver!r} is replayed"
            )
            self._worker_group.services.printer.call_soon(lambda: _log.warning("%s", words))

    def on_restarted(self) -> None:
        """Forget the descriptions of sources, because all ranks are new."""
        self.described.clear()

    def load_state(self, saved: Any) -> None:
        """Mark all synced weights as stale, because the group was restored from a checkpoint."""
        self.stale |= dict.fromkeys(self.synced, "the group was restored from a checkpoint since")

    def on_roles_described(self, told: Mapping[str, tuple[int, str | None]]) -> None:
        """Record weight versions and reasons for staleness that only a worker knew, for example after a restore."""
        for name, (version, stale) in told.items():
            synced_version, _ = self.synced.get(name, (0, 0.0))
            if version > synced_version:  # The version is from a sync that isn't recorded yet, or from a checkpoint.
                self.synced[name] = version, time.time() if stale is None else 0.0
                self.stale.pop(name, None)
            if stale is not None and version >= synced_version:  # An older report is ignored.
                self.stale.setdefault(name, stale)

    def role_attributes(self, role: str) -> Mapping[str, str]:
        """Return the state of a role's synced weights for the ownership graph."""
        if role not in self.synced and role not in self.stale:
            return {}
        return {"weights": weights_age(self.synced.get(role), self.stale.get(role))}

    def memory_fields(self) -> Mapping[str, Any]:
        """Return the weights' versions and the stale roles for the memory report."""
        return {"weights": dict(self.synced), "stale": dict(self.stale)}

    def handover_state(self) -> dict[str, tuple[int, float]] | None:
        """Return the number and time of syncs by role, for a later driver; None without any sync."""
        return dict(self.synced) or None

    def resume_handover(self, kept: dict[str, tuple[int, float]]) -> None:
        """Restore the number and time of syncs by role from an earlier driver."""
        self.synced.update(kept)


@attrs.frozen
class StartedSync:
    """Facts about a started sync, attached to a group's call.

    Attributes:
        updates: The counter of the source's updates from this sync on.
        source: The source's name; None if the source is in another group.
        target: The target's name; None if the target is in another group.
    """

    updates: SourceUpdates
    source: str | None
    target: str | None


def get_weights(worker_group: WorkerGroup) -> WeightsOfGroup:
    """Return the driver's record of the weights of a group's roles."""
    return cast("WeightsOfGroup", worker_group.get_part("weights"))


class SubmittedFunction(Generic[P, R]):
    """A function that sends a call to workers. Calling it waits for the result, and `submit` returns at once."""

    def __init__(self, send: Callable[P, R]) -> None:
        """Wrap the function `send`, which sends and returns a call, but is annotated with the type of the result."""
        self._send = send
        functools.update_wrapper(self, send)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Send the call, wait for the end, and return the result."""
        check_may_wait(self._send.__name__)
        token = _wait_call.set(True)
        try:
            call = cast("PendingCall", self._send(*args, **kwargs))
        finally:
            _wait_call.reset(token)
        return call.result()  # type: ignore[no-any-return]

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Send the call and return at once, without waiting for the result."""
        return Call(cast("PendingCall", self._send(*args, **kwargs)))


@SubmittedFunction
def sync_weights(
    source: Any,
    target: Any,
    *,
    names: Mapping[str, str | None] | None = None,
    dtype: torch.dtype | str | None = None,
    bucket: str | int = "256MiB",
    finite: bool = False,
    check: bool = False,
    staleness: int = 0,
    timeout: float | None = None,
) -> WeightSync:
    """Copy the weights of a role to another one, and wait until all ranks of the target have all weights.

    `sync_weights.submit(...)` returns a `Call` at once.

    The source has a method `named_weights(self)` that yields `(name, tensor)`: whole tensors, one at a time, the
    same names in the same order on all ranks. The target has `load_weights(self, weights, version)`, which copies
    the tensors from the iterator `weights` (`colocate.Weights`), or, declared with `@method(shares=True)`, keeps these
    very tensors. Neither needs `@method`. `colocate.torch.named_weights` and `load_weights` implement this for modules.

    A sync takes its place in the order of the group's calls. Sleeping memory is woken as far as needed:
    "weights" and "cache" of both roles, or the tags in `@method(awake=...)` of the two methods. Until all ranks of the
    target have all weights, and after a failure midway, calls of the target are refused (`StaleWeightsError`); so
    they are when a source has written into tensors that the target shares, and after a restart or a `restore` of the
    group.

    Args:
        source: The view of the role that has the weights.
        target: The view of the role that gets the weights, in the same group or another group of the runtime.
        names: The target's names by the source's names; None for a weight that the target doesn't get.
            Other weights keep their names.
        dtype: The dtype that floating-point weights are converted to before the target gets them: torch.bfloat16, say.
        bucket: The bytes that are sent together between workers, such as "256MiB". Two such buckets exist at once.
        finite: Whether a weight that isn't finite is an error.
        check: Whether the bits of the target's weights are compared afterwards with the weights sent, converted to the
            target's dtypes. The target then needs a method `named_weights`, too, which yields its weights under the
            names of `load_weights`. Each rank computes digests of its tensors on their device.
        staleness: The updates of the source that rows of the target may be behind until the next sync; beyond that a
            warning is logged, once. An update is a call with a step of a torch optimizer. A run's
            metric `weights_behind` has the number.
        timeout: Seconds until the sync is given up; None for never.

    Returns:
        The version of the target's weights, their bytes, the seconds, and the ways of the transfer.

    Raises:
        ConfigError: The weights don't fit; the text lists all mismatches, and nothing was written.
        RoleError: `named_weights` or `load_weights` has raised; the target is stale if some weights had arrived.
        WeightsDifferError: A rank of the target has other weights; the target is stale.
        SleepingError: Memory of one of the roles, or a weight, sleeps and is only woken by `group.wake`.
    """
    limited = parse_limit(timeout, "sync_weights(timeout)", positive=True)
    worker_group, giver = viewed(source, "sync_weights(source")
    other, taker = viewed(target, "sync_weights(target")
    _check_roles(worker_group, giver, other, taker, check)
    label = f"the sync of {giver.name} to {taker.name}"
    for group in {id(worker_group): worker_group, id(other): other}.values():
        refuse_here(group, label)
    sync_plan = _plan_sync(worker_group, giver, other, taker, names, dtype, bucket, finite, check)
    updates = SourceUpdates(f"{worker_group.name}.{giver.name}", staleness)
    draft = _draft_sync(
        other, label, sync_plan if worker_group is other else attrs.evolve(sync_plan, serves={}), limited
    )
    if _wait_call.get():
        draft.call.check_deadlock()
    if not sync_plan.idle:
        draft.call._add_callback(partial(_note_sync, worker_group, giver.name, other, taker.name))
    if worker_group is other:
        draft.call.parts = {"weights": StartedSync(updates, giver.name, taker.name)}
        submit(draft)
    else:
        draft.call.parts = {"weights": StartedSync(updates, None, taker.name)}
        gives = _draft_sync(
            worker_group, label, attrs.evolve(sync_plan, source=giver.name, target=None, takes={}), limited
        )
        gives.call.parts = {"weights": StartedSync(updates, giver.name, None)}
        if _wait_call.get():
            gives.call.check_deadlock()
        _send_both(gives, draft)
    return cast("WeightSync", draft.call)


def _check_roles(worker_group: WorkerGroup, giver: RoleInfo, other: WorkerGroup, taker: RoleInfo, check: bool) -> None:
    check_method("sync_weights", giver, "named_weights")
    check_method("sync_weights", taker, "load_weights")
    if check:
        check_method("sync_weights(check=True)", taker, "named_weights", _FOR_CHECK)
    if worker_group.services is not other.services:
        raise ColocateError(
            f"sync_weights: roles {giver.name!r} and {taker.name!r} are of two runtimes, and weights have no way there"
        )
    if worker_group is other and giver.name == taker.name:
        raise ConfigError(f"sync_weights: source and target are one role, {giver.name!r}")


_METHODS = {
    "named_weights": (1, "named_weights(self), which yields (name, tensor)"),
    "load_weights": (3, "load_weights(self, weights, version), which takes them from an iterator"),
}
_FOR_CHECK = (
    ". What it yields is compared with what was to arrive, under the names by which load_weights takes it; for modules "
    "colocate.torch.named_weights(module) does it"
)


def check_method(asks: str, role: RoleInfo, name: str, more: str = "") -> None:
    """Raise unless a role has the named method with the signature that weight syncs need.

    Args:
        asks: The caller, for error texts.
        role: The role.
        name: The method's name.
        more: An addition to error texts.

    Raises:
        ConfigError: The method is missing, or has another signature.
    """
    count, example = _METHODS[name]
    method = getattr(role.cls, name, None)
    if not callable(method) and not isinstance(method, RoleMethod):
        near = did_you_mean(name, [attribute for attribute in dir(role.cls) if not attribute.startswith("_")])
        raise ConfigError(f"{asks}: {role.cls.__qualname__} (role {role.name!r}) has no method {example}{near}{more}")
    function = method.spec.function if isinstance(method, RoleMethod) else method
    try:
        inspect.signature(function).bind(*("self", "weights", "version")[:count])
    except TypeError as error:
        raise ConfigError(
            f"{asks}: {role.cls.__qualname__}.{name} (role {role.name!r}) must be {example}: {error}{more}"
        ) from None


def _plan_sync(
    worker_group: WorkerGroup,
    giver: RoleInfo,
    other: WorkerGroup,
    taker: RoleInfo,
    names: Mapping[str, str | None] | None,
    dtype: torch.dtype | str | None,
    bucket: str | int,
    finite: bool,
    check: bool,
) -> SyncPlan:
    """Plan a sync: decide from which rank of the source each slot of the target gets the weights.

    Slots with a rank of the source get the weights by reference. For other slots, the load is spread evenly over the
    source's ranks, ranks on the same node first. But weights in host memory are written once for all takers of a node.
    """
    is_one, services = worker_group is other, worker_group.services
    shares = getattr(getattr(getattr(taker.cls, "load_weights", None), "spec", None), "shares", False)
    if shares and (apart := {giver.name} & {*worker_group.background} or {taker.name} & {*other.background}):
        raise ConfigError(
            f"sync_weights: {taker.name} shares the tensors of {giver.name} (shares=True), and {apart.pop()!r} is a "
            "background role: one would write while the other one reads. Leave shares=True out, so that they are copied"
        )
    takes: dict[int, int] = {}
    serves: Counter[int] = Counter()
    for slot in taker.slots:
        if is_one and slot in giver.slots:
            continue
        if shares:
            raise ConfigError(
                f"sync_weights: {taker.name} shares the tensors of {giver.name} (shares=True), which isn't in the same "
                f"worker as its rank on slot {slot}: leave shares=True out, so that they are copied"
            )
        boots = worker_group.workforce.workers
        node, on_host = other.node(slot), boots[giver.slots[0]].boot.device == "cpu"

        def dear(rank: int, node: str = node, on_host: bool = on_host) -> tuple[int, ...]:
            giver_slot = giver.slots[rank]
            is_far, serving = worker_group.node(giver_slot) != node, serves[giver_slot]
            return (serving, is_far) if is_far or not on_host else (-1, -serving)

        takes[slot] = rank = min(range(len(giver.slots)), key=dear)
        serves[giver.slots[rank]] += 1
    if shares and dtype is not None:
        raise ConfigError(f"sync_weights(dtype=...): {taker.name} shares the tensors of {giver.name} as they are")
    if names is not None and not isinstance(names, Mapping):
        raise ConfigError(
            f"sync_weights(names={names!r}): it is a dict of names of the source to the target's, as {{'a': 'b'}}"
        )
    size = parse_bytes(bucket, "sync_weights(bucket)")
    if not size:
        raise ConfigError("sync_weights(bucket=0): it is a size, as '256MiB'")
    if giver.is_substituted and not taker.is_substituted:
        get_weights(other).warn_kept(taker.name, giver.name)
    offers = None
    if takes:
        origin = Origin(
            worker_group.name,
            giver.slots,
            giver.ranks,
            Gather(),
            f"the weights of {giver.name}",
            worker_group.generation,
            worker_group.number,
        )
        offers = Source(-((worker_group.base + services.new_key()) << BUCKETS), origin)
    return SyncPlan(
        giver=giver.name if is_one else f"{worker_group.name}.{giver.name}",
        taker=taker.name if is_one else f"{other.name}.{taker.name}",
        source=giver.name if is_one else None,
        target=taker.name,
        members=len(taker.slots),
        names=dict(names or {}),
        dtype=_check_dtype(dtype),
        finite=finite,
        check=check,
        shares=shares,
        described=giver.name in get_weights(worker_group).described,
        bucket=size,
        idle=giver.is_substituted or taker.is_substituted,
        offers=offers,
        takes=takes,
        serves=serves,
    )


def _draft_sync(worker_group: WorkerGroup, label: str, given: SyncPlan, timeout: float | None) -> Draft:
    draft = for_all(worker_group, label, SYNC, WeightsOfWorker.calls[SYNC], {"plan": given}, timeout)
    needs = [(given.source, "named_weights"), (given.target, "load_weights")]
    if given.check:
        needs.append((given.target, "named_weights"))
    draft.wakes = {}
    for role, name in needs:
        if role is not None:
            tags = needed_tags(worker_group.roles[role].cls, name)
            draft.wakes[role] = tuple(dict.fromkeys((*draft.wakes.get(role, ()), *tags)))
    return draft


_send_lock = threading.Lock()
"""Held while the two calls of a sync between groups are sent: two such syncs have one order in both groups."""


def _send_both(gives: Draft, takes: Draft) -> None:
    """Send the calls of a sync between two groups. A failure of one call fails the other one."""
    for one, other in ((gives, takes), (takes, gives)):
        one.call.partner = other.call
        one.call._add_callback(partial(_fail_other, other))

    def send() -> None:
        with suppress(BaseException), _send_lock:  # The calls themselves hold the error.
            for draft in (gives, takes):
                send_now(draft)

    if is_in_framework():
        takes.worker_group.services.timers.call_soon(send)
    else:
        send()


def _fail_other(other: Draft, call: PendingCall) -> None:
    error = call.peek_error()
    if isinstance(error, ColocateError) and not other.call.done():
        other.worker_group.order.abort_call(other.call, copy.copy(error))


def _check_dtype(dtype: torch.dtype | str | None) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"sync_weights(dtype={dtype!r}): it is of {', '.join(_DTYPES)}{did_you_mean(name, _DTYPES)}")
    return name


def _note_sync(worker_group: WorkerGroup, source: str, other: WorkerGroup, target: str, call: PendingCall) -> None:
    """Record the outcome of a sync: the target's number of syncs, staleness, and the source's description."""
    error = call.peek_error()
    if error is None:
        sync: WeightSync = call.result()
        get_weights(worker_group).described.add(source)
        get_weights(other).synced[target] = sync.version, time.time()
        get_weights(other).stale.pop(target, None)
    elif not isinstance(error, ConfigError | CallCancelled | SleepingError):
        get_weights(other).stale[target] = "a sync has failed since"
    other.home.on_groups_changed()
