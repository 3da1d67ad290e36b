"""Which code a config may name: plugins of its allow-list, and modules only where the caller wants that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from colocate._plugins import plugins

_OWN = "colocate"


@attrs.frozen
class Trust:
    """What may be imported for a config.

    Attributes:
        allow: Names of the plugins that may; None for all that are installed. colocate's own always may.
        modules: Whether "module:Class" may.
    """

    allow: Sequence[str] | None
    modules: bool

    def objection(self, use: str, kind: Literal["executor", "roles"]) -> str | None:
        """Why what a config names isn't imported; None when it may be."""
        if ":" in use:
            return None if self.modules else f"{use!r} names a module, and this config may name plugins only"
        name = use if kind == "executor" else use.partition(".")[0]
        if self.allow is None or name in self.allow:
            return None
        found = next((each for each in plugins() if each.kind == kind and each.name == name), None)
        if found is None or found.distribution == _OWN:  # one that isn't there is an error of its own
            return None
        return f"plugin {name!r} ({found.origin}) isn't in plugins.allow: add it there if you trust it"
