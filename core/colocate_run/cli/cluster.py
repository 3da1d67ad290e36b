"""Which cluster a command is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colocate.errors import ConfigError
from colocate.plugins import about_executor, abouts, find_executor
from colocate_run.cli.output import load

if TYPE_CHECKING:
    from colocate import Runtime

_ADDRESS = "address"  # of an executor that doesn't say by which option it joins a cluster


def joins(executor: str) -> str:
    """The option by which an executor joins a cluster that is there, as it says; empty when there is none to join."""
    about = about_executor(executor)
    return _ADDRESS if about is None else about.joins


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
        """A runtime of it."""
        from colocate import connect

        name, options = self.engine(command)
        if name is not None:
            find_executor(name)  # one that there isn't is told of as such
        if name is None or options.get(joins(name)) is None:
            which = name if name is not None and joins(name) else next(iter(_joining()), "NAME")
            raise ConfigError(
                f"which cluster? A private one has no {lacks}: `colocate {command} --executor {which} --address ...`, "
                "or a config whose executor has an address"
            )
        return connect(name, **options)

    def engine(self, command: str) -> tuple[str | None, Mapping[str, Any]]:
        """Which executor, and its options."""
        if self.file is not None:
            config = load(self.file, self.executor, self.changes, allow_import=self.allow_import)
            return config.executor.use, {**config.executor.with_, **self._joining(config.executor.use)}
        if self.changes:
            raise ConfigError(f"--set changes a config: name one, as in `colocate {command} FILE --set ...`")
        if self.address is not None and self.executor is None:
            which = ", ".join(f"--executor {name}" for name in _joining()) or "--executor NAME"
            raise ConfigError(f"--address {self.address} is that of which engine? Say {which}")
        return self.executor, {} if self.executor is None else self._joining(self.executor)

    def _joining(self, executor: str) -> dict[str, str]:
        """The option that names the cluster, if an address is given."""
        if self.address is None:
            return {}
        option = joins(executor)
        if not option:
            raise ConfigError(f"--address {self.address}: executor {executor!r} has no cluster to join; leave it out")
        return {option: self.address}


def _joining() -> list[str]:
    """The installed executors that say that they join clusters."""
    return [plugin.name for plugin, about in abouts() if about.joins]
