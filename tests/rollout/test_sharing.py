"""The engine `transformers` on another role's module, which each rank has whole while it generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import colocate
from colocate import ConfigError, RoleError, RoleStartError, method
from colocate_rollout import Sampling
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer

ENDLESS = Sampling(max_tokens=12, stop_token_ids=())
SHARES = colocate.role("rollout.engine", engine="transformers", role="trainer", max_rows=4, max_batch_tokens=16)


class _Gathered:
    """A module's weights, with a counter of reads."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.weights: Any = colocate.torch.named_weights(module)
        self.specs = self.weights.specs
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self.weights:
            self.count += 1
            yield each


class Sharded(Trainer):
    """A trainer whose model is sharded over its ranks, or whose gradients are averaged."""

    def __init__(self, model: Mapping[str, Any], parallel: str) -> None:
        super().__init__(model)
        self.trained: Any = self.model
        if parallel == "tp":
            shards = {f"layers.*.{name}": ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj")}
            shards |= {f"layers.*.{name}": ColwiseParallel() for name in ("self_attn.v_proj", "mlp.gate_proj")}
            shards |= {"layers.*.mlp.up_proj": ColwiseParallel(), "layers.*.mlp.down_proj": RowwiseParallel()}
            shards |= {"layers.*.self_attn.o_proj": RowwiseParallel()}
            parallelize_module(self.model.model, self.ctx.device_mesh()["tp"], shards)
        elif parallel == "ddp":
            self.trained = torch.nn.parallel.DistributedDataParallel(
                self.model, process_group=self.ctx.process_group(), broadcast_buffers=False
            )
        else:
            for layer in (*self.model.model.layers, self.model):
                torch.distributed.fsdp.fully_shard(layer, mesh=self.ctx.device_mesh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.gathered = _Gathered(self.model)

    @method
    def learn(self) -> None:
        """Make an update whose forward and backward passes involve all ranks."""
        self.model.train()
        logits = self.trained(torch.tensor([[5, 6, 7, 8 + self.ctx.mesh.rank("dp")]]), use_cache=False).logits
        logits.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named_weights(self) -> Any:
        """See `Trainer`."""
        return self.gathered

    @method
    def state(self) -> tuple[int, bool]:
        """Return how many weights were read, and whether the model is in training mode."""
        return self.gathered.count, self.model.training


def spawned(parallel: str, **engine: Any) -> Any:
    roles = {"trainer": colocate.role(Sharded, LLAMA, parallel), "shares": SHARES.on(**engine)}
    return colocate.spawn(roles, slots=2, processes=True)


@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_a_module_of_several_ranks(parallel: str) -> None:
    """A module of several ranks generates with its current weights, also for unequal rows; a sync gathers nothing."""
    with spawned(parallel) as group:
        trainer, shares = group.role("trainer", Sharded), group.role("shares")
        for version in range(1, 3):
            trainer.learn()
            assert colocate.sync_weights(trainer, shares).by == ("shared",)
            for count in (1, 3):  # With one prompt the other rank has none.
                found = shares.generate(PROMPTS[-count:], sampling=ENDLESS)
                (rows,) = zip(*found, strict=True)
                for row, wanted in zip(rows, trainer.log_probs(PROMPTS[-count:], rows)[0], strict=True):
                    assert row.log_probs == pytest.approx(wanted, abs=1e-5)
                    assert row.versions == ((version, 12),)
        assert trainer.state() == [(0, True)] * 2


class Restored(Trainer):
    """A trainer with unusual settings, and with methods that report them."""

    def __init__(self, after_forward: bool | None) -> None:
        super().__init__(LLAMA)
        options = {} if after_forward is None else {"reshard_after_forward": after_forward}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.generation_config.temperature = 0.5
        self.model.model.embed_tokens.requires_grad_(False)
        for layer in (*self.model.model.layers, self.model):
            torch.distributed.fsdp.fully_shard(layer, mesh=self.ctx.device_mesh(), **options)
        self.model.train()
        self.model.model.layers[0].eval()  # This part is frozen.
        self.fails = False
        self.model.model.norm.register_forward_hook(self._fail)

    def _fail(self, module: Any, args: Any, output: Any) -> None:
        if self.fails and not module.training:
            raise ArithmeticError("amid a forward pass")

    @method
    def fail(self, fails: bool) -> None:
        self.fails = fails

    @method
    def settings(self) -> list[Any]:
        """Return all settings that an engine might change."""
        each = self.model
        return [
            [
                (name, part.training, len(part._forward_hooks), len(part._forward_pre_hooks))
                for name, part in each.named_modules()
            ],
            [(name, part.requires_grad, part.grad is None) for name, part in each.named_parameters()],
            each.config.to_dict(),
            each.generation_config.to_dict(),
            each.is_gradient_checkpointing,
            torch.is_grad_enabled(),
            [type(part).__name__ for part in each.parameters()],
        ]

    @method
    def communicates(self) -> dict[str, int]:
        """Return the counts of a training step's collectives."""
        with CommDebugMode() as found:  # type: ignore[no-untyped-call]
            self.model(torch.tensor([[5, 6, 7]]), use_cache=False).logits.square().mean().backward()
        self.model.zero_grad()
        return {str(kind): count for kind, count in found.get_comm_counts().items()}


@pytest.mark.parametrize("after_forward", [None, True, False])
def test_a_model_is_as_before(after_forward: bool | None) -> None:
    """Generating changes neither settings nor collectives of a sharded model, also when a call fails."""
    roles = {f"trainer{number}": colocate.role(Restored, after_forward) for number in range(2)}
    roles["shares"] = colocate.role("rollout.engine", engine="transformers", role="trainer0", max_rows=4)
    with colocate.spawn(roles, slots=2, processes=True) as group:
        trainer, alone = group.role("trainer0", Restored), group.role("trainer1", Restored)
        settings, shares = trainer.settings(), group.role("shares")
        assert shares.generate(PROMPTS, sampling=ENDLESS)
        assert trainer.settings() == settings
        assert trainer.communicates() == alone.communicates()  # Both make their first step.
        wanted = alone.communicates()
        for fails in (False, True):
            trainer.fail(fails)
            if fails:
                with pytest.raises(RoleError, match="amid a forward pass"):
                    shares.generate(PROMPTS, sampling=ENDLESS)
            else:
                assert shares.generate(PROMPTS, sampling=ENDLESS)
            settled = trainer.settings()
            assert settled == settings
            assert trainer.communicates() == wanted


def test_ranks_that_would_be_missing() -> None:
    """An engine needs all ranks of a sharded module, but not of a module that each rank has whole."""
    with pytest.raises(RoleStartError, match=r"'trainer' shards its model over its 2 slots.* 'shares' is on 1 of them"):
        spawned("fsdp2", slots=[1])
    with spawned("ddp", slots=[1]) as group:
        trainer, shares = group.role("trainer", Sharded), group.role("shares")
        assert colocate.sync_weights(trainer, shares).version == 1
        (((row,),),) = (shares.generate(PROMPTS[:1], sampling=ENDLESS),)
        assert row.log_probs == pytest.approx(trainer.log_probs(PROMPTS[:1], [row])[1][0], abs=1e-5)


@pytest.mark.long
def test_shards_of_tensor_parallelism() -> None:
    """Tensor-parallel shards can be synced to whole engines, in their slots and elsewhere, but not shared."""
    roles = {
        "trainer": colocate.role(Sharded, LLAMA, "tp").on(mesh={"dp": 1, "tp": 2}),
        "beside": colocate.role("rollout.engine", engine="transformers", model=LLAMA, max_rows=4),
    }
    with colocate.connect(processes=True) as runtime, runtime.reserve(slots=2) as pool, runtime.reserve(slots=1) as one:
        group, other = pool.spawn(roles), one.spawn({"beside": roles["beside"]})
        trainer = group.role("trainer", Sharded)
        for version in range(1, 3):
            trainer.learn()
            for view in (group.role("beside"), other.role("beside")):
                assert colocate.sync_weights(trainer, view).version == version
                found = view.generate(PROMPTS, sampling=ENDLESS)
                (rows,) = zip(*found, strict=True)
                for wanted in trainer.log_probs(PROMPTS, rows):
                    for row, each in zip(rows, wanted, strict=True):
                        assert row.log_probs == pytest.approx(each, abs=5e-5)
                        assert row.versions == ((version, 12),)
        group.close()
        said = "role 'trainer' shards its model by tensor parallelism.* give the engine a model of its own"
        with pytest.raises(RoleStartError, match=said):
            pool.spawn({**roles, "beside": SHARES})


def test_weights_of_another_role() -> None:
    """An engine that shares one role's module takes no weights of another role."""
    roles = {"trainer": colocate.role(Trainer, LLAMA), "other": colocate.role(Trainer, LLAMA), "shares": SHARES}
    with colocate.spawn(roles) as group:
        with pytest.raises((ConfigError, RoleError), match=r"by the model of role 'trainer', .* takes none of other"):
            colocate.sync_weights(group.role("other"), group.role("shares"))
        assert group.role("shares").generate(PROMPTS[:1])


def test_fewer_prompts_than_ranks() -> None:
    """A call with fewer prompts than ranks, or with none, returns all its rows, also streamed or kept."""
    role = colocate.role("rollout.engine", engine="transformers", model=LLAMA)
    with colocate.spawn({"rollout": role}, slots=2) as group:
        view = group.role("rollout")
        assert view.generate([]) == []
        assert [*view.generate.stream([])] == []
        for count in (2, 1):
            assert [len(rows) for rows in view.generate(PROMPTS[:count], 3, sampling=ENDLESS)] == [3] * count
        ((index, (row,)),) = view.generate.stream(PROMPTS[:1], sampling=ENDLESS)
        assert (index, row.index, len(row.token_ids)) == (0, 0, 12)
        kept = view.generate.keep(PROMPTS[:1], sampling=ENDLESS)
        assert [len(rows) for rows in kept.fetch()] == [1]
