"""Samples the GPUs of a node by NVML, on a separate thread of one worker per node."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from colocate import gpus
from colocate._protocol.message import Message
from colocate._system.installed import get_pip_line
from colocate._system.jobs import JobThread, format_error, report_exception
from colocate.features.devices.messages import AskDevices, DeviceReport, Sampled
from colocate.worker.context import WorkerContext
from colocate.worker.hooks import WorkerFeature

_ENDS_WITHIN_S = 1.0


class DevicesOfWorker(WorkerFeature):
    """Samples GPUs at the driver's request. NVML is loaded at the first request."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._worker_context = worker_context
        name = f"colocate-devices-{worker_context.boot.worker}"
        self._jobs = JobThread(name, lambda error: report_exception())
        self._nvml: _Nvml | None = None

    def on_message(self, message: Message, body: Any) -> None:
        """Queue a request for samples on the sampling thread."""
        assert isinstance(message, AskDevices)
        with suppress(RuntimeError):  # No thread could be started. The driver asks again in a second.
            self._jobs.call_soon(partial(self._send_samples, message.uuids))

    def close(self) -> None:
        """Stop the sampling thread."""
        self._jobs.close(_ENDS_WITHIN_S)

    def _send_samples(self, uuids: Sequence[str]) -> None:
        own_uuid, samples, trouble = "", list[Sampled](), ""
        try:
            if self._nvml is None:
                self._nvml = _Nvml()
            if uuids:
                samples = self._nvml.sample_devices(uuids)
            else:
                own_uuid = self._nvml.find_uuid(self._worker_context.boot.device)
        except ModuleNotFoundError:
            trouble = f"nvidia-ml-py isn't installed: {get_pip_line('gpu')}"
        except Exception as error:  # NVIDIA's driver may raise any error, or be missing.
            trouble = format_error(error)
        self._worker_context.send_message(DeviceReport(own_uuid, samples, trouble))


class _Nvml:
    """Reads a node's GPUs by NVML."""

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("pynvml")
        self._library.nvmlInit()
        self._handles: dict[str, Any] = {}
        self._errors: Any = None

    def find_uuid(self, device: str) -> str:
        index, visible, library = int(device.partition(":")[2] or 0), gpus.list_visible_gpus(), self._library
        name = str(index) if visible is None else visible[index]
        if name.startswith("MIG-"):
            return name
        uuids = [
            _decode_text(library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(item)))
            for item in range(library.nvmlDeviceGetCount())
        ]
        return uuids[int(name)] if name.isdigit() else next(item for item in uuids if item.startswith(name))

    def sample_devices(self, uuids: Sequence[str]) -> list[Sampled]:
        for uuid in uuids:
            if uuid not in self._handles:
                self._handles[uuid] = self._library.nvmlDeviceGetHandleByUUID(uuid)
                self._register_events(self._handles[uuid])
        errors = self._new_errors()
        return [self._sample_device(uuid, errors.get(uuid, [])) for uuid in uuids]

    def _sample_device(self, uuid: str, errors: list[int]) -> Sampled:
        library, handle = self._library, self._handles[uuid]

        def asked(ask: Callable[[], Any]) -> Any:
            try:
                return ask()
            except library.NVMLError:  # This kind of GPU, or a part of a GPU, doesn't report the value.
                return None

        memory = asked(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        use = asked(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = asked(lambda: library.nvmlDeviceGetPowerUsage(handle))
        celsius = asked(lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))
        return (
            uuid,
            _decode_text(asked(lambda: library.nvmlDeviceGetName(handle)) or ""),
            None if use is None else use / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if milliwatts is None else milliwatts / 1000,
            None if celsius is None else float(celsius),
            errors,
        )

    def _register_events(self, handle: Any) -> None:
        library = self._library
        with suppress(library.NVMLError):  # In a container, the permission to register events may be lacking.
            if self._errors is None:
                self._errors = library.nvmlEventSetCreate()
            library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, self._errors)

    def _new_errors(self) -> dict[str, list[int]]:
        library, errors = self._library, dict[str, list[int]]()
        with suppress(library.NVMLError):  # NVML raises NVMLError_Timeout when there is no further event.
            while self._errors is not None:
                event = library.nvmlEventSetWait_v2(self._errors, 0)
                errors.setdefault(_decode_text(library.nvmlDeviceGetUUID(event.device)), []).append(
                    int(event.eventData)
                )
        return errors


def _decode_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
