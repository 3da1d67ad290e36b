"""What goes to sleep, and what stays: laws of the plans, without a worker."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from colocate.features.memory.sleep import unneeded  # noqa: E402
from colocate.worker.holdings import Objects, held_by  # noqa: E402


@pytest.mark.parametrize("kind", ["frozen", "optimized", "differentiated", "sparse"])
def test_weights_are_no_cache(kind: str) -> None:
    """Also of a role that has them in no module; nor are indices, which zeros would make invalid."""

    class Role:
        def __init__(self) -> None:
            self.weights, self.cache = torch.ones(1000), torch.ones(1000)

    role = Role()
    if kind == "frozen":
        role.weights = torch.nn.Parameter(role.weights, requires_grad=False)
    elif kind == "optimized":
        role.optimizer = torch.optim.SGD([role.weights], lr=0.1)  # type: ignore[attr-defined]
    elif kind == "differentiated":
        role.weights.requires_grad_()
    else:
        role.weights = torch.eye(30).to_sparse()
    found, _ = held_by(role, storages=Objects)
    lost = unneeded(found, ("grads", "cache"), ())
    values = {role.weights._values().untyped_storage()._cdata} if kind == "sparse" else set()
    assert lost == {role.cache.untyped_storage()._cdata} | values
