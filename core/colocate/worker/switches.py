"""Reads and sets torch's switches that apply to the whole process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from colocate._system.imported import find_imported

_Switch: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]

_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
_PAIRS = (
    *((f"_get_cudnn_{name}", f"_set_cudnn_{name}") for name in ("enabled", "benchmark", "deterministic")),
    *(
        (f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}")
        for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    ),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
)


class Switches:
    """Torch's process-wide switches, such as deterministic algorithms, anomaly detection and attention kernels.

    The precision of products and cuDNN's options are included. Denormals are missing, because torch doesn't report
    their state.

    Attributes:
        usual: Switches for roles that have set none.
    """

    name = "switches"
    usual: tuple[Any, ...] | None = None
    _current: tuple[Any, ...] = ()
    _switches: list[_Switch] | None = None

    def is_available(self) -> bool:
        """Return whether torch has been imported."""
        return find_imported("torch") is not None

    def read_state(self, state: Any) -> Any:
        """Return the present switches. `state` is ignored."""
        if self._switches is None:
            self._switches = _list_switches(find_imported("torch"))
        self._current = tuple([read() for read, _ in self._switches])
        return self._current

    def write_state(self, state: Any) -> None:
        """Set the switches that differ from the values read or written last."""
        now, self._current = self._current, state
        if now != state:
            for (_, write), old, new in zip(self._switches or (), now, state, strict=True):
                if old != new:
                    write(new)

    def seed_state(self, seed: int) -> Any:
        """Set and return the switches in `usual`, with which roles start. `seed` is ignored."""
        now = self.read_state(None)
        if self.usual is None:
            self.usual = now
        self.write_state(self.usual)
        return self.usual


def _list_switches(torch: Any) -> list[_Switch]:
    c = torch._C

    def deterministic() -> Any:
        return c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()

    def set_deterministic(wanted: Any) -> None:
        c._set_deterministic_algorithms(wanted[0], warn_only=wanted[1])
        compiler: Any = sys.modules.get("torch._inductor.config")
        if compiler is not None:  # `torch.use_deterministic_algorithms` also sets this.
            compiler.deterministic = wanted[0]

    def anomaly() -> Any:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def set_anomaly(wanted: Any) -> None:
        torch.set_anomaly_enabled(*wanted)

    switches = [(deterministic, set_deterministic), (anomaly, set_anomaly), _get_precision_switch(c)]
    return switches + [
        (getattr(c, read), getattr(c, write)) for read, write in _PAIRS if hasattr(c, read) and hasattr(c, write)
    ]


def _get_precision_switch(c: Any) -> _Switch:
    """Return functions that read and set the precision of float32 products, by torch's old and new (2.9) settings."""
    newer = hasattr(c, "_get_fp32_precision_getter")

    def read() -> Any:
        older = []
        for name in ("_get_float32_matmul_precision", "_get_cudnn_allow_tf32"):
            try:
                older.append(getattr(c, name)())
            except RuntimeError:  # The newer settings have a value that the older settings can't express.
                older.append(None)
        return *older, *((c._get_fp32_precision_getter(*of) for of in _PRECISIONS) if newer else ())

    def write(wanted: Any) -> None:
        products, convolutions, *newer_values = wanted
        if products is not None:
            c._set_float32_matmul_precision(products)
        if convolutions is not None:
            c._set_cudnn_allow_tf32(convolutions)
        # The newer settings are set last, because setting the older settings changes the newer ones, too.
        for of, precision in zip(_PRECISIONS, newer_values, strict=bool(newer_values)):
            c._set_fp32_precision_setter(*of, precision)

    return read, write
