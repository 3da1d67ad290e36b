"""`launch` opens the runtime, pools and groups of a config, and closes all at the end of a block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

from colocate.plugins import RoleSpec, find_role, role
from colocate.signatures import arguments_of
from colocate.texts import attribute_to, format_count
from colocate_run.config.schema import Config, RoleConfig
from colocate_run.recorded import apply_recordings
from colocate_run.screen import Stage

if TYPE_CHECKING:
    from colocate.connecting import Runtime
    from colocate.driver import ColocatedGroup, Pool
    from colocate_report.record import RunRecord
    from colocate_run.recording import Resume


@attrs.frozen(eq=False)
class Launched:
    """A launched config, with a runtime and groups.

    Attributes:
        config: The config.
        runtime: The runtime.
        groups: The groups by name.
        start_up: Duration of the start, in seconds.
    """

    config: Config
    runtime: Runtime
    groups: Mapping[str, ColocatedGroup]
    start_up: float = 0.0

    def run(self, *, resume: Resume = False, quiet: bool = False) -> RunRecord:
        """Run the config's job to the end.

        Args:
            resume: Continue from the last complete checkpoint of a run of this name; "auto": if there is one, else from
                its start.
            quiet: Whether nothing is shown; the run's folder gets all output either way.

        Raises:
            ConfigError: There is no job, or nothing to resume, or another driver writes into that run's folder.
        """
        from colocate_run.log import RunLog
        from colocate_run.recording import execute_job, start_run
        from colocate_run.screen import Screen
        from colocate_run.stopping import StopSignals

        screen, log = Screen(quiet=quiet), RunLog()
        with (
            StopSignals(screen.show_signal) as signals,
            log.capture_output(),
            start_run(self.config, log, resume=resume, screen=screen) as begun,
        ):
            return execute_job(begun, self.runtime, self.groups, self.start_up, signals)


def launch(config: Config) -> AbstractContextManager[Launched]:
    """A context manager that opens a config's runtime, pools and groups, and closes all at the end of the block.

    Args:
        config: From `load_config`.
    """
    return open_config(config, lambda stage, what: contextlib.nullcontext(), lambda runtime: None)


@contextlib.contextmanager
def open_config(config: Config, stage: Stage, connected: Callable[[Runtime], object]) -> Iterator[Launched]:
    """A context manager that opens a config like `launch`, and reports each stage.

    `connected` is called with the runtime, before the first worker starts.
    """
    from colocate.connecting import connect

    began = time.monotonic()
    use, options = config.executor.use, config.executor.with_
    with stage("connect", f"connecting to {use}"), attribute_to(config.origins.get("executor")):
        runtime = connect(use, seed=config.seed, call_timeout=config.call_timeout, **options)
    with runtime:
        connected(runtime)
        pools, groups = {}, {}
        for name, pool in config.pools.items():
            with stage(f"pool {name}", f"reserving pool {name}: {format_count(pool.slots, 'slot')}"):
                pools[name] = reserve_pool(runtime, name, config)
        for name, group in config.groups.items():
            workers, roles = format_count(len(pools[group.pool]), "worker"), format_count(len(group.roles), "role")
            with stage(f"group {name}", f"starting group {name}: {workers} with {roles}"):
                groups[name] = _spawn_group(pools[group.pool], name, config)
        yield Launched(config, runtime, groups, time.monotonic() - began)


def reserve_pool(runtime: Runtime, name: str, config: Config) -> Pool:
    """Reserve the pool that an entry of the config describes."""
    with attribute_to(config.origins.get(f"pools.{name}")):
        options = attrs.asdict(config.pools[name], recurse=False)
        if (least := options.pop("at_least")) is not None:
            options["slots"] = least, options["slots"]
        return runtime.reserve(name=name, **options)


def _spawn_group(pool: Pool, name: str, config: Config) -> ColocatedGroup:
    entry = config.groups[name]
    roles: dict[str, RoleSpec[Any]] = {
        key: apply_recordings(config, name, key, _make_role(role)) for key, role in entry.roles.items()
    }
    with attribute_to(config.origins.get(f"groups.{name}")):
        return pool.spawn(
            roles,
            name=name,
            mesh=entry.mesh,
            on_failure=entry.on_failure,
            restarts=entry.restarts,
            device_memory=entry.device_memory,
            host_memory=entry.host_memory,
            residency=entry.residency,
            step=entry.step,
            env=entry.env,
        )


def _make_role(entry: RoleConfig) -> RoleSpec[Any]:
    options = arguments_of(find_role(entry.use).load(), entry.use).convert(entry.with_)
    return role(entry.use, **options).on(
        slots=entry.slots,
        mesh=entry.mesh,
        default_group=entry.default_group,
        env=entry.env,
        device_memory=entry.device_memory,
        host_memory=entry.host_memory,
        reserve_activations=entry.reserve_activations,
        sleep=entry.sleep,
        weights=entry.weights,
        background=entry.background,
    )
