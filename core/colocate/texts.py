"""Numbers, sizes, names and errors as messages have them: for packages beside core.

What this module offers may change with any version.
"""

from colocate._display import columns
from colocate._plugins.entry_points import listed
from colocate._system.jobs import error_text
from colocate._system.lines import made_for
from colocate._system.nearest import did_you_mean, nearest
from colocate._system.numbers import parse_bytes, plural, shown, size_text
from colocate._system.tracebacks import frames_of_users, told

__all__ = [
    "columns",
    "did_you_mean",
    "error_text",
    "frames_of_users",
    "listed",
    "made_for",
    "nearest",
    "parse_bytes",
    "plural",
    "shown",
    "size_text",
    "told",
]
