"""A user's script on Ray, whose workers call Ray; a driver that is a Ray actor; a second Ray after the first."""

import json
import sys

import ray
import torch
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import Plain  # beside this script


def spawned(count=1):
    return RayWorkerGroup(RayResourcePool([count], use_gpu=False), RayClassWithInitArgs(ray.remote(Plain), 5))


def place(worker):
    context = ray.get_runtime_context()
    return context.get_job_id(), context.namespace, context.get_accelerator_ids()["GPU"]


def adds(worker):
    return ray.get(ray.get_actor("counter").add.remote(worker.rank + 1))


def reduces(worker):
    import ray.util.collective as collective

    collective.init_collective_group(2, worker.rank, backend="gloo", group_name="both")
    found = torch.tensor([float(worker.rank + 1)])
    collective.allreduce(found, group_name="both")
    return found.item()


@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def add(self, more):
        self.count += more
        return self.count


@ray.remote
class Runner:
    def run(self):
        return spawned().to_all(1)


def start():
    ray.init(num_cpus=16, num_gpus=0, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])


start()
group, counter, mine = spawned(2), Counter.options(name="counter").remote(), ray.get_runtime_context()
found = {
    "driver": (mine.get_job_id(), mine.namespace, []),
    "workers": ray.get([worker.__ray_call__.remote(place) for worker in group.workers]),
    "counts": sorted(ray.get([worker.__ray_call__.remote(adds) for worker in group.workers])),
    "mixed": ray.get([counter.add.remote(1), group.workers[0].number.remote()]),
    "reduced": ray.get([worker.__ray_call__.remote(reduces) for worker in group.workers]),
    "by an actor": ray.get(Runner.remote().run.remote()),
}
ray.shutdown()
start()
found["again"] = spawned().to_all(1)
ray.shutdown()
print(json.dumps(found))
