"""Format numbers, sizes, names and errors for messages, for packages other than core.

This module's contents may change with any version.
"""

from colocate._display import columns as columns
from colocate._plugins.entry_points import join_words as join_words
from colocate._system.jobs import format_error as format_error
from colocate._system.lines import attribute_to as attribute_to
from colocate._system.nearest import did_you_mean as did_you_mean, find_nearest as find_nearest
from colocate._system.numbers import (
    find_amount_problem as find_amount_problem,
    format_count as format_count,
    format_size as format_size,
    format_value as format_value,
    parse_bytes as parse_bytes,
    parse_limit as parse_limit,
)
from colocate._system.tracebacks import format_exception as format_exception, format_user_frames as format_user_frames
