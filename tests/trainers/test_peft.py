"""PEFT in "Weights in sync": adapters are merged into their weights, or come alone."""

from __future__ import annotations

from typing import Any

import pytest

import colocate

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads this.


def _model(**options: Any) -> Any:
    """Return a PEFT model whose adapters aren't zeros, and a plain one."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], **options)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model, transformers.LlamaForCausalLM(config)


def test_merged() -> None:
    """A plain model with the merged weights computes what PEFT's model computes."""
    model, plain = _model()
    weights = colocate.torch.named_weights(model)
    with torch.no_grad():
        plain.load_state_dict({name: tensor.clone() for name, tensor in weights})
    assert weights.specs == colocate.torch.named_weights(plain).specs
    rows = torch.randint(0, 32, (2, 7))
    torch.testing.assert_close(plain(rows).logits, model(rows).logits, atol=1e-5, rtol=1e-5)
    model.merge_adapter()
    for name, tensor in colocate.torch.named_weights(model):
        torch.testing.assert_close(tensor, plain.state_dict()[name])


def test_alone() -> None:
    """Adapters alone have the names by which PEFT saves them."""
    model, _ = _model()
    saved = peft.get_peft_model_state_dict(model)
    assert [name for name, _ in colocate.torch.named_weights(model, adapters="alone")] == list(saved)
