"""Roles that change torch's settings, or return the devices of their arguments. Needs torch."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate import Concat, Context, Gather, PerRank, Role, Scatter, method
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")


def read_settings() -> dict[str, Any]:
    """Return torch's current settings."""
    tensor = torch.ones(1)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None,
        "dtype": str(tensor.dtype),
        "device": tensor.device.type,
    }


def read_settings_on_worker(ctx: Context) -> dict[str, Any]:
    """Return torch's settings on a worker."""
    return read_settings()


def change_settings(dtype: bool) -> list[Any]:
    """Change the thread's settings, and the process's dtype if wanted; return the entered blocks."""
    blocks: list[Any] = [torch.inference_mode(), torch.autocast("cpu", torch.float16)]
    for block in blocks:
        block.__enter__()
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    if dtype:
        torch.set_default_dtype(torch.float64)
    return blocks


class SettingsChanger(Role):
    """A role that changes settings in its constructor or in a method."""

    def __init__(self, changes: bool = False, dtype: bool = False) -> None:
        self._dtype = dtype
        self._blocks = change_settings(dtype) if changes else []

    @method
    def read_settings(self) -> dict[str, Any]:
        return read_settings()

    @method
    def change_settings(self) -> dict[str, Any]:
        self._blocks += change_settings(self._dtype)
        return read_settings()

    @method
    def change_and_fail(self) -> None:
        self._blocks += change_settings(self._dtype)
        raise ValueError("on purpose")

    @method(concurrency=2)
    async def soon(self) -> dict[str, Any]:
        return read_settings()

    @method(concurrency=3)
    async def across(self, block: bool) -> list[dict[str, Any]]:
        """Return the settings before and after each await, also in tasks; inside blocks, if wanted."""
        with contextlib.ExitStack() as stack:
            if block:
                stack.enter_context(torch.inference_mode())
                stack.enter_context(torch.autocast("cpu", torch.float16))
                stack.enter_context(torch.device("meta"))
            facts = await self._across()
            for one in await asyncio.gather(self._across(), self._across()):
                facts += one
        return facts

    async def _across(self) -> list[dict[str, Any]]:
        facts = [read_settings()]
        for _ in range(3):
            await asyncio.sleep(0)
            facts.append(read_settings())
        return facts

    def save(self, directory: str) -> None:
        self.saved = read_settings()
        Path(directory, str(self.ctx.rank)).touch()

    def restore(self, directory: str) -> None:
        """Do nothing."""


@attrs.frozen
class Batch:
    """A user's record."""

    tokens: Any
    texts: tuple[str, ...] = ()


def list_devices(value: Any) -> Any:
    """Return the devices of a value's tensors, in the value's structure."""
    if isinstance(value, dict):
        return {key: list_devices(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [list_devices(item) for item in value]
    if isinstance(value, Batch):
        return list_devices(value.tokens)
    if hasattr(value, "parameters"):
        return [str(parameter.device) for parameter in value.parameters()]
    return str(value.device) if hasattr(value, "device") else value


def list_devices_on_worker(ctx: Context, value: Any) -> Any:
    """Return the devices of an argument's tensors on a worker."""
    return list_devices(value)


class DeviceReader(Role):
    """A role that returns the devices of its arguments."""

    def __init__(self, given: Any = None) -> None:
        self.argument_devices = list_devices(given)

    @method
    def constructed(self) -> Any:
        return self.argument_devices

    @method
    def broadcast(self, x: Any) -> Any:
        return list_devices(x)

    @method(dispatch=Scatter("x"), collect=Gather())
    def scattered(self, x: Any) -> Any:
        return list_devices(x)

    @method(dispatch=PerRank("x"))
    def each(self, x: Any) -> Any:
        return list_devices(x)

    @method(dispatch=Scatter("x", "lengths"), collect=Gather(), host=("lengths", "more"))
    def mixed(self, x: Any, lengths: Any, *, more: Any = None) -> Any:
        return list_devices([x, lengths, more])

    @method(concurrency=2)
    async def soon(self, x: Any) -> Any:
        return list_devices(x)

    @method(collect=Concat())
    def make(self, rows: int) -> torch.Tensor:
        """Return a tensor on the host, whatever the slot's device."""
        return torch.ones(rows, 2)

    @method
    def make_record(self) -> Any:
        return Batch(self.make(1))
