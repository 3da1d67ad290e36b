"""The runtimes of the pytest plugin's fixtures. Tests share a runtime if the cluster takes long to start."""

from __future__ import annotations

from typing import Any

import attrs

import colocate
from colocate import Runtime
from colocate.errors import PluginError
from colocate.testing import leaks
from colocate.testing.probes.plain import Echo


@attrs.define(eq=False)
class Runtimes:
    """The runtimes of a test session, by executor and options. A runtime that a test has closed is replaced."""

    _runtimes: dict[str, Runtime] = attrs.field(factory=dict)

    def get(self, executor: str, **options: Any) -> Runtime:
        """Return the session's runtime of an executor with these options, and connect first if there is none."""
        key = f"{executor} {sorted(options.items())!r}"
        runtime = self._runtimes.get(key)
        if runtime is None or not runtime.alive:
            with leaks.share_between_tests():
                runtime = self._runtimes[key] = connect_or_skip(executor, **options)
                warm_up_runtime(runtime)
        return runtime

    def close(self) -> None:
        """Close all runtimes of the session."""
        for runtime in self._runtimes.values():
            runtime.close(force=True)


def connect_or_skip(executor: str, **options: Any) -> Runtime:
    """Connect to an executor, or skip the test if the executor isn't installed."""
    import pytest

    try:
        return colocate.connect(executor, **options)
    except PluginError as error:
        if error.hint is None:  # The cause isn't a missing package.
            raise
        pytest.skip(f"executor {executor!r} can't be imported here; it needs: {error.hint}")


def warm_up_runtime(runtime: Runtime) -> Runtime:
    """Start a first worker, so that resources which a runtime creates only once don't look like leaks of a test."""
    with runtime.reserve(1, cpus=0) as pool:
        pool.spawn({"echo": colocate.role(Echo)})
    return runtime
