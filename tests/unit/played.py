"""GPUs that are played: tensors which say that they are on one, and behave so. They have contents, in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_to = torch.Tensor.to


class Played(torch.Tensor):
    """A tensor on a GPU that isn't there."""

    played: str

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.played)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {str(tensor.device) for tensor in _tensors([args, kwargs or {}])}
        if len(found) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but got {sorted(found)}")
        return _on(super().__torch_function__(func, types, args, kwargs or {}), found.pop())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _on(value: Any, device: str) -> Any:
    if isinstance(value, Played):
        value.played = device
    elif isinstance(value, (list, tuple)):
        for item in value:
            _on(item, device)
    return value


def _moved(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    device = options.get("device", args[0] if args else None)
    if not isinstance(device, (str, torch.device)) or torch.device(device) == tensor.device:
        return tensor if isinstance(tensor, Played) else _to(tensor, *args, **options)
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(torch.Tensor).clone()
    device = torch.device(device)
    return _on(plain.as_subclass(Played), str(device)) if device.type == "cuda" else _to(plain, device)


def play(patch: pytest.MonkeyPatch) -> None:
    """Let tensors go to GPUs that aren't there."""
    patch.setattr(torch.Tensor, "to", _moved)


def ones(device: str = "cpu", rows: int = 3) -> torch.Tensor:
    """A tensor there."""
    return _moved(torch.ones(rows, 2), device)
