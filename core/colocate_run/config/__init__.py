"""Configs: YAML or a dict, read strictly, with every mistake reported at once."""

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
