"""The engine `transformers`: what all engines hold, and what it alone does."""

from typing import Any, ClassVar

import pytest

from colocate_rollout.testing import LLAMA, ModelSuite


class TestTransformers(ModelSuite):
    """By a few rows at once, of short prompts, so that rows come and go in every step."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {"model": LLAMA, "max_rows": 5, "max_batch_tokens": 12}
    tolerance = 1e-5


class TestInAChild(ModelSuite):
    """In a process of its own, which takes seconds to start: of the models one is tried."""

    engine = "transformers"
    options: ClassVar[dict[str, Any]] = {
        **TestTransformers.options,
        "child": {"env": {"OMP_NUM_THREADS": "1"}, "bucket": "4KiB"},
    }
    tolerance = 1e-5

    @pytest.fixture
    def leave_nothing(self) -> None:
        """The engine stays for the next test, and so does its group."""

    @pytest.fixture
    def without(self) -> None:
        """It is in the way of no other child."""

    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("kind", ["tied"])
    def test_updates(self, kind: str) -> None:
        """See `ModelSuite`."""
        super().test_updates(kind)
