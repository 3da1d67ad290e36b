"""The engine `transformers`: what all engines hold, and what it alone does."""

from typing import Any, ClassVar

from colocate_rollout.testing import LLAMA, ModelSuite


class TestTransformers(ModelSuite):
    """By a few rows at once, of short prompts, so that rows come and go in every step."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {"model": LLAMA, "max_rows": 5, "max_batch_tokens": 12}
    tolerance = 1e-5
