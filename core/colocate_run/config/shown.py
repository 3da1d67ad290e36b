"""The config as run, without what nobody should pass on."""

from __future__ import annotations

from colocate.errors import ConfigError
from colocate_report.scale import shorten
from colocate_run.config.secrets import without_secrets
from colocate_run.config.source import read_text, write_yaml

LONGEST = 100_000


def config_text(config: str) -> str:
    """The config's YAML with hidden values where a key calls itself a secret, such as HF_TOKEN in a pool's `env`."""
    if not config.strip():
        return ""
    try:
        data = read_text(config, "config").data
    except ConfigError:
        return shorten(config, LONGEST)
    hidden = without_secrets(data)
    return shorten(config if hidden == data else write_yaml(hidden), LONGEST)
