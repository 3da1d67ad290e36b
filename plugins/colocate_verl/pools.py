"""verl's resource pools, on slots of colocate's."""

from __future__ import annotations

from typing import Any, NoReturn

from verl.single_controller.base import ResourcePool  # pyright: ignore[reportMissingImports]

from colocate.errors import CapabilityError, ConfigError

from . import private
from .driver import Slots


class Placements(list[Any]):
    """What stands for the placement groups of a resource pool: there are none, and it only says which pool it is of."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def __repr__(self) -> str:
        return f"<the slots of resource pool {self.slots.name!r}, which are colocate's and no placement groups>"


class RayResourcePool(ResourcePool):  # type: ignore[misc]  # verl isn't there when types are checked
    """Slots, reserved when the first worker group is made on them."""

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        if detached:
            raise CapabilityError(
                "RayResourcePool(detached=True): not by verl's name; colocate has pool.detach(name, ttl=...)"
            )
        if accelerator_type is not None:
            raise CapabilityError(
                f"RayResourcePool(accelerator_type={accelerator_type!r}): colocate reserves GPUs of any type"
            )
        self.use_gpu = use_gpu
        self.name_prefix = private.home().get_random_string(length=6) if name_prefix is None else name_prefix
        self.detached = detached
        self.accelerator_type = accelerator_type
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        """Its slots, of as many as `store` says when they are first asked for."""
        if self._slots is None:
            if not self.store or min(self.store) < 1:
                raise ConfigError(
                    f"RayResourcePool(process_on_nodes={self.store}): name at least one process on each node"
                )
            self._slots = Slots(tuple(self.store), self.name_prefix, self.max_colocate_count, 0, sum(self.store))
        return self._slots

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> Placements:
        """Return what stands for them."""
        return Placements(self.slots)

    @property
    def pgs(self) -> Placements:
        """What stands for its placement groups."""
        return Placements(self.slots)

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"the resource pool {self.name_prefix!r} lives with its driver and can't be sent to a Ray actor"
        )


class SubRayResourcePool(RayResourcePool):
    """A part of another pool's slots."""

    def __init__(
        self, placement_groups: Placements, start_bundle_index: int, subgroup_world_size: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.start_bundle_index = int(start_bundle_index)
        self.subgroup_world_size = subgroup_world_size
        self._slots = placement_groups.slots.part(self.start_bundle_index, subgroup_world_size)

    @property
    def world_size(self) -> int:
        """How many slots it has."""
        return self.subgroup_world_size


class ResourcePoolManager(private.home().ResourcePoolManager):  # type: ignore[misc]
    """verl's, but for the count of GPUs: a pool that doesn't fit is an error of its reservation."""

    def _check_resource_available(self) -> None: ...


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> NoReturn:
    """Refuse: slots are reserved together."""
    raise CapabilityError(
        "merge_resource_pool: colocate reserves the slots of a pool together; make one pool, and split_resource_pool"
    )
