"""The installed plugins, and what they bring: for packages beside core.

What this module offers may change with any version; plugins themselves need `colocate.hookimpl`,
`colocate.needs` and `colocate.checks`.
"""

from colocate._plugins.entry_points import hookimpl as hookimpl
from colocate._plugins.entry_points import only_plugins as only_plugins
from colocate._plugins.entry_points import versions_of as versions_of
from colocate._plugins.needs import check_of as check_of
from colocate._plugins.needs import lacks_processes as lacks_processes
from colocate._plugins.needs import lacks_vmm as lacks_vmm
from colocate._plugins.needs import needed_by as needed_by
from colocate._plugins.plugins import (
    FoundEngine as FoundEngine,
)
from colocate._plugins.plugins import (
    FoundJob as FoundJob,
)
from colocate._plugins.plugins import (
    FoundRole as FoundRole,
)
from colocate._plugins.plugins import (
    PluginInfo as PluginInfo,
)
from colocate._plugins.plugins import (
    about_executor as about_executor,
)
from colocate._plugins.plugins import (
    abouts as abouts,
)
from colocate._plugins.plugins import (
    find_engine as find_engine,
)
from colocate._plugins.plugins import (
    find_executor as find_executor,
)
from colocate._plugins.plugins import (
    find_job as find_job,
)
from colocate._plugins.plugins import (
    find_observer as find_observer,
)
from colocate._plugins.plugins import (
    find_role as find_role,
)
from colocate._plugins.plugins import (
    jobs_of as jobs_of,
)
from colocate._plugins.plugins import (
    plugins as plugins,
)
from colocate._plugins.plugins import (
    plugins_named as plugins_named,
)
from colocate._plugins.plugins import (
    roles_of as roles_of,
)
from colocate._protocol.versions import PROTOCOL as PROTOCOL
from colocate._role.role import RoleSpec as RoleSpec
from colocate._role.role import role as role
from colocate._system.installed import pip_line as pip_line
from colocate._version import __version__

VERSION = __version__
