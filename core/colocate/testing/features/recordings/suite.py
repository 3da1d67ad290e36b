"""What calls of a role gave: it is recorded as it was, on each rank, and read without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import ConfigError, RoleError, SerializationError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.waiting import wait_until

torch = pytest.importorskip("torch")
from colocate.testing.features.recordings.probes import Answer, Critic, Player  # noqa: E402


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other)  # type: ignore[no-any-return]


class Recordings(ExecutorCase):
    """`runtime.record` and `colocate.load_recording`."""

    @pytest.fixture
    def player(self, spawn: Spawn) -> ColocatedGroup:
        """A group of two slots with a role of each kind."""
        return spawn({"player": colocate.role(Player), "critic": colocate.role(Critic)}, name="group")

    def test_what_calls_gave(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Each rank's value is there as it was when the call ended, whatever became of it."""
        role, runtime = player.role("player", Player), player.owner.owner
        role.buffer()
        with runtime.record(role, tmp_path / "it"):
            gave = role.generate(torch.arange(5.0), temperature=2.0)
            role.buffer()
            role.buffer()
            answers = role.answer("yes")
            kept = role.generate.keep(torch.arange(4.0))
            gave_kept = kept.fetch()
            assert role.later(3) == [3, 3]
        role.buffer()
        recording = colocate.load_recording(tmp_path / "it")
        assert [*recording] == ["player"]
        recorded = recording["player"]
        assert (recorded.group, recorded.ranks, recorded.torn) == ("group", 2, [])
        names = ["generate", "buffer", "buffer", "answer", "generate", "later"]
        assert [call.method for call in recorded.calls] == names
        assert [call.place for call in recorded.calls] == [*range(6)]
        first, second = recorded["generate"]
        assert _equal(torch.cat([value["ids"] for value in first.values()]), gave["ids"])
        assert [text for value in first.values() for text in value["text"]] == gave["text"]
        assert _equal(torch.cat([value["ids"] for value in second.values()]), gave_kept["ids"])
        assert [call.values()[0].tolist() for call in recorded["buffer"]] == [[2.0, 2.0], [3.0, 3.0]]
        (answer,) = recorded["answer"]
        assert [each.text for each in answer.values()] == ["yes", "yes"]
        assert isinstance(answer.value(1), Answer)
        assert _equal(answer.value(1).numbers, answers[1].numbers)
        assert first.arguments(0)["temperature"] == [["", "2.0"]]
        assert first.arguments(0) != second.arguments(0)

    def test_errors(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """An error is recorded as data, on the rank that has raised it."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            with pytest.raises(RoleError):
                role.lucky(1)
            assert role.lucky(7) == ["lucky", "lucky"]
        first, second = colocate.load_recording(tmp_path / "it")["player"]["lucky"]
        assert first.error is not None
        assert first.error.cls == "colocate.testing.features.recordings.probes:OutOfLuckError"
        assert first.error.text == "out of luck: rank 1"
        assert "in lucky" in first.error.traceback
        assert second.error is None
        assert second.values() == ["lucky", "lucky"]
        with pytest.raises(SerializationError, match="it has raised OutOfLuckError: out of luck: rank 1"):
            first.value(1)

    @needs_feature("rows")
    def test_rows(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Rows have their index, and the order in which they ended; an error of one is its own."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            with role.play.options(on_error="return").stream(["a", "fails", "c"]) as rows:
                order = [index for index, _ in rows]
            assert role.produce([10, 20, 30]) == [10, 20, 30]
            assert role.produce_async([1, 2]) == [1, 2]
            assert role.produce.keep([5, 6]).fetch() == [5, 6]
        recorded = colocate.load_recording(tmp_path / "it")["player"]
        (played,) = recorded["play"]
        assert sorted(row.index for row in played.rows) == sorted(order) == [0, 1, 2]
        assert {row.index: row.value for row in played.rows if row.error is None} == {0: "a", 2: "c"}
        assert {row.index: row.error.text for row in played.rows if row.error} == {1: "out of luck: this row"}
        first, second = recorded["produce"]
        assert [(row.index, row.value) for row in first.rows if row.rank == 0] == [(1, 20), (0, 10)]
        assert sorted(row.value for row in second.rows) == [5, 6]
        with pytest.raises(ConfigError, match="has no value of rank 0: see its rows"):
            first.value()

    def test_two_roles_and_what_is_refused(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Roles are recorded together, each once; a folder that is taken, and what is no view, are refused."""
        runtime = player.owner.owner
        role, critic = player.role("player", Player), player.role("critic", Critic)
        with runtime.record([role, critic], tmp_path / "it"):
            with pytest.raises(ConfigError, match="'critic' is recorded already"):
                runtime.record(critic, tmp_path / "other")
            critic.value(role.generate(torch.arange(2.0)))
        with pytest.raises(ConfigError, match="is there already"):
            runtime.record(critic, tmp_path / "it")
        with pytest.raises(ConfigError, match="it takes views"):
            runtime.record("critic", tmp_path / "other")
        recording = colocate.load_recording(tmp_path / "it")
        assert {name: [call.method for call in recording[name].calls] for name in recording} == {
            "critic": ["value"],
            "player": ["generate"],
        }
        with pytest.raises(ConfigError, match=r"role 'plyer' isn't in the recording.*did you mean 'player'"):
            recording["plyer"]

    def test_the_limit(self, player: ColocatedGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A recording that is large enough ends with a warning; the calls go on, and what there is can be read."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it", limit="1MiB"):
            for _ in range(8):
                assert [value.numel() for value in role.large(50_000)] == [50_000, 50_000]
            wait_until(lambda: "has 1 MiB, its limit" in caplog.text, "the warning has been given")
        calls = colocate.load_recording(tmp_path / "it")["player"].calls
        assert 2 <= len(calls) < 8
        assert all(value.numel() == 50_000 for call in calls for value in call.values())
        assert sum(path.stat().st_size for path in (tmp_path / "it").rglob("*.calls")) <= 1.5 * 2**20

    def test_what_is_not_recorded(
        self, player: ColocatedGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A value of a class that nobody can read without running its code is told, and the call is none the worse."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            role.foreign.keep()
            role.later(1)
            wait_until(lambda: "what foreign gives isn't recorded: builtins.object" in caplog.text, "it has been told")
        (call,) = colocate.load_recording(tmp_path / "it")["player"]["foreign"]
        with pytest.raises(SerializationError, match=r"it wasn't recorded: builtins\.object"):
            call.value()

    @needs(OwnProcess)
    def test_a_rank_that_is_killed(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """What it had written is there; an entry that it was amid isn't."""
        role, runtime = player.role("player", Player), player.owner.owner
        runtime.record(role, tmp_path / "it")
        role.generate(torch.arange(2.0))
        recording = colocate.load_recording(tmp_path / "it")
        wait_until(lambda: [call.ranks for call in recording["player"].calls] == [(0, 1)], "it is written")
        player.close(grace=0)
        (file,) = (tmp_path / "it" / "group.player").glob("rank-1.*")
        with open(file, "ab") as grows:
            grows.write(file.read_bytes()[:-5])
        recorded = recording["player"]
        assert (len(recorded.calls), recorded.torn) == (1, [1])
        assert len(recorded["generate"][0].values()) == 2


AREAS = [Recordings]
