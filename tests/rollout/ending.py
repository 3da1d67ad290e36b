"""Models whose folders name end tokens in several places, and the responses of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from colocate import method
from colocate_rollout import Row
from colocate_rollout.role import EngineRole
from colocate_rollout.testing import LLAMA, PROMPTS, Trainer, make_model

# The values of `eos_token_id` in config.json, and of generation_config.json; None: there is no such file.
PLACES: Mapping[str, tuple[Any, Any]] = {
    "several": (3, {"eos_token_id": [3, *range(5, 25)]}),
    "others": (list(range(5, 25)), {"eos_token_id": list(range(40, 60))}),
    "none": (list(range(5, 25)), {}),
    "config alone": (list(range(5, 25)), None),
}
LENGTH = 24


def make_folder(folder: Path, place: str) -> str:
    """Write the suite's model with the ends of `PLACES`; return the folder."""
    of_config, of_generation = PLACES[place]
    model = make_model({**LLAMA, "eos_token_id": of_config})
    model.generation_config = GenerationConfig(**(of_generation or {}))
    model.save_pretrained(folder)
    if of_generation is None:
        (folder / "generation_config.json").unlink()
    return str(folder)


def generated(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Return the likeliest response to each prompt by transformers' `generate`."""
    model = AutoModelForCausalLM.from_pretrained(model).eval() if isinstance(model, str) else model
    found = []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
        found.append(tuple(tokens[0, len(prompt) :].tolist()))
    return found


def check_ends(role: EngineRole, model: Any) -> None:
    """Assert that a role's greedy responses equal transformers' `generate`, to the last token."""
    expected = generated(model)
    rows = role.generate(PROMPTS, sampling={"temperature": 0, "max_tokens": LENGTH})
    assert [row.token_ids for (row,) in rows] == expected
    assert [_finish(row) for (row,) in rows] == [row.finish_reason for (row,) in rows]


def _finish(row: Row) -> str:
    return "length" if len(row.token_ids) == LENGTH else "stop"


class Ending(Trainer):
    """A trainer whose generation config has more end tokens than its model's config."""

    def __init__(self) -> None:
        super().__init__(LLAMA)
        self.model.generation_config.eos_token_id = [3, *range(5, 25)]

    @method
    def generated(self) -> list[tuple[int, ...]]:
        """Return the model's responses by `generate`."""
        return generated(self.model)
