"""What torch has set for a thread or a process, which each role of a worker has its own of.

Roles share a process and a thread. What a role's constructor has set holds in its methods, as it would in a process of
its own, and nobody else's; what a method leaves set is forgotten when it ends. What a module sets as it is imported
holds for all roles.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs

from colocate._system.imported import imported
from colocate.gpus import in_use, number_of


@attrs.frozen
class Settings:
    """Torch's settings.

    Attributes:
        grad: Whether gradients are recorded.
        dtype: That of new tensors of which none is said; None for the usual one.
        device: Where such are made; None for the host.
        stream: On which a GPU computes; None for the usual one.
    """

    grad: bool = True
    dtype: Any = None
    device: Any = None
    stream: Any = None


USUAL = Settings()
"""As torch is imported."""


class Setting:
    """Reads and makes torch's settings, on the lane."""

    def __init__(self, device: str, in_process: bool, leaves: Callable[[Any], object] = lambda stream: None) -> None:
        """Begin with the usual ones.

        Args:
            device: The slot's, as torch calls it.
            in_process: Whether the process is the driver's: what is set for all of it is left alone.
            leaves: Told of a stream that isn't the current one any more: something may have been begun there.
        """
        self._device = device
        self._in_process = in_process
        self._leaves = leaves
        self.base = USUAL
        self._stream: Any = None  # the usual one
        self._torch: Any = None  # once it is imported: each call asks for it

    def now(self) -> Settings:
        """As they are."""
        torch = imported("torch")
        if torch is None:
            return USUAL
        dtype = torch.get_default_dtype()
        # A default device is one of torch's function modes. To ask for it takes as long as a short call.
        device = torch.get_default_device() if torch._C._len_torch_function_stack() else None
        module = in_use(self._device)
        return Settings(
            torch.is_grad_enabled(),
            None if self._in_process or dtype is torch.float32 else dtype,
            None if device is None or device.type == "cpu" else device,
            None if module is None else module.current_stream(self._device),
        )

    def is_aside(self, settings: Settings | None) -> bool:
        """Whether who has these computes on a stream of its own."""
        stream = None if settings is None else settings.stream
        return stream is not None and stream != (self.base.stream or self._stream)

    def have(self, wanted: Settings) -> None:
        """Make them so."""
        torch = self._torch
        if torch is None:
            if "torch" not in sys.modules:  # for each call asks for it
                return
            torch = self._torch = imported("torch")
            if torch is None:
                return
        # What each call asks for, and finds as it is to be, mostly.
        if torch.is_grad_enabled() is not wanted.grad:
            torch._C._set_grad_enabled(wanted.grad)  # without an object for a block
        if not self._in_process and torch.get_default_dtype() is not (dtype := wanted.dtype or torch.float32):
            torch.set_default_dtype(dtype)
        if (torch._C._len_torch_function_stack() or wanted.device is not None) and self.now().device != wanted.device:
            torch.set_default_device(wanted.device)
        if self._device != "cpu" and (module := in_use(self._device)) is not None:
            if module.current_device() != number_of(self._device):
                module.set_device(self._device)
            if self._stream is None:  # the current one may be that of the role whose constructor is the first to use it
                self._stream = getattr(module, "default_stream", module.current_stream)(self._device)
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
        torch, number = imported("torch"), number_of(self._device)
        module = getattr(torch, self._device.partition(":")[0], None)
        if number and module is not None and module.is_available():
            module.set_device(self._device)

    @contextlib.contextmanager
    def amid(self) -> Iterator[None]:
        """A block amid role code, in which colocate's own and other roles' runs: as it usually is, then as it was."""
        torch = imported("torch")
        if torch is None:
            yield
            return
        before = attrs.evolve(self.now(), device=None)
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            for kind in {"cpu", self._device.partition(":")[0]}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            _leave_modes(torch, stack)
            self.have(self.base)
            try:
                yield
            finally:
                self.have(before)


class OwnSettings:
    """Those of code that runs step by step: it finds them as it has left them, and leaves the usual ones to others.

    Among them are torch's function modes, of which a default device is one.
    """

    def __init__(self, setting: Setting, first: Settings | None = None) -> None:
        """Args: setting: What makes them. first: Those of the first step; None for those that are made now."""
        self._setting = setting
        self._now = first or setting.now()
        self._modes: _Modes | None = None
        self._others: _Modes | None = None

    def __enter__(self) -> None:
        self._others = _without_modes()
        self._setting.have(self._now)
        _have_modes(self._modes)

    def __exit__(self, *_: object) -> None:
        self._modes = _without_modes()
        self._now = self._setting.now()
        self._setting.have(attrs.evolve(self._setting.base, device=None) if self._others else self._setting.base)
        _have_modes(self._others)


def _leave_modes(torch: Any, stack: contextlib.ExitStack) -> None:
    """Until a stack ends: no mode of torch's has to do with what runs, nor a transform of `torch.func`."""
    stack.enter_context(_without_function_modes())
    if torch._C._len_torch_dispatch_stack():
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
    if torch._C._functorch.peek_interpreter_stack() is not None:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        stack.enter_context(temporarily_clear_interpreter_stack())


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """A block in which there are none of torch's function modes."""
    modes = _without_modes()
    try:
        yield
    finally:
        _have_modes(modes)


# Torch's function modes, the last one first, and the one of them that is the default device. They can't be ended and
# begun again: torch takes one that lies under another one's block for that one.
_Modes: TypeAlias = tuple[list[Any], Any]


def _without_modes() -> _Modes | None:
    """There are none any more; those that there were."""
    torch = imported("torch")
    if torch is None or not (count := torch._C._len_torch_function_stack()):
        return None
    modes = [torch.overrides._pop_mode() for _ in range(count)]
    place = torch._GLOBAL_DEVICE_CONTEXT
    own = getattr(place, "device_context", None)
    place.device_context = None
    return modes, own


def _have_modes(found: _Modes | None) -> None:
    """There are these, where there are none."""
    if found is None:
        return
    torch = imported("torch")
    assert torch is not None
    modes, own = found
    torch._GLOBAL_DEVICE_CONTEXT.device_context = own
    for mode in reversed(modes):
        torch.overrides._push_mode(mode)
