"""What torch has set for a thread or a process, which each role of a worker has its own of.

Roles share a process and a thread. What a role's constructor has set holds in its methods, as it would in a process of
its own, and nobody else's; what a method leaves set is forgotten when it ends. What a module sets as it is imported
holds for all roles.
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

from colocate._system.imported import imported
from colocate.gpus import in_use, number_of
from colocate.worker.process_wide import Own, ProcessWide

_Autocast: TypeAlias = tuple[tuple[tuple[str, bool, Any], ...], bool, int]
"""Of each kind of device, whether it is on, and its dtype; whether there is a cache, and how many blocks deep."""


@attrs.frozen
class Settings:
    """Torch's settings."""

    grad: bool = True  # whether gradients are recorded
    inference: bool = False  # whether tensors are made that autograd can't use
    autocast: _Autocast | None = None  # which operations compute in another dtype; None for none
    dtype: Any = None  # that of new tensors of which none is said; None for the usual one
    modes: _Modes | None = None  # what is asked about each operation, a default device among them; None for nothing
    stream: Any = None  # on which a GPU computes; None for the usual one
    own: Own | None = None  # whose default generators, and switches, are in place; None for whatever is


@attrs.frozen
class _Modes:
    """What torch keeps on stacks of a thread, the first to be put there first."""

    functions: tuple[Any, ...]  # its function modes
    default: Any  # the one of them that is the default device
    device: Any  # what code is compiled for, if there are any
    operators: tuple[Any, ...]  # its dispatch modes
    saved: tuple[tuple[Any, Any], ...]  # what packs and unpacks tensors that a backward pass needs


USUAL = Settings()
"""As torch is imported."""

_guards = threading.local()  # what has a thread in inference mode, or out of it


class Setting:
    """Reads and makes torch's settings, on the lane."""

    def __init__(
        self,
        device: str,
        in_process: bool,
        leaves: Callable[[Any], object] = lambda stream: None,
        own_stream: bool = False,
    ) -> None:
        """Begin with the usual ones. What is set for all of a process is left alone where that is the driver's.

        `leaves` is told of a stream that isn't the current one any more: something may have been begun there. With
        `own_stream` the usual one is made for this lane.
        """
        self.process_wide = None if in_process else ProcessWide(device)
        self._device = device
        self._own_stream = own_stream
        self._kinds = tuple(dict.fromkeys(("cpu", device.partition(":")[0])))
        self._in_process = in_process
        self._leaves = leaves
        self.base = USUAL
        self._stream: Any = None  # the usual one
        self._torch: Any = None  # once it is imported: each call asks for it
        self._no_autocast: Any = None
        self._casts = False  # some role has set something of it

    def now(self) -> Settings:
        """As they are."""
        torch, wide = self._imported(), self.process_wide
        own = None if wide is None else wide.now
        if torch is None:
            return USUAL if own is None else Settings(own=own)
        autocast, dtype, module = self._autocast(torch), torch.get_default_dtype(), in_use(self._device)
        casts = autocast != self._no_autocast
        self._casts = self._casts or casts
        return Settings(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast if casts else None,
            None if self._in_process or dtype is torch.float32 else dtype,
            _modes(torch),
            None if module is None else module.current_stream(self._device),
            own,
        )

    def have(self, wanted: Settings) -> None:
        """Make them so."""
        own, wide = wanted.own, self.process_wide
        if own is not None and wide is not None and own is not wide.now:
            wide.have(own)
        torch = self._torch
        if torch is None:
            if "torch" not in sys.modules:  # for each call asks for it
                return
            torch = self._imported()
            if torch is None:
                return
        # What each call asks for, and finds as it is to be, mostly.
        changes = torch.is_inference_mode_enabled() is not wanted.inference
        others = changes or ((_has_modes(torch) or wanted.modes is not None) and _modes(torch) != wanted.modes)
        if others:
            _pop_modes(torch)  # first: they are a part of what a guard gives back
        if changes:
            guard, _guards.guard = getattr(_guards, "guard", None), None
            if guard is not None:  # which gives back what there was before
                guard.__exit__(None, None, None)
            if torch.is_inference_mode_enabled() is not wanted.inference:
                _guards.guard = torch.inference_mode(wanted.inference)
                _guards.guard.__enter__()
        if self._casts or torch._C._is_any_autocast_enabled():
            _set_autocast(torch, self._autocast(torch), wanted.autocast or self._no_autocast)
        if torch.is_grad_enabled() is not wanted.grad:
            torch._C._set_grad_enabled(wanted.grad)  # without an object for a block
        if not self._in_process and torch.get_default_dtype() is not (dtype := wanted.dtype or torch.float32):
            torch.set_default_dtype(dtype)
        if others:
            _push_modes(torch, wanted.modes)
        if self._device != "cpu" and (module := in_use(self._device)) is not None:
            if module.current_device() != number_of(self._device):
                module.set_device(self._device)
            if self._stream is None:  # the current one may be that of the role whose constructor is the first to use it
                usual = module.Stream if self._own_stream else getattr(module, "default_stream", module.current_stream)
                self._stream = usual(self._device)
            before, stream = module.current_stream(self._device), wanted.stream or self._stream
            if before != stream:
                self._leaves(before)
                # What comes on the one uses what the other has made, and memory that it has let go of. But of a graph
                # that is being captured nobody else is a part.
                if not getattr(module, "is_current_stream_capturing", lambda: False)():
                    stream.wait_stream(before)
                module.set_stream(stream)

    def choose_device(self) -> None:
        """A constructor is about to run: the thread's device is the slot's, though nobody has used any yet.

        By itself each thread begins with the first.
        """
        module = getattr(imported("torch"), self._device.partition(":")[0], None)
        if module is not None and self._device != "cpu" and number_of(self._device) and module.is_available():
            module.set_device(self._device)

    def _imported(self) -> Any:
        torch = self._torch = imported("torch")
        if torch is not None and self._no_autocast is None:
            self._kinds = tuple(filter(torch.amp.is_autocast_available, self._kinds))
            usual = [(kind, False, torch.bfloat16 if kind == "cpu" else torch.float16) for kind in self._kinds]
            self._no_autocast = tuple(usual), True, 0
        return torch

    def _autocast(self, torch: Any) -> _Autocast:
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return tuple(kinds), torch.is_autocast_cache_enabled(), depth

    @contextlib.contextmanager
    def amid(self) -> Iterator[None]:
        """A block amid role code, in which colocate's own and other roles' runs: as it usually is, then as it was."""
        torch = imported("torch")
        if torch is None:
            yield
            return
        clears: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        if torch._C._functorch.peek_interpreter_stack() is not None:  # no transform of `torch.func` has to do with it
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as clears
        with clears():
            before = self.now()
            self.have(self.base)
            try:
                yield
            finally:
                self.have(before)


class OwnSettings:
    """Settings of code that runs step by step: it finds them as it has left them, and others find the usual ones."""

    def __init__(self, setting: Setting, first: Settings | None = None) -> None:
        """Args: setting: What makes them. first: Those of the first step; None for those that are made now."""
        self._setting = setting
        self._now = first or setting.now()

    def __enter__(self) -> None:
        self._setting.have(self._now)

    def __exit__(self, *_: object) -> None:
        self._now = self._setting.now()
        self._setting.have(self._setting.base)


def _set_autocast(torch: Any, now: _Autocast, wanted: _Autocast) -> None:
    if now == wanted:
        return
    kinds, caches, depth = wanted
    for kind, is_on, dtype in kinds:
        torch.set_autocast_enabled(kind, is_on)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)
    # Torch empties the cache where the outermost block ends, which isn't that of a role that has never left its own:
    # what others compute with would be weights of before their update.
    while torch.autocast_increment_nesting() <= depth:
        pass
    while torch.autocast_decrement_nesting() > depth:
        pass
    torch.clear_autocast_cache()


# Modes can't be ended and begun again: torch takes one that lies under another one's block for that one. So they are
# taken from their stacks, and put back there.


def _has_modes(torch: Any) -> bool:
    c = torch._C
    return bool(c._len_torch_function_stack() or c._len_torch_dispatch_stack() or _top_saved(c._autograd))


def _modes(torch: Any) -> _Modes | None:
    """Return torch's stacks of modes, where there are some."""
    if not _has_modes(torch):
        return None
    c = torch._C
    functions, operators = c._len_torch_function_stack(), c._len_torch_dispatch_stack()
    saved = _pop_saved(torch)
    _push_saved(torch, saved)
    return _Modes(
        tuple(map(c._get_function_stack_at, range(functions))),
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        _compiled_for().CURRENT_DEVICE if functions else None,
        tuple(map(c._get_dispatch_stack_at, range(operators))),
        saved,
    )


def _pop_modes(torch: Any) -> None:
    """There are none any more."""
    c = torch._C
    if c._len_torch_function_stack():
        while c._len_torch_function_stack():
            c._pop_torch_function_stack()
        torch._GLOBAL_DEVICE_CONTEXT.device_context = _compiled_for().CURRENT_DEVICE = None
    while c._len_torch_dispatch_stack():
        c._pop_torch_dispatch_stack(None)
    _pop_saved(torch)


def _push_modes(torch: Any, wanted: _Modes | None) -> None:
    """There are these, where there are none."""
    if wanted is None:
        return
    if wanted.functions:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = wanted.default
        _compiled_for().CURRENT_DEVICE = wanted.device
    for mode in wanted.functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in wanted.operators:
        torch._C._push_on_torch_dispatch_stack(mode)
    _push_saved(torch, wanted.saved)


def _compiled_for() -> Any:
    from torch.utils import _device

    return _device


def _pop_saved(torch: Any) -> tuple[tuple[Any, Any], ...]:
    autograd, found = torch._C._autograd, []
    while (hooks := _top_saved(autograd)) is not None:
        found.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    return tuple(reversed(found))


def _top_saved(autograd: Any) -> tuple[Any, Any] | None:
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)  # not in each torch


def _push_saved(torch: Any, saved: tuple[tuple[Any, Any], ...]) -> None:
    for pack, unpack in saved:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


T = TypeVar("T")

own_block: ContextVar[Callable[[], AbstractContextManager[object]] | None] = ContextVar("own_block", default=None)
"""Makes what each step of a task is in that the code which runs makes, of how things are then."""


class Steps(Coroutine[Any, Any, T]):
    """A coroutine each of whose steps is in a block.

    Attributes:
        coroutine: It.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], block: AbstractContextManager[object]) -> None:
        """Args: coroutine: It. block: What is entered before each step and left after it."""
        self.coroutine = coroutine
        self._block = block

    def send(self, value: Any) -> Any:
        """Take a step."""
        with self._block:
            return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Take one in which what it waits for raises."""
        with self._block:
            return self.coroutine.throw(*error)

    def close(self) -> None:
        """Take the last one, in which it is closed."""
        with self._block:
            self.coroutine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coroutine, name)  # its name, its frame ...: who looks at it sees the coroutine

    def __next__(self) -> Any:
        return self.send(None)

    def __await__(self) -> Generator[Any, Any, T]:
        return cast("Generator[Any, Any, T]", self)  # which it is but for its type
