"""Memory of roles: reports, budgets, sleep and turns."""

from __future__ import annotations

from tests.suite.memory.ledgers import Budgets, LedgerSuite
from tests.suite.memory.sleeping import Sleeping, SleepingAmidSteps, SleepingBeside
from tests.suite.memory.turns import TakingTurns

AREAS = [LedgerSuite, Sleeping, SleepingBeside, SleepingAmidSteps, Budgets, TakingTurns]
