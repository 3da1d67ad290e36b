"""Run any engine in a child process of the role, controlled by messages.

A request is a method's name with arguments, and gets one answer. For `rows`, the child instead sends each row, and asks
between any two steps whether to stop. Until the reply, the child handles other requests.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs

import colocate
from colocate import Child, ChildDied, ConfigError, Context, Role, Weights
from colocate.texts import parse_bytes
from colocate_rollout.contract import Prompt, Row, Sampling, check_options, make_engine

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

_LOOKS_S = 0.05
_CANCELLED_S = 5.0
"""The longest step after a call's cancellation, in seconds. A call that runs on for ten seconds fails its group."""
_CLOSES_S = 5.0


@attrs.frozen
class ChildOptions:
    """Options of an engine's child process.

    Attributes:
        python: The interpreter of another environment, which has the same version of colocate; None for the worker's.
        env: Environment variables in addition to the worker's.
        within: Seconds until the engine must be ready.
        hung_after: Seconds of silence during a request after which the child is killed; more than the longest step.
        fails: What fails if the child ends: "call" for the generating call, or "group", which may then be restarted.
        bucket: Size of the buffer through which weights are sent.
    """

    python: str | None = None
    env: Mapping[str, str] = attrs.field(factory=dict)
    within: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    hung_after: float = attrs.field(default=120.0, validator=attrs.validators.gt(0))
    fails: Literal["call", "group"] = "call"
    bucket: str = attrs.field(default="256MiB", validator=lambda _, field, value: bool(parse_bytes(value, field.name)))


class ChildEngine:
    """An engine that runs in a child process of the role.

    A call fails if the child has ended. The next update of weights starts a new child; if no weights ever came, the
    next call does.

    Args:
        ctx: The role's context.
        engine: The engine's name, or its class.
        options: The engine's options. With `role`, the engine has the config of that role's model, and gets weights by
            a sync.
        child: Options of the process; True for the defaults.

    Raises:
        ConfigError: The engine can't run in a child, or refuses its options.
        ChildDied: The child wasn't ready in time, or has ended before.
    """

    def __init__(
        self, ctx: Context, engine: str | type[Any], options: Mapping[str, Any], child: Literal[True] | ChildOptions
    ) -> None:
        if not isinstance(child, ChildOptions):
            child_options: Any = {} if child is True else child  # A role declared in Python may pass a mapping.
            if not isinstance(child_options, Mapping):
                raise ConfigError(f"child={child_options!r}: true or false, or a mapping with what ChildOptions has")
            child = ChildOptions(**check_options(ChildOptions, "child", child_options))
        if any(place.size("tp") > 1 for place in ctx.meshes.values()):
            raise ConfigError(
                "engine in a child: ranks along the axis 'tp' would be one engine, and children of several slots "
                "can't be: leave the axis out, or `child`"
            )
        self._ctx, self._settings = ctx, child
        self._missing: str | None = None  # The reason why the weights can't be used.
        if options.get("role") is not None:
            options = _replace_role(ctx, options)
            self._missing = "no sync was made yet; call colocate.sync_weights first"
        place = {"device": str(ctx.device), "role": ctx.role, "group": ctx.group, "node": ctx.node}
        self._serve = partial(_serve_engine, engine, dict(options), place)
        self._has_got = False  # Whether a child has ever received weights.
        self._managed: Mapping[str, int] = {}
        self._pending_answers: deque[Any] = deque()  # Messages of `rows` that came during another request.
        self.apart = (self,)
        self._start_child()

    def _start_child(self) -> None:
        settings = self._settings
        self._is_told = False  # Whether a call has failed because the child ended.
        self._pending_answers.clear()
        # With `fails="call"`, the child's end doesn't fail the group, so that a later update can start a new child.
        self._child = self._ctx.start(
            self._serve,
            name="engine",
            ready=self._is_ready,
            within=settings.within,
            env=settings.env,
            python=settings.python,
            fails="group" if settings.fails == "group" else None,
        )
        self._line = _Line(self._ctx, self._child, settings.hung_after)

    def _is_ready(self, child: Child) -> bool:
        assert child.connection is not None
        kind, value, managed = child.connection.recv()
        if kind == "raised":
            raise _decode_error(*value)
        self._has_managed(managed, child)
        return True

    def _has_managed(self, managed: Mapping[str, int], child: Child) -> None:
        self._managed = managed
        if self._ctx.device.type == "cpu":
            child.managed = sum(managed.values())

    # -- messages

    def _call_engine(self, method: str, *args: Any, patience: float | None = None) -> None:
        self._line.send((method, args))
        kind, value = self._await_answer(patience)
        if kind == "raised":
            raise _decode_error(*value)

    def _call_if_alive(self, method: str, *args: Any, patience: float | None = None) -> None:
        """Send a request if the child is alive. The next call of `rows` reports a dead child."""
        with contextlib.suppress(ChildDied):
            if self._child.alive:
                self._call_engine(method, *args, patience=patience)

    def _await_answer(self, patience: float | None = None) -> tuple[str, Any]:
        while True:
            kind, value, managed = message = self._line.recv(patience)
            if kind in ("returned", "raised", "wants"):
                if kind == "returned":
                    self._has_managed(managed, self._child)
                return kind, value
            self._pending_answers.append(message)

    def _next_answer(self) -> Any:
        return self._pending_answers.popleft() if self._pending_answers else self._line.recv()

    # -- what an engine does

    def rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        """Generate rows in the child process; see `Engine.rows`."""
        if self._is_told and not (self._child.alive or self._has_got):
            self._start_child()
        try:
            yield from self._generate_rows(prompts, sampling, stop)
        except ChildDied:
            self._is_told = True
            raise

    def _generate_rows(self, prompts: Sequence[Prompt], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Row]:
        if self._child.alive and self._missing is not None:
            raise ConfigError(f"the engine has no whole weights: {self._missing}")
        self._call_engine("managed")  # Detect a hung child before sending a message that might fill the pipe.
        self._line.send(("rows", ([*prompts], sampling)))
        runs, asks, child = True, False, self._child
        try:
            while runs:
                kind, value, managed = self._next_answer()
                if asks := kind == "asks":
                    stops = stop()  # A paused role waits here, and the child may be replaced meanwhile.
                    self._check_child(child)
                    self._line.send(("goes on", stops))
                elif kind == "row":
                    yield value
                    self._check_child(child)
                else:
                    runs = False
                    if kind == "failed":
                        raise _decode_error(*value)
                    self._has_managed(managed, self._child)
        finally:
            while runs and child is self._child and child.alive:
                if asks:
                    self._line.send(("goes on", True))
                kind, _, _ = self._next_answer()
                runs, asks = kind in ("asks", "row"), kind == "asks"

    def _check_child(self, child: Child) -> None:
        """Raise an error if the child that began a generation has been replaced."""
        if child is not self._child:
            raise ChildDied("the engine's process has ended amid these rows, and another one has begun since")

    def update(self, weights: Weights, version: int) -> None:
        """Send weights to the child through shared memory or CUDA IPC; see `Engine.update`."""
        if not self._child.alive:
            self._start_child()
            if self._has_got:
                self._missing = "its process has ended; call colocate.sync_weights again"
        self._call_engine("managed")  # Detect a hung child before sending a message that might fill the pipe.
        self._line.send(("update", (weights.source, dict(weights.specs), version)))
        kind, value = self._await_answer()
        if kind == "wants":
            try:
                colocate.torch.send_weights(cast("Connection", self._line), weights, self._settings.bucket)
            except ChildDied:
                raise
            except BaseException:
                self._await_answer()  # Read the child's answer, which reports the failure.
                raise
            kind, value = self._await_answer()
        if kind == "raised":
            error = _decode_error(*value)
            if isinstance(error, ConfigError) and not weights.loaded:
                weights.mismatch = error
            raise error
        self._missing, self._has_got = None, True

    def named_weights(self) -> _ReceivedWeights:
        """Return the child's weights, received through shared memory or CUDA IPC.

        Raises:
            ConfigError: The engine can't return weights.
        """
        self._line.send(("described", ()))
        kind, value = self._await_answer()
        if kind == "raised":
            raise _decode_error(*value)
        return _ReceivedWeights(value, self._received_weights)

    def _received_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._line.send(("give", (self._settings.bucket,)))
        try:
            yield from colocate.torch.receive_weights(cast("Connection", self._line))
        finally:  # The child always sends a final answer, which must be read.
            kind, value = self._await_answer()
            if kind == "raised":
                raise _decode_error(*value)

    def managed(self) -> Mapping[str, int]:
        """Return the sizes in the child's last report. No request is sent, because other threads call this, too."""
        return self._managed if self._child.alive else {}

    def sleep(self, tags: Sequence[str]) -> None:
        """Free memory in the child by tag; see `Engine.sleep`.

        Weights that an engine leaves to colocate stay awake, because colocate can't find these in a child.
        """
        self._call_if_alive("sleep", tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the freed memory in the child again; see `Engine.wake`."""
        self._call_if_alive("wake", tags)

    def abort(self) -> None:
        """Drop all requests in the child; see `Engine.abort`."""
        self._call_if_alive("abort")

    def close(self) -> None:
        """Close the engine and stop the child process; see `Engine.close`."""
        try:
            self._call_if_alive("close", patience=_CLOSES_S)
        finally:
            self._child.stop()


@attrs.frozen(eq=False)
class _ReceivedWeights:
    """Weights that a child sends back to the role.

    Attributes:
        specs: Shape and dtype of each weight, in order.
        source: Receives the weights.
    """

    specs: Mapping[str, Any]
    source: Callable[[], Iterator[tuple[str, Tensor]]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.source()


class _Line:
    """The connection to a child process. If no message comes for too long, it kills the process."""

    def __init__(self, ctx: Context, child: Child, hung_after: float) -> None:
        assert child.connection is not None
        self._ctx, self._child, self._hung_after, self._connection = ctx, child, hung_after, child.connection
        self.fileno, self.send = self._connection.fileno, self._connection.send

    def recv(self, patience: float | None = None) -> Any:
        """Return the child's next message; kill the child after `patience` seconds without a message.

        Raises:
            ChildDied: The child has ended.
        """
        # Count seconds by polls, because a clock would also count the time while this process was stopped.
        silent = since_cancelled = 0.0
        longest = self._hung_after if patience is None else patience
        while not self._connection.poll(_LOOKS_S):
            silent += _LOOKS_S
            since_cancelled += _LOOKS_S if self._ctx.cancelled else 0.0
            if silent > longest or since_cancelled > _CANCELLED_S:
                amid = f", the last {_CANCELLED_S:g} of them amid a call that nobody waited for"
                message = f"gave no sign for {silent:.3g} s{amid if since_cancelled > _CANCELLED_S else ''}"
                self._child.abort(f"hung: it {message}, so it was ended")
                self._connection.poll(None)
        return self._connection.recv()


# -- in the child


def _serve_engine(
    engine: str | type[Any], options: Mapping[str, Any], place: Mapping[str, Any], connection: Connection
) -> None:
    serving = _EngineServer(connection)
    serving.run_and_answer(serving.make_engine, engine, options, place)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        serving.send_rows(*args) if method == "rows" else serving.run_method(method, args)


class _EngineServer:
    """Runs the engine in the child, and answers requests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Any = None

    def make_engine(self, engine: str | type[Any], options: Mapping[str, Any], place: Mapping[str, Any]) -> None:
        ctx, make = attrs.evolve(Role().ctx, **place), make_engine(engine, options)
        model = options.get("model")
        if isinstance(model, Mapping) and "dtype" in model and "dtype" in inspect.signature(make).parameters:
            make = make_engine(engine, {"dtype": model["dtype"], **options})
        self._engine = make(ctx)

    def _send(self, kind: str, value: Any = None, managed: Mapping[str, int] | None = None) -> None:
        self._connection.send((kind, value, managed))

    def run_and_answer(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function; send the result or the error, and the size of the memory that the engine manages now."""
        try:
            result = function(*args)
            managed = {} if function == self._engine.close else dict(self._engine.managed())
        except BaseException as error:  # The role handles any error of an engine.
            self._send("raised", _encode_error(error))
        else:
            self._send("returned", result if function == self._describe_weights else None, managed)

    def run_method(self, method: str, args: tuple[Any, ...]) -> None:
        own_methods: Mapping[str, Callable[..., object]] = {
            "update": self._update_weights,
            "described": self._describe_weights,
            "give": self._send_weights,
        }
        self.run_and_answer(own_methods[method] if method in own_methods else getattr(self._engine, method), *args)

    def _named_weights(self) -> Any:
        if not hasattr(self._engine, "named_weights"):
            raise ConfigError(f"the engine {type(self._engine).__name__} has no method named_weights(self)")
        return self._engine.named_weights()

    def _describe_weights(self) -> dict[str, Any]:
        weights = self._named_weights()
        return dict(getattr(weights, "specs", None) or Weights.of(weights).specs)

    def _send_weights(self, bucket: str) -> None:
        colocate.torch.send_weights(self._connection, self._named_weights(), bucket)

    def send_rows(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        try:
            for row in self._engine.rows(prompts, sampling, self._should_stop):
                self._send("row", row)
            managed = dict(self._engine.managed())
        except BaseException as error:  # The role handles any error of an engine.
            self._send("failed", _encode_error(error))
        else:
            self._send("ended", None, managed)

    def _should_stop(self) -> bool:
        """Ask the role whether to stop, and handle other requests until the reply."""
        self._send("asks")
        while True:
            method, args = self._connection.recv()
            if method == "goes on":
                return bool(args)
            self.run_method(method, args)

    def _update_weights(self, source: str, specs: Mapping[str, Any], version: int) -> None:
        import torch

        weights = self._receive_weights()
        try:
            with torch.no_grad():
                self._engine.update(Weights(source, weights, specs, shared=False), version)
        finally:
            weights.close()

    def _receive_weights(self) -> Generator[tuple[str, Tensor]]:
        """Yield received weights. The transfer starts when the engine takes the first weight."""
        self._send("wants")
        with contextlib.closing(colocate.torch.receive_weights(self._connection)) as received:
            for name, tensor in received:
                # Copy the tensor, because vLLM keeps weights until a layer is complete, and the buffer is reused.
                yield name, tensor.clone()


def _encode_error(error: BaseException) -> tuple[bytes, str, str]:
    try:
        packed = pickle.dumps(error)
    except Exception:  # A user's exception may raise any error when pickled.
        packed = b""
    return packed, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def _decode_error(packed: bytes, said: str, text: str) -> BaseException:
    """Rebuild an error that the child sent, and add the child's traceback as a note."""
    try:
        error: BaseException = pickle.loads(packed)
    except Exception:  # The class may exist only in the child.
        error = RuntimeError(said)
    error.add_note(f"In the engine's own process:\n{text}")
    return error


def _replace_role(ctx: Context, options: Mapping[str, Any]) -> dict[str, Any]:
    # Imported here, because `models` imports torch, which this module must not import.
    from colocate_rollout.models import describe_model

    name = options["role"]
    fields, dtype = describe_model(ctx, name)
    model = {**fields, "dtype": dtype}
    return {**{key: value for key, value in options.items() if key != "role"}, "model": model}
