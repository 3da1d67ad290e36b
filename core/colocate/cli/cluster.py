"""Which cluster a command is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate._plugins.plugins import find_executor
from colocate.cli.output import load
from colocate.errors import ConfigError

if TYPE_CHECKING:
    from colocate._api.runtime import Runtime

ADDRESS = "address"  # the option by which an executor joins what is there; without it there is nothing to join


@attrs.frozen
class Cluster:
    """A cluster as a command line names it: by a config, or by an executor and its address."""

    file: Path | None = None
    executor: str | None = None
    address: str | None = None
    changes: Sequence[str] = ()
    allow_import: bool = True

    @property
    def given(self) -> bool:
        """Whether one was named."""
        return any([self.file, self.executor, self.address, self.changes])

    def joined(self, command: str, lacks: str) -> Runtime:
        """A runtime of it.

        Args:
            command: What it is for.
            lacks: What a private one doesn't have, in words.

        Raises:
            ConfigError: No cluster is named that is there already.
        """
        from colocate import connect

        name, options = self.engine(command)
        if name is not None:
            find_executor(name)  # one that there isn't is told of as such
        if name is None or options.get(ADDRESS) is None:
            raise ConfigError(
                f"which cluster? A private one has no {lacks}: `colocate {command} --executor ray --address ...`, "
                "or a config whose executor has an address"
            )
        return connect(name, **options)

    def engine(self, command: str) -> tuple[str | None, Mapping[str, Any]]:
        """Which executor, and its options.

        Raises:
            ConfigError: The config is wrong, or it isn't said of what `--set` and `--address` are.
        """
        if self.file is not None:
            more = [] if self.address is None else [f"executor.with.{ADDRESS}={self.address}"]
            config = load(self.file, self.executor, [*self.changes, *more], allow_import=self.allow_import)
            return config.executor.use, config.executor.with_
        if self.changes:
            raise ConfigError(f"--set changes a config: name one, as in `colocate {command} FILE --set ...`")
        if self.address is not None and self.executor is None:
            raise ConfigError(
                f"--address {self.address} is that of which engine? Say --executor ray, --executor dask, ..."
            )
        return self.executor, {} if self.address is None else {ADDRESS: self.address}
