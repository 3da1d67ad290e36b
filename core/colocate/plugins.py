"""The installed plugins, and their roles, jobs and executors, for packages other than core.

This module's contents may change with any version; plugins themselves use `colocate.hookimpl`, `colocate.needs` and
`colocate.checks`.
"""

from colocate._plugins.entry_points import (
    hookimpl as hookimpl,
    only_plugins as only_plugins,
    versions_of as versions_of,
)
from colocate._plugins.needs import (
    check_of as check_of,
    lacks_processes as lacks_processes,
    lacks_vmm as lacks_vmm,
    needed_by as needed_by,
)
from colocate._plugins.plugins import (
    FoundEngine as FoundEngine,
    FoundJob as FoundJob,
    FoundRole as FoundRole,
    PluginInfo as PluginInfo,
    about_executor as about_executor,
    abouts as abouts,
    find_engine as find_engine,
    find_executor as find_executor,
    find_job as find_job,
    find_observer as find_observer,
    find_role as find_role,
    jobs_of as jobs_of,
    plugins as plugins,
    plugins_named as plugins_named,
    roles_of as roles_of,
)
from colocate._protocol.versions import PROTOCOL as PROTOCOL
from colocate._role.role import RoleSpec as RoleSpec, role as role
from colocate._system.installed import get_pip_line as get_pip_line
from colocate._version import __version__

VERSION = __version__
