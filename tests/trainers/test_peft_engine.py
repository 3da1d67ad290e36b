"""An engine generates with a role's PEFT model and its current adapters."""

from __future__ import annotations

from typing import Any

import pytest

import colocate
from colocate import First, Role, RoleStartError, method
from colocate_rollout import Sampling

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT gives many warnings.
PROMPTS = [[5], [3, 4, 5, 6], [9, 9]]
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Actor(Role):
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(
            torch.bfloat16 if kind == "bfloat16" else torch.float32
        )
        options: dict[str, Any] = {"task_type": None if kind == "no_task" else "CAUSAL_LM"}
        if kind == "prompts":
            config = peft.PromptTuningConfig(num_virtual_tokens=2, **options)
        else:
            options |= {"target_modules": ["q_proj", "embed_tokens"], "lora_dropout": 0.5, "use_dora": kind == "dora"}
            options |= {"alora_invocation_tokens": [1], "target_modules": ["q_proj"]} if kind == "aLoRA" else {}
            config = peft.LoraConfig(r=2, **options)
        self.model: Any = peft.get_peft_model(model, config).train()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        if kind == "disabled":
            self.model.base_model.disable_adapter_layers()
        if kind == "merged":
            self.model.merge_adapter()
        self.whole = self.model
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.model, process_group=self.ctx.process_group(), broadcast_buffers=False
            )
        if kind == "compiled":
            self.whole, self.model = None, torch.compile(self.model, backend="eager")
        if kind == "shards":
            for layer in (*self.model.base_model.model.model.layers, self.model):
                torch.distributed.fsdp.fully_shard(layer, mesh=self.ctx.device_mesh())

    @method(collect=First())
    def log_probs(self, prompts: list[list[int]], rows: list[Any], adapters: bool = True) -> list[list[float]]:
        """Return the log-probabilities of rows' tokens by PEFT's model."""
        model, found = self.whole or self.model, []
        model.eval()
        for prompt, row in zip(prompts, rows, strict=True):
            ids = torch.tensor([[*prompt, *row.token_ids]])
            with torch.no_grad():
                if adapters:
                    logits = model(input_ids=ids).logits
                else:
                    with model.disable_adapter():
                        logits = model(input_ids=ids).logits
            logs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(logs.gather(1, ids[0, len(prompt) :, None]).flatten().tolist())
        model.train()
        return found

    @method(collect=First())
    def trains(self) -> bool:
        return all(each.training for each in (self.whole or self.model).modules())

    def named_weights(self) -> Any:
        return colocate.torch.named_weights(self.model)


def engine(role: str) -> Any:
    sampling = Sampling(max_tokens=6, stop_token_ids=())
    return colocate.role("rollout.engine", engine="transformers", role=role, sampling=sampling)


def check(group: Any, kind: str) -> None:
    actor, rollout = group.role(kind, Actor), group.role(f"rollout_of_{kind}")
    if kind != "disabled":  # Disabled adapters can't be synced.
        assert colocate.sync_weights(actor, rollout).by == ("shared",)
    rows = [row for (row,) in rollout.generate(PROMPTS)]
    gap = 0.2 if kind == "bfloat16" else 1e-4
    for row, wanted in zip(rows, actor.log_probs(PROMPTS, rows), strict=True):
        assert row.log_probs == pytest.approx(wanted, abs=gap), kind
    if kind in ("plain", "dora", "ddp"):
        without = actor.log_probs(PROMPTS, rows, adapters=False)
        assert [row.log_probs for row in rows] != [pytest.approx(each, abs=gap) for each in without]
    assert actor.trains()


def spawned(kinds: list[str], **options: Any) -> Any:
    roles = {kind: colocate.role(Actor, kind) for kind in kinds}
    roles |= {f"rollout_of_{kind}": engine(kind) for kind in kinds}
    return colocate.spawn(roles, **options)


def test_rows_agree_with_peft_forward_pass() -> None:
    """Rows agree with PEFT's own forward pass without dropout, for adapters of each kind; the model trains on."""
    kinds = ["plain", "no_task", "bfloat16", "dora", "disabled", "merged", "compiled"]
    with spawned(kinds) as group:
        for kind in kinds:
            check(group, kind)


def test_several_ranks() -> None:
    """Rows agree with a PEFT model under DDP, and with one in FSDP2 shards."""
    with spawned(["ddp", "shards"], slots=2, processes=True) as group:
        for kind in ("ddp", "shards"):
            check(group, kind)


@pytest.mark.parametrize(("kind", "said"), [("prompts", "PROMPT_TUNING"), ("aLoRA", "aLoRA")])
def test_adapters_outside_layers_are_refused(kind: str, said: str) -> None:
    """A model with adapters outside its layers is refused when the engine is made."""
    with pytest.raises(
        RoleStartError, match=f"the model of role '{kind}' has adapters of the kind {said}, which aren't"
    ):
        spawned([kind])
