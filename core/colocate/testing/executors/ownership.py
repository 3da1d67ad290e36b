"""Tests of ownership: closing a group while another group uses one of its residents."""

from __future__ import annotations

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import BorrowedError, ColocateError
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


class Borrows(ExecutorCase):
    """A close is refused while another group uses a resident. A forced close fails that use with a clear error."""

    def test_broken_borrow(self, pair: ColocatedGroup, spawn: Spawn) -> None:
        """A group can only be closed by `force=True` while another group uses its resident. That use then fails."""
        owner = spawn({"rows": colocate.role(Rows)}, slots=1, name="owner")
        resident = owner.role("rows", Rows).produce.keep(2)
        resident.fetch()
        with Gate() as gate:
            waiting = pair.role("faulty", Faulty).wait.submit(gate.address)
            use = pair.role("echo", Echo).first.submit(resident.ref)
            for close in (owner.close, owner.owner.close):
                with pytest.raises(
                    BorrowedError, match=rf"echo\.first of group '{pair.name}' uses the resident of rows"
                ):
                    close()
            owner.close(force=True)
        waiting.result(PATIENCE_S)
        error = use.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert "owner" in str(error)
        assert pair.role("echo", Echo).first(1) == 1
