"""Taps: observers that record or compare a role's calls and results. A player replays calls.

If a role has taps, this feature runs the role's calls, on top of the feature that runs the calls otherwise. Roles
without taps have no overhead.
"""

from __future__ import annotations

import abc
import hashlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from colocate._protocol.consequence import RetryCall
from colocate._role.context import RowState, running_call
from colocate._role.method_spec import MethodSpec
from colocate._system.imported import find_imported
from colocate.features.recordings.digests import Digest, digest_arguments
from colocate.worker.context import WorkerContext
from colocate.worker.lane import Work
from colocate.worker.serving.role_instance import RoleInstance
from colocate.worker.serving.signal_handlers import calls_role_code

NAME = "recordings"


@attrs.define(eq=False)
class TappedCall:
    """A running call, as observed by taps.

    Attributes:
        method: The method.
        number: The number among the method's calls, from 0, counted from the tap's first call.
        place: The number among the role's calls, also counted from the tap's first call.
        seq: The number in the order of the group.
        digest: The digests of the arguments.
        begun: The start, in seconds of time.time().
        rows: The number of ended rows.
        is_cut: Whether the caller stopped reading before the last row.
        defaults: The states of the process's default generators, if the call has changed these for the whole process.
        weights: A digest of the weights of the last sync; "" if none came while tapped.
        row_counts: The numbers of rows: without padding (`valid`), and where padding is removed, with it (`padded`).
    """

    method: str
    number: int
    place: int
    seq: int
    digest: Digest
    begun: float
    rows: int = 0
    defaults: Any = None
    is_cut: bool = False
    weights: str = ""
    row_counts: Mapping[str, int] = attrs.field(factory=dict)


class Tap(abc.ABC):
    """An observer of a role's calls on a rank. Its methods are called on the role's lane."""

    def on_arguments(self, seen: TappedCall, arguments: Mapping[str, Any], row: int | None = None) -> None:  # noqa: B027
        """Handle the arguments of a call, or of a row, before the method runs. The default does nothing."""

    @abc.abstractmethod
    def on_value(self, seen: TappedCall, value: Any) -> None:
        """Handle the value of a call."""

    @abc.abstractmethod
    def on_row(self, seen: TappedCall, row: int, value: Any, digest: Digest) -> None:
        """Handle the value of an ended row, with the digest of the row's arguments.

        Methods that yield get all rows at once: then the value is the yielded item, and the digest is empty.
        """

    @abc.abstractmethod
    def on_error(
        self, seen: TappedCall, error: BaseException, row: int | None = None, digest: Digest | None = None
    ) -> None:
        """Handle the error of a call, or of a row (then with the digest of the row's arguments)."""

    @abc.abstractmethod
    def on_rows_ended(self, seen: TappedCall) -> None:
        """Handle the end of a call whose rows ended one by one."""


class Player(abc.ABC):
    """Answers the calls of a replayed role in place of the role."""

    @abc.abstractmethod
    def begin_call(self, seen: TappedCall) -> None:
        """Find the recorded answer to a call, or raise an error to refuse the call."""

    @abc.abstractmethod
    def play_value(self, seen: TappedCall) -> Any:
        """Return the recorded value of a call, or raise the recorded error."""

    @abc.abstractmethod
    def play_row(self, seen: TappedCall, row: int, digest: Digest) -> Any:
        """Return the recorded value of a row, or raise the recorded error."""

    @abc.abstractmethod
    def play_rows(self, seen: TappedCall) -> Iterator[Any]:
        """Yield the recorded rows of a call, for methods that yield their rows."""

    @abc.abstractmethod
    def end_call(self, seen: TappedCall) -> None:
        """Handle the end of a call."""


class TappedRole:
    """Runs the calls of a role that has taps or a player.

    Attributes:
        methods: The methods as declared by the role.
        taps: The observers of calls.
        player: Answers the calls; None if the role itself does.
        counts_before: The number of each method's calls before the first call that counts.
        weights: A digest of the weights of the last sync.
    """

    def __init__(self, context: WorkerContext, role: RoleInstance) -> None:
        self._context, self._role = context, role
        self.methods = role.methods
        self.taps: tuple[Tap, ...] = ()
        self.player: Player | None = None
        self.counts_before: dict[str, int] = {}
        self.weights = ""
        self._places = 0
        self._running_calls: dict[int, TappedCall] = {}
        routed = {name: self._wrap_spec(spec) for name, spec in role.methods.items()}
        role.routes = {name: (routed[name], label) for name, (_, label) in role.routes.items()}

    def reset_counts(self) -> None:
        """Start to count calls from 0, at the start of a recording or after a restore."""
        self.counts_before, self._places = dict(self._role.ctx._calls), 0

    def count_calls(self, method: str) -> int:
        """Return the number of a method's calls so far, including calls withdrawn after a failure."""
        return self._role.ctx._calls.get(method, 0) - self.counts_before.get(method, 0)

    def digest_weights(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights of a sync, and store their digest after the last weight."""
        digest = hashlib.blake2b(digest_size=8)
        for pair in weights:
            digest.update(f"{pair[0]} {digest_arguments({'': pair[1]})[''][0][1]};".encode())
            yield pair
            del pair  # Drop the reference, which would look like a tensor that the target role keeps.
        self.weights = digest.hexdigest()

    def _wrap_spec(self, spec: MethodSpec) -> MethodSpec:
        function = spec.function if spec.feature is None else self._wrap_rows(spec)
        routed = attrs.evolve(spec, function=function)
        object.__setattr__(routed, "feature", NAME)  # The class is frozen, so a plain assignment would raise.
        return routed

    # -- a call

    def wrap_runner(self, work: Work, code: Callable[[object, dict[str, Any]], Any]) -> Callable[..., Any]:
        """Return a function that runs a call by `code` and reports the call to the taps."""
        if not self.taps and self.player is None:
            return code
        spec = self.methods[work.spec.name]
        ends_in_rows = spec.feature is not None

        def run(instance: object, arguments: dict[str, Any]) -> Any:
            tapped_call = self._begin_call(work, spec, arguments)
            run_it = code
            if self.player is not None:
                try:
                    self.player.begin_call(tapped_call)
                except BaseException:
                    del self._running_calls[tapped_call.seq]
                    raise
                if not ends_in_rows:
                    run_it = self._play_async if spec.is_async else self._play_call
            if spec.is_async:
                return self._await_result(tapped_call, run_it, instance, arguments, ends_in_rows)
            try:
                result = run_it(instance, arguments)
            except BaseException as error:
                self._on_error(tapped_call, error)
                raise
            self._on_result(tapped_call, result, ends_in_rows)
            return result

        return calls_role_code(run)

    def _begin_call(self, work: Work, spec: MethodSpec, arguments: Mapping[str, Any]) -> TappedCall:
        assert work.place is not None
        method, count = work.place
        former = self._running_calls.get(work.seq)  # A call that is retried is known already.
        place = self._places if former is None else former.place
        self._places += former is None
        digest = digest_arguments(arguments)
        if spec.rows is not None:  # Each row has a separate digest, because rows arrive one by one on any rank.
            digest = {**digest, spec.rows: [["", f"{work.valid_rows} rows"]]}
        tapped_call = TappedCall(
            method, count - self.counts_before.get(method, 0), place, work.seq, digest, time.time()
        )
        had = {"valid": work.valid_rows, "padded": work.rows}
        tapped_call.weights = self.weights
        tapped_call.row_counts = {name: count for name, count in had.items() if count is not None}
        if self._context.in_process and not spec.is_async:
            tapped_call.defaults = _generator_states()
        self._running_calls[work.seq] = tapped_call
        whole_arguments = {name: value for name, value in arguments.items() if name != spec.rows}
        for tap in self.taps if former is None else ():
            tap.on_arguments(tapped_call, whole_arguments)
        return tapped_call

    @calls_role_code
    async def _await_result(
        self, seen: TappedCall, code: Any, instance: object, arguments: Any, ends_in_rows: bool
    ) -> Any:
        try:
            result = await code(instance, arguments)
        except BaseException as error:
            self._on_error(seen, error)
            raise
        self._on_result(seen, result, ends_in_rows)
        return result

    def _play_call(self, instance: object, arguments: Any) -> Any:
        call = running_call.get()
        assert call is not None
        assert self.player is not None
        return self.player.play_value(self._running_calls[call.seq])

    async def _play_async(self, instance: object, arguments: Any) -> Any:
        return self._play_call(instance, arguments)

    def _on_result(self, seen: TappedCall, result: Any, ends_in_rows: bool) -> None:
        self._note_randomness(seen)
        for tap in self.taps:
            if ends_in_rows:
                tap.on_rows_ended(seen)
            else:
                tap.on_value(seen, result)

    def _on_error(self, seen: TappedCall, error: BaseException) -> None:
        if isinstance(error, RetryCall):
            return
        self._note_randomness(seen)
        for tap in self.taps:
            tap.on_error(seen, error)

    def _note_randomness(self, seen: TappedCall) -> None:
        """Record the end of a call, and the states of the default random generators if the call has changed any."""
        del self._running_calls[seen.seq]
        if self.player is not None:
            self.player.end_call(seen)
        if seen.defaults is not None:
            now = _generator_states()
            seen.defaults = None if now == seen.defaults else now

    # -- rows

    def _wrap_rows(self, spec: MethodSpec) -> Callable[..., Any]:
        if spec.rows is not None:
            return self._wrap_given_rows(spec, spec.rows)
        return self._wrap_async_generator(spec) if spec.is_async else self._wrap_generator(spec)

    def _wrap_given_rows(self, spec: MethodSpec, parameter: str) -> Callable[..., Any]:
        @calls_role_code
        async def row(instance: object, *args: Any, **kwargs: Any) -> Any:
            state = running_call.get()
            if not isinstance(state, RowState) or (tapped_call := self._running_calls.get(state.seq)) is None:
                return await spec.function(instance, *args, **kwargs)
            row_arguments = {parameter: spec.bind((instance, *args)[1:], kwargs).get(parameter)}
            digest = digest_arguments(row_arguments)
            for tap in self.taps:
                tap.on_arguments(tapped_call, row_arguments, state.row)
            try:
                if self.player is not None:
                    value = self.player.play_row(tapped_call, state.row, digest)
                else:
                    value = await spec.function(instance, *args, **kwargs)
            except BaseException as error:
                for tap in self.taps:
                    tap.on_error(tapped_call, error, state.row, digest)
                raise
            for tap in self.taps:
                tap.on_row(tapped_call, state.row, value, digest)
            tapped_call.rows += 1
            return value

        return row

    def _open_items(self, spec: MethodSpec, instance: object, args: Any, kwargs: Any) -> tuple[TappedCall | None, Any]:
        call = running_call.get()
        tapped_call = None if call is None else self._running_calls.get(call.seq)
        if tapped_call is not None and self.player is not None:
            return tapped_call, self.player.play_rows(tapped_call)
        return tapped_call, spec.function(instance, *args, **kwargs)

    def _on_item(self, seen: TappedCall | None, item: Any) -> None:
        if seen is not None:
            index = item[0] if isinstance(item, tuple) and item and type(item[0]) is int else seen.rows
            for tap in self.taps:
                tap.on_row(seen, index, item, {})
            seen.rows += 1

    def _wrap_generator(self, spec: MethodSpec) -> Callable[..., Any]:
        @calls_role_code
        def items(instance: object, *args: Any, **kwargs: Any) -> Iterator[Any]:
            tapped_call, results = self._open_items(spec, instance, args, kwargs)
            try:
                for item in results:
                    self._on_item(tapped_call, item)
                    yield item
            except GeneratorExit:
                _mark_cut(tapped_call)
                raise
            finally:
                results.close()

        return items

    def _wrap_async_generator(self, spec: MethodSpec) -> Callable[..., Any]:
        @calls_role_code
        async def items(instance: object, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            tapped_call, results = self._open_items(spec, instance, args, kwargs)
            if tapped_call is not None and self.player is not None:
                for item in results:
                    self._on_item(tapped_call, item)
                    yield item
                return
            try:
                async for item in results:
                    self._on_item(tapped_call, item)
                    yield item
            except GeneratorExit:
                _mark_cut(tapped_call)
                raise
            finally:
                await results.aclose()

        return items


def _mark_cut(seen: TappedCall | None) -> None:
    if seen is not None:
        seen.is_cut = True


def _generator_states() -> tuple[Any, ...]:
    """Return the states of the process's default random generators, in a comparable form."""
    torch, numpy = find_imported("torch"), sys.modules.get("numpy.random")
    of_torch = None if torch is None else torch.get_rng_state().numpy().tobytes()
    if numpy is None:
        return of_torch, random.getstate(), None
    kind, keys, *more = numpy.get_state()
    return of_torch, random.getstate(), (kind, keys.tobytes(), *more)


def restore_generators(states: Sequence[Any]) -> None:
    """Set the states of the process's default random generators."""
    of_torch, of_random, of_numpy = states
    if of_torch is not None and (torch := find_imported("torch")) is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    random.setstate(of_random)
    if of_numpy is not None and (numpy := sys.modules.get("numpy.random")) is not None:
        import numpy as np

        kind, keys, *more = of_numpy
        numpy.set_state((kind, np.frombuffer(keys, np.uint32), *more))
