"""Process groups of ranks that aren't there: models are put into shards, and nothing is sent."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from colocate._role.context import Context
from colocate.errors import ColocateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def planned_world(ranks: int) -> Iterator[None]:
    """While the block runs, this process is the first of so many ranks, of which the others only seem to be there."""
    import torch.distributed as dist

    # Torch has them for tests of its own; there is no public way to them.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with _unsynchronized():
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch has put its own there


@contextmanager
def _unsynchronized() -> Iterator[None]:
    """While the block runs, `DistributedDataParallel` compares and sends nothing: to compare it reads numbers."""
    from torch.nn.parallel import DistributedDataParallel

    wrapper: Any = DistributedDataParallel
    construct = wrapper.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def constructed(*args: Any, **named: Any) -> None:
        bound = signature.bind(*args, **named)
        bound.arguments.update(init_sync=False, device_ids=None, output_device=None)  # the meta device has no index
        construct(*bound.args, **bound.kwargs)

    wrapper.__init__ = constructed
    try:
        yield
    finally:
        wrapper.__init__ = construct


@attrs.define(eq=False)
class PlannedGroups:
    """The groups of one role, which has the first ranks."""

    _mesh: dict[str, DeviceMesh] = attrs.field(factory=dict, init=False)

    def get(self, ctx: Context, axis: str | None) -> ProcessGroup:
        """See `Context.process_group`."""
        import torch.distributed as dist

        if axis is None:
            group: Any = dist.new_group(list(range(ctx.world_size)))
            return group  # type: ignore[no-any-return]
        mesh, _, name = axis.rpartition(".")
        holding = mesh or next(key for key, place in ctx.meshes.items() if name in place.shape)
        return self.mesh(ctx, holding).get_group(name)

    def mesh(self, ctx: Context, name: str | None) -> DeviceMesh:
        """See `Context.device_mesh`."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        which = next(iter(ctx.meshes)) if name is None else name
        if which not in self._mesh:
            shape = ctx.meshes[which].shape
            with torch.device("cpu"):  # whatever else is made is on the meta device
                ranks = torch.arange(ctx.world_size).reshape([*shape.values()])
                self._mesh[which] = DeviceMesh("cpu", ranks, mesh_dim_names=(*shape,))
        return self._mesh[which]

    def rendezvous(self) -> tuple[str, int]:
        """See `Context.rendezvous`: there is nobody to meet."""
        raise ColocateError("ctx.rendezvous: nobody is there to meet where memory is only planned")

    def make_again(self, ctx: Context) -> None:
        """None is ever dropped."""
