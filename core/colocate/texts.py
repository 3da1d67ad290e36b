"""Format numbers, sizes, names and errors for messages, for packages other than core.

This module's contents may change with any version.
"""

from colocate._display import columns as columns
from colocate._plugins.entry_points import listed as listed
from colocate._system.jobs import error_text as error_text
from colocate._system.lines import made_for as made_for
from colocate._system.nearest import did_you_mean as did_you_mean, nearest as nearest
from colocate._system.numbers import (
    amount_problem as amount_problem,
    limit as limit,
    parse_bytes as parse_bytes,
    plural as plural,
    shown as shown,
    size_text as size_text,
)
from colocate._system.tracebacks import frames_of_users as frames_of_users, told as told
