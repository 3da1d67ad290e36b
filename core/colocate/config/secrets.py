"""What of a config nobody should pass on."""

from __future__ import annotations

import re
from typing import Any

_SECRET = re.compile(r"(^|[_-])(api_?key|access_?key|secret|password|passwd|credentials?|auth|token)$", re.IGNORECASE)


def without_secrets(value: Any) -> Any:
    """The same plain data with hidden values where a key calls itself a secret, such as HF_TOKEN in a pool's `env`."""
    if isinstance(value, dict):
        return {
            key: "(hidden)" if isinstance(item, str) and item and _SECRET.search(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value
