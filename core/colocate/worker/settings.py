"""Keeps torch's thread-wide and process-wide settings separate for each role of a worker.

Roles share a process and a thread. Settings that a role's constructor makes apply in that role's methods, and in no
other role. Settings that a method leaves behind are reset when the method ends. Settings that a module makes at import
apply to all roles.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar, cast

import attrs

from colocate._system.imported import find_imported
from colocate.gpus import in_use, number_of
from colocate.worker.process_wide import ProcessState, RoleState

_Autocast: TypeAlias = tuple[tuple[tuple[str, bool, Any], ...], bool, int]
"""For each kind of device, the state and dtype of autocast; then the state of the cache, and the depth of blocks."""


@attrs.frozen
class Settings:
    """A snapshot of torch's settings, such as gradients, autocast, modes and the current stream."""

    grad: bool = True  # Whether gradients are recorded.
    inference: bool = False  # Whether inference mode is on.
    autocast: _Autocast | None = None  # Autocast of operations to another dtype; None if autocast is off.
    dtype: Any = None  # Default dtype of new tensors; None for float32.
    # Modes that intercept operations, including the default device; None if no mode is active.
    modes: _Modes | None = None
    stream: Any = None  # Current stream of the GPU; None for the lane's usual stream.
    role_state: RoleState | None = None  # The role's random generators and switches; None for no change.


@attrs.frozen
class _Modes:
    """A thread's stacks of active torch modes, each from the bottom up."""

    functions: tuple[Any, ...]  # Modes that intercept torch functions.
    default: Any  # The function mode that sets the default device.
    device: Any  # Torch's `CURRENT_DEVICE` for compiled code; None without function modes.
    operators: tuple[Any, ...]  # Modes that intercept operators at dispatch.
    saved: tuple[tuple[Any, Any], ...]  # Pack and unpack hooks for saved tensors.


USUAL = Settings()
"""Settings of freshly imported torch."""

_guards = threading.local()  # For each thread, the guard object that sets inference mode.


class Setting:
    """Reads and applies torch's settings on the thread of a lane."""

    def __init__(
        self,
        device: str,
        in_process: bool,
        leaves: Callable[[Any], object] = lambda stream: None,
        own_stream: bool = False,
    ) -> None:
        """Begin with the settings of freshly imported torch. If `in_process`, never change process-wide settings.

        `leaves` is called with a stream that is no longer current, because work may have begun on it. With
        `own_stream`, the lane's usual stream is a new one.
        """
        self.process_state = None if in_process else ProcessState(device)
        self._device = device
        self._own_stream = own_stream
        self._kinds = tuple(dict.fromkeys(("cpu", device.partition(":")[0])))
        self._in_process = in_process
        self._on_stream_left = leaves
        self.base = USUAL
        self._stream: Any = None  # The stream that is current unless a role sets another.
        self._torch: Any = None  # The torch module, cached because each call uses torch.
        self._no_autocast: Any = None
        self._uses_autocast = False  # Whether any role has used autocast.

    def read_settings(self) -> Settings:
        """Return torch's present settings on this thread."""
        torch, wide = self._get_torch(), self.process_state
        role_state = None if wide is None else wide.current
        if torch is None:
            return USUAL if role_state is None else Settings(role_state=role_state)
        autocast, dtype, module = self._read_autocast(torch), torch.get_default_dtype(), in_use(self._device)
        casts = autocast != self._no_autocast
        self._uses_autocast = self._uses_autocast or casts
        return Settings(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast if casts else None,
            None if self._in_process or dtype is torch.float32 else dtype,
            _read_modes(torch),
            None if module is None else module.current_stream(self._device),
            role_state,
        )

    def apply_settings(self, wanted: Settings) -> None:
        """Apply the wanted settings to torch."""
        role_state, wide = wanted.role_state, self.process_state
        if role_state is not None and wide is not None and role_state is not wide.current:
            wide.switch_to(role_state)
        torch = self._torch
        if torch is None:
            if "torch" not in sys.modules:  # This cheap check comes first, because every call gets here.
                return
            torch = self._get_torch()
            if torch is None:
                return
        # Every call checks these settings, but changes are rarely needed.
        changes = torch.is_inference_mode_enabled() is not wanted.inference
        changes_modes = changes or (
            (_has_modes(torch) or wanted.modes is not None) and _read_modes(torch) != wanted.modes
        )
        if changes_modes:
            _pop_modes(torch)  # Modes are popped before the guard is left, because the guard restores modes, too.
        if changes:
            guard, _guards.guard = getattr(_guards, "guard", None), None
            if guard is not None:  # Leaving the guard restores the former inference mode.
                guard.__exit__(None, None, None)
            if torch.is_inference_mode_enabled() is not wanted.inference:
                _guards.guard = torch.inference_mode(wanted.inference)
                _guards.guard.__enter__()
        if self._uses_autocast or torch._C._is_any_autocast_enabled():
            _set_autocast(torch, self._read_autocast(torch), wanted.autocast or self._no_autocast)
        if torch.is_grad_enabled() is not wanted.grad:
            torch._C._set_grad_enabled(wanted.grad)  # This avoids the cost of creating a context manager.
        if not self._in_process and torch.get_default_dtype() is not (dtype := wanted.dtype or torch.float32):
            torch.set_default_dtype(dtype)
        if changes_modes:
            _push_modes(torch, wanted.modes)
        if self._device != "cpu" and (module := in_use(self._device)) is not None:
            if module.current_device() != number_of(self._device):
                module.set_device(self._device)
            # The default stream is preferred, because a role's constructor may have changed the current stream.
            if self._stream is None:
                usual = module.Stream if self._own_stream else getattr(module, "default_stream", module.current_stream)
                self._stream = usual(self._device)
            before, stream = module.current_stream(self._device), wanted.stream or self._stream
            if before != stream:
                self._on_stream_left(before)
                # The new stream waits, because role code there uses the former stream's results and freed memory.
                # There is no wait during a graph capture, which must not include other streams' work.
                if not getattr(module, "is_current_stream_capturing", lambda: False)():
                    stream.wait_stream(before)
                module.set_stream(stream)

    def choose_device(self) -> None:
        """Set the thread's device to the slot's, before a constructor runs and the device is first used.

        Otherwise each thread begins with the first device.
        """
        module = getattr(find_imported("torch"), self._device.partition(":")[0], None)
        if module is not None and self._device != "cpu" and number_of(self._device) and module.is_available():
            module.set_device(self._device)

    def _get_torch(self) -> Any:
        torch = self._torch = find_imported("torch")
        if torch is not None and self._no_autocast is None:
            self._kinds = tuple(filter(torch.amp.is_autocast_available, self._kinds))
            usual = [(kind, False, torch.bfloat16 if kind == "cpu" else torch.float16) for kind in self._kinds]
            self._no_autocast = tuple(usual), True, 0
        return torch

    def _read_autocast(self, torch: Any) -> _Autocast:
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return tuple(kinds), torch.is_autocast_cache_enabled(), depth

    @contextlib.contextmanager
    def with_base_settings(self) -> Iterator[None]:
        """Apply the base settings inside a block amid role code, and restore the role's settings after the block."""
        torch = find_imported("torch")
        if torch is None:
            yield
            return
        clears: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        # Transforms of `torch.func` must not apply inside the block.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as clears
        with clears():
            before = self.read_settings()
            self.apply_settings(self.base)
            try:
                yield
            finally:
                self.apply_settings(before)


class OwnSettings:
    """A context manager for code that runs step by step. Each step starts with the settings that the last step left."""

    def __init__(self, setting: Setting, first: Settings | None = None) -> None:
        """Args: setting: Applies the settings. first: Settings of the first step; None for the present settings."""
        self._setting = setting
        self._current = first or setting.read_settings()

    def __enter__(self) -> None:
        self._setting.apply_settings(self._current)

    def __exit__(self, *_: object) -> None:
        self._current = self._setting.read_settings()
        self._setting.apply_settings(self._setting.base)


def _set_autocast(torch: Any, now: _Autocast, wanted: _Autocast) -> None:
    if now == wanted:
        return
    kinds, caches, depth = wanted
    for kind, is_on, dtype in kinds:
        torch.set_autocast_enabled(kind, is_on)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)
    # Torch clears autocast's cache at the end of the outermost autocast block, but a role's permanent block never ends.
    # Without clearing the cache, other code would compute with weights from before an update.
    while torch.autocast_increment_nesting() <= depth:
        pass
    while torch.autocast_decrement_nesting() > depth:
        pass
    torch.clear_autocast_cache()


def _has_modes(torch: Any) -> bool:
    c = torch._C
    return bool(c._len_torch_function_stack() or c._len_torch_dispatch_stack() or _top_saved(c._autograd))


def _read_modes(torch: Any) -> _Modes | None:
    """Return torch's stacks of modes, or None if all stacks are empty."""
    if not _has_modes(torch):
        return None
    c = torch._C
    functions, operators = c._len_torch_function_stack(), c._len_torch_dispatch_stack()
    saved = _pop_saved(torch)
    _push_saved(torch, saved)
    return _Modes(
        tuple(map(c._get_function_stack_at, range(functions))),
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        _get_device_module().CURRENT_DEVICE if functions else None,
        tuple(map(c._get_dispatch_stack_at, range(operators))),
        saved,
    )


# Modes are popped here and pushed back later, not exited and entered again.
# Exiting a mode below another mode on a stack would mix up torch's stacks.
def _pop_modes(torch: Any) -> None:
    c = torch._C
    if c._len_torch_function_stack():
        while c._len_torch_function_stack():
            c._pop_torch_function_stack()
        torch._GLOBAL_DEVICE_CONTEXT.device_context = _get_device_module().CURRENT_DEVICE = None
    while c._len_torch_dispatch_stack():
        c._pop_torch_dispatch_stack(None)
    _pop_saved(torch)


def _push_modes(torch: Any, wanted: _Modes | None) -> None:
    if wanted is None:
        return
    if wanted.functions:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = wanted.default
        _get_device_module().CURRENT_DEVICE = wanted.device
    for mode in wanted.functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in wanted.operators:
        torch._C._push_on_torch_dispatch_stack(mode)
    _push_saved(torch, wanted.saved)


def _get_device_module() -> Any:
    from torch.utils import _device

    return _device


def _pop_saved(torch: Any) -> tuple[tuple[Any, Any], ...]:
    autograd, hook_pairs = torch._C._autograd, []
    while (hooks := _top_saved(autograd)) is not None:
        hook_pairs.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    return tuple(reversed(hook_pairs))


def _top_saved(autograd: Any) -> tuple[Any, Any] | None:
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)  # Some versions of torch lack this function.


def _push_saved(torch: Any, saved: tuple[tuple[Any, Any], ...]) -> None:
    for pack, unpack in saved:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


T = TypeVar("T")

own_block: ContextVar[Callable[[], AbstractContextManager[object]] | None] = ContextVar("own_block", default=None)
"""Makes the block around each step of a task that running code creates, from the present settings."""


class Steps(Coroutine[Any, Any, T]):
    """A wrapper that runs each step of a coroutine inside a context manager.

    Attributes:
        coroutine: The wrapped coroutine.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], block: AbstractContextManager[object]) -> None:
        """Args: coroutine: The coroutine. block: Entered before each step and exited after the step."""
        self.coroutine = coroutine
        self._block = block

    def send(self, value: Any) -> Any:
        """Send a value to the coroutine, and run the next step."""
        with self._block:
            return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Throw an error into the coroutine, and run the next step."""
        with self._block:
            return self.coroutine.throw(*error)

    def close(self) -> None:
        """Close the coroutine."""
        with self._block:
            self.coroutine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coroutine, name)  # Name, frame and other attributes come from the coroutine.

    def __next__(self) -> Any:
        return self.send(None)

    def __await__(self) -> Generator[Any, Any, T]:
        # This object is also the iterator; the cast only satisfies the type checker.
        return cast("Generator[Any, Any, T]", self)
