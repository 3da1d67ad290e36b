"""Read configs from YAML or a dict, and report all mistakes at once."""

from colocate_run.config.load import load_config as load_config
from colocate_run.config.schema import (
    Config as Config,
    ExecutorConfig as ExecutorConfig,
    GroupConfig as GroupConfig,
    JobConfig as JobConfig,
    PluginsConfig as PluginsConfig,
    PoolConfig as PoolConfig,
    RoleConfig as RoleConfig,
)
