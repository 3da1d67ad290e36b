"""A role with several meshes, and functions for `group.run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocate import Concat, First, Gather, Reduce, Role, Scatter, method

if TYPE_CHECKING:
    pass


class Meshes(Role):
    """Rows through a mesh for training and one for inference. Rows say along which ranks they have come."""

    @method
    def places(self) -> dict[str, dict[str, tuple[int, int]]]:
        return {
            name: {axis: (mesh.rank(axis), mesh.size(axis)) for axis in ("pp", "dp", "tp")}
            for name, mesh in self.ctx.meshes.items()
        }

    @method
    def only_mesh(self) -> dict[str, int]:
        return dict(self.ctx.mesh.shape)

    @method(dispatch=Scatter("batch", mesh="train"), collect=Gather())
    def train_seen(self, batch: list[Any]) -> list[Any]:
        return batch

    @method(dispatch=Scatter("batch", mesh="infer"), collect=Gather())
    def infer_seen(self, batch: list[Any]) -> list[Any]:
        return batch

    @method(dispatch=Scatter("batch", mesh="train", empty="run"), collect=Concat(mesh="train"))
    def train(self, batch: list[int]) -> list[int]:
        return [row + 1 for row in batch]

    @method(dispatch=Scatter("batch", mesh="infer", empty="run"), collect=Concat(mesh="infer"))
    def infer(self, batch: list[int]) -> list[int]:
        return [2 * row for row in batch]

    @method(dispatch=Scatter("batch", mesh="train"), collect=Concat(mesh="train"))
    def staged(self, batch: list[int]) -> list[int] | None:
        """Minus each row; as in pipelined training, only the last stage has a result."""
        mesh = self.ctx.meshes["train"]
        return [-row for row in batch] if mesh.rank("pp") == mesh.size("pp") - 1 else None

    @method(dispatch=Scatter("batch", mesh="train"), collect=Concat(mesh="infer"))
    def reshard(self, batch: list[int]) -> list[tuple[int, int]]:
        """Split along one mesh and joined along the other, with the rank."""
        return [(row, self.ctx.rank) for row in batch]

    @method(dispatch=Scatter("batch", mesh="infer", axis="tp"), collect=Concat(mesh="train", axis="pp"))
    def along_others(self, batch: list[int]) -> list[tuple[int, int]]:
        """Split along another axis than dp, with the rank."""
        return [(row, self.ctx.rank) for row in batch]

    @method(dispatch=Scatter("batch", mesh="train", pad=True), collect=Concat(mesh="train"))
    def padded(self, batch: list[int]) -> list[int]:
        return batch

    @method(collect=First(mesh="train"))
    def first_of_train(self) -> int:
        return self.ctx.rank

    @method(collect=First(mesh="infer"))
    def first_of_infer(self) -> int:
        return self.ctx.rank

    @method(dispatch=Scatter("batch", mesh="train"), collect=Reduce("mean", mesh="train"))
    def mean(self, batch: list[float]) -> float:
        return sum(batch) / len(batch)

    @method(collect=Reduce("sum", axis="pp", mesh="train"))
    def stages(self) -> int:
        return 1 + self.ctx.meshes["train"].rank("pp")

    @method(dispatch=Scatter("batch"), collect=Gather())
    def which(self, batch: list[int]) -> list[int]:
        return batch
