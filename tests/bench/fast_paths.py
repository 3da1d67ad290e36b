"""Ray's own fast paths, beside colocate's: compiled graphs for calls, direct transport over gloo for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tests.bench.engines import TENSOR_BYTES, Bare, Probe, own_ray
from tests.bench.measure import side_by_side
from tests.bench.rows import Row

import colocate
from colocate import First, method


def ones() -> torch.Tensor:
    return torch.ones(TENSOR_BYTES // 4)


class Maker(Probe):
    @method(collect=First())
    def make(self) -> torch.Tensor:
        return ones()

    @method(collect=First())
    def take(self, x: torch.Tensor) -> float:
        return float(x[0])


@contextmanager
def _ray() -> Iterator[tuple[Callable[[], object], Callable[[], object], Callable[[], object]]]:
    """Yield a call of two actors by a compiled graph, the graph's teardown, and a tensor's transfer over gloo.

    Actors of a compiled graph poll without a pause, and take CPU time from all others.
    """
    with own_ray() as ray:
        from ray.dag import InputNode, MultiOutputNode
        from ray.experimental.collective import create_collective_group

        class Direct(Bare):
            @ray.method(tensor_transport="gloo")  # type: ignore[untyped-decorator]
            def make(self) -> torch.Tensor:
                return ones()

            def take(self, x: torch.Tensor) -> float:
                return float(x[0])

        actor: Any = ray.remote(Direct)
        pair = [actor.remote() for _ in range(2)]
        with InputNode() as given:
            graph: Any = MultiOutputNode([one.noop.bind(given) for one in pair]).experimental_compile()
        maker, taker = actor.remote(), actor.remote()
        create_collective_group([maker, taker], backend="torch_gloo")
        yield lambda: ray.get(graph.execute(0)), graph.teardown, lambda: ray.get(taker.take.remote(maker.make.remote()))


def rows() -> Iterator[Row]:
    with ExitStack() as stack:
        theirs, end, their_hand_over = stack.enter_context(_ray())
        runtime = stack.enter_context(colocate.connect("ray", cpus=8))
        both, maker, taker = (
            stack.enter_context(runtime.reserve(slots)).spawn({"probe": colocate.role(Maker)}).role("probe", Maker)
            for slots in (2, 1, 1)
        )

        def hand_over() -> None:
            with maker.make.keep() as made:
                taker.take(made.ref)

        part = "Ray's own fast paths"
        timed = side_by_side({"theirs": theirs, "ours": both.noop}, rounds=20, calls=50)
        yield Row(part, "a call that does nothing, 2 slots, compiled graph", timed["theirs"].least * 1e6, "µs")
        yield Row(part, "ours to that", timed["ours"].over(timed["theirs"]), "x")
        end()
        timed = side_by_side({"theirs": their_hand_over, "ours": hand_over}, rounds=8, calls=1)
        name = "64 MB made in one process, used in another, direct over gloo"
        yield Row(part, name, timed["theirs"].least * 1e3, "ms")
        yield Row(part, "ours to that", timed["ours"].over(timed["theirs"]), "x")
