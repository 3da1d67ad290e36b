"""Roles that change what torch has set for their thread or process. Needs torch."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from colocate import Context, First, Role, method


def told() -> dict[str, Any]:
    """What torch computes with when nothing is said."""
    import torch

    made = torch.ones(1)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None,
        "dtype": str(made.dtype),
        "device": made.device.type,
    }


def told_by(ctx: Context) -> dict[str, Any]:
    """The same, as a plain function on a worker."""
    return told()


def change(dtype: bool) -> list[Any]:
    """Set what is for the thread, and what is for the process if that is wanted: what has been begun for good."""
    import torch

    blocks: list[Any] = [torch.inference_mode(), torch.autocast("cpu", torch.float16)]
    for block in blocks:
        block.__enter__()
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    if dtype:
        torch.set_default_dtype(torch.float64)
    return blocks


class Changing(Role):
    """Sets something in its constructor, or in a method."""

    def __init__(self, changes: bool = False, dtype: bool = False) -> None:
        self._dtype = dtype
        self._blocks = change(dtype) if changes else []

    @method
    def told(self) -> dict[str, Any]:
        """What is set."""
        return told()

    @method
    def change(self) -> dict[str, Any]:
        """Set it, and what is set then."""
        self._blocks += change(self._dtype)
        return told()

    @method
    def change_and_fail(self) -> None:
        """Set it, and raise."""
        self._blocks += change(self._dtype)
        raise ValueError("on purpose")

    @method(concurrency=2)
    async def soon(self) -> dict[str, Any]:
        """What is set, beside others."""
        return told()

    @method(concurrency=3)
    async def across(self, block: bool) -> list[dict[str, Any]]:
        """What is set before and after each time that it waits, and so in tasks of its own; in blocks, if wanted."""
        import torch

        with contextlib.ExitStack() as stack:
            if block:
                stack.enter_context(torch.inference_mode())
                stack.enter_context(torch.autocast("cpu", torch.float16))
                stack.enter_context(torch.device("meta"))
            found = await self._across()
            for one in await asyncio.gather(self._across(), self._across()):
                found += one
        return found

    async def _across(self) -> list[dict[str, Any]]:
        found = [told()]
        for _ in range(3):
            await asyncio.sleep(0)
            found.append(told())
        return found

    def save(self, directory: str) -> None:
        """A hook, which runs on the lane as well."""
        self.saved = told()

    def restore(self, directory: str) -> None:
        """Nothing is needed."""

    @method
    def when_saved(self) -> dict[str, Any]:
        """What was set in `save`."""
        return self.saved


class Casting(Role):
    """Computes in 16 bits for good, as its constructor has said."""

    def __init__(self) -> None:
        import torch

        self._blocks: list[Any] = [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)]
        for block in self._blocks:
            block.__enter__()

    @method(collect=First())
    def dtype(self) -> str:
        """Of what a layer computes."""
        import torch

        return str(torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype)


class Learning(Role):
    """Fits a weight, in blocks of autocast if wanted."""

    def __init__(self) -> None:
        import torch

        self._weight = torch.nn.Parameter(torch.zeros(1, 1))

    @method(collect=First())
    def step(self, casts: bool) -> float:
        """Take a step; what the layer has computed before."""
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = torch.nn.functional.linear(torch.ones(1, 1), self._weight).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            assert self._weight.grad is not None
            self._weight.add_(self._weight.grad)
            self._weight.grad = None
        return loss.item()
