"""Check values against signatures before a start, for packages other than core.

Other checks are of amounts, variables, meshes and budgets. This module's contents may change with any
version.
"""

from colocate._role.budget import (
    NO_BUDGET as NO_BUDGET,
    Budget as Budget,
    Budgets as Budgets,
    Limit as Limit,
    budgets as budgets,
)
from colocate._role.role import (
    fixed_problem as fixed_problem,
    methods_of as methods_of,
    torchrun_problem as torchrun_problem,
)
from colocate._signatures import (
    Arguments as Arguments,
    Checked as Checked,
    Place as Place,
    Problem as Problem,
    arguments_of as arguments_of,
    brief as brief,
    options_of as options_of,
    path_text as path_text,
    problems as problems,
    shown as shown,
)
from colocate._system.numbers import (
    find_amount_problem as find_amount_problem,
    find_duration_problem as find_duration_problem,
    find_gpus_problem as find_gpus_problem,
    find_labels_problem as find_labels_problem,
    find_name_problem as find_name_problem,
    find_resources_problem as find_resources_problem,
    find_size_problem as find_size_problem,
    find_step_problem as find_step_problem,
    find_together_problem as find_together_problem,
    find_url_problem as find_url_problem,
    find_variable_problem as find_variable_problem,
)
from colocate._values.mesh import parse_meshes as parse_meshes
