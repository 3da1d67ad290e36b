"""Whether values fit what takes them, before anything is started: for packages beside core.

Signatures, and what isn't in one: amounts, variables, meshes and budgets. What this module offers may change with any
version.
"""

from colocate._role.budget import NO_BUDGET, Budget, Budgets, Limit, budgets
from colocate._role.method_spec import MethodSpec
from colocate._role.role import methods_of, torchrun_problem
from colocate._signatures import (
    Arguments,
    Checked,
    Place,
    Problem,
    arguments_of,
    brief,
    options_of,
    path_text,
    problems,
    shown,
)
from colocate._system.numbers import amount_problem, duration_problem, gpus_problem, variable_problem
from colocate._values.mesh import parse_meshes

__all__ = [
    "NO_BUDGET",
    "Arguments",
    "Budget",
    "Budgets",
    "Checked",
    "Limit",
    "MethodSpec",
    "Place",
    "Problem",
    "amount_problem",
    "arguments_of",
    "brief",
    "budgets",
    "duration_problem",
    "gpus_problem",
    "methods_of",
    "options_of",
    "parse_meshes",
    "path_text",
    "problems",
    "shown",
    "torchrun_problem",
    "variable_problem",
]
