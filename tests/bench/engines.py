"""Ray and Dask: calls, tensors and starts, beside the bare engine in the same run."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from tests.bench.measure import median_s, side_by_side
from tests.bench.rows import Row

import colocate
from colocate import First, Role, method

TENSOR_BYTES = 64 << 20
_PIPELINED = 300
_STARTS = 7
_WARM_AFTER_S = 0.5


class Bare:
    """The class of an engine's own actors."""

    def noop(self, _: Any = None) -> None:
        """Do nothing."""

    def echo(self, x: Any) -> Any:
        return x


class Probe(Role):
    """The same methods as a role."""

    @method(collect=First())
    def noop(self) -> None:
        """Do nothing."""

    @method(collect=First())
    def echo(self, x: Any) -> Any:
        return x


@attrs.frozen
class Actors:
    noop: Callable[[], object]
    pipelined: Callable[[], object]
    echo: Callable[[Any], object]
    start: Callable[[], object]


@contextmanager
def own_ray() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
        import ray

        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def bare_ray() -> Iterator[Actors]:
    with own_ray() as ray:
        actor: Any = ray.remote(Bare)
        actors = [actor.options(num_cpus=1).remote() for _ in range(2)]

        def start() -> None:
            made = [actor.options(num_cpus=1).remote() for _ in range(2)]
            ray.get([one.noop.remote() for one in made])
            for one in made:
                ray.kill(one)

        yield Actors(
            lambda: ray.get([one.noop.remote() for one in actors]),
            lambda: ray.get([actors[0].noop.remote() for _ in range(_PIPELINED)]),
            lambda x: ray.get(actors[0].echo.remote(x)),
            start,
        )


@contextmanager
def bare_dask() -> Iterator[Actors]:
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=2, processes=True, **options) as cluster, Client(cluster) as client:
        workers = list(client.scheduler_info()["workers"])

        def made(worker: str) -> Any:
            return client.submit(Bare, actor=True, workers=[worker], pure=False).result()

        actors = [made(worker) for worker in workers]
        yield Actors(
            lambda: [future.result() for future in [one.noop() for one in actors]],
            lambda: [future.result() for future in [actors[0].noop() for _ in range(_PIPELINED)]],
            lambda x: actors[0].echo(x).result(),
            lambda: [made(worker).noop().result() for worker in workers],
        )


_BARE = {"ray": bare_ray, "dask": bare_dask}


def rows() -> Iterator[Row]:
    for engine in _BARE:
        yield from _engine(engine)


def _engine(engine: str) -> Iterator[Row]:
    title = engine.capitalize()
    with ExitStack() as stack:
        bare = stack.enter_context(_BARE[engine]())
        runtime = stack.enter_context(colocate.connect(engine, cpus=8))
        group = stack.enter_context(runtime.reserve(slots=2)).spawn({"probe": colocate.role(Probe)})
        probe = group.role("probe", Probe)
        alone = stack.enter_context(runtime.reserve()).spawn({"probe": colocate.role(Probe)}).role("probe", Probe)
        yield from _calls(title, bare, probe, alone)
        yield from _tensors(title, bare, alone)
        yield from _starts(title, bare, runtime)


def _calls(title: str, bare: Actors, probe: Probe, alone: Probe) -> Iterator[Row]:
    part = f"{title}: calls beside bare {title} actors"
    timed = side_by_side({"bare": bare.noop, "ours": probe.noop}, rounds=20, calls=50)
    yield Row(part, "a call that does nothing, 2 slots", timed["ours"].least * 1e6, "µs")
    bars = {"Ray": 1.15, "Dask": 0.95}
    yield Row(part, "to bare actors", timed["ours"].over(timed["bare"]), "x", bars[title])

    def pipelined() -> None:
        for call in [alone.noop.submit() for _ in range(_PIPELINED)]:
            call.result()

    timed = side_by_side({"bare": bare.pipelined, "ours": pipelined}, rounds=8, calls=1)
    yield Row(part, "pipelined calls, 1 slot", _PIPELINED / timed["ours"].least, "calls/s")
    yield Row(part, "time of those to bare actors", timed["ours"].over(timed["bare"]), "x", 0.25)


def _tensors(title: str, bare: Actors, alone: Probe) -> Iterator[Row]:
    part = f"{title}: a 64 MB tensor there and back, 1 slot"
    x = torch.rand(TENSOR_BYTES // 4)
    timed = side_by_side({"bare": lambda: bare.echo(x), "ours": lambda: alone.echo(x)}, rounds=8, calls=1)
    yield Row(part, "time", timed["ours"].least * 1e3, "ms")
    bars = {"Ray": 0.35, "Dask": 1.3}
    yield Row(part, "to a bare actor given the tensor", timed["ours"].over(timed["bare"]), "x", bars[title])


def _starts(title: str, bare: Actors, runtime: colocate.Runtime) -> Iterator[Row]:
    """Time spawns in a pool whose keepers had time to start their first workers."""
    part = f"{title}: spawn of 2 slots with 4 roles, {_WARM_AFTER_S:g} s after reserve"
    roles = {name: colocate.role(Probe) for name in ("a", "b", "c", "d")}
    ours, ratios = [], []
    for _ in range(_STARTS):
        theirs = median_s(bare.start, 1)
        with runtime.reserve(slots=2) as pool:
            time.sleep(_WARM_AFTER_S)
            ours.append(median_s(lambda pool=pool: pool.spawn(roles), 1))
        ratios.append(ours[-1] / theirs)
    yield Row(part, "time", statistics.median(ours) * 1e3, "ms", 150.0 if title == "Dask" else None)
    if title == "Ray":
        yield Row(part, "to creating 2 bare actors", statistics.median(ratios), "x", 1.3)
