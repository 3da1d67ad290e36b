"""Runs the functions of `group.run` in a worker, with the worker's context."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from colocate._role.awaited import run_coroutine
from colocate._role.context import current
from colocate._role.method import method
from colocate.worker.hooks import WorkerFeature
from colocate.worker.serving.build import FUNCTION, ShippedObject
from colocate.worker.serving.signal_handlers import calls_role_code


class FunctionsOfWorker(WorkerFeature, calls={FUNCTION: "run"}):
    """Runs the functions of `group.run` on a worker."""

    @method
    @calls_role_code
    def run(self, function: ShippedObject, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function with the worker's context; await the coroutine of an async function."""
        result = function.load_object()(current(), *args, **kwargs)
        return run_coroutine(result) if inspect.iscoroutine(result) else result
