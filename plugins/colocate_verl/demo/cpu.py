"""A shim that lets verl train without an accelerator, for tests and the demo. verl itself needs an accelerator.

The shim isn't part of the plugin. `import verl` imports this module in each process with
`VERL_USE_EXTERNAL_MODULES=colocate_verl.demo.cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda`, which is verl's own way to
add a platform. The shim adds or replaces:

- a platform "cpu", with the engines that verl registers for CUDA;
- the default process group, because verl requests `cpu:gloo,<device>:<backend>`, and torch refuses the CPU twice;
- the attention of critics, which is flash attention whatever the config says;
- the offload policy, because there is no pinned memory without an accelerator.
"""

# Types are checked without verl installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import psutil
import torch
import verl.utils.distributed
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Cpu(types.ModuleType):
    """The module `torch.cpu`, extended by the functions of `torch.cuda` that verl calls."""

    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self) -> str:
        return "CPU"

    def memory_allocated(self) -> int:
        return 0

    empty_cache = memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total


def _do_nothing(*_: Any) -> None: ...


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):  # type: ignore[misc]
    """The CPU as an accelerator of verl. verl requests GPUs from Ray, so pass `ray.init(num_gpus=...)`."""

    device_name = "cpu"
    device_module = _Cpu("cpu")
    set_device = synchronize = set_allocator_settings = _do_nothing
    nvtx_range = staticmethod(contextlib.nullcontext)

    def is_available(self) -> bool:
        """Return True for the CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False, so that only VERL_PLATFORM selects this platform, and verl's search never does."""
        return False

    def current_device(self) -> str:
        """Return the device's name, as for `Tensor.to`."""
        return "cpu"

    def communication_backend_name(self) -> str:
        """Return torch.distributed's backend for the CPU."""
        return "gloo"


# Patch this function before any module imports the function by name.
verl.utils.distributed.initialize_global_process_group_ray = functools.partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)

import verl.utils.fsdp_utils  # noqa: E402
import verl.utils.model  # noqa: E402


def _offload(pin_memory: bool) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


def _load_critic(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


verl.utils.model.load_valuehead_model = _load_critic
verl.utils.fsdp_utils.CPUOffloadPolicy = _offload
