"""Kept calls that fail: who is told, when, and once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import colocate
from colocate import ColocatedGroup
from colocate._system.lines import caller
from colocate.errors import RoleError
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, wait_until


class KeptFailures(ExecutorCase):
    """The failure of a kept call is raised by what uses its resident, or else by what ends next; it is never lost."""

    def test_poisoned(self, pair: ColocatedGroup) -> None:
        """A kept call that fails poisons its resident: every use raises the same error."""
        faulty, echo = pair.role("faulty", Faulty), pair.role("echo", Echo)
        kept = faulty.fail.keep(ranks=(1,))
        with pytest.raises(RoleError, match="a plain one") as caught:
            kept.fetch()
        for use in (kept.fetch, lambda: kept.spec, lambda: echo.echo(kept.ref)):
            with pytest.raises(RoleError) as again:
                use()
            assert str(again.value) == str(caught.value)
            assert again.value.remote_traceback == caught.value.remote_traceback
            assert again.value.__cause__ is caught.value.__cause__
        assert echo.first(1) == 1

    def test_poison_spreads(self, pair: ColocatedGroup) -> None:
        """A call that was queued with a resident whose call then fails fails with that error too, kept or not."""
        faulty, echo = pair.role("faulty", Faulty), pair.role("echo", Echo)
        with Gate() as gate:
            kept = faulty.fail_after.keep([gate.address, None], failing=0)  # type: ignore[arg-type]
            use, kept_use = echo.echo.submit(kept.ref), echo.echo.keep(kept.ref)
            gate.wait_for()
        error = use.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert "rank 0 was told to raise" in str(error) + str(error.__cause__)
        with pytest.raises(RoleError, match="rank 0 was told to raise"):
            kept_use.fetch()
        with pytest.raises(RoleError, match="rank 0 was told to raise"):
            kept.fetch()
        assert echo.first(1) == 1

    def test_unused_poison(self, pair: ColocatedGroup) -> None:
        """A kept call that failed and was never used raises at the end of its scope."""

        def keep() -> None:
            with pair.scope():
                pair.role("faulty", Faulty).fail.keep()
                pair.role("echo", Echo).noop()

        with pytest.raises(RoleError, match="a plain one"):
            keep()

    def test_a_failure_that_was_dropped_is_logged_at_once(self, spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
        """With the line that kept it, whether it fails before its handle is dropped or after; and raised once."""
        group = spawn({"faulty": colocate.role(Faulty)}, slots=1)
        faulty = group.role("faulty", Faulty)
        with Gate() as gate:
            _, here = faulty.wait.submit(gate.address), caller()
            faulty.fail.keep()
            gate.wait_for()
        wait_until(lambda: "a plain one" in caplog.text, "the failure is logged")
        (record,) = (each for each in caplog.records if each.name == "colocate")
        assert record.levelno == logging.ERROR
        assert (
            f"faulty.fail of group {group.name!r}, kept at {here[0]}:{here[1] + 1}, has failed" in record.getMessage()
        )
        assert "dropping its handle" in record.getMessage()
        with pytest.raises(RoleError, match="a plain one"), group.scope():
            faulty.fine()
        with group.scope():
            faulty.fine()  # it was told
        kept = faulty.fail.keep()
        faulty.fine()
        with group.scope():  # whoever has the handle may still use it
            faulty.fine()
        caplog.clear()
        kept.free()
        wait_until(lambda: "freed by free()" in caplog.text, "the failure is logged")
        with pytest.raises(ExceptionGroup) as caught:
            group.close()
        assert [type(error) for error in caught.value.exceptions] == [RoleError]

    def test_a_failure_that_was_dropped_voids_a_checkpoint(self, spawn: Spawn, tmp_path: Path) -> None:
        """Nothing is saved as if all had gone well, also when it fails just before the roles save themselves."""
        group = spawn({"faulty": colocate.role(Faulty), "lasting": colocate.role(Lasting)}, slots=1)
        faulty = group.role("faulty", Faulty)
        for wait in (True, False):
            faulty.fail.keep()
            if wait:
                faulty.fine()
            with pytest.raises(RoleError, match="a plain one"):
                group.checkpoint(tmp_path / "one")
            assert not list(tmp_path.iterdir())
        group.checkpoint(tmp_path / "one")
