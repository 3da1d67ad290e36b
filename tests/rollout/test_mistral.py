"""Chats by Mistral's own tokenizer, which has no template to render; `make engines` runs these tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from colocate import ConfigError
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.task import Problem, Problems
from colocate_rollout import Row

mistral_common = pytest.importorskip("mistral_common", reason="its pins fight with those of constraints.txt")

CHATS: list[Any] = [
    [{"role": "user", "content": "2+2?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": " spell [INST] "}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a small Mistral model with the tokenizer of Mistral Nemo."""
    from transformers import MistralConfig, MistralForCausalLM

    made = tmp_path_factory.mktemp("mistral")
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MistralConfig(
        vocab_size=131072, num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **sizes
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(made)
    data = Path(mistral_common.__file__).parent / "data"
    shutil.copy(data / "tekken_240718.json", made / "tekken.json")
    return str(made)


def test_chats(folder: str) -> None:
    """Messages have the prompts of Mistral's own encoder, and answers are decoded to the last blank."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    encoder: Any = MistralTokenizer.from_file(f"{folder}/tekken.json")
    expected = [
        encoder.encode_chat_completion(ChatCompletionRequest.from_openai(messages=messages)).tokens
        for messages in CHATS
    ]
    actor = GroupActor(model=folder)
    problems = Problems.from_list(Problem(messages, "", {}) for messages in CHATS)
    assert actor.prompts(problems) == expected
    text = "  <think>a</think>\n b , c "
    body = encoder.instruct_tokenizer.tokenizer.encode(text, bos=False, eos=False)
    rows = [(Row(at, 0, (*body, 2), (0.0,) * (len(body) + 1), "stop", ()),) for at in range(len(CHATS))]
    rollout = actor.read(problems, rows, len(body) + 1)
    assert rollout["answers"] == [text, text]
    assert [problem.prompt for problem in rollout["problems"]] == expected
    assert actor.generate(problems, 2)["token_ids"]


def test_texts(folder: str) -> None:
    """A text's prompt has one begin token and no end token; an unknown message role is refused."""
    actor = GroupActor(model=folder)
    ((begin, *tokens), again) = actor.prompts(
        Problems.from_list([Problem("a  b\n", "", {}), Problem("a  b\n", "", {})])
    )
    assert begin == 1
    assert 1 not in tokens
    assert 2 not in tokens
    assert again == [begin, *tokens]
    with pytest.raises(ConfigError, match="the chat template of the model's tokenizer can't ask"):
        actor.prompts(Problems.from_list([Problem([{"role": "nobody", "content": ""}], "", {})]))
