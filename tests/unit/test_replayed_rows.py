"""Rows that a recording lacks: a replay gives the recorded rows first, in their order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ReplayError, Role, method
from colocate.features.recordings.telling import RecordingTap


class Player(Role):
    @method(rows="row", concurrency=8)
    async def play(self, row: int) -> int:
        """Return later for smaller rows."""
        for _ in range(20 - row):
            await asyncio.sleep(0)
        return row


def test_a_row_that_is_missing_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay gives recorded rows in their recorded order, and the missing ones after these, as errors."""
    wrote = RecordingTap.on_row

    def gave_row(self: Any, seen: Any, row: int, value: Any, digest: Any) -> None:
        if value % 10:
            wrote(self, seen, row, value, digest)

    with colocate.spawn({"player": colocate.role(Player)}, slots=1, name="group") as group:
        player = group.role("player", Player)
        with monkeypatch.context() as patch, group.owner.owner.record(player, tmp_path / "it"):
            patch.setattr(RecordingTap, "on_row", gave_row)
            with player.play.stream([1, 10, 3, 0]) as rows:
                assert [value for _, value in rows] == [10, 3, 1, 0]
    roles = {"player": colocate.role(Player).on(replay=str(tmp_path / "it"))}
    with colocate.spawn(roles, slots=1, name="group") as group:
        read = [*group.role("player", Player).play.options(on_error="return").stream([1, 10, 3, 0])]
    assert read[:2] == [(2, 3), (0, 1)]
    assert {index for index, error in read[2:] if isinstance(error, ReplayError)} == {1, 3}
