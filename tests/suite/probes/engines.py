"""Roles that manage memory and processes of their own, as engines for generation do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.suite.probes.sleepers import Dozing

import colocate
from colocate import Role, method
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")

BYTES = 1 << 20


class Engine:
    """An engine with a cache that core must not move."""

    def __init__(self, device: Any) -> None:
        self.cache = torch.ones(BYTES // 4, device=device)
        self.awake = True


class EngineUser(Role):
    """A role with an engine."""

    def __init__(self, file: str | None = None, wrong: bool = False) -> None:
        self.engine, self.file, self.wrong = Engine(self.ctx.device), file, wrong
        self.own_tensor = torch.ones(BYTES // 4, device=self.ctx.device)

    def managed(self) -> Mapping[str, Any]:
        return {"cash": 1} if self.wrong else {"cache": BYTES if self.engine.awake else 0}

    def apart(self) -> Sequence[object]:
        return [self.engine]

    def sleep(self, tags: Sequence[str]) -> None:
        self.engine.awake = self.engine.awake and "cache" not in tags

    def wake(self, tags: Sequence[str]) -> None:
        self.engine.awake = True

    @method(awake=())
    def state(self) -> tuple[bool, int]:
        """Return whether the engine is awake, and the bytes of its cache."""
        return self.engine.awake, self.engine.cache.untyped_storage().nbytes()

    @method
    def use(self) -> bool:
        return self.engine.awake

    @method
    def ranks(self) -> int:
        """Return the size of the role's process group."""
        return torch.distributed.get_world_size(self.ctx.process_group())

    def close(self) -> None:
        if self.file is not None:
            Path(f"{self.file}-{self.ctx.rank}").write_text(str(self.ranks()))
        elif self.wrong:
            raise RuntimeError("the engine doesn't end")


class Borrower(Role):
    """A role that uses another role's weights for one call."""

    @method
    def borrow(self, name: str, awake: Sequence[str] | None = None) -> float:
        with self.ctx.borrow(name, Dozing, awake=awake) as other:
            return float(other.net.weight.detach().sum())


@colocate.needs("process")
class LoneEngine(Role):
    """A role that needs a process of its own."""

    @method
    def nothing(self) -> None: ...
