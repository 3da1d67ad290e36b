"""Process groups of roles, and models that go on with new ones."""

from __future__ import annotations

from colocate.testing.features.process_groups.groups import CutProcessGroups, ProcessGroups
from colocate.testing.features.process_groups.renewals import Renewals

AREAS = [ProcessGroups, CutProcessGroups, Renewals]
