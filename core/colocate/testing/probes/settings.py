"""Roles that change what torch has set for their thread or process. Needs torch."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from colocate import Context, Role, method


def told() -> dict[str, Any]:
    """What torch computes with when nothing is said."""
    import torch

    made = torch.ones(1)
    return {"grad": torch.is_grad_enabled(), "dtype": str(made.dtype), "device": made.device.type}


def told_by(ctx: Context) -> dict[str, Any]:
    """The same, as a plain function on a worker."""
    return told()


def change(dtype: bool) -> None:
    """Set what is for the thread, and what is for the process if that is wanted."""
    import torch

    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    if dtype:
        torch.set_default_dtype(torch.float64)


class Changing(Role):
    """Sets something in its constructor, or in a method."""

    def __init__(self, changes: bool = False, dtype: bool = False) -> None:
        self._dtype = dtype
        if changes:
            change(dtype)

    @method
    def told(self) -> dict[str, Any]:
        """What is set."""
        return told()

    @method
    def change(self) -> dict[str, Any]:
        """Set it, and what is set then."""
        change(self._dtype)
        return told()

    @method
    def change_and_fail(self) -> None:
        """Set it, and raise."""
        change(self._dtype)
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
                stack.enter_context(torch.no_grad())
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


class Asking(Role):
    """Asks for another role's object in a block in which it has set something."""

    @method
    def reach(self, role: str) -> dict[str, Any]:
        """What is set when it has it."""
        import torch

        with torch.inference_mode(), torch.device("meta"):
            self.ctx.sibling(role)
            return {**told(), "inference": torch.is_inference_mode_enabled()}
