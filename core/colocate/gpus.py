"""Count a process's GPUs without initialising CUDA, and choose which GPUs a worker sees.

A scheduler gives a job GPUs by a variable, `CUDA_VISIBLE_DEVICES` for NVIDIA's: by number, by UUID, or as parts of
one GPU (MIG). A job's workers see a subset, so executors use indices into that list, and `shown` returns the variable
for some indices. `KINDS` has the names for other makers' GPUs; a cluster has one kind.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from colocate._system.imported import find_imported
from colocate.errors import ConfigError


@attrs.frozen
class Kind:
    """A kind of GPU, by maker, with the names that torch and the environment use.

    Attributes:
        device: Torch's name for the type of device.
        variable: The environment variable that selects visible GPUs.
        backend: The backend of torch.distributed for collectives.
        vmm: Whether memory can be unmapped from its addresses and mapped again (`.on(sleep="vmm")`).
    """

    device: str
    variable: str
    backend: str
    vmm: bool = False


KINDS = {
    "NVIDIA": Kind("cuda", "CUDA_VISIBLE_DEVICES", "nccl", vmm=True),
    "AMD": Kind("cuda", "HIP_VISIBLE_DEVICES", "nccl"),  # Torch uses the names cuda and nccl for ROCm and RCCL, too.
    "Intel": Kind("xpu", "ZE_AFFINITY_MASK", "xccl"),
}
SHOWING = frozenset({"ROCR_VISIBLE_DEVICES", *(kind.variable for kind in KINDS.values())})
"""Variables that select visible GPUs: each kind's, and that of ROCm's runtime, below HIP."""


def kind_in(devices: Path, classes: Path) -> Kind:
    """Return the kind of a machine's GPUs, found in the kernel's device and class folders; NVIDIA if unknown."""
    if any(devices.glob("nvidia[0-9]*")):
        return KINDS["NVIDIA"]
    if (devices / "kfd").exists():
        return KINDS["AMD"]
    makers = {path.read_text().strip() for path in classes.glob("drm/renderD*/device/vendor")}
    return KINDS["Intel" if makers == {_INTEL} else "NVIDIA"]


_INTEL = "0x8086"
KIND = kind_in(Path("/dev"), Path("/sys/class"))
"""The kind of this machine's GPUs."""
VARIABLE = KIND.variable
_PREFIXES = ("GPU-", "MIG-")
_UUID_BYTES = 96  # This is NVML's constant NVML_DEVICE_UUID_V2_BUFFER_SIZE.


def list_visible_gpus(environ: Mapping[str, str] | None = None, machine: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Return the GPUs that an environment makes visible to CUDA; None if all GPUs are visible.

    CUDA reads the list up to the first entry that names no GPU, and ignores a list that names a GPU twice.

    Args:
        environ: The environment; None for this process's. (A default value would appear in `help`, with its
            secrets.)
        machine: The UUIDs of the machine's GPUs, in order ("" if unknown); empty if none is known: entries are then
            not verified.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text is None:
        return None
    prefix = next((prefix for prefix in _PREFIXES if text.strip().startswith(prefix)), None)
    gpus: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if prefix is None:  # CUDA parses entries like strtoul: text after the digits doesn't count.
            digits = re.match(r"\+?([0-9]+)", entry, re.ASCII)
            if digits is None or (machine and int(digits[1]) >= len(machine)):
                break
            name = str(int(digits[1]))
        else:
            name = entry
            # If all UUIDs are known, an entry may be just the beginning of a UUID.
            is_known = prefix == "GPU-" and machine and all(machine)
            if not entry.startswith(prefix) or entry == prefix:
                break
            if is_known and not any(uuid.startswith(entry) for uuid in machine):
                break
        if name in gpus:
            return ()
        gpus.append(name)
    return tuple(gpus)


def names(count: int, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the names of the first `count` GPUs of this process; GPU indices refer to this list.

    Args:
        count: Number of GPUs.
        environ: The environment; None for this process's.

    Raises:
        ConfigError: The environment shows this process fewer.
    """
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"gpus={count!r}: an executor hands out whole GPUs; give how many, or leave it out")
    environ = os.environ if environ is None else environ
    visible = list_visible_gpus(environ, machine_gpus() if count else ())
    if visible is None:
        return tuple(map(str, range(count)))
    if count > len(visible):
        shown = f"{len(visible)} GPU" if visible else "none"
        raise ConfigError(
            f"gpus={count}: {VARIABLE}={environ[VARIABLE]!r} shows this process {shown}. Ask for as many, leave gpus "
            f"out to have all of them, or start the driver with another {VARIABLE}"
        )
    return visible[:count]


def visibility_variables(gpus: Sequence[str], indices: Sequence[int]) -> dict[str, str]:
    """Return the variable that makes the GPUs at some indices visible to a worker; empty for no indices."""
    return {VARIABLE: ",".join(gpus[index] for index in indices)} if indices else {}


def torch_device(index: int | None) -> str:
    """Return torch's name for a slot's device: for example "cuda:1" for GPU 1, and "cpu" for None."""
    return "cpu" if index is None else f"{KIND.device}:{index}"


def backend_for(device: str) -> str | None:
    """Return torch.distributed's backend for a device, in the form "device:backend"; None for the CPU."""
    return next((f"{kind.device}:{kind.backend}" for kind in KINDS.values() if device.startswith(kind.device)), None)


def indices(some: Iterable[str], gpus: Sequence[str] = ()) -> tuple[int, ...]:
    """Return each named GPU's index in `gpus`; for a name not in `gpus`, its number, or else its position in `some`."""
    positions = {name: index for index, name in enumerate(gpus)}
    return tuple(positions.get(name, int(name) if name.isdigit() else index) for index, name in enumerate(some))


def count_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Return how many GPUs this process may give to workers: the machine's GPUs that the environment shows."""
    if list_visible_gpus(environ) == ():
        return 0
    machine = machine_gpus()
    visible = list_visible_gpus(environ, machine) if machine else ()
    return len(machine if visible is None else visible)


def machine_gpus() -> tuple[str, ...]:
    """Return the UUIDs of this machine's NVIDIA GPUs ("" for an unknown one), without initialising CUDA.

    NVIDIA's management library is the first source. Without it, as in some containers, the device files are counted.
    AMD's GPUs are counted in the kernel's list of compute nodes; an executor must be told the number of other GPUs.
    """
    uuids = _by_nvml()
    return ("",) * (_by_device_files() or _by_amd_topology()) if uuids is None else uuids


def _by_nvml(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs according to NVML; None without the NVML library or a driver."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        uuids = []
        for index in range(count.value):
            device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
            failed = failed or nvml.nvmlDeviceGetUUID(device, text, ctypes.c_uint(_UUID_BYTES))
            uuids.append("" if failed else text.value.decode(errors="replace"))
        return tuple(uuids)
    finally:
        nvml.nvmlShutdown()


def _by_device_files(folder: Path = Path("/dev")) -> int:
    return sum(1 for path in folder.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def _by_amd_topology(folder: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    # The kernel's nodes include CPUs, which have no SIMD units.
    matches = (re.search(r"^simd_count (\d+)$", path.read_text(), re.MULTILINE) for path in folder.glob("*/properties"))
    return sum(1 for count in matches if count is not None and int(count[1]))


def gpu_names(torch: Any) -> list[str]:
    """Return the names of the GPUs that torch can use."""
    module = getattr(torch, KIND.device)
    return [str(module.get_device_name(number)) for number in range(module.device_count())]


def in_use(device: str) -> Any:
    """Return torch's module for a device, such as `torch.cuda`; None for the CPU, or if the module isn't in use yet.

    Args:
        device: Torch's name for the device, such as "cuda:0".
    """
    if device == "cpu" or (torch := find_imported("torch")) is None:
        return None
    module: Any = getattr(torch, device.partition(":")[0], None)
    return module if hasattr(module, "is_initialized") and module.is_initialized() else None


def number_of(device: str) -> int:
    """Return the device number in a name of torch's, such as 1 for "cuda:1"; 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)
