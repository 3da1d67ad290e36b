"""The runtimes that the fixtures of the pytest plugin give: shared ones for clusters that are dear to start."""

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
    """Runtimes for a whole session, by executor and options. One that a test has closed is connected anew."""

    _found: dict[str, Runtime] = attrs.field(factory=dict)

    def get(self, executor: str, **options: Any) -> Runtime:
        """The runtime of an executor with some options, connected now if there is none that is open."""
        key = f"{executor} {sorted(options.items())!r}"
        runtime = self._found.get(key)
        if runtime is None or not runtime.alive:
            with leaks.shared():
                runtime = self._found[key] = connected(executor, **options)
                make_first_worker(runtime)
        return runtime

    def close(self) -> None:
        """Close all of them."""
        for runtime in self._found.values():
            runtime.close(force=True)


def connected(executor: str, **options: Any) -> Runtime:
    """Connect; a test whose executor isn't installed is skipped with the line that installs it."""
    import pytest

    try:
        return colocate.connect(executor, **options)
    except PluginError as error:
        if error.hint is None:  # it isn't a matter of what is installed
            raise
        pytest.skip(f"executor {executor!r} can't be imported here; it needs: {error.hint}")


def make_first_worker(runtime: Runtime) -> Runtime:
    """Return what a runtime makes for its first worker is there from now on, so that no test seems to leak it."""
    with runtime.reserve(1, cpus=0) as pool:
        pool.spawn({"echo": colocate.role(Echo)})
    return runtime
