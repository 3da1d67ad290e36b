"""`colocate doctor`: print versions, plugins and devices, and check whether a config would work on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import psutil

from colocate.connecting import connect
from colocate.driver import SpillFile, read_free_memory
from colocate.errors import ColocateError, ConfigError, PluginError
from colocate.gpus import gpu_names
from colocate.plugins import PluginInfo, get_pip_line, plugins
from colocate.texts import format_size
from colocate_run.cli.output import error_to_json, leaf_errors, load_command_config, print_errors, print_json
from colocate_run.environment import describe_environment
from colocate_run.launch import reserve_pool
from colocate_run.screen import console, show_table

_SPILL_DIR = "spill_dir"
_SHM = Path("/dev/shm")
_SMALL_SHM = 1 << 30  # In bytes. Containers have 64 MiB by default.


def examine(
    file: Path | None, executor: str | None, changes: Iterable[str], *, json: bool, allow_import: bool = True
) -> int:
    """Print versions, devices and plugins; return exit status 1 if the given config would not work here."""
    spill_folder, faults = (None, []) if file is None else _examine_config(file, executor, changes, allow_import)
    devices = {**_describe_devices(), "memory that sleeps": _describe_offload(spill_folder)}
    plugin_faults = [(plugin, plugin.fault()) for plugin in plugins()]
    if json:
        rows = [{**attrs.asdict(plugin), "fault": fault and fault.message} for plugin, fault in plugin_faults]
        data = {"versions": describe_environment(), "devices": devices, "plugins": rows}
        if file is not None:
            data["config"] = {"file": str(file), "errors": [error_to_json(error) for error in faults]}
        print_json(data)
        return 1 if faults else 0
    to = console()
    show_table("versions", [{"": name, "version": text} for name, text in describe_environment().items()], to)
    show_table("devices", [{"": name, "found": text} for name, text in devices.items()], to)
    show_table("plugins", [_plugin_row(plugin, fault) for plugin, fault in plugin_faults], to)
    if file is not None:
        to.print(f"\n{file}: {'would not work here' if faults else 'works here'}", markup=False, soft_wrap=True)
        print_errors(faults, as_json=False)
    return 1 if faults else 0


def _examine_config(
    file: Path, executor: str | None, changes: Iterable[str], allow_import: bool
) -> tuple[str | None, list[ColocateError]]:
    """Return the spill folder that a config names, and the errors with which the config fails on this machine.

    The errors are mistakes in the config, or refusals of the executor to reserve the pools.
    """
    spill_folder: str | None = None
    try:
        config = load_command_config(file, executor, changes, allow_import=allow_import)
        spill_folder = config.executor.with_.get(_SPILL_DIR)
        # Reserve all pools together for a moment, without starting workers.
        with connect(config.executor.use, seed=config.seed, **config.executor.with_) as runtime:
            pools = [reserve_pool(runtime, name, config) for name in config.pools]
            if spill_folder is not None and any(slot.node == platform.node() for pool in pools for slot in pool.slots):
                try:
                    SpillFile.create_somewhere(spill_folder).close()
                except ValueError as error:
                    raise ConfigError(f"{_SPILL_DIR}={spill_folder!r}: {error}") from None
    except ColocateError as error:
        return spill_folder, [error]
    except ExceptionGroup as group:
        ours, rest = group.split(ColocateError)
        if ours is None or rest is not None:
            raise
        return spill_folder, leaf_errors(ours)
    return spill_folder, []


def _plugin_row(plugin: PluginInfo, fault: PluginError | None) -> dict[str, Any]:
    state = "works" if fault is None else fault.message
    # An error that was raised `from None` has the cause only in `__context__`.
    cause = None if fault is None else fault.__cause__ or fault.__context__
    if fault is not None and fault.hint and isinstance(cause, ModuleNotFoundError):
        state = f"needs {cause.name}: {fault.hint}"  # This is no error, because the plugin is optional.
    return {"name": plugin.name, "kind": plugin.brings, "from": plugin.origin, "state": state}


def _describe_devices() -> dict[str, str]:
    gpus = f"unknown: torch is not installed; {get_pip_line('torch')}"
    if importlib.util.find_spec("torch") is not None:
        import torch

        names = gpu_names(torch)
        gpus = f"{len(names)} ({names[0]})" if names else "none that torch can use"
    memory = psutil.virtual_memory()
    free = read_free_memory()
    # Allow a difference of 10 %, because free memory changes between the two readings.
    limited = free < 0.9 * memory.available
    of = ", by the limit of its control group" if limited else f" of {memory.total / 2**30:.1f} GiB"
    return {
        "CPUs": describe_environment()["cpus"],
        "memory": f"{free / 2**30:.1f} GiB free{of}",
        "shared memory": describe_shared_memory(_SHM),
        "GPUs": gpus,
    }


def describe_shared_memory(folder: Path) -> str:
    """Describe the space in `/dev/shm`, which Ray's object store and DataLoader's processes need."""
    try:
        size = shutil.disk_usage(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}; Ray and DataLoader's processes need it"
    if not os.access(folder, os.W_OK | os.X_OK):
        mode = folder.stat().st_mode & 0o7777
        return f"{folder}: this user may not write there (mode {mode:o}, wanted 1777); Ray can't start"
    text = f"{folder}: {format_size(size.free)} free of {format_size(size.total)}"
    if size.total < _SMALL_SHM:
        text += "; that is little for Ray and DataLoader's processes: in a container --shm-size=8g"
    return text


def _describe_offload(wanted: str | None) -> str:
    try:
        spill = SpillFile.create_somewhere(wanted)
    except ValueError as error:
        return str(error)
    with closing(spill):
        return f"goes to {spill.directory} ({shutil.disk_usage(spill.directory).free / 2**30:.1f} GiB free)"
