"""Ray's own fast paths, beside the same here: compiled graphs for calls, direct transport over gloo for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from tests.bench.engines import own_ray
from tests.bench.measure import side_by_side
from tests.bench.rows import Row

import colocate
from colocate import First, Role, method

_TENSOR_BYTES = 64 << 20


class Bare:
    """What Ray's actors run."""

    def noop(self, x: Any) -> None:
        """Nothing."""

    def make(self) -> torch.Tensor:
        """What stays where it was made."""
        return torch.ones(_TENSOR_BYTES // 4)

    def take(self, x: torch.Tensor) -> float:
        """One item of it."""
        return float(x[0])


class Probe(Role):
    """The same as a role."""

    @method(collect=First())
    def noop(self) -> None:
        """Nothing."""

    @method(collect=First())
    def make(self) -> torch.Tensor:
        """What stays where it was made."""
        return torch.ones(_TENSOR_BYTES // 4)

    @method(collect=First())
    def take(self, x: torch.Tensor) -> float:
        """One item of it."""
        return float(x[0])


@attrs.frozen
class Paths:
    """Ray's."""

    noop: Callable[[], object]
    hand_over: Callable[[], object]


@contextmanager
def _ray() -> Iterator[Paths]:
    """Two pairs of actors on a Ray of their own: one compiled to a graph, one with a group of gloo's."""
    with own_ray() as ray:
        from ray.dag import InputNode, MultiOutputNode
        from ray.experimental.collective import create_collective_group

        actor: Any = ray.remote(type("Direct", (Bare,), {"make": ray.method(tensor_transport="gloo")(Bare.make)}))
        pair = [actor.remote() for _ in range(2)]
        with InputNode() as given:
            graph: Any = MultiOutputNode([one.noop.bind(given) for one in pair]).experimental_compile()
        maker, taker = actor.remote(), actor.remote()
        create_collective_group([maker, taker], backend="torch_gloo")
        yield Paths(
            lambda: ray.get(graph.execute(0)),
            lambda: ray.get(taker.take.remote(maker.make.remote())),
        )
        graph.teardown()


def rows() -> Iterator[Row]:
    """Calls, then a tensor from one process to another."""
    with ExitStack() as stack:
        bare = stack.enter_context(_ray())
        runtime = stack.enter_context(colocate.connect("ray", cpus=8))
        both = stack.enter_context(runtime.reserve(slots=2)).spawn({"probe": colocate.role(Probe)})
        noop = both.role("probe", Probe).noop
        maker, taker = (
            stack.enter_context(runtime.reserve(slots=1)).spawn({"probe": colocate.role(Probe)}).role("probe", Probe)
            for _ in range(2)
        )

        def hand_over() -> None:
            with maker.make.keep() as made:
                taker.take(made.ref)

        part = "Ray's own fast paths"
        timed = side_by_side({"theirs": bare.noop, "ours": noop}, rounds=20, calls=50)
        yield Row(part, "a call that does nothing, 2 slots, compiled graph", timed["theirs"].least * 1e6, "µs")
        yield Row(part, "ours to that", timed["ours"].over(timed["theirs"]), "x")
        timed = side_by_side({"theirs": bare.hand_over, "ours": hand_over}, rounds=8, calls=1)
        yield Row(
            part, "64 MB made in one process, used in another, direct over gloo", timed["theirs"].least * 1e3, "ms"
        )
        yield Row(part, "ours to that", timed["ours"].over(timed["theirs"]), "x")
