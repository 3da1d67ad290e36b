"""The installed plugins, and what they bring: for packages beside core.

What this module offers may change with any version; plugins themselves need `colocate.hookimpl` and `colocate.needs`.
"""

from colocate._plugins.entry_points import versions_of
from colocate._plugins.needs import lacks_processes, lacks_vmm, needed_by
from colocate._plugins.plugins import (
    FoundJob,
    FoundRole,
    PluginInfo,
    about_executor,
    abouts,
    find_executor,
    find_job,
    find_observer,
    find_role,
    jobs_of,
    plugins,
    plugins_named,
    roles_of,
)
from colocate._plugins.strays import of_this_machine
from colocate._protocol.versions import PROTOCOL
from colocate._system.installed import pip_line

__all__ = [
    "PROTOCOL",
    "FoundJob",
    "FoundRole",
    "PluginInfo",
    "about_executor",
    "abouts",
    "find_executor",
    "find_job",
    "find_observer",
    "find_role",
    "jobs_of",
    "lacks_processes",
    "lacks_vmm",
    "needed_by",
    "of_this_machine",
    "pip_line",
    "plugins",
    "plugins_named",
    "roles_of",
    "versions_of",
]
