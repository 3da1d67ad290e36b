"""Limit the code that a config may run: plugins on an allow-list, and other code only with the caller's consent.

A config can run a module without naming one. An environment variable names files that a loader, Python or a library
opens at its start; an option of an executor may install and import packages on its cluster, or choose the peers whose
messages are unpickled. If modules are refused, variables must be on a list, and options must be approved by their
executor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs

_CHECKS = "strict"  # This option of `connect` only adds checks, and so is allowed.

# This list has only variables for numbers, switches and levels.
# The list lacks variables that name a file, a library or a server, such as PYTHONPATH, LD_PRELOAD and HF_ENDPOINT.
# The list lacks variables that import modules by name (PYTHONWARNINGS, TORCH_LOGS) or write files (NCCL_DEBUG_FILE).
# The list lacks variables that open sockets to other hosts (GLOO_SOCKET_IFNAME) or choose GPUs (CUDA_VISIBLE_DEVICES).
HARMLESS_VARIABLES = frozenset(
    {
        # threads
        *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "MKL_NUM_THREADS"),
        *("OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS", "RAYON_NUM_THREADS"),
        # Variables of Python and of C's allocator.
        *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "MALLOC_ARENA_MAX"),
        # Variables of CUDA and torch.
        *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG"),
        *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG"),
        *("TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_COMPILE_DISABLE"),
        # NCCL
        *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
        *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CROSS_NIC"),
        *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
        *("NCCL_IB_DISABLE", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL"),
        *("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
        # Variables of libraries for models.
        *("TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_VERBOSITY", "WANDB_MODE"),
    }
)


@attrs.frozen
class Trust:
    """A policy for the code that a config may run, except for plugins, which `plugins.allow` limits."""

    modules: bool  # Whether a config may name "module:Class".

    def import_objection(self, use: str) -> str | None:
        """Return the reason to refuse an import, or None to allow the import."""
        if self.modules or ":" not in use:
            return None
        return f"{use!r} names a module, and this config may name plugins only"

    def variable_objection(self, name: str) -> str | None:
        """Return the reason to refuse an environment variable, or None to allow the variable."""
        if self.modules or name in HARMLESS_VARIABLES:
            return None
        return (
            f"a config that may name plugins only can't set {name!r}: it isn't on the list of variables that hold "
            "numbers and switches and can't have anything loaded or run (docs/trust.md). Set it in your own "
            "environment, if you trust it"
        )

    def observer_option_objection(self) -> str | None:
        """Return the reason to refuse options of observers, or None to allow the options."""
        if self.modules:
            return None
        return (
            "a config that may name plugins only can't say where an observer sends what it is told: give its options "
            "by --set, if you trust them"
        )

    def option_objections(self, cls: Any, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the reason for each refused option of an executor or role, as the method `objection` decides."""
        hook = inspect.getattr_static(cls, "objection", None)
        if self.modules or not isinstance(hook, classmethod):  # A role's ordinary method may have the same name.
            return {}
        objections = {name: cls.objection(name, value) for name, value in options.items() if name != _CHECKS}
        return {name: why for name, why in objections.items() if why is not None}
