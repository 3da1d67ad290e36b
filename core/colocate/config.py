"""`load_config`, and the classes that describe a config's parts. The package `colocate_run` implements these."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocate_run.config.load import load_config
    from colocate_run.config.schema import (
        Config,
        ExecutorConfig,
        GroupConfig,
        JobConfig,
        PluginsConfig,
        PoolConfig,
        RoleConfig,
    )

__all__ = [
    "Config",
    "ExecutorConfig",
    "GroupConfig",
    "JobConfig",
    "PluginsConfig",
    "PoolConfig",
    "RoleConfig",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'colocate.config' has no attribute {name!r}")
    import colocate_run.config

    return getattr(colocate_run.config, name)
