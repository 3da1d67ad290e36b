"""Hide secrets in configs and command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_SECRET = re.compile(r"(^|[_-])(api_?key|access_?key|secret|password|passwd|credentials?|auth|token)$", re.IGNORECASE)
_CHANGE = re.compile(r"((?:--set=)?(?:[^=]*\.)?([^=.]+))=")


def is_secret(name: str) -> bool:
    """Return whether the name of a key or variable looks like the name of a secret."""
    return _SECRET.search(name) is not None


def hide_secrets(value: Any) -> Any:
    """Return plain data with hidden values under keys that look like secrets, such as HF_TOKEN in a pool's `env`."""
    if isinstance(value, dict):
        return {
            key: "(hidden)" if isinstance(item, str) and item and is_secret(str(key)) else hide_secrets(item)
            for key, item in value.items()
        }
    return [hide_secrets(item) for item in value] if isinstance(value, list) else value


def hide_secret_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide the values in a command line's changes (`--set path=value`) if their paths look like secrets."""
    masked = []
    for arg in arguments:
        match = _CHANGE.match(arg)
        masked.append(f"{match[1]}=(hidden)" if match and is_secret(match[2]) else arg)
    return masked
