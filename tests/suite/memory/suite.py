"""Memory of roles: reports, budgets, sleep and turns."""

from __future__ import annotations

from tests.suite.memory.ledgers import Budgets, LedgerRequests
from tests.suite.memory.sleeping import Sleeping, SleepingAmidSteps, SleepingBeside
from tests.suite.memory.turns import TakingTurns

AREAS = [LedgerRequests, Sleeping, SleepingBeside, SleepingAmidSteps, Budgets, TakingTurns]
