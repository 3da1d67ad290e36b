"""Runs the functions of `group.run` in a worker, with the worker's context."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from colocate._role.awaited import awaited
from colocate._role.context import current
from colocate._role.method import method
from colocate.worker.hooks import OfWorker
from colocate.worker.serving.build import FUNCTION, Shipped
from colocate.worker.serving.signal_handlers import calls_role_code


class FunctionsOfWorker(OfWorker, calls={FUNCTION: "run"}):
    """Runs the functions of `group.run` on a worker."""

    @method
    @calls_role_code
    def run(self, function: Shipped, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function with the worker's context; await the coroutine of an async function."""
        result = function.load()(current(), *args, **kwargs)
        return awaited(result) if inspect.iscoroutine(result) else result
