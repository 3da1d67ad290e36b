"""A role that sets torch's switches, and a function that seeds. Needs torch and NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocate import Context, Role, method
from colocate.testing.probes import import_optional
from colocate.testing.probes.numbers import seed_all

if TYPE_CHECKING:
    import numpy
    import torch
else:
    numpy, torch = import_optional("numpy"), import_optional("torch")


def seed_on_worker(ctx: Context, seed: int) -> None:
    """Seed all default generators of a worker."""
    seed_all(seed)


def read_switches() -> list[Any]:
    """Return torch's process-wide switches."""
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    ]


def set_switches() -> None:
    """Set torch's switches to other values."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_anomaly_enabled(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


class Switching(Role):
    """A role that sets switches in its constructor or in a method."""

    def __init__(self, sets: bool = False) -> None:
        if sets:
            set_switches()

    @method
    def told(self) -> list[Any]:
        return read_switches()

    @method
    def set_switches(self) -> list[Any]:
        set_switches()
        return read_switches()

    @method
    def newer(self) -> list[Any]:
        """Set a precision in torch's newer terms, and return all precisions."""
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        return self.precisions()

    def precisions(self) -> list[Any]:
        return [torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision]  # type: ignore[attr-defined]

    @method
    def all_precisions(self) -> list[Any]:
        return self.precisions()
