"""Read configs from YAML or a dict, and report all mistakes at once."""

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
