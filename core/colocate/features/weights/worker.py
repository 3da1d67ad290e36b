"""Run the worker's part of weight syncs, which copy all weights from one role to another or mark the target as stale.

The source's `named_weights` yields the weights, and the target's `load_weights` reads them from one iterator, so that
only one tensor's memory is needed in between. The target compares the description from a first pass over the source
before it writes anything. The target's ranks wait for each other until each has all weights. Until then, and after a
failure, the target's weights are stale.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from colocate._protocol import questions
from colocate._protocol.consequence import Consequence, PoisonedPart
from colocate._protocol.uses import Source, Taking
from colocate._role.context import CallState, Context, RowState, reset_current, running_call, set_current
from colocate._role.method import RoleMethod, method
from colocate._system.jobs import format_error
from colocate._system.limits import CAUSE_WITHIN_S
from colocate._system.nearest import did_you_mean
from colocate._values.collect import Collect, Gather
from colocate._values.leaving import Watch, get_version
from colocate._values.mesh import Ranks
from colocate.errors import ColocateError, ConfigError, RoleError, SleepingError, WeightsDifferError
from colocate.features.weights.messages import BUCKETS, DIGESTS, SYNC, Digest, DigestRequest, SyncPlan, SyncReport
from colocate.features.weights.updates import count_steps
from colocate.features.weights.weights import (
    ReceivedWeights,
    Weights,
    WeightSpec,
    WeightSync,
    check_pairs,
    describe_weights,
    find_differences,
    limit_messages,
    needed_tags,
)
from colocate.wire import ReusableFile
from colocate.worker.context import WorkerContext, list_excluded_objects
from colocate.worker.holdings import Objects, WeakStorage, find_holdings
from colocate.worker.hooks import WorkerFeature
from colocate.worker.lane import Work
from colocate.worker.serving.failure import INSPECTION_LOCK
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code

if TYPE_CHECKING:
    import torch

    from colocate.features.weights.digests import TensorDigests

_IN_CACHE = 16 << 20
"""The size of parts, in bytes, through the host's memory: written parts are still in the processor's cache when read.
"""
_BUCKETS_OFFERED = 2
"""The number of buckets on offer at once; the next one is prepared meanwhile."""
_AREAS = _BUCKETS_OFFERED + 1


class _JoinSynced(Collect):
    """Combines the target ranks' results into the result of a sync."""

    def join(self, results: Sequence[SyncReport | None], ranks: Ranks) -> WeightSync | None:
        syncs = [sync for sync in results if sync is not None]
        if not syncs:
            return None
        ways = {sync.by for sync in syncs}
        by = tuple(way for way in ("shared", "reference", "peers") if way in ways)
        checked = min([sync.checked for sync in syncs if sync.checked is not None], default=None)
        return WeightSync(syncs[0].version, syncs[0].nbytes, max(sync.seconds for sync in syncs), by, checked)


class WeightsOfWorker(WorkerFeature, calls={SYNC: "sync", DIGESTS: "digests"}):
    """Runs weight syncs on a worker's lane, and keeps the state of the roles' synced weights."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        # Caches the descriptions of sources that have no `specs`, by role.
        self._specs: dict[str, dict[str, WeightSpec]] = {}
        self._copies: set[tuple[str, str]] = set()  # In these pairs of source and target, the target copies tensors.
        self._source_failure: ColocateError | None = None  # Holds the last error that a source has caused.
        self._areas = [
            ReusableFile() for _ in range(_AREAS)
        ]  # Offered buckets reuse these shared-memory files, because new memory costs more than a copy.
        self._finished_offers: deque[tuple[int, list[WeakStorage]]] = (
            deque()
        )  # Lists buckets taken from another worker, but not yet reported as done.
        self._buffers: list[WeakStorage] = []  # Lists storages still in use when their bucket was reported as done.
        self._sent_bucket: Mapping[str, Digest] | None = None  # Holds the digests sent by another worker.
        self._steps: dict[str, int] = {}  # Counts the optimizer steps of sources, by role.
        self._last_sync: CallState | None = None  # Identifies the call of the last sync.

    # -- hooks

    def on_role_built(self, role: RoleInstance, plain: tuple[int, str] | None) -> None:
        """Mark the weights of a new role as stale if the group has passed a reason in `plain`."""
        if plain is not None:
            version, why = plain
            received = role.parts["weights"] = ReceivedWeights(version)
            received.mark_unusable(why)
            role.ctx.weights_version = version

    def check_begin(
        self, role: RoleInstance, tags: Collection[str] | None, label: str, row: RowState | None = None
    ) -> None:
        """Refuse a call that would use stale weights."""
        if (tags is None or "weights" in tags) and (received := get_received(role)) is not None:
            received.check_usable(str(role.name), label)

    def check_sibling(self, asking: Context, role: RoleInstance, tags: Collection[str]) -> None:
        """Refuse to pass a role with stale weights to a sibling role."""
        self.check_begin(role, tags, f"what asks for role {role.name!r} in its worker")

    def call_report(self, work: Work, role: RoleInstance) -> Mapping[str, Any] | None:
        """Return a report on a sync, a source's update or a target's rows, from which the driver counts updates."""
        if work is self._last_sync:
            return {"weights": ("sync", 0.0)}
        if role.name in self._steps:
            steps, self._steps[role.name] = self._steps[role.name], count_steps(role.ctx)
            if steps != self._steps[role.name]:
                return {"weights": ("update", time.time())}
        if work.valid_rows is not None and get_received(role) is not None:
            return {"weights": ("rows", work.began)}
        return None

    def describe_role(self, role: RoleInstance) -> tuple[int, str | None] | None:
        """Return the version of a role's weights, and a reason if the weights are unusable (else None)."""
        received = get_received(role)
        return None if received is None else received.current_state()

    def save_state(self, role: RoleInstance) -> str | None:
        """Return the weights' version, and a reason if no other role may copy the weights, as text for checkpoints."""
        received = get_received(role)
        return None if received is None else f"{received.version} {received.failure_reason or ''}"

    def load_state(self, role: RoleInstance, told: str | None, by_role: bool) -> None:
        """Mark synced weights as stale after a restore, because the source may have other weights now."""
        received = get_received(role)
        if received is None and told is None:
            return
        version, _, torn = (told or "0").partition(" ")
        why = "it was restored since from a checkpoint"
        if by_role:
            why += f", where it was stale: {torn}" if torn else ""
        else:
            torn = "it has what its constructor has made" if received is None else received.failure_reason or ""
            why = "other roles were restored since from a checkpoint, and it has no restore()"
            why += f": {torn}" if torn else ""
        role.parts["weights"] = received = received or ReceivedWeights()
        received.version = max(received.version, int(version))
        received.mark_unusable(why, whole=not torn)
        role.ctx.weights_version = received.version

    # -- a sync

    @method(collect=_JoinSynced())
    def sync(self, plan: SyncPlan) -> SyncReport | None:
        """Run this worker's part of a sync. Afterwards, refuse workers that request an offer too late."""
        if plan.offers is None or self._worker_context.boot.slot not in plan.serves:
            return self._run_sync(plan)
        store, key = self._worker_context.store, plan.offers.key
        store.end_offers(key + 1)
        try:
            return self._run_sync(plan)
        finally:
            store.end_offers(key - (1 << BUCKETS) + 1)

    def _run_sync(self, plan: SyncPlan) -> SyncReport | None:
        """Run this worker's part of a sync; return None if the worker has no rank of the target.

        Raises:
            ConfigError: The weights don't fit, or a role lacks a method of a source or a target.
            RoleError: The target has kept a tensor instead of copying, or hasn't taken all; a weight isn't finite.
            SleepingError: A weight of the source sleeps.
            BaseException: Role code has raised.
        """
        roles = self._worker_context.roles
        source, target = roles.get(plan.source), roles.get(plan.target)
        start, slot = time.time(), self._worker_context.boot.slot
        if plan.idle:
            return None if target is None else _idle_sync(target)
        self._last_sync = running_call.get()
        if source is not None and source.name is not None:
            self._steps[source.name] = count_steps(source.ctx)
        self._source_failure = self._sent_bucket = None
        self._finished_offers.clear()  # Entries may remain from a failed sync.
        needs = [(source, "named_weights"), (target, "load_weights"), (target if plan.check else None, "named_weights")]
        for role, name in needs:
            if role is not None:
                self._worker_context.wake_memory(str(role.name), needed_tags(type(role.instance), name))
        check = _ArrivalCheck(self, target, plan) if plan.check and target is not None else None
        had = None if source is None else get_received(source)
        if had is not None and not had.is_whole:
            had.check_usable(str(plan.source), f"the sync of {plan.giver} to {plan.taker}")
        if source is not None and slot not in plan.takes:
            by = "shared" if plan.shares else "reference"
            specs, pairs_iterator = self._open_source(source, plan)
            if takers := plan.serves.get(slot, 0):
                sent = _new_digests(plan.giver) if plan.check else None
                pairs_iterator = self._offer_weights(pairs_iterator, specs, takers, plan, sent)
                # Offer the first bucket now, because the target's ranks may wait for each other before taking one.
                next(pairs_iterator)
        elif target is not None:
            pairs_iterator, by, source = self._take_weights(plan), "peers", None
            specs = self._take_offer(plan, next(_offer_keys(plan)))
        else:
            return None
        with closing(pairs_iterator):  # Closing reports the end to takers.
            if target is None:  # Other ranks may wait for this rank in the iterator's collectives.
                deque(pairs_iterator, maxlen=0)
                return None
            received = target.parts["weights"] = get_received(target) or ReceivedWeights()
            arriving: Iterator[tuple[str, torch.Tensor]] = (
                pairs_iterator if check is None else check.note_weights(pairs_iterator)
            )
            for part in self._worker_context.parts.values():
                arriving = part.wrap_weights(target, arriving)
            weights = Weights(plan.giver, arriving, specs, plan.shares)
            try:
                shared = self._load_weights(source, target, weights, received, plan)
                if arriving is not pairs_iterator:  # Digests need all weights, even after `Weights.skip`.
                    deque(arriving, maxlen=0)
                self._report_over(plan)
                self._worker_context.check_result(target.name, f"the sync of {plan.giver} to {plan.taker}")
                checked = None
                if check is not None:
                    checked = check.count_matching(self._sent_bucket)
                    check.check_agreement(self._meet_ranks(plan.members, "checked", check.first_values()))
                self._meet_ranks(plan.members)
            except BaseException as error:
                if weights.loaded:
                    progress = f"{weights.loaded} of {len(specs)} had come to rank {target.ctx.rank}"
                    why = "elsewhere" if isinstance(error, Consequence) else format_error(error)
                    received.mark_unusable(f"a sync of {plan.giver} to it has failed when {progress} ({why})")
                raise
        nbytes = sum(map(_nbytes, specs.values()))
        watch = Watch([*shared.values()], contents=self._worker_context.store.strict) if shared else None
        received.mark_complete(shared, watch)
        target.ctx.weights_version = received.version
        return SyncReport(received.version, nbytes, time.time() - start, "shared" if weights.skipped else by, checked)

    # -- comparing

    @method(collect=Gather())
    def digests(self, wanted: DigestRequest) -> dict[str, Digest] | None:
        """Return the digests of a role's current weights by name; None if the worker doesn't have the role.

        Raises:
            ConfigError: The role yields no weights, or tensors without all bits here.
            SleepingError: A weight sleeps.
            BaseException: The role's code has raised.
        """
        import torch

        role = self._worker_context.roles.get(wanted.role)
        if role is None:
            return None
        self._worker_context.wake_memory(wanted.role, needed_tags(type(role.instance), "named_weights"))
        digests = _new_digests(wanted.owner)
        for name, tensor in self.read_weights(role, wanted.owner):
            dtype = wanted.dtypes.get(name)
            digests.add_tensor(name, tensor, None if dtype is None else getattr(torch, dtype))
            del tensor
        return digests.collect_digests()

    def read_weights(self, role: RoleInstance, whose: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a role's weights from `named_weights`, with `whose` as the role's name in error texts.

        Raises:
            ConfigError: An item is no pair of a name and a tensor, a name comes twice, or there are none.
            SleepingError: A weight sleeps.
        """
        aways = [part.offloaded_storages() for part in self._worker_context.parts.values()]
        weights = _iterate_as_role(role, _run_as_role(role, _find_method(role, "named_weights", whose)))
        for name, tensor in check_pairs(weights, whose):
            if any(away and tensor.untyped_storage()._cdata in away for away in aways):
                raise SleepingError(f"weight {name} of {whose} sleeps: call group.wake before its bits are compared")
            yield name, tensor
            del tensor

    # -- the source

    def _open_source(
        self, source: RoleInstance, plan: SyncPlan
    ) -> tuple[dict[str, WeightSpec], Generator[tuple[str, torch.Tensor]]]:
        """Return the specs of the weights, by the target's names, and a generator of the weights."""
        name = str(source.name)
        function = _find_method(source, "named_weights", plan.giver)
        weights = _run_as_role(source, function)
        specs: Mapping[str, WeightSpec] | None = getattr(weights, "specs", None)
        if specs is None:  # A first pass, done once, describes the weights.
            if not plan.described or name not in self._specs:
                self._specs[name] = describe_weights(_iterate_as_role(source, weights), plan.giver)
                weights = _run_as_role(source, function)
            specs = self._specs[name]
        if unknown := [source_name for source_name in plan.names if source_name not in specs]:
            hint = did_you_mean(unknown[0], specs)
            raise ConfigError(f"sync_weights(names=...): {plan.giver} has no weight {unknown[0]!r}{hint}")
        target_specs: dict[str, WeightSpec] = {}
        dtype = _dtype(plan)
        for source_name, (shape, has) in specs.items():
            called = plan.names.get(source_name, source_name)
            if called in target_specs:
                raise ConfigError(f"sync_weights(names=...): two weights of {plan.giver} are called {called!r}")
            if called is not None:
                target_specs[called] = WeightSpec(shape, dtype if dtype is not None and has.is_floating_point else has)
        if not target_specs:
            raise ConfigError(f"sync_weights(names=...): no weight of {plan.giver} is left")
        return target_specs, self._check_weights(source, weights, specs, plan)

    def _check_weights(
        self, source: RoleInstance, weights: Any, specs: Mapping[str, WeightSpec], plan: SyncPlan
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield the weights under the target's names, each checked against the expected name, shape and dtype."""
        import torch

        dtype, remaining, names = _dtype(plan), iter(specs.items()), set[str]()
        aways = [part.offloaded_storages() for part in self._worker_context.parts.values()]
        for name, tensor in _iterate_as_role(source, weights):
            expected_name, spec = next(remaining, ("nothing", None))
            if not isinstance(tensor, torch.Tensor):
                raise self._source_error(
                    f"named_weights of {plan.giver}: {name!r} is {type(tensor).__name__}, and no tensor"
                )
            if name in names:
                raise self._source_error(f"named_weights of {plan.giver} yields {name!r} twice")
            names.add(name)
            if name != expected_name or spec != (tuple(tensor.shape), tensor.dtype):
                raise self._source_error(
                    f"named_weights of {plan.giver} yields {name} {WeightSpec(tuple(tensor.shape), tensor.dtype)} "
                    f"where {expected_name} {'' if spec is None else spec} came before: all ranks yield the "
                    f"same weights in "
                    "the same order, each time"
                )
            if (called := plan.names.get(name, name)) is None:
                continue
            if any(away and tensor.untyped_storage()._cdata in away for away in aways):
                self._source_failure = SleepingError(
                    f"weight {name} of {plan.giver} sleeps, and a sync doesn't wake it: say by @method(awake=...) at "
                    "named_weights what is to be awake, or call group.wake before"
                )
                raise self._source_failure
            if plan.finite and not bool(torch.isfinite(tensor).all()):
                raise self._source_error(f"weight {name} of {plan.giver} isn't finite: it has inf or nan")
            converted = tensor.detach()
            if dtype is not None and converted.is_floating_point():
                converted = converted.to(dtype)
            yield called, converted
        if (missing := next(remaining, None)) is not None:
            raise self._source_error(f"named_weights of {plan.giver} ends before {missing[0]}, which came before")

    def _source_error(self, text: str) -> RoleError:
        self._source_failure = RoleError(text)
        return self._source_failure

    # -- between workers

    def _offer_weights(
        self,
        given: Generator[tuple[str, torch.Tensor]],
        specs: Mapping[str, WeightSpec],
        takers: int,
        plan: SyncPlan,
        sent: TensorDigests | None,
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Offer weights to other workers in buckets, two at once, and yield the weights to this worker's target, too.

        The first yielded item is a dummy. `sent` has the digests of all offers, and is offered last.
        """
        worker_context, keys = self._worker_context, _offer_keys(plan)
        store, why_not = worker_context.store, worker_context.get_wait_refusal
        offered: deque[int] = deque()
        in_files = not worker_context.in_process and worker_context.boot.device == "cpu"
        areas = self._areas
        most = min(plan.bucket, _IN_CACHE) if in_files else plan.bucket

        def offer(value: Any) -> None:
            offered.append(key := next(keys))
            if in_files:
                value = areas[key % len(areas)].write_body(worker_context.pack_result(value, plan.giver))
            store.offer_value(key, value, f"{plan.source}.named_weights", takers)  # The label names the memory's owner.
            while len(offered) > _BUCKETS_OFFERED:
                if store.wait_taken(taken_key := offered.popleft(), why_not):  # A taker still uses the memory.
                    areas[taken_key % len(areas)].close()

        try:
            offer(dict(specs))
            yield "", cast("torch.Tensor", None)
            bucket: dict[str, torch.Tensor] = {}
            versions: list[int] = []
            nbytes = 0
            for name, tensor in given:
                if versions != [*map(get_version, bucket.values())]:
                    raise self._source_error(
                        f"named_weights of {plan.giver} writes into a tensor that it has yielded before {name}: what "
                        "is made for the sync is a tensor of its own for each weight"
                    )
                if sent is not None:
                    sent.add_tensor(name, tensor)
                bucket[name] = tensor
                versions.append(get_version(tensor))
                nbytes += _nbytes(specs[name])
                del tensor
                if nbytes >= most:
                    offer(bucket)  # Offer first, because the target may wait for other ranks at each weight.
                    yield from bucket.items()
                    bucket, versions, nbytes = {}, [], 0
            # No empty bucket is offered, because the target holds the last tensor until the next one arrives.
            if bucket:
                offer(bucket)
                yield from bucket.items()
            del bucket
            offer(() if sent is None else tuple(sent.collect_digests().items()))
            while offered:
                if store.wait_taken(taken_key := offered.popleft(), why_not):
                    areas[taken_key % len(areas)].close()
        except BaseException:
            store.free(offered)
            for area in areas:  # A taker may still be reading from an area.
                area.close()
            raise
        finally:
            given.close()
            for area in areas:
                area.close(above=2 * _IN_CACHE)

    def _take_offer(self, plan: SyncPlan, key: int, taking: Taking | None = None) -> Any:
        """Take an offer, by key, from another worker. With `taking`, the request also reports a finished bucket."""
        peers, rank = self._worker_context.peers, plan.takes[self._worker_context.boot.slot]
        assert plan.offers is not None
        try:
            return peers.fetch_part(Source(key, plan.offers.origin), rank, None, taking)
        except ColocateError as error:  # The driver soon ends this call with the cause from the source's group.
            self._worker_context.lane.on_waiting()
            self._worker_context.store.wait_for(
                lambda: self._worker_context.get_wait_refusal() is not None, CAUSE_WITHIN_S
            )
            raise PoisonedPart(f"{plan.giver} doesn't give its weights to the end: {error.message}") from error

    def _take_weights(self, plan: SyncPlan) -> Generator[tuple[str, torch.Tensor]]:
        """Yield weights from another worker's offers.

        A bucket is reported as done two buckets later, because the target holds the last tensor until the next one
        arrives. The memory of a bucket is mapped once, until the end.
        """
        keys, over, taking = _offer_keys(plan), self._finished_offers, Taking(deque(maxlen=_AREAS))
        self._buffers.clear()
        over.append((next(keys), []))
        for key in keys:
            first = over.popleft() if len(over) > 1 else None
            taking.over = None
            if first is not None:
                taking.over = first[0], _is_alive(first[1])
                if taking.over[1]:
                    self._buffers += first[1]  # The target may release these storages later.
            bucket: dict[str, torch.Tensor] | tuple[tuple[str, Digest], ...] = self._take_offer(plan, key, taking)
            if not isinstance(bucket, dict):
                over.append((key, []))
                self._sent_bucket = dict(bucket)
                return
            over.append((key, [WeakStorage(tensor.untyped_storage()) for tensor in bucket.values()]))
            yield from bucket.items()
            del bucket

    def _report_over(self, plan: SyncPlan) -> None:
        """Check that the target holds no tensor of the last buckets, and report these buckets as done.

        Raises:
            RoleError: The target still holds a tensor, although other workers may share the memory.
        """
        taken_storages = [*self._buffers, *(storage for _, storages in self._finished_offers for storage in storages)]
        # With tensors passed by reference, `_load_weights` has checked this already.
        if self._worker_context.codec.name != "reference" and self._has_kept(lambda: _is_alive(taken_storages)):
            raise self._kept_error(plan)
        while self._finished_offers:
            assert plan.offers is not None
            key, storages = self._finished_offers.popleft()
            source, rank = Source(key, plan.offers.origin), plan.takes[self._worker_context.boot.slot]
            self._worker_context.peers.report_taken(source, rank, _is_alive(storages))

    # -- the target

    def _load_weights(
        self,
        source: RoleInstance | None,
        target: RoleInstance,
        weights: Weights,
        received: ReceivedWeights,
        plan: SyncPlan,
    ) -> Mapping[str, torch.Tensor]:
        """Run the target's `load_weights`; return the tensors shared by both roles."""
        for begins in self._worker_context.begin_checks:
            begins(target, (), f"the sync of {plan.giver} to {plan.taker}")
        shared: dict[str, torch.Tensor] = {}
        if plan.shares:
            assert source is not None
            shared = self._lasting_tensors(source, weights, received, plan)
            if shared.keys() == received.shared.keys() and all(
                map(_is_same, shared.values(), received.shared.values())
            ):
                return shared
            weights._pairs = iter(shared.items())
        alive: list[weakref.ref[torch.Tensor]] = []
        handed: list[WeakStorage] = []
        names = plan.giver, str(target.name)
        # Tensors from another worker's process belong to the target alone.
        by_reference = not plan.shares and (source is not None or self._worker_context.codec.name == "reference")
        strict = self._worker_context.store.strict
        looks = by_reference and (strict or names not in self._copies)
        before = self._find_storages(target) if looks else set()
        load = _find_method(target, "load_weights", plan.taker)
        weights._pairs = _note_tensors(weights._pairs, alive, handed if looks else None, plan.taker, strict)
        try:
            target.run_hook(partial(_without_grad, load, weights, received.version + 1), name="load_weights")
        except BaseException:
            # The framework's own error takes precedence over the target's error.
            if (ours := weights.mismatch or self._source_failure) is not None:
                raise ours.with_traceback(None) from None
            raise
        if weights.skipped:
            if plan.check or plan.serves or plan.takes or source is None or source.ctx.world_size > plan.members:
                deque(weights._pairs, maxlen=0)  # Other workers need the weights, or wait in collectives.
        elif (rest := next(weights._pairs, None)) is not None:
            raise RoleError(
                f"load_weights of {plan.taker} returned before it had taken all weights of {plan.giver}: "
                f"{weights.loaded} of {len(weights.specs)} had come, and {rest[0]} is next"
            )
        if by_reference:
            # Other takers may keep the same tensors alive, so only a lone target is checked.
            is_alone = not (plan.serves or plan.takes)
            keeps = is_alone and self._has_kept(lambda: any(ref() is not None for ref in alive))
            new = self._find_storages(target) - before if looks else set()
            if keeps or any(
                not handed_tensor.is_expired() and handed_tensor.get_storage()._cdata in new for handed_tensor in handed
            ):
                raise self._kept_error(plan)
            self._copies.add(names)
        return shared

    def _has_kept(self, is_there: Callable[[], bool]) -> bool:
        """Return whether the target keeps given tensors, apart from references by the framework's own inspections."""
        if not is_there():
            return False
        for looking in (INSPECTION_LOCK, self._worker_context.inspection_lock):
            with looking:  # An inspection holds this lock until all references are released.
                pass
        gc.collect()  # Some tensors may be in reference cycles.
        return is_there()

    @staticmethod
    def _kept_error(plan: SyncPlan) -> RoleError:
        return RoleError(
            f"load_weights of {plan.taker} keeps tensors of {plan.giver} that it was given: copy what is needed "
            "(param.copy_), or declare it with @method(shares=True) where both are in one worker"
        )

    def _find_storages(self, role: RoleInstance) -> set[int]:
        holdings, _ = find_holdings(role.instance, (), list_excluded_objects(self._worker_context, role.name), Objects)
        return {key for pieces in holdings.values() if isinstance(pieces, Objects) for key in pieces.storages}

    def _lasting_tensors(
        self, source: RoleInstance, weights: Weights, received: ReceivedWeights, plan: SyncPlan
    ) -> dict[str, torch.Tensor]:
        """Return the source's tensors for sharing with the target. The source itself must hold all of them."""
        tensors: dict[str, torch.Tensor] = {}
        own_storages: set[int] | None = None
        for name, tensor in weights._pairs:
            before = received.shared.get(name)
            if before is None or not _is_same(tensor, before):
                own_storages = self._find_storages(source) if own_storages is None else own_storages
                if tensor.untyped_storage()._cdata not in own_storages:
                    raise ConfigError(
                        f"load_weights of {plan.taker} shares tensors, and {name} of {plan.giver} is made for the "
                        "sync only (gathered, merged or converted): leave shares=True out, so that it is copied"
                    )
            tensors[name] = tensor
        return tensors

    def _meet_ranks(self, members: int, what: str = "", value: Any = None) -> Any:
        """Wait for all ranks of the target, and return the value that one rank has passed."""
        if members == 1:
            return value
        call = running_call.get()
        assert call is not None
        rendezvous_key = f"weights {call.seq} {self._worker_context.lane.last_resumed}{what}"
        return self._worker_context.ask_driver(questions.JoinRendezvous(rendezvous_key, members, value, None))


def _idle_sync(target: RoleInstance) -> SyncReport:
    """Increase the weights version of a substitute target, as a sync would; leave a real target unchanged."""
    target.ctx.weights_version += target.is_substitute
    return SyncReport(target.ctx.weights_version, 0, 0.0, "", None)


class _ArrivalCheck:
    """Compares a target rank's weights with the weights that have arrived.

    A weight's bits are the source's, converted to the dtype of the target's own tensor. Weights from another worker are
    also compared with the digests sent.
    """

    def __init__(self, worker: WeightsOfWorker, target: RoleInstance, plan: SyncPlan) -> None:
        """Prepare the comparison. Raises the errors of `WeightsOfWorker.read_weights`, before anything is written."""
        self._worker, self._target, self._plan = worker, target, plan
        weights = _run_as_role(target, _find_method(target, "named_weights", plan.taker))
        specs = getattr(weights, "specs", None) or describe_weights(_iterate_as_role(target, weights), plan.taker)
        self._dtypes = {name: spec.dtype for name, spec in specs.items()}
        self._source_digests, self._expected_digests = _new_digests(plan.giver), _new_digests(plan.giver)

    def note_weights(self, given: Generator[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
        for name, tensor in given:
            dtype = self._dtypes.get(name, tensor.dtype)
            self._expected_digests.add_tensor(name, tensor, dtype)
            if self._plan.takes and dtype != tensor.dtype:
                self._source_digests.add_tensor(name, tensor)
            yield name, tensor
            del tensor

    def count_matching(self, sent: Mapping[str, Digest] | None) -> int:
        """Return the number of the target's weights if all are equal to the arrived weights.

        Raises:
            WeightsDifferError: Some weights differ.
        """
        taker, rank = self._plan.taker, self._target.ctx.rank
        self._target_digests = expected = self._expected_digests.collect_digests()
        received = self._source_digests.collect_digests()
        problems = {
            name: "has come with other bits than were sent"
            for name, digest in (sent or {}).items()
            if received.get(name, expected.get(name, digest)).content != digest.content
        }
        owns = _new_digests(taker)
        for name, tensor in self._worker.read_weights(self._target, taker):
            owns.add_tensor(name, tensor)
            del tensor
        has = owns.collect_digests()
        problems |= find_differences(expected, has)
        if not problems:
            return len(has)
        text = "; ".join(limit_messages(f"{name} {how}" for name, how in problems.items()))
        raise WeightsDifferError(
            f"{len(problems)} of {len({*expected, *has})} weights of {taker} on rank {rank} aren't those of "
            f"{self._plan.giver} after the sync: {text}",
            names=tuple(problems),
        )

    def first_values(self) -> dict[str, int] | None:
        """Return the arrived weights' digests by name if this is the target's first rank; None on other ranks."""
        return None if self._target.ctx.rank else {name: digest.value for name, digest in self._target_digests.items()}

    def check_agreement(self, first: Mapping[str, int]) -> None:
        """Compare the weights that have arrived here with the weights that have arrived on the target's first rank.

        Raises:
            WeightsDifferError: This rank has other weights, from another rank of the source.
        """
        names = [name for name, digest in self._target_digests.items() if first.get(name) != digest.value]
        if names:
            giver, taker = self._plan.giver, self._plan.taker
            raise WeightsDifferError(
                f"{len(names)} of {len(self._target_digests)} weights that rank {self._target.ctx.rank} of {taker} "
                "has from "
                f"{giver} aren't those that rank 0 has: the ranks of {giver} have different ones "
                f"(colocate.compare_weights shows them): {'; '.join(limit_messages(names))}",
                names=tuple(names),
            )


def get_received(role: RoleInstance) -> ReceivedWeights | None:
    """Return the state of a role's synced weights; None for a role that has received no weights."""
    return role.parts.get("weights")


def _new_digests(whose: str) -> TensorDigests:
    from colocate.features.weights.digests import TensorDigests  # Imported late, because this imports torch.

    return TensorDigests(whose)


def _offer_keys(plan: SyncPlan) -> Iterator[int]:
    assert plan.offers is not None
    return itertools.count(plan.offers.key, -1)


def _dtype(plan: SyncPlan) -> torch.dtype | None:
    import torch

    return None if plan.dtype is None else getattr(torch, plan.dtype)


def _nbytes(spec: WeightSpec) -> int:
    count = spec.dtype.itemsize
    for size in spec.shape:
        count *= size
    return count


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _is_alive(storages: Sequence[WeakStorage]) -> bool:
    return not all(storage.is_expired() for storage in storages)


def _note_tensors(
    given: Iterator[tuple[str, torch.Tensor]],
    alive: list[weakref.ref[torch.Tensor]],
    handed: list[WeakStorage] | None,
    taker: str,
    strict: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, and record the tensors and storages. With `strict`, compare contents to detect writes.

    Raises:
        RoleError: The target has written into a tensor that the source, or other takers, have.
    """
    for name, tensor in given:
        alive.append(weakref.ref(tensor))
        if handed is not None:
            handed.append(WeakStorage(tensor.untyped_storage()))
        before, watch = get_version(tensor), Watch(tensor, contents=True) if strict else None
        yield name, tensor
        if get_version(tensor) != before or (watch is not None and watch.was_written()):
            raise RoleError(
                f"load_weights of {taker} writes into the tensor of {name}, which isn't its own: the source has it, or "
                "others take it. Clone what is to be changed"
            )
        del tensor, watch


def _find_method(role: RoleInstance, name: str, whose: str) -> Callable[..., Any]:
    """Return a role's method for a sync, bound to the role object, with or without `@method`."""
    attribute = getattr(type(role.instance), name, None)
    if isinstance(attribute, RoleMethod):
        return MethodType(attribute.spec.function, role.instance)
    bound = getattr(role.instance, name, None)
    if not callable(bound):
        raise ConfigError(f"{whose} has no method {name}")
    return bound  # type: ignore[no-any-return]


@calls_role_code
def _without_grad(code: Callable[..., Any], *args: Any) -> Any:
    import torch

    with torch.no_grad():
        return code(*args)


def _run_as_role(role: RoleInstance, code: Callable[..., Any], *args: Any) -> Any:
    """Run code of a role with the role's own context and settings, even inside another role's code."""
    setting = role.setting
    token, before = set_current(role.ctx), setting.read_settings()
    setting.apply_settings(role.settings or setting.base)
    try:
        return _without_grad(code, *args)
    finally:
        setting.apply_settings(before)
        reset_current(token)


_END = object()


def _iterate_as_role(source: RoleInstance, weights: Any) -> Iterator[Any]:
    """Yield the items of a source's weights. The source's code runs with the source's own context."""
    if not isinstance(weights, Iterable):
        raise ConfigError(f"named_weights of {source.name} gives {type(weights).__name__}: it yields (name, tensor)")
    items = _run_as_role(source, iter, weights)
    try:
        while (item := _run_as_role(source, next, items, _END)) is not _END:
            yield item
            del item
    finally:
        with suppress(AttributeError):  # Only generators have a `close`.
            items.close()
