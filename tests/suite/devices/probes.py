"""A role that fakes NVML in its worker's process."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from colocate import Role, method

GIB = 1 << 30


class NVMLError(Exception):
    """The fake of NVML's error."""


def make_fake_nvml(xids: list[int], *, fails: bool = False) -> Any:
    """Return a fake pynvml module with two GPUs, of which the second can't report its power."""
    of: Any = ModuleType("pynvml")
    uuids = ["GPU-0000-aaaa", "GPU-1111-bbbb"]

    def init() -> None:
        if fails:
            raise NVMLError("Driver Not Loaded")

    def power(handle: int) -> int:
        if handle:
            raise NVMLError("Not Supported")
        return 310_500

    def waited(events: object, timeout: int) -> Any:
        if not xids:
            raise NVMLError("Timeout")
        return SimpleNamespace(device=0, eventData=xids.pop(0))

    of.NVMLError, of.NVML_TEMPERATURE_GPU, of.nvmlEventTypeXidCriticalError = NVMLError, 0, 8
    of.nvmlInit, of.nvmlDeviceGetCount = init, lambda: len(uuids)
    of.nvmlDeviceGetHandleByIndex = lambda index: index
    of.nvmlDeviceGetHandleByUUID = uuids.index
    of.nvmlDeviceGetUUID = lambda handle: uuids[handle].encode()  # Older versions return bytes.
    of.nvmlDeviceGetName = lambda handle: "NVIDIA Played"
    of.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=87 - 40 * handle, memory=1)
    of.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=(41 + handle) * GIB, total=80 * GIB)
    of.nvmlDeviceGetPowerUsage = power
    of.nvmlDeviceGetTemperature = lambda handle, kind: 61 + handle
    of.nvmlEventSetCreate = object
    of.nvmlDeviceRegisterEvents = lambda handle, kind, events: None
    of.nvmlEventSetWait_v2 = waited
    return of


class HasNvml(Role):
    """A role that fakes NVML in its process."""

    @method
    def play(self, *, fails: bool = False) -> None:
        """Install the fake NVML, with one XID error."""
        sys.modules["pynvml"] = make_fake_nvml([79], fails=fails)

    @method
    def forget(self) -> None:
        """Remove the fake NVML."""
        sys.modules.pop("pynvml", None)
