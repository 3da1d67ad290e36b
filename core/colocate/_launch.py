"""`launch`: a config's runtime, pools and groups, opened in order and closed with the block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from colocate._owned import made_for
from colocate._role import RoleSpec, role
from colocate.config.schema import Config, RoleConfig

if TYPE_CHECKING:
    from colocate._group import ColocatedGroup
    from colocate._pool import Pool
    from colocate._run import RunRecord
    from colocate._runtime import Runtime


@attrs.frozen(eq=False)
class Launched:
    """What a config describes, running.

    Attributes:
        config: The config.
        runtime: Its runtime.
        groups: Its groups by name.
    """

    config: Config
    runtime: Runtime
    groups: Mapping[str, ColocatedGroup]

    def run(self, *, resume: bool = False, quiet: bool = False) -> RunRecord:
        """Run the config's job to its end.

        Args:
            resume: Go on from the last complete checkpoint of a run of this name.
            quiet: Whether nothing is shown; the run's folder gets everything either way.

        Raises:
            ConfigError: There is no job, or nothing to resume.
        """
        from colocate._run import execute
        from colocate._screen import Screen

        return execute(self.config, self.runtime, self.groups, resume=resume, screen=Screen(quiet=quiet))


@contextlib.contextmanager
def launch(config: Config) -> Iterator[Launched]:
    """Open what a config describes: its runtime, then pools and groups in order; all of it closes with the block.

    Args:
        config: From `load_config`.
    """
    from colocate import connect

    use, options = config.executor.use, config.executor.with_
    with made_for(config.origins.get("executor")):
        runtime = connect(use, seed=config.seed, call_timeout=config.call_timeout, **options)
    with runtime:
        pools = {name: reserve_pool(runtime, name, config) for name in config.pools}
        groups = {name: _spawn(pools[group.pool], name, config) for name, group in config.groups.items()}
        yield Launched(config, runtime, groups)


def reserve_pool(runtime: Runtime, name: str, config: Config) -> Pool:
    """Reserve a pool as the config's entry describes it."""
    with made_for(config.origins.get(f"pools.{name}")):
        return runtime.reserve(name=name, **attrs.asdict(config.pools[name], recurse=False))


def _spawn(pool: Pool, name: str, config: Config) -> ColocatedGroup:
    entry = config.groups[name]
    roles: dict[str, RoleSpec[Any]] = {key: _role(role) for key, role in entry.roles.items()}
    with made_for(config.origins.get(f"groups.{name}")):
        return pool.spawn(roles, name=name, mesh=entry.mesh, on_failure=entry.on_failure, restarts=entry.restarts)


def _role(entry: RoleConfig) -> RoleSpec[Any]:
    spec = role(entry.use, **entry.with_)
    return spec.on(slots=entry.slots, mesh=entry.mesh, default_group=entry.default_group)
