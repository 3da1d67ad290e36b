"""A role with several meshes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocate import Concat, First, Gather, Reduce, Role, Scatter, method

if TYPE_CHECKING:
    pass


class Meshes(Role):
    """A role whose methods split and join rows along a mesh for training and a mesh for inference."""

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
        """Return the negated rows on the last stage of the pipeline, and None on the other stages."""
        mesh = self.ctx.meshes["train"]
        return [-row for row in batch] if mesh.rank("pp") == mesh.size("pp") - 1 else None

    @method(dispatch=Scatter("batch", mesh="train"), collect=Concat(mesh="infer"))
    def reshard(self, batch: list[int]) -> list[tuple[int, int]]:
        """Return each row with its rank, for rows that are split along one mesh and joined along another mesh."""
        return [(row, self.ctx.rank) for row in batch]

    @method(dispatch=Scatter("batch", mesh="infer", axis="tp"), collect=Concat(mesh="train", axis="pp"))
    def along_others(self, batch: list[int]) -> list[tuple[int, int]]:
        """Return each row with its rank, for rows that are split and joined along axes other than dp."""
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
