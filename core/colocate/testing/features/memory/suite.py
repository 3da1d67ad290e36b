"""Memory of roles: what is told of it, budgets, sleep and turns."""

from __future__ import annotations

from colocate.testing.features.memory.ledgers import Budgets, Ledgers
from colocate.testing.features.memory.sleeping import Sleeping, SleepingAmidSteps, SleepingBeside
from colocate.testing.features.memory.turns import TakingTurns

AREAS = [Ledgers, Sleeping, SleepingBeside, SleepingAmidSteps, Budgets, TakingTurns]
