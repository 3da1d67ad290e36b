"""`colocate plugins`: what is installed, by metadata; nothing is imported."""

from __future__ import annotations

import attrs

from colocate.plugins import PluginInfo, plugins
from colocate_run.cli.output import print_json
from colocate_run.screen import console, show_table


def show_plugins(*, json: bool) -> int:
    """List all plugins. Exit status 1 when a name is claimed twice."""
    found = plugins()
    if json:
        print_json([attrs.asdict(plugin) for plugin in found])
    else:
        show_table("plugins", [_row(plugin) for plugin in found], console())
    return 1 if any(plugin.rivals for plugin in found) else 0


def _row(plugin: PluginInfo) -> dict[str, str]:
    rivals = f"; also claimed by {', '.join(plugin.rivals)}: uninstall one" if plugin.rivals else ""
    return {
        "name": plugin.name,
        "kind": plugin.brings,
        "from": plugin.origin + rivals,
        "object": plugin.value,
    }
