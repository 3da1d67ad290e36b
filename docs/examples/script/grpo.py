import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SAMPLES, NEW, BETA = 12, 8, 4, 0.02


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=None, **sizes))


def make_prompts(step: int, count: int = 8) -> torch.Tensor:
    """Three numbers each. The model is to learn to go on with even ones."""
    return torch.randint(1, VOCABULARY, (count, 3), generator=torch.Generator().manual_seed(step))


def sample(model: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    prompts = prompts.repeat_interleave(SAMPLES, 0)
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW)


def rewards(seqs: torch.Tensor) -> torch.Tensor:
    return (seqs[:, -NEW:] % 2 == 0).float().mean(1)


def logprobs(model: LlamaForCausalLM, seqs: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=seqs).logits[:, -NEW - 1 : -1]
    return logits.log_softmax(-1).gather(-1, seqs[:, -NEW:, None]).squeeze(-1)


def loss_of(model: LlamaForCausalLM, seqs: torch.Tensor, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    groups = scores.view(-1, SAMPLES)  # of one prompt each
    advantages = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    policy = logprobs(model, seqs)
    ratio = (policy - policy.detach()).exp()
    away = (reference - policy).exp() - (reference - policy) - 1
    return (BETA * away - ratio * advantages).mean()


def main(steps: int = 40) -> None:
    model = make_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        seqs = sample(model, make_prompts(step))
        scores = rewards(seqs)
        loss = loss_of(model, seqs, scores, logprobs(reference, seqs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: reward {scores.mean():.2f}")


if __name__ == "__main__":
    main()
