"""`colocate plan`: what roles will hold, who must take turns, and what isn't known."""

import json
import subprocess
from typing import Any

import pytest
from tests.cli.conftest import CommandLine

ROLES = """
    import torch
    from torch import nn

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

    class Looks(Role):
        def __init__(self) -> None:
            self.total = float(torch.rand(3).sum())

        @method
        def use(self) -> None: ...
"""
CONFIG = """
    executor: {use: local, with: {processes: true}}
    pools: {main: {slots: 4}}
    groups:
      all:
        pool: main
        roles:
          first: {use: beside:Net, with: {mib: 8}}
          second: {use: beside:Net, with: {mib: 4, trains: false}, slots: [1, 3]}
"""
MIB = 1 << 20


def said_beside(done: "subprocess.CompletedProcess[str]") -> str:
    """What is on standard error.

    Without what torch's C++ says: how much that is it decides as it is loaded, and these commands are forks of what may
    have it. tests/ppo/test_step_failures.py has a command that begins by itself.
    """
    return "".join(line for line in done.stderr.splitlines(keepends=True) if "ProcessGroup.hpp" not in line)


def write(colocate: CommandLine, config: str = CONFIG) -> None:
    colocate.write("beside.py", ROLES)
    colocate.write("demo.yaml", config)


def planned(colocate: CommandLine, config: str = CONFIG, *changes: str, status: int = 0) -> dict[str, Any]:
    write(colocate, config)
    done = colocate("plan", "demo.yaml", "--json", *(part for each in changes for part in ("--set", each)))
    assert (done.returncode, said_beside(done)) == (status, "")
    (group,) = json.loads(done.stdout)
    return dict(group)


def kinds(group: dict[str, Any], role: str) -> dict[str, int]:
    (found,) = [each for each in group["roles"] if each["role"] == role]
    return {kind: round(size / MIB) for kind, size in found["kinds"].items()}


def test_what_they_hold(colocate: CommandLine) -> None:
    """Adam has two moments, and what isn't trained has neither gradients nor any."""
    group = planned(colocate)
    assert kinds(group, "first") == {"parameters": 8, "gradients": 8, "optimizer": 16}
    assert kinds(group, "second") == {"parameters": 4}
    assert [role["alone"] for role in group["roles"]] == [role["total"] for role in group["roles"]]


def test_shards_of_a_mesh(colocate: CommandLine) -> None:
    """A role on a mesh of two axes holds its part; collectives meet nobody."""
    mesh = ("groups.all.roles.first.with.grid=true", "groups.all.roles.first.mesh={dp: 2, tp: 2}")
    assert kinds(planned(colocate, CONFIG, *mesh), "first") == {"parameters": 4, "gradients": 4, "optimizer": 8}


def test_copies_on_each_rank(colocate: CommandLine) -> None:
    """`DistributedDataParallel` meets nobody, and reads no numbers."""
    group = planned(colocate, CONFIG, "groups.all.roles.first.with.copies=true")
    assert kinds(group, "first") == {"parameters": 8, "gradients": 8, "optimizer": 16}


def test_what_two_roles_share_counts_once(colocate: CommandLine) -> None:
    group = planned(
        colocate, CONFIG.replace("use: beside:Net, with: {mib: 4, trains: false}, slots", "use: beside:Tied, slots")
    )
    assert kinds(group, "second") == {}
    first, second = group["roles"]
    assert (second["total"], second["alone"]) == (0, 16 * MIB)  # each process would have its own
    assert first["alone"] == first["total"]


def test_what_a_role_gets_later(colocate: CommandLine) -> None:
    """By its `plan`, which is given the other roles."""
    group = planned(
        colocate, CONFIG.replace("use: beside:Net, with: {mib: 4, trains: false}, slots", "use: beside:Later, slots")
    )
    assert kinds(group, "second") == {"tensors": 8}


def test_models_of_a_hub(colocate: CommandLine) -> None:
    """A constructor that has one by its name, as most have: its config is wanted, and no weights."""
    pytest.importorskip("transformers")
    sizes = (
        "hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2, vocab_size: 4096, tie_word_embeddings: true"
    )
    options = f"config: {{{sizes}, num_attention_heads: 4}}"
    group = planned(
        colocate, CONFIG.replace("use: beside:Net, with: {mib: 8}", f"use: beside:Pretrained, with: {{{options}}}")
    )
    layer = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
    (first,) = [each for each in group["roles"] if each["role"] == "first"]
    assert first["kinds"]["parameters"] == 4 * (4096 * 256 + 2 * layer + 256)


def test_what_is_not_known(colocate: CommandLine) -> None:
    """A constructor that wants to know numbers: the rest is told, and why it isn't."""
    config = CONFIG.replace("use: beside:Net, with: {mib: 4, trains: false}, slots", "use: beside:Looks, slots")
    group = planned(colocate, config, status=1)
    assert kinds(group, "first")["parameters"] == 8
    (second,) = [each for each in group["roles"] if each["role"] == "second"]
    assert second["unknown"].startswith("its constructor raised on the meta device: ")
    done = colocate("plan", "demo.yaml")
    assert done.returncode == 1
    assert "second isn't known: its constructor raised on the meta device: " in done.stdout
    assert said_beside(done) == ""
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("second  ")]
    assert row.split() == ["second", "1,", "3", "?"]
    assert "the fullest holds at least 32 MiB" in done.stdout


def test_budgets(colocate: CommandLine) -> None:
    """Whether all fit, who must take turns, and who doesn't fit alone."""
    write(colocate)

    def said(*changes: str, status: int = 0) -> str:
        done = colocate("plan", "demo.yaml", *(part for each in changes for part in ("--set", each)))
        assert (done.returncode, said_beside(done)) == (status, "")
        return str(done.stdout)

    assert "device_memory, on slot 1, 3: all roles fit together (36 MiB)" in said("groups.all.device_memory=37MiB")
    few = "groups.all.device_memory=33MiB"
    text = "33 MiB of device_memory, on slot 1, 3, and they need 36 MiB: first and second must take turns"
    assert f"{text}; say residency: swap" in said(few)
    assert "33 MiB of device_memory, on slot 0, 2: all roles fit together (32 MiB)" in said(few)
    assert f"{text}\n" in said(few, "groups.all.residency=swap")
    assert "slot 1, 3: first can't fit (they need 36 MiB)" in said("groups.all.device_memory=30MiB", status=1)
    own = "groups.all.roles.first.device_memory=20MiB"
    assert "role 'first' may have 20 MiB of device_memory, on slot 0, 2: first can't fit" in said(own, status=1)
    tight = ("groups.all.roles.first.device_memory=34MiB", "groups.all.roles.first.reserve_activations=6MiB")
    assert "first can't fit (they need 38 MiB, with 6 MiB to stay free)" in said(*tight, status=1)
    free = ("groups.all.device_memory=40MiB", "groups.all.roles.first.reserve_activations=6MiB")
    assert "they need 42 MiB, with 6 MiB to stay free: first and second must take turns" in said(*free)


def test_the_smallest_stay(colocate: CommandLine) -> None:
    """Only roles that don't fit beside each of the others take turns."""
    config = CONFIG.replace("mib: 8}", "mib: 30, trains: false}").replace(
        "mib: 4, trains: false}, slots: [1, 3]", "mib: 21, trains: false}"
    )
    config += "          third: {use: beside:Net, with: {mib: 10, trains: false}}\n"
    for mib, takers in ((45, ["first", "second"]), (35, ["first", "second", "third"])):
        (fit,) = planned(colocate, config, f"groups.all.device_memory={mib}MiB")["budgets"]
        assert (fit["takers"], fit["misfits"], fit["needs"]) == (takers, [], 61 * MIB)


def test_the_hosts_memory(colocate: CommandLine) -> None:
    """What sleeps counts in it, so turns are of no use; and beside a GPU none of this is the host's."""
    write(colocate)
    done = colocate("plan", "demo.yaml", "--set", "groups.all.host_memory=33MiB")
    assert done.returncode == 1
    assert (
        "33 MiB of host_memory, on slot 1, 3, also for what sleeps: first and second can't fit (they need 36 MiB)"
        in done.stdout
    )
    options = ("--set", "groups.all.host_memory=1MiB", "--set", "pools.main.gpus=1")
    done = colocate("plan", "demo.yaml", *options)
    assert (done.returncode, "host_memory" in done.stdout) == (0, False)


def test_what_is_called(colocate: CommandLine) -> None:
    """A role method called `plan` isn't; what a constructor prints is no JSON; and a `device_state` may raise."""
    write(colocate, CONFIG.replace("use: beside:Net, with: {mib: 4, trains: false}, slots", "use: beside:Own, slots"))
    done = colocate("plan", "demo.yaml", "--json")
    (group,) = json.loads(done.stdout)
    assert said_beside(done) == "constructed on slot 1\n"
    assert group["roles"][1]["unknown"] == "its device_state() raised on the meta device: LookupError: nowhere"
