"""The GPUs that a process may use: counted without initialising CUDA, and named for the workers that get some of them.

A scheduler gives a job its GPUs by a variable, `CUDA_VISIBLE_DEVICES` where they are NVIDIA's: by number, by UUID, or
as parts of one (MIG). What the job's workers see are some of these, so an executor deals in indices into that list, and
`shown` says what they stand for. `KINDS` has what is called otherwise for GPUs of other makers; a cluster has one kind.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from colocate._system.imported import imported
from colocate.errors import ConfigError


@attrs.frozen
class Kind:
    """GPUs of one maker, by what others call them.

    Attributes:
        device: Torch's name for the type of device.
        variable: The environment variable that shows a process some of them.
        backend: What torch.distributed has their collectives done by.
        vmm: Whether memory can be taken from its addresses and given back to them (`.on(sleep="vmm")`).
    """

    device: str
    variable: str
    backend: str
    vmm: bool = False


KINDS = {
    "NVIDIA": Kind("cuda", "CUDA_VISIBLE_DEVICES", "nccl", vmm=True),
    "AMD": Kind("cuda", "HIP_VISIBLE_DEVICES", "nccl"),  # in ROCm's torch they have CUDA's names, and RCCL has NCCL's
    "Intel": Kind("xpu", "ZE_AFFINITY_MASK", "xccl"),
}
SHOWING = frozenset({"ROCR_VISIBLE_DEVICES", *(kind.variable for kind in KINDS.values())})
"""The variables that show a process some GPUs: each kind's, and that of ROCm's runtime, below HIP."""


def kind_in(devices: Path, classes: Path) -> Kind:
    """The kind of a machine's GPUs, by the kernel's folders for devices and their classes; NVIDIA's where unknown."""
    if any(devices.glob("nvidia[0-9]*")):
        return KINDS["NVIDIA"]
    if (devices / "kfd").exists():
        return KINDS["AMD"]
    makers = {path.read_text().strip() for path in classes.glob("drm/renderD*/device/vendor")}
    return KINDS["Intel" if makers == {_INTEL} else "NVIDIA"]


_INTEL = "0x8086"
KIND = kind_in(Path("/dev"), Path("/sys/class"))
"""That of this machine."""
VARIABLE = KIND.variable
_PREFIXES = ("GPU-", "MIG-")
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


def listed(environ: Mapping[str, str] | None = None, machine: Sequence[str] = ()) -> tuple[str, ...] | None:
    """The GPUs that an environment names, as CUDA reads it; None when it leaves them all visible.

    CUDA takes the list up to its first entry that names no GPU, and nothing of one that names a GPU twice.

    Args:
        environ: The environment; None for this process's. (As a default it would be shown, secrets too, by `help`.)
        machine: The UUIDs of the machine's GPUs, in order ("" where unknown); empty when they aren't known, and entries
            are taken at their word.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text is None:
        return None
    prefix = next((prefix for prefix in _PREFIXES if text.strip().startswith(prefix)), None)
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if prefix is None:  # CUDA reads it as strtoul does: what follows the digits doesn't count
            digits = re.match(r"\+?([0-9]+)", entry, re.ASCII)
            if digits is None or (machine and int(digits[1]) >= len(machine)):
                break
            name = str(int(digits[1]))
        else:
            name = entry
            known = prefix == "GPU-" and machine and all(machine)  # then the beginning of one is enough
            if not entry.startswith(prefix) or entry == prefix:
                break
            if known and not any(uuid.startswith(entry) for uuid in machine):
                break
        if name in found:
            return ()
        found.append(name)
    return tuple(found)


def names(count: int, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return what the first so many GPUs of this process are called: indices are of this list.

    Args:
        count: How many.
        environ: The environment; None for this process's.

    Raises:
        ConfigError: The environment shows this process fewer.
    """
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"gpus={count!r}: an executor hands out whole GPUs; give how many, or leave it out")
    environ = os.environ if environ is None else environ
    visible = listed(environ, machine_gpus() if count else ())
    if visible is None:
        return tuple(map(str, range(count)))
    if count > len(visible):
        shown = f"{len(visible)} GPU" if visible else "none"
        raise ConfigError(
            f"gpus={count}: {VARIABLE}={environ[VARIABLE]!r} shows this process {shown}. Ask for as many, leave gpus "
            f"out to have all of them, or start the driver with another {VARIABLE}"
        )
    return visible[:count]


def shown(gpus: Sequence[str], indices: Sequence[int]) -> dict[str, str]:
    """The environment in which a worker sees these of some GPUs, numbered from 0; empty for none of them."""
    return {VARIABLE: ",".join(gpus[index] for index in indices)} if indices else {}


def torch_device(index: int | None) -> str:
    """Return what torch calls the slot's device: a GPU that its process sees, by number, or the CPU for none."""
    return "cpu" if index is None else f"{KIND.device}:{index}"


def backend_for(device: str) -> str | None:
    """Return what does the collectives of a device's tensors, as torch.distributed names it; None for the host's."""
    return next((f"{kind.device}:{kind.backend}" for kind in KINDS.values() if device.startswith(kind.device)), None)


def indices(some: Iterable[str], gpus: Sequence[str] = ()) -> tuple[int, ...]:
    """Indices of some GPUs in a list of them; those that it doesn't have go by their numbers, or else are counted."""
    known = {name: index for index, name in enumerate(gpus)}
    return tuple(known.get(name, int(name) if name.isdigit() else index) for index, name in enumerate(some))


def count_gpus(environ: Mapping[str, str] | None = None) -> int:
    """How many GPUs this process may hand out to workers: those of the machine that its environment shows it."""
    if listed(environ) == ():
        return 0
    machine = machine_gpus()
    visible = listed(environ, machine) if machine else ()
    return len(machine if visible is None else visible)


def machine_gpus() -> tuple[str, ...]:
    """Return the UUIDs of this machine's NVIDIA GPUs ("" where one can't be had), without initialising CUDA.

    NVIDIA's management library knows best. Where there is none (a container may lack it) the device files tell. AMD's
    are counted by the kernel's list of what computes; how many others there are an executor has to be told.
    """
    found = _by_nvml()
    return ("",) * (_by_device_files() or _by_amd_topology()) if found is None else found


def _by_nvml(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[str, ...] | None:
    """Ask NVML; None when it isn't there, or can't reach a driver."""
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
        found = []
        for index in range(count.value):
            device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
            failed = failed or nvml.nvmlDeviceGetUUID(device, text, ctypes.c_uint(_UUID_BYTES))
            found.append("" if failed else text.value.decode(errors="replace"))
        return tuple(found)
    finally:
        nvml.nvmlShutdown()


def _by_device_files(folder: Path = Path("/dev")) -> int:
    return sum(1 for path in folder.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def _by_amd_topology(folder: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    # CPUs are nodes as well; what has no SIMD units is one.
    found = (re.search(r"^simd_count (\d+)$", path.read_text(), re.MULTILINE) for path in folder.glob("*/properties"))
    return sum(1 for count in found if count is not None and int(count[1]))


def gpu_names(torch: Any) -> list[str]:
    """Return what the GPUs are called that torch can use."""
    module = getattr(torch, KIND.device)
    return [str(module.get_device_name(number)) for number in range(module.device_count())]


def in_use(device: str) -> Any:
    """Torch's module for a kind of device, such as `torch.cuda`; None until this process has used it, and for the host.

    Args:
        device: As torch calls it, such as "cuda:0".
    """
    if device == "cpu" or (torch := imported("torch")) is None:
        return None
    module: Any = getattr(torch, device.partition(":")[0], None)
    return module if hasattr(module, "is_initialized") and module.is_initialized() else None


def number_of(device: str) -> int:
    """A device's number, as torch counts them; that of "cuda" is 0."""
    return int(device.partition(":")[2] or 0)
