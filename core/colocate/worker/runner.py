"""Runs the work of a worker's lanes: constructs roles, and calls methods of roles."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from colocate._protocol import from_worker, questions, to_worker
from colocate._protocol.consequence import Consequence, RetryCall
from colocate._protocol.taken import summarize_receipts
from colocate._protocol.uses import Resolver
from colocate._role.context import reset_current, running_call, set_current
from colocate._role.method_spec import MethodSpec
from colocate._system.room import read_private_bytes
from colocate._system.tracebacks import format_exception, rebuilding
from colocate._values import batch
from colocate._values.dispatch import Scatter
from colocate._values.leaving import Watch, detach_value, place_arguments
from colocate._values.nesting import find_nesting_error
from colocate._values.plain import is_plain
from colocate.errors import CapabilityError, DispatchError, RoleError
from colocate.worker.background import Background
from colocate.worker.birth.ending import RoleCode
from colocate.worker.birth.template import announce_imports
from colocate.worker.context import WorkerContext
from colocate.worker.lane import Work
from colocate.worker.results import count_joined_rows, is_counted, strip_padding
from colocate.worker.serving import failure
from colocate.worker.serving.build import GROUP_WIDE_CALLS, RoleBuild, construct
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code, deferred_handlers, run_deferred_handlers
from colocate.worker.settings import OwnSettings, Steps, own_block


class Runner:
    """Runs the work of one lane on the lane's thread, and sends the results to the driver."""

    def __init__(
        self, worker_context: WorkerContext, broken: Callable[[str], None], background: Background | None = None
    ) -> None:
        """Prepare to run a lane's work.

        Args:
            worker_context: The worker whose roles are constructed and run.
            broken: Called with a reason when the worker can't run its roles any more.
            background: The background role with the lane; None for the main lane.
        """
        self._worker_context = worker_context
        self._report_broken = broken
        lane = worker_context if background is None else background
        self._lane, self._device, self._setting = lane.lane, lane.device, lane.setting
        self._background, self._is_main = background, background is None
        # In a worker process, the main lane runs on the process's main thread, which colocate didn't start.
        has_thread = worker_context.in_process or not self._is_main
        self._role_code, self._awaited_code = RoleCode(has_thread), RoleCode(has_thread=False)

    def build_roles(self, work: Work) -> bool:
        """Construct and start this slot's roles, and return whether everything succeeded."""
        worker_context = self._worker_context
        message = work.message
        assert isinstance(message, to_worker.Build)
        start = time.time()
        try:
            worker_context.definitions.compare_modules()
            for name, plain in message.configs.items():
                worker_context.get_feature(name).configure(plain)
        except Exception as error:  # For example, torch raises an error when the default process group can't be made.
            self._report_failure(0, None, None, error)
            return False
        builds: list[RoleBuild] = worker_context.codec.unpack(work.body, None)
        if worker_context.baseline_bytes is not None:
            worker_context.baseline_bytes = read_private_bytes()
        for build in builds:
            if worker_context.boot.slot not in build.slots:
                continue
            work.label = f"{build.name}.__init__"
            try:
                worker_context.definitions.received.load_bundles(work.bundles_seen)
                self._lane.ensure_loop()
                before = worker_context.device.begin_call()
                with worker_context.around_construction(build.name), self._role_code:
                    worker_context.roles[build.name] = construct(build, worker_context)
                worker_context.device.finish_call(f"{build.name}.__init__", before)
                worker_context.check_result(build.name, f"the constructor of role {build.name!r}")
            except BaseException as error:
                worker_context.wait_for_cause(error, build.name)
                self._report_failure(0, None, build.name, error)
                return False
            role = worker_context.roles[build.name]
            worker_context.instances[build.name] = role.instance
            places = [spec.concurrency for spec in role.methods.values() if spec.is_async]
            worker_context.lane_for(build.name).reserve_places(max(places, default=0))
            role.shares_numbers = worker_context.in_process and len(builds) > 1
        for name, plain in message.parts.items():
            part = worker_context.get_feature(name)
            for role in list(worker_context.roles.values()):
                try:
                    with self._role_code:
                        part.on_roles_ready(role, plain)
                except BaseException as error:
                    self._report_failure(0, None, role.name, error)
                    return False
        if not worker_context.in_process:
            announce_imports()
        worker_context.send_message(from_worker.CallEnded(0, None, start, time.time(), None))
        return True

    def call(self, work: Work) -> Any:
        """Run a method, and return whether the call succeeded.

        For an async method, return a coroutine with that result.

        Return None if the call must be queued again. Steps that only some calls need are conditional, so that other
        calls don't pay for them.
        """
        worker_context = self._worker_context
        call = work.message
        assert isinstance(call, to_worker.Call)
        # The body may be large, and the role refers to the last call, so the call must not keep the body.
        body, work.body = work.body, None
        role = work.role
        assert role is not None
        spec: MethodSpec = work.spec
        start = work.began = time.time()
        tokens = set_current(role.ctx), running_call.set(work)
        role.ctx.last_call = work
        role.ctx.number_call(work, call.method)
        role.last_draw = call.seq, None if role.ctx._generator is None else role.ctx._generator.get_state()
        try:
            if worker_context.before_call_hooks:
                for hook in worker_context.before_call_hooks:
                    hook(call.seq, role, spec)
            if self._device.is_gpu and not spec.is_async:  # Async calls aren't measured, because async calls overlap.
                work.allocated_before = self._device.begin_call()
            if worker_context.begin_checks and not spec.revives:
                for check in worker_context.begin_checks:
                    check(role, spec.awake, work.label)
            if work.bundles_seen:
                worker_context.definitions.received.load_bundles(work.bundles_seen)
            resolver = self._create_resolver(call, work) if call.uses else None
            arguments = {} if body is None else self._unpack_arguments(body, resolver, role, spec)
            if worker_context.store.strict:
                work.watches = {name: Watch(value, contents=True) for name, value in arguments.items()}
            work.valid_rows = resolver.valid if call.valid is None and resolver is not None else call.valid
            if spec.padded is not None:
                work.rows = batch.get_row_count(arguments[spec.padded], spec.padded)
            # Without asyncio, no code can ask for a current event loop.
            if not spec.is_async and "asyncio" in sys.modules:
                self._lane.ensure_loop()
            code = (
                spec.call if spec.feature is None else worker_context.get_feature(spec.feature).get_runner(work, role)
            )
            with self._role_code:
                result = role.run_code(code, role.instance, arguments)
            if spec.is_async:
                finish = self._finish_async(result, work, call, role, spec, resolver, start)
                return Steps(finish, OwnSettings(self._setting, role.settings or self._setting.base))
            self._finish_call(result, work, call, role, spec, resolver, start)
            if work.watches:
                work.release_values()
        except RetryCall:
            worker_context.after_call(call.seq)
            work.body = body
            return None
        except BaseException as error:  # Every error of role code is reported to the caller, even SystemExit.
            worker_context.after_call(call.seq)
            worker_context.peers.collect_written(work.seq, work.label)
            worker_context.wait_for_cause(error, role.name)
            self._report_failure(call.seq, call.keep, role.name, error, work)
            work.release_values()
            return False
        finally:
            running_call.reset(tokens[1])
            reset_current(tokens[0])
        return True

    def close(self) -> None:
        """Call the `close` hooks of the lane's roles, the last role first, to end the roles' background work.

        If a hook raises, print the error and continue with the next role.
        """
        background = self._worker_context.background
        for role in reversed([*self._worker_context.roles.values()]):
            runner = background[role.name].runner if role.name in background else None
            if runner is not (None if self._is_main else self):
                continue
            try:
                with self._role_code:
                    role.close()
                if role.name is not None:  # The role that runs plain functions has no name.
                    for part in self._worker_context.parts.values():
                        part.on_role_closed(role.name)
            except BaseException as error:
                print(
                    f"close() of role {role.name!r} has raised:\n{format_exception(error)}", file=sys.stderr, flush=True
                )

    def _create_resolver(self, call: to_worker.Call, work: Work) -> Resolver:
        worker_context, aligned = self._worker_context, partial(self._ask_aligned, call.seq)
        resolver = Resolver(
            worker_context.peers, worker_context.boot.group, worker_context.boot.slot, aligned, call.observed
        )
        work.transfers, work.used_residents = resolver.receipts, resolver.keys
        return resolver

    def _ask_aligned(self, seq: int, key: int, others: Sequence[int]) -> Any:
        return self._worker_context.ask_driver(questions.FindAligned(seq, key, others))

    @calls_role_code
    async def _finish_async(
        self,
        coroutine: Any,
        work: Work,
        call: to_worker.Call,
        role: RoleInstance,
        spec: MethodSpec,
        resolver: Resolver | None,
        start: float,
    ) -> bool:
        # Each task has a separate context, so these variables needn't be reset.
        set_current(role.ctx)
        running_call.set(work)
        own_block.set(partial(OwnSettings, self._setting))
        try:
            try:
                with self._awaited_code:
                    result = await coroutine
            finally:
                if work.pending_error is not None:
                    raise work.pending_error from None
            self._setting.apply_settings(self._setting.base)
            self._finish_call(result, work, call, role, spec, resolver, start)
        except BaseException as error:
            self._worker_context.after_call(call.seq)
            self._worker_context.peers.collect_written(work.seq, work.label)
            await self._worker_context.await_cause(error, role.name)
            self._report_failure(call.seq, call.keep, role.name, error, work)
            return False
        finally:
            work.release_values()
        return True

    def _unpack_arguments(
        self, body: Any, resolver: Resolver | None, role: RoleInstance, spec: MethodSpec
    ) -> dict[str, Any]:
        worker_context = self._worker_context
        with rebuilding("an argument"):
            arguments: dict[str, Any] = worker_context.codec.unpack(body, worker_context.boot.device)
        if resolver is not None:
            arguments = self._resolve_arguments(arguments, resolver, role, spec)
        return (
            place_arguments(arguments, worker_context.boot.device, spec.host)
            if worker_context.moves_tensors
            else arguments
        )

    def _resolve_arguments(
        self, arguments: dict[str, Any], resolver: Resolver, role: RoleInstance, spec: MethodSpec
    ) -> dict[str, Any]:
        worker_context = self._worker_context
        arguments = resolver.resolve(arguments)
        if worker_context.store.strict:
            resolver.start_watching()
        for key, maker, by in list(worker_context.store.pop_written(resolver.keys)):
            if by is not None:
                raise _make_write_error(by, maker, key)
            raise RoleError(f"resident {key}, returned by {maker}, was changed in place after that; it can't be used")
        dispatch = spec.dispatch
        nothing = resolver.total if isinstance(dispatch, Scatter) and dispatch.pad else resolver.valid
        if nothing == 0 and isinstance(dispatch, Scatter) and dispatch.empty == "error":
            raise DispatchError(
                f"{role.label(spec.name)}: rank {role.ctx.rank} has no rows of {dispatch.parameters[0]!r} (a resident "
                'keeps its producer\'s partition); declare Scatter(..., empty="run") or pass the fetched value',
                parameter=dispatch.parameters[0],
            )
        return arguments

    def _finish_call(
        self,
        result: Any,
        work: Work,
        call: to_worker.Call,
        role: RoleInstance,
        spec: MethodSpec,
        resolver: Resolver | None,
        start: float,
    ) -> None:
        worker_context, label, device = self._worker_context, work.label, self._device
        try:
            if worker_context.end_checks and work.ends_at_once:
                for check in worker_context.end_checks:
                    check(role, work.began)
            if device.is_gpu:
                device.finish_call(label, work.allocated_before)
            returned = result
            if result is not None and not is_plain(result):
                result = detach_value(result, device.is_volatile)
            if work.rows is not None and (result is not None or is_counted(spec, role.ctx)):
                result = strip_padding(result, work.rows, work.valid_rows, label)
            if result is not returned and device.is_gpu:
                device.finish_call(label)  # This waits for the copies that `detach_value` and `strip_padding` made.
            is_of_worker = call.method in GROUP_WIDE_CALLS
            # Calls on the whole worker change no residents, and features have checked the free memory.
            if is_of_worker:
                worker_context.on_holdings_changed(None)
            else:
                if worker_context.store.entries or resolver is not None or work.watches:
                    self._check_writes(work, role, resolver)
                if worker_context.result_checks:
                    worker_context.check_result(role.name, label, None if call.keep is None else {label: result})
            reports = None
            for report in worker_context.report_hooks:
                if (plain := report(work, role)) is not None:
                    reports = {**(reports or {}), **plain}
            transfers = summarize_receipts(work.transfers) if work.transfers else ()
            body = None if result is None or call.keep is not None else worker_context.pack_result(result, label)
            # Calls on a whole worker aren't interrupted by signal handlers.
            if deferred_handlers and self._is_main and not is_of_worker:
                run_deferred_handlers()
            kept_result = None
            if call.keep is not None:
                rows = count_joined_rows(result, spec, role.ctx)
                kept_result = worker_context.store.put_value(call.keep, result, label, work.valid_rows, rows), rows
            done = from_worker.CallEnded(call.seq, work.valid_rows, start, time.time(), kept_result, reports, transfers)
            if not spec.is_async:
                self._lane.on_call_ending()
            if body is None:
                worker_context.send_message(done)
            else:
                worker_context.send_result(done, body, label)
        except RecursionError:
            raise find_nesting_error(f"the result of {work.label}", "result") from None
        if worker_context.recent is not None and role.name is not None:
            worker_context.recent.add_span(role.name, start, time.time())
        if worker_context.after_call_hooks:
            worker_context.after_call(call.seq)

    def _check_writes(self, work: Work, role: RoleInstance, resolver: Resolver | None) -> None:
        worker_context, label = self._worker_context, work.label
        # All changed residents are marked before the first error is raised, so that nobody reads a changed value.
        written = self._list_writes(work, role.name)
        if resolver is not None:
            written += [
                (key, maker, by or label) for key, maker, by in worker_context.peers.collect_written(work.seq, label)
            ]
            # Remote residents are reported like local ones, because only one of several ranks may hold the value.
            # The error must be the same, whichever rank reports first.
            written += [(source.key, source.label, self._name_suspects(work)) for source in resolver.find_written()]
        for key, maker, by in written:
            raise _make_write_error(by, maker, key)
        for name, watch in work.watches.items():
            if watch.was_written():
                raise RoleError(f"{label} changed its argument {name!r} in place; {_CURE}")

    def _list_writes(self, work: Work, role: str | None) -> list[tuple[int, str, str]]:
        store = self._worker_context.store
        # A role may write into arguments, or into a former result that the role still refers to.
        everything = store.strict or role is None  # A plain function may have changed the objects of any role.
        keys = None if everything else dict.fromkeys((*work.used_residents, *store.list_keys_of(role or "")))
        by = self._name_suspects(work)
        return [(key, maker, by) for key, maker, _ in store.pop_written(keys, by)]

    def _name_suspects(self, work: Work) -> str:
        """Return the labels of the calls that may have changed a value: this call, and calls running on other lanes."""
        context = self._worker_context
        if not context.background:
            return work.label
        other_works = [other for lane in context.lanes if lane is not self._lane for other in lane.list_started()]
        labels = [
            other.label
            for other in other_works
            if context.store.strict or other.used_residents or self._has_made(other)
        ]
        return " or ".join([*labels, work.label])

    def _has_made(self, work: Work) -> bool:
        return isinstance(work.message, to_worker.Call) and bool(
            self._worker_context.store.list_keys_of(work.message.role)
        )

    def _report_failure(
        self, seq: int, keep: int | None, role: str | None, error: BaseException, work: Work | None = None
    ) -> None:
        worker_context = self._worker_context
        error = worker_context.explain_failure(error, role)
        worker_context.on_holdings_changed(role)  # The failed role may use more or less memory than before.
        if failure.is_out_of_memory(error):
            # There may be too little memory left even for this report.
            with suppress(RoleError, MemoryError, CapabilityError):
                failure.add_note(error, worker_context.describe_memory())
        self._lane.on_waiting()
        parts = worker_context.collect_reports(lambda part: part.failure_report(error, work)) if self._is_main else {}
        secondary = isinstance(error, Consequence) or (work is not None and work.is_abandoned)
        secondary = secondary or (self._is_main and worker_context.is_consequence())
        report, body = failure.describe_failure(
            error, worker_context.codec, worker_context.definitions, role, secondary
        )
        # Without the call's driver, nobody would lead the hold after this report.
        if not worker_context.scope.is_of_former_driver(seq):
            transfers = summarize_receipts(work.transfers) if work is not None and work.transfers else ()
            end = time.time()
            start = end if work is None else work.began
            lane = "" if self._is_main or role is None else role
            worker_context.send_message(from_worker.Failed(seq, report, parts, start, end, transfers, lane), body)
        if keep is not None:  # Calls that use this resident also fail, and their reports should come after this one.
            worker_context.store.fail_value(keep, f"{report.type}: {report.text}")
        # The device is checked after the report, because work on the device may wait for other ranks.
        # The other ranks learn of the failure by that report.
        if seq and (lost := self._device.explain_loss()) is not None:
            self._report_broken(lost)
        elif work is not None:  # Record writes of the failed call now, so that no later call is held responsible.
            self._list_writes(work, role)


_CURE = "a role method must not change its arguments or returned values: clone the value first"


def _make_write_error(label: str, maker: str, key: int) -> RoleError:
    return RoleError(f"{label} changed in place a value that {maker} had returned (resident {key}); {_CURE}")
