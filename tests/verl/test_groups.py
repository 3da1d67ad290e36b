"""verl's worker groups on colocate: calls, classes, pools, failures and refusals."""

import asyncio
import importlib
import os
import pickle
import re

import pytest
import ray
import torch
from tests.verl.workers import Critic, Hybrid, Plain
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import (
    SubRayResourcePool,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    merge_resource_pool,
    split_resource_pool,
)

import colocate
from colocate.driver import Driver, RecentCalls
from colocate_verl import group_of
from colocate_verl.driver import ENGINE


def spawned(cls, *args, count=2, **options):
    pool = RayResourcePool([count], use_gpu=False)
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args), **options)


@pytest.fixture(scope="module")
def plain():
    return spawned(ray.remote(Plain), 5, name_prefix="mine", worker_env={"OF_MINE": "yes"})


def rows(count):
    return DataProto.from_dict({"a": torch.zeros(count)})


class TestCalls:
    def test_each_way(self, plain):
        assert plain.world_size == 2
        assert plain.to_all(1) == [6, 7]
        assert plain.on_first(1) == 6
        assert plain.execute_all_sync("number", more=2) == [7, 8]
        assert plain.execute_all_sync("number", [10, 20]) == [15, 26]
        assert plain.execute_rank_zero_sync("number") == 5
        assert ray.get(plain.execute_all("number")) == [5, 6]
        assert ray.get(plain.execute_rank_zero("number")) == 5
        assert plain.add(rows(4)).batch["a"].tolist() == [0, 0, 1, 1]
        assert plain.by_mesh(rows(4)).batch["a"].tolist() == [0, 0]

    def test_results_are_awaited_and_got(self, plain):
        async def both():
            return await asyncio.gather(*plain.later(1), plain.workers[1].number.remote())

        assert asyncio.run(both()) == [6, 7, 6]
        later = plain.later(2)
        assert isinstance(later[0], ray.ObjectRef)
        assert ray.get(later[1], timeout=60) == 8
        assert ray.get(plain.execute_all_async("number", later[0])) == [12, 13]  # a result as an argument

    def test_futures_go_into_other_calls(self, plain):
        future = plain.add_later(rows(4))
        assert isinstance(future, DataProtoFuture)
        assert future.get().batch["a"].tolist() == [10] * 4
        assert plain.add(future).batch["a"].tolist() == [10, 10, 11, 11]

    def test_functions_of_the_driver(self, plain):
        assert plain.execute_func_rank_zero(lambda x: x + 1, 2) == 3
        handle = plain.workers[1]
        assert ray.get(handle.__ray_call__.remote(lambda worker, more: worker.number(more), 3)) == 9

    def test_a_handle_is_sent_as_a_name(self, plain):
        copy = pickle.loads(pickle.dumps(plain.workers))
        assert len(copy) == 2
        with pytest.raises(colocate.CapabilityError, match=r"number of .*minePlain_0:1 .*: only the driver"):
            copy[1].number.remote()

    def test_torch_finds_the_ranks(self, plain):
        assert plain.sum_of_ranks() == [1, 1]

    def test_workers_have_verl_environment(self, plain):
        found = {
            name: plain.execute_rank_zero_sync("variable", name) for name in ("WG_PREFIX", "WG_BACKEND", "OF_MINE")
        }
        assert found == {"WG_PREFIX": "mine", "WG_BACKEND": "ray", "OF_MINE": "yes"}
        assert plain.execute_all_sync("variable", "RAY_LOCAL_WORLD_SIZE") == ["2", "2"]
        assert (plain.master_address, plain.master_port) == tuple(
            plain.execute_rank_zero_sync("variable", name) for name in ("MASTER_ADDR", "MASTER_PORT")
        )

    def test_errors_name_role_method_and_the_users_line(self, plain):
        with pytest.raises(colocate.RoleError, match=r"Plain\.raises.*rank 0") as caught:
            plain.raises()
        assert repr(caught.value.__cause__) == "RuntimeError('out of luck')"
        assert re.search(r"The call was made at .*test_groups\.py", str(caught.value))
        assert plain.to_all(0) == [5, 6]


class TestSeveralClasses:
    @pytest.fixture(scope="class")
    def both(self):
        classes = {
            "actor": RayClassWithInitArgs(ray.remote(Plain), 3),
            "critic": RayClassWithInitArgs(ray.remote(Critic), 9),
        }
        pool = RayResourcePool([2], use_gpu=False)
        return RayWorkerGroup(pool, create_colocated_worker_cls(classes))

    def test_parts_have_own_methods(self, both):
        parts = both.spawn({"actor", "critic"})
        assert parts["critic"].get() == [9, 10]
        assert parts["actor"].to_all(1) == [4, 5]
        with pytest.raises(AttributeError, match=r"RayWorkerGroup\.critic_get.* spawn\(\)"):
            both.critic_get()
        assert parts["actor"].execute_all_sync("number") == [3, 4]
        assert parts["actor"].sub_cls_name == "actor"

    def test_colocated_parts_find_neighbours(self, both):
        assert both.spawn({"actor"})["actor"].beside() == [9, 9]
        graph = ENGINE.connect_runtime().graph.render("tree")
        assert "role critic rank 1/2 (Critic)" in graph

    def test_displays_use_verl_names(self, both, tmp_path):
        """Graph, `colocate top`, trace and errors have verl's names of calls, and memory has verl's names of roles."""
        runtime, trace = ENGINE.connect_runtime(), tmp_path / "trace.json"
        with runtime.trace(trace):
            calls = both.spawn({"critic"})["critic"].train_mini_batch(tmp_path / "until")
            name = group_of(both).name
            (now,) = [
                each for each in Driver(runtime).glance(RecentCalls(Driver(runtime).slot_of)) if each["group"] == name
            ]
            graph = runtime.graph.render("tree")
            (tmp_path / "until").touch()
            with pytest.raises(colocate.RoleError, match=r"critic\.train_mini_batch raised ValueError on rank"):
                ray.get(calls)
        assert [slot["call"] for slot in now["slots"]] == ["critic.train_mini_batch"] * 2
        assert "call critic.train_mini_batch" in graph
        assert "critic.train_mini_batch" in trace.read_text()
        assert {role.role for slot in group_of(both).memory().slots for role in slot.roles} >= {"actor", "critic"}

    def test_fused(self):
        classes = {
            "actor": RayClassWithInitArgs(ray.remote(Plain), 3),
            "critic": RayClassWithInitArgs(ray.remote(Critic), 9),
        }
        group = RayWorkerGroup(RayResourcePool([1], use_gpu=False), create_colocated_worker_cls_fused(classes))
        group.fuse(classes.keys())
        assert group.critic.get() == [9]

    def test_a_subclass_of_a_fused_worker(self):
        group = spawned(Hybrid, count=1)
        assert group.both() == [(0, 7)]
        assert group.spawn({"critic"})["critic"].get() == [7]


class TestPools:
    def test_parts_of_a_pool(self):
        whole = RayResourcePool([1, 2], use_gpu=False)
        first, second = split_resource_pool(whole, [1, 2])
        assert isinstance(second, SubRayResourcePool)
        assert (second.start_bundle_index, second.subgroup_world_size, second.world_size) == (1, 2, 2)
        one = RayWorkerGroup(first, RayClassWithInitArgs(ray.remote(Plain), 1), use_gpu=False)
        two = RayWorkerGroup(second, RayClassWithInitArgs(ray.remote(Plain), 2), use_gpu=False)
        assert (one.to_all(0), two.to_all(0)) == ([1], [2, 3])
        assert "no placement groups" in repr(whole.pgs)
        assert whole.local_rank_list() == [0, 0, 1]

    def test_groups_share_pool_slots(self):
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=2)
        first = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 1), name_prefix="f")
        env = {"OMP_NUM_THREADS": "3"}  # A worker reads this at its start.
        second = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 2), name_prefix="g", worker_env=env)
        assert (first.to_all(0), second.to_all(0)) == ([1], [2])
        assert second.execute_rank_zero_sync("variable", "OMP_NUM_THREADS") == "3"
        with pytest.raises(colocate.ColocateError, match=r"'fPlain' and 'gPlain'.*2 groups at a time"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Plain))
        both = RayWorkerGroup(
            worker_handles=[*first.workers, *second.workers], ray_cls_with_init=RayClassWithInitArgs(Plain)
        )
        assert both.to_all(1) == [2, 3]
        assert both.execute_all_sync("number", [10, 20]) == [11, 22]

    def test_unreferenced_workers_end(self):
        group = spawned(ray.remote(Plain), count=1, name_prefix="short")
        assert any(name.startswith("short") for name in ENGINE.connect_runtime().groups)
        del group
        ENGINE.wait_closed()
        assert not any(name.startswith("short") for name in ENGINE.connect_runtime().groups)
        assert not ENGINE.connect_runtime().audit()


class TestDeath:
    def test_of_a_worker(self):
        group = spawned(ray.remote(Plain), name_prefix="ends")
        with pytest.raises(colocate.WorkerDied, match="code 3"):
            ray.get(group.workers[1].__ray_call__.remote(lambda worker: os._exit(3)))
        with pytest.raises(colocate.ColocateError, match="endsPlain"):
            group.to_all(1)


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: RayResourcePool([1], detached=True), r"detached=True.*pool\.detach"),
            (lambda: RayResourcePool([1], accelerator_type="H100"), "accelerator_type='H100'"),
            (lambda: RayResourcePool([]).slots, "at least one process"),
            (lambda: len(RayResourcePool([1]).pgs), "TensorRT-LLM"),
            (lambda: merge_resource_pool(RayResourcePool([1]), RayResourcePool([1])), "merge_resource_pool"),
            (lambda: spawned(ray.remote(Plain), detached=True), r"detached=True.*pool\.detach"),
            (lambda: spawned(ray.remote(Plain), master_addr="here"), r"master_addr=.here.*finds a port itself"),
            (lambda: spawned(ray.remote(Plain), profile_steps=[1], worker_nsight_options={}), "nsight"),
            (lambda: RayWorkerGroup.from_detached(worker_names=["a", "b"]), r"'a', 'b'.*only the driver"),
            (lambda: RayWorkerGroup(RayResourcePool([1])), "the class that it is made of"),
        ],
    )
    def test_by_name(self, make, words):
        with pytest.raises((colocate.CapabilityError, colocate.ConfigError), match=words):
            make()

    @pytest.mark.parametrize("name", ["wait", "kill", "cancel"])
    def test_functions_of_ray(self, plain, name):
        for subject in (plain.workers[0], plain.later(1)[0]):
            with pytest.raises(colocate.CapabilityError, match=rf"ray\.{name}.*colocate's"):
                getattr(ray, name)([subject] if name == "wait" else subject)

    def test_driver_objects_refuse_pickling(self, plain):
        for thing in (plain, plain.resource_pool, plain.later(1)[0]):
            with pytest.raises(colocate.CapabilityError, match="lives with its driver"):
                pickle.dumps(thing)

    def test_unknown_method_name_is_refused(self, plain):
        with pytest.raises(AttributeError, match=r"RayWorkerGroup\.nothing"):
            plain.nothing()
        with pytest.raises(AttributeError, match="no method 'nothing'"):
            plain.execute_all_sync("nothing")


class TestBadInput:
    @pytest.fixture(autouse=True)
    def nothing_is_left(self):
        yield
        ENGINE.wait_closed()
        assert not ENGINE.connect_runtime().audit()

    def test_a_constructor_that_raises(self):
        with pytest.raises(colocate.RoleStartError, match="no such model"):
            spawned(ray.remote(Plain), 0, True)

    def test_a_module_that_workers_cannot_import(self, tmp_path, monkeypatch):
        code = "import os\nif 'WG_BACKEND' in os.environ:\n    import a_library_of_the_drivers\n"
        code += "from verl.single_controller.base import Worker\nclass Lonely(Worker): ...\n"
        (tmp_path / "on_the_driver.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        lonely = importlib.import_module("on_the_driver").Lonely
        with pytest.raises(colocate.RoleStartError, match=r"(?s)on_the_driver.*a_library_of_the_drivers"):
            spawned(ray.remote(lonely), count=1)

    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
    def test_a_variable_that_is_colocates(self, name):
        with pytest.raises(ValueError, match=f"worker_env sets {name}"):
            spawned(ray.remote(Plain), worker_env={name: "100"})

    def test_rows_that_cannot_be_divided(self, plain):
        with pytest.raises(
            AssertionError, match=re.escape("only support equal chunk. Got size of DataProto 3 and chunk 2")
        ):
            plain.add(rows(3))

    def test_a_pool_that_never_fits(self):
        with pytest.raises(colocate.PlacementError, match=r"64 slots .* can never fit"):
            RayWorkerGroup(RayResourcePool([64]), RayClassWithInitArgs(ray.remote(Plain)))

    def test_a_process_group_that_disagrees(self):
        group = spawned(ray.remote(Plain), count=1)
        with pytest.raises(colocate.RoleError, match=r"rank=3 \(there it is 0\), world_size=4 \(there it is 1\)"):
            group.execute_func_rank_zero(_disagree)
        assert group.to_all(1) == [1]


def _disagree():
    torch.distributed.init_process_group(rank=3, world_size=4)
