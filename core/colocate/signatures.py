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
from colocate._role.method_spec import MethodSpec as MethodSpec
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
    amount_problem as amount_problem,
    duration_problem as duration_problem,
    gpus_problem as gpus_problem,
    labels_problem as labels_problem,
    name_problem as name_problem,
    resources_problem as resources_problem,
    size_problem as size_problem,
    step_problem as step_problem,
    together_problem as together_problem,
    url_problem as url_problem,
    variable_problem as variable_problem,
)
from colocate._values.mesh import parse_meshes as parse_meshes
