"""What of a config nobody should pass on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_SECRET = re.compile(r"(^|[_-])(api_?key|access_?key|secret|password|passwd|credentials?|auth|token)$", re.IGNORECASE)
_CHANGE = re.compile(r"((?:--set=)?(?:[^=]*\.)?([^=.]+))=")


def is_secret(name: str) -> bool:
    """Whether a key, or a variable, calls itself a secret."""
    return _SECRET.search(name) is not None


def without_secrets(value: Any) -> Any:
    """The same plain data with hidden values where a key calls itself a secret, such as HF_TOKEN in a pool's `env`."""
    if isinstance(value, dict):
        return {
            key: "(hidden)" if isinstance(item, str) and item and is_secret(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def without_secret_values(arguments: Sequence[str]) -> list[str]:
    """A command line, with hidden values where one has the form of `--set path=value`, and the path is a secret's."""
    found = []
    for each in arguments:
        match = _CHANGE.match(each)
        found.append(f"{match[1]}=(hidden)" if match and is_secret(match[2]) else each)
    return found
