"""The config as run, without what nobody should pass on."""

from __future__ import annotations

import re
from typing import Any

from colocate.config.source import read_text, write_yaml
from colocate.errors import ConfigError
from colocate.report.scale import shorten

LONGEST = 100_000
_SECRET = re.compile(r"(^|[_-])(api_?key|access_?key|secret|password|passwd|credentials?|auth|token)$", re.IGNORECASE)


def config_text(config: str) -> str:
    """The config's YAML with hidden values where a key calls itself a secret, such as HF_TOKEN in a pool's `env`."""
    if not config.strip():
        return ""
    try:
        data = read_text(config, "config").data
    except ConfigError:
        return shorten(config, LONGEST)
    hidden = _hide(data)
    return shorten(config if hidden == data else write_yaml(hidden), LONGEST)


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "(hidden)" if isinstance(item, str) and item and _SECRET.search(str(key)) else _hide(item)
            for key, item in value.items()
        }
    return [_hide(item) for item in value] if isinstance(value, list) else value
