"""`colocate plan`: the memory that roles will hold, roles that must take turns, and unknown sizes."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from tests.cli.conftest import CommandLine

ROLES = """
    import torch
    from torch import nn

    import colocate
    from colocate import Role, method


    class Net(Role):
        def __init__(
            self, mib: int, trains: bool = True, grid: bool = False, copies: bool = False, **options: bool
        ) -> None:
            self.net = nn.Linear(1 << 18, mib, bias=False, device=self.ctx.device)
            assert self.ctx.generator.device.type == "cpu"
            if grid:
                from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

                mesh = self.ctx.device_mesh()["tp"]
                self.net.weight = nn.Parameter(distribute_tensor(self.net.weight, mesh, [Shard(0)]))
                torch.distributed.all_reduce(torch.ones(1), group=self.ctx.process_group("dp"))
            self.optimizer = torch.optim.Adam(self.net.parameters(), **options) if trains else None
            if copies:
                group = self.ctx.process_group()
                self.wrapped = nn.parallel.DistributedDataParallel(self.net, [self.ctx.device], process_group=group)

        @method
        def use(self) -> None: ...


    class Tied(Role):
        def __init__(self) -> None:
            self.net = self.ctx.sibling("first", Net).net

        @method
        def use(self) -> None: ...


    class Later(Role):
        def plan(self, roles: dict[str, object]) -> None:
            self.copy = torch.empty_like(roles["first"].net.weight)

        @method
        def use(self) -> None: ...


    class Own(Role):
        def __init__(self) -> None:
            print("constructed on slot", self.ctx.slot)

        @method
        def plan(self, goals: int) -> None: ...

        def device_state(self) -> dict[str, object]:
            raise LookupError("nowhere")


    class Pretrained(Role):
        def __init__(self, config: dict[str, int | bool]) -> None:
            from transformers import AutoModelForCausalLM, LlamaConfig

            config = LlamaConfig(**config)
            config.save_pretrained("model")  # without its weights
            self.model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).to(self.ctx.device)

        @method
        def use(self) -> None: ...

    class Cuda(Role):
        def __init__(self) -> None:
            self.net = torch.nn.Linear(2, 2).cuda()

        @method
        def use(self) -> None: ...

    class Engine(Role):
        def __init__(self, mib: int, parts: int = 1) -> None:
            raise AssertionError("it would take minutes")

        @classmethod
        def plan(cls, mib: int, parts: int = 1) -> dict[str, int]:
            assert colocate.context().world_size == 2
            return {"weights": mib << 20, "cache": 3 << 20, "grads": 0} if parts == 1 else {"kv": mib}

        @method
        def use(self) -> None: ...

    class Looks(Role):
        def __init__(self) -> None:
            self.total = float(torch.rand(3).sum())

        @method
        def use(self) -> None: ...
"""
FIRST: dict[str, Any] = {"use": "beside:Net", "with": {"mib": 8}}
SECOND: dict[str, Any] = {"use": "beside:Net", "with": {"mib": 4, "trains": False}, "slots": [1, 3]}
MIB = 1 << 20


def said_beside(done: "subprocess.CompletedProcess[str]") -> str:
    """Return standard error without the lines of torch's C++.

    torch decides at import how much it prints, and these commands are forks of a process that may have imported torch.
    tests/ppo/test_step_failures.py runs a command in a fresh process.
    """
    return "".join(line for line in done.stderr.splitlines(keepends=True) if "ProcessGroup.hpp" not in line)


def write(colocate: CommandLine, **groups: Mapping[str, Any]) -> None:
    """Write a config with these groups, each in its own pool of four slots, and the module of their roles.

    A group has the roles `first` and `second`; its own `roles` override them.
    """
    made = {
        name: {"pool": name, **said, "roles": {"first": FIRST, "second": SECOND, **said.get("roles", {})}}
        for name, said in groups.items()
    }
    config = {
        "executor": {"use": "local", "with": {"processes": True}},
        "pools": {name: {"slots": 4, "gpus": int(name == "on_gpus")} for name in groups},
        "groups": made,
    }
    colocate.write("beside.py", ROLES)
    colocate.write("demo.yaml", json.dumps(config))


def planned(colocate: CommandLine, status: int = 0, **groups: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the plan of each group by its name."""
    write(colocate, **groups)
    done = colocate("plan", "demo.yaml", "--json")
    assert (done.returncode, said_beside(done)) == (status, "")
    return {group["group"]: group for group in json.loads(done.stdout)}


def kinds(group: dict[str, Any], role: str) -> dict[str, int]:
    (found,) = [each for each in group["roles"] if each["role"] == role]
    return {kind: round(size / MIB) for kind, size in found["kinds"].items()}


def first(**options: Any) -> dict[str, Any]:
    return {"first": {**FIRST, "with": {**FIRST["with"], **options}}}


def second(use: str) -> dict[str, Any]:
    return {"second": {"use": f"beside:{use}", "slots": [1, 3]}}


def test_plan_lists_role_memory(colocate: CommandLine) -> None:
    wide = {
        name: {"use": "beside:Net", "with": {"mib": mib, "trains": False}}
        for name, mib in (("first", 30), ("second", 21), ("third", 10))
    }
    found = planned(
        colocate,
        plain={},
        shards={"roles": {"first": {**first(grid=True)["first"], "mesh": {"dp": 2, "tp": 2}}}},
        copies={"roles": first(copies=True)},
        tied={"roles": second("Tied")},
        later={"roles": second("Later")},
        some={"roles": wide, "device_memory": "45MiB"},
        most={"roles": wide, "device_memory": "35MiB"},
    )
    # Adam has two moments; a role that isn't trained has neither gradients nor moments.
    assert kinds(found["plain"], "first") == {"parameters": 8, "gradients": 8, "optimizer": 16}
    assert kinds(found["plain"], "second") == {"parameters": 4}
    assert [role["alone"] for role in found["plain"]["roles"]] == [role["total"] for role in found["plain"]["roles"]]
    # A role on a mesh of two axes holds its shard; collectives have no peers in a plan.
    assert kinds(found["shards"], "first") == {"parameters": 4, "gradients": 4, "optimizer": 8}
    # `DistributedDataParallel` has no peers in a plan, and reads no values.
    assert kinds(found["copies"], "first") == {"parameters": 8, "gradients": 8, "optimizer": 16}
    # A module that two roles share counts once.
    assert kinds(found["tied"], "second") == {}
    one, other = found["tied"]["roles"]
    assert (other["total"], other["alone"]) == (0, 16 * MIB)  # in its own process the role would have a copy
    assert one["alone"] == one["total"]
    # `plan`, which is given the other roles, declares the memory that a role gets later.
    assert kinds(found["later"], "second") == {"tensors": 8}
    # Only roles that don't fit beside each of the others take turns: the smallest stay.
    for name, takers in (("some", ["first", "second"]), ("most", ["first", "second", "third"])):
        (fit,) = found[name]["budgets"]
        assert (fit["takers"], fit["misfits"], fit["needs"]) == (takers, [], 61 * MIB)


def test_plan_shows_worker_placement(colocate: CommandLine) -> None:
    """The plan says where workers lie if the pool has such a strategy, and omits it otherwise."""
    write(colocate, group={})
    done = colocate("plan", "demo.yaml", "--set", "+pools.group.strategy=strict_pack")
    assert "fused: 4 workers (all on one node), and the fullest holds 36 MiB" in done.stdout
    done = colocate("plan", "demo.yaml", "--json", "--set", "+pools.group.strategy=strict_spread")
    assert json.loads(done.stdout)[0]["where"] == "each on a node of its own"
    assert "where" not in planned(colocate, group={})["group"]


def test_models_of_a_hub(colocate: CommandLine) -> None:
    """A constructor that calls `from_pretrained` is planned from the model's config, without its weights."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    sizes |= {"tie_word_embeddings": True, "num_attention_heads": 4}
    role = {"use": "beside:Pretrained", "with": {"config": sizes}}
    (found, _) = planned(colocate, hub={"roles": {"first": role}})["hub"]["roles"]
    layer = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
    assert found["kinds"]["parameters"] == 4 * (4096 * 256 + 2 * layer + 256)


def test_class_method_plan_declares_memory(colocate: CommandLine) -> None:
    """A class method `plan` gets the constructor's arguments and declares the memory; the role isn't constructed."""
    engine = {"use": "beside:Engine", "with": {"mib": 5}, "slots": [1, 3]}
    group = planned(colocate, all={"roles": {"second": engine}, "device_memory": "36MiB"})["all"]
    assert kinds(group, "second") == {"parameters": 5, "tensors": 3}
    assert [(fit["needs"] >> 20, fit["takers"]) for fit in group["budgets"]][-1] == (40, ["first", "second"])
    wrong = {**engine, "with": {"mib": 5, "parts": 2}}
    (_, other) = planned(colocate, status=1, all={"roles": {"second": wrong}})["all"]["roles"]
    assert other["unknown"].endswith(
        "plan() of role 'second' returns {'kv': 5}: it returns bytes by tag, of weights, grads, optimizer, cache"
    )


def test_value_reading_constructor_has_unknown_memory(colocate: CommandLine) -> None:
    """A role whose constructor reads tensor values has unknown memory, with the reason; other roles are planned."""
    group = planned(colocate, status=1, all={"roles": second("Looks")})["all"]
    assert kinds(group, "first")["parameters"] == 8
    (_, other) = group["roles"]
    assert other["unknown"].startswith("its constructor raised on the meta device: ")
    done = colocate("plan", "demo.yaml")
    assert done.returncode == 1
    assert "second isn't known: its constructor raised on the meta device: " in done.stdout
    assert said_beside(done) == ""
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("second  ")]
    assert row.split() == ["second", "1,", "3", "?"]
    assert "the fullest holds at least 32 MiB" in done.stdout


def test_budgets(colocate: CommandLine) -> None:
    """A plan says for each budget whether all roles fit, which must take turns, and which don't fit alone.

    Sleeping memory counts as host memory, so turns don't help there; on a GPU's slots, the plan checks no host memory.
    """

    spare = {"reserve_activations": "6MiB"}
    write(
        colocate,
        fits={"device_memory": "37MiB"},
        few={"device_memory": "33MiB"},
        swaps={"device_memory": "33MiB", "residency": "swap"},
        fewer={"device_memory": "30MiB"},
        own={"roles": {"first": {**FIRST, "device_memory": "20MiB"}}},
        tight={"roles": {"first": {**FIRST, "device_memory": "34MiB", **spare}}},
        free={"device_memory": "40MiB", "roles": {"first": {**FIRST, **spare}}},
        host={"host_memory": "33MiB"},
        on_gpus={"host_memory": "1MiB"},
    )
    done = colocate("plan", "demo.yaml")
    assert (done.returncode, said_beside(done)) == (1, "")
    _, *told = done.stdout.split("\ngroup ")
    said = {text.partition(":")[0]: text for text in told}
    turns = "33 MiB of device_memory, on slot 1, 3, and they need 36 MiB: first and second must take turns"
    for name, words in (
        ("fits", "device_memory, on slot 1, 3: all roles fit together (36 MiB)"),
        ("few", f"{turns}; say residency: swap"),
        ("few", "33 MiB of device_memory, on slot 0, 2: all roles fit together (32 MiB)"),
        ("swaps", f"{turns}\n"),
        ("fewer", "slot 1, 3: first can't fit (they need 36 MiB)"),
        ("own", "role 'first' may have 20 MiB of device_memory, on slot 0, 2: first can't fit"),
        ("tight", "first can't fit (they need 38 MiB, with 6 MiB to stay free)"),
        ("free", "they need 42 MiB, with 6 MiB to stay free: first and second must take turns"),
        ("host", "33 MiB of host_memory, on slot 1, 3, also for what sleeps: first and second can't fit (they need 36"),
    ):
        assert words in said[name], name
    assert "host_memory" not in said["on_gpus"]


def test_instance_method_plan_is_not_called(colocate: CommandLine) -> None:
    """A role method `plan` isn't called, a constructor's prints stay out of the JSON, and `device_state` may raise."""
    write(colocate, all={"roles": second("Own")})
    done = colocate("plan", "demo.yaml", "--json")
    (group,) = json.loads(done.stdout)
    assert said_beside(done) == "constructed on slot 1\n"
    assert group["roles"][1]["unknown"] == "its device_state() raised on the meta device: LookupError: nowhere"
