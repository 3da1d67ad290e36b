"""Tests of residents, which are results that stay on the workers."""

from __future__ import annotations

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.testing.executors._base import ExecutorCase, Spawn, smoke
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows


class Residents(ExecutorCase):
    """Tests of residents with plain values. `TensorResidents` has the tests with tensors."""

    def test_of_a_group_with_the_name_of_an_earlier_one(self, spawn: Spawn, runtime: Runtime) -> None:
        """A group can use residents of two groups with the same name, the second created after the first was closed."""
        taking = spawn({"echo": colocate.role(Echo)}, slots=1).role("echo", Echo)
        with runtime.reserve(1, cpus=0) as pool:
            for text in ("earlier", "later"):
                with pool.spawn({"echo": colocate.role(Echo)}, name="again") as giving:
                    resident = giving.role("echo", Echo).first.keep(text)
                    assert taking.first(resident.ref) == text

    @smoke
    def test_between_slots(self, pair: ColocatedGroup) -> None:
        """A resident of one slot can be used on another slot, and by a role on all slots."""
        left_rows, right, rows = pair.role("left", Rows), pair.role("right", Rows), pair.role("rows", Rows)
        with left_rows.produce.keep(3) as resident, rows.produce.keep(2) as spread:
            assert right.double(resident.ref) == [0, 2, 4]
            assert rows.double(resident.ref) == [0, 2, 4]
            assert rows.seen(resident.ref) == [([0, 1], 1), ([2], 1)]
            assert right.double(spread.ref) == left_rows.double(spread.ref) == [0, 2, 200, 202]
            assert pair.role("echo", Echo).echo(resident.ref) == [[0, 1, 2]] * 2

    def test_between_groups(self, pair: ColocatedGroup, spawn: Spawn) -> None:
        """A resident of one group can be used by another group."""
        other = spawn({"rows": colocate.role(Rows)}, slots=1)
        with pair.role("rows", Rows).produce.keep(2) as resident:
            assert other.role("rows", Rows).double(resident.ref) == [0, 2, 200, 202]
