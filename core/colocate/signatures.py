"""Whether values fit what takes them, before anything is started: for packages beside core.

Signatures, and what isn't in one: amounts, variables, meshes and budgets. What this module offers may change with any
version.
"""

from colocate._role.budget import NO_BUDGET as NO_BUDGET
from colocate._role.budget import Budget as Budget
from colocate._role.budget import Budgets as Budgets
from colocate._role.budget import Limit as Limit
from colocate._role.budget import budgets as budgets
from colocate._role.method_spec import MethodSpec as MethodSpec
from colocate._role.role import fixed_problem as fixed_problem
from colocate._role.role import methods_of as methods_of
from colocate._role.role import torchrun_problem as torchrun_problem
from colocate._signatures import (
    Arguments as Arguments,
)
from colocate._signatures import (
    Checked as Checked,
)
from colocate._signatures import (
    Place as Place,
)
from colocate._signatures import (
    Problem as Problem,
)
from colocate._signatures import (
    arguments_of as arguments_of,
)
from colocate._signatures import (
    brief as brief,
)
from colocate._signatures import (
    options_of as options_of,
)
from colocate._signatures import (
    path_text as path_text,
)
from colocate._signatures import (
    problems as problems,
)
from colocate._signatures import (
    shown as shown,
)
from colocate._system.numbers import amount_problem as amount_problem
from colocate._system.numbers import duration_problem as duration_problem
from colocate._system.numbers import gpus_problem as gpus_problem
from colocate._system.numbers import labels_problem as labels_problem
from colocate._system.numbers import name_problem as name_problem
from colocate._system.numbers import resources_problem as resources_problem
from colocate._system.numbers import step_problem as step_problem
from colocate._system.numbers import together_problem as together_problem
from colocate._system.numbers import url_problem as url_problem
from colocate._system.numbers import variable_problem as variable_problem
from colocate._values.mesh import parse_meshes as parse_meshes
