"""Process groups of roles, and models that continue with new ones after a failure."""

from __future__ import annotations

from tests.suite.process_groups.groups import CutProcessGroups, ProcessGroups
from tests.suite.process_groups.renewals import Renewals

AREAS = [ProcessGroups, CutProcessGroups, Renewals]
