"""Recordings of roles' calls: their contents, replays and comparisons."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.suite.core.restarting import kill_and_get_error
from tests.suite.recordings.probes import Answer, BufferedPlayer, Critic, Giver, Player, Steady, Taker

import colocate
from colocate import ColocatedGroup, RoleSpec
from colocate.errors import ClosedError, ConfigError, ReplayError, RoleError, SerializationError
from colocate.executor import OwnProcess
from colocate.features import FEATURES
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import Lasting
from colocate.testing.waiting import PATIENCE_S, wait_until

torch = pytest.importorskip("torch")


def _are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other)  # type: ignore[no-any-return]


class Recordings(ExecutorCase):
    """`runtime.record` and `colocate.load_recording`."""

    @pytest.fixture
    def player(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a group of two slots with a player and a critic."""
        return spawn({"player": colocate.role(Player), "critic": colocate.role(Critic)}, name="group")

    def test_recorded_values_are_of_call_end(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """A recording has each rank's value as of the end of the call, whatever changed the value later."""
        role, runtime = player.role("player", Player), player.owner.owner
        role.buffer()
        with runtime.record(role, tmp_path / "it"):
            gave = role.generate(torch.arange(5.0), temperature=2.0)
            role.buffer()
            role.buffer()
            answers = role.answer("yes")
            resident = role.generate.keep(torch.arange(4.0))
            gave_kept = resident.fetch()
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
        assert _are_equal(torch.cat([value["ids"] for value in first.values()]), gave["ids"])
        assert [text for value in first.values() for text in value["text"]] == gave["text"]
        assert _are_equal(torch.cat([value["ids"] for value in second.values()]), gave_kept["ids"])
        assert [call.values()[0].tolist() for call in recorded["buffer"]] == [[2.0, 2.0], [3.0, 3.0]]
        (answer,) = recorded["answer"]
        assert [answer_item.text for answer_item in answer.values()] == ["yes", "yes"]
        assert isinstance(answer.value(1), Answer)
        assert _are_equal(answer.value(1).numbers, answers[1].numbers)
        assert first.arguments(0)["temperature"] == [["", "2.0"]]
        assert first.arguments(0) != second.arguments(0)

    def test_calls_of_some_ranks(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """A call on some ranks is recorded with only these ranks and their values."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            for rank in (1, 0):
                role.later.options(ranks=[rank])(rank)
        calls = colocate.load_recording(tmp_path / "it")["player"].calls
        assert [(call.ranks, call.values()) for call in calls] == [((1,), [1]), ((0,), [0])]

    def test_errors(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """An error is recorded as data (class, text, traceback), and reading the failed rank's value is refused."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            with pytest.raises(RoleError):
                role.lucky(1)
            assert role.lucky(7) == ["lucky", "lucky"]
        first, second = colocate.load_recording(tmp_path / "it")["player"]["lucky"]
        assert first.error is not None
        assert first.error.cls == "tests.suite.recordings.probes:OutOfLuckError"
        assert first.error.text == "out of luck: rank 1"
        assert "in lucky" in first.error.traceback
        assert second.error is None
        assert second.values() == ["lucky", "lucky"]
        with pytest.raises(SerializationError, match="it has raised OutOfLuckError: out of luck: rank 1"):
            first.value(1)

    @needs_feature("rows")
    def test_rows(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Rows are recorded with index and value, each rank's yields in order, and a failed row with an error."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            with role.play.options(on_error="return").stream(["a", "fails", "c"]) as rows:
                order = [index for index, _ in rows]
            assert role.produce([10, 20, 30]) == [10, 20, 30]
            assert role.produce_async([1, 2]) == [1, 2]
            assert role.produce.keep([5, 6]).fetch() == [5, 6]
        recorded = colocate.load_recording(tmp_path / "it")["player"]
        (played,) = recorded["play"]
        assert {row.index for row in played.rows} == {*order} == {0, 1, 2}
        assert len(played.rows) == 3
        assert {row.index: row.value for row in played.rows if row.error is None} == {0: "a", 2: "c"}
        assert {row.index: row.error.text for row in played.rows if row.error} == {1: "out of luck: this row"}
        first, second = recorded["produce"]
        assert [(row.index, row.value) for row in first.rows if row.rank == 0] == [(1, 20), (0, 10)]
        assert [(row.index, row.value) for row in first.rows if row.rank == 1] == [(2, 30)]
        assert sorted(row.value for row in second.rows) == [5, 6]
        with pytest.raises(ConfigError, match="has no value of rank 0: see its rows"):
            first.value()

    def test_several_roles_and_refused_recordings(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Roles are recorded together, each at most once at a time; a taken folder and a non-view are refused."""
        runtime = player.owner.owner
        role, critic = player.role("player", Player), player.role("critic", Critic)
        with runtime.record([role, critic], tmp_path / "it"):
            with pytest.raises(ConfigError, match="'critic' is recorded already"):
                runtime.record(critic, tmp_path / "other")
            critic.value(role.generate(torch.arange(2.0)))
        with pytest.raises(ConfigError, match="is there already"):
            runtime.record(critic, tmp_path / "it")
        with pytest.raises(ConfigError, match="it is a view"):
            runtime.record("critic", tmp_path / "other")
        recording = colocate.load_recording(tmp_path / "it")
        assert {name: [call.method for call in recording[name].calls] for name in recording} == {
            "critic": ["value"],
            "player": ["generate"],
        }
        with pytest.raises(ConfigError, match=r"role 'plyer' isn't in the recording.*did you mean 'player'"):
            recording["plyer"]

    @pytest.mark.parametrize("how", ["taken", "closed"])
    def test_two_groups_of_which_one_fails(self, spawn: Spawn, tmp_path: Path, how: str) -> None:
        """A recording of two groups is all or nothing; after a refusal the first group runs and can be recorded."""
        first = spawn({"player": colocate.role(Player)}, name="first")
        second = spawn({"player": colocate.role(Player)}, name="second")
        runtime, views = first.owner.owner, [first["player"], second["player"]]
        if how == "taken":
            (tmp_path / "it" / "second.player").mkdir(parents=True)
        else:
            second.close()
        with pytest.raises(ConfigError if how == "taken" else ClosedError):
            runtime.record(views, tmp_path / "it")
        assert first.role("player", Player).later(1) == [1, 1]
        assert not [*(tmp_path / "it").rglob("*.calls")]
        with runtime.record(views[0], tmp_path / "it"):
            first.role("player", Player).later(2)
        assert [call.values() for call in colocate.load_recording(tmp_path / "it")["player"].calls] == [[2, 2]]

    def test_a_file_that_is_damaged(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Reading a damaged value raises an error with file and byte, and other values stay readable."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            role.later(1)
        (file,) = (tmp_path / "it" / "group.player").glob("rank-1.*")
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        (call,) = colocate.load_recording(tmp_path / "it")["player"].calls
        assert call.value(0) == 1
        with pytest.raises(SerializationError, match=re.escape(f"{file} is damaged at byte ")):
            call.value(1)
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(SerializationError, match=re.escape(f"{file} is damaged at byte 0: ")):
            colocate.load_recording(tmp_path / "it")["player"]

    def test_recorded_inputs_are_of_call_start(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """With `inputs=`, a recording has each rank's arguments as they were when the call began."""
        role, critic, runtime = player.role("player", Player), player.role("critic", Critic), player.owner.owner
        prompts = torch.arange(5.0)
        with runtime.record([role, critic], tmp_path / "it", inputs=role):
            resident = role.generate.keep(prompts, temperature=2.0)
            critic.value(resident.ref)
            role.answer("yes")
            with pytest.raises(RoleError):
                role.lucky(0)
            prompts += 1
        recording = colocate.load_recording(tmp_path / "it")
        generate, answer, lucky = recording["player"].calls
        inputs = [generate.inputs(rank) for rank in generate.ranks]
        assert _are_equal(torch.cat([arguments["prompts"] for arguments in inputs]), torch.arange(5.0))
        assert [arguments["temperature"] for arguments in inputs] == [2.0, 2.0]
        assert (answer.inputs(1), lucky.inputs(0)) == ({"text": "yes"}, {"rank": 0})
        with pytest.raises(ConfigError, match="what it was given isn't recorded: name the role in runtime"):
            recording["critic"]["value"][0].inputs()
        with pytest.raises(ConfigError, match="role 'critic' isn't among the roles that are recorded"):
            runtime.record(role, tmp_path / "other", inputs=[critic])

    @needs_feature("rows")
    def test_recorded_rows_have_index_and_inputs(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """Recorded rows have the caller's index, whichever rank ran them, and their inputs."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it", inputs=role):
            assert role.play(["a", "b", "c"]) == ["a", "b", "c"]
            assert role.produce([10, 20, 30]) == [10, 20, 30]
            assert role.produce_async.keep([1, 2]).fetch() == [1, 2]
        recorded = colocate.load_recording(tmp_path / "it")["player"]
        (play,), (produce,), (produce_async,) = (recorded[name] for name in ("play", "produce", "produce_async"))
        assert {(row.index, row.inputs, row.value) for row in play.rows} == {
            (0, "a", "a"),
            (1, "b", "b"),
            (2, "c", "c"),
        }
        assert {(row.index, row.value) for row in produce.rows} == {(0, 10), (1, 20), (2, 30)}
        assert [call.joined() for call in (play, produce, produce_async)] == [["a", "b", "c"], [10, 20, 30], [1, 2]]
        assert [produce.inputs(rank) for rank in (0, 1)] == [{"rows": [10, 20]}, {"rows": [30]}]

    def test_joined_values_match_collect(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """`call.joined()` joins the ranks' recorded values as the method's `collect` does, fetched or not."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            gave = role.generate(torch.arange(5.0))
            resident = role.generate.keep(torch.arange(3.0))
            numbers = role.later(3)
            gave_kept = resident.fetch()
            with pytest.raises(RoleError):
                role.lucky(1)
            role.foreign.keep()
        first, second, later, lucky, foreign = colocate.load_recording(tmp_path / "it")["player"].calls
        for call, value in ((first, gave), (second, gave_kept)):
            assert _are_equal(call.joined()["ids"], value["ids"])
            assert call.joined()["text"] == value["text"]
        assert later.joined() == numbers
        with pytest.raises(SerializationError, match="it has raised OutOfLuckError: out of luck: rank 1"):
            lucky.joined()
        with pytest.raises(ConfigError, match="call 0 of foreign can't be joined: what rank 0 gave wasn't recorded"):
            foreign.joined()

    def test_the_limit(self, player: ColocatedGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A recording that reaches its limit ends with a warning; calls continue, and the written part is readable."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it", limit="1MiB"):
            for _ in range(8):
                assert [value.numel() for value in role.large(50_000)] == [50_000, 50_000]
            wait_until(lambda: "has 1 MiB, its limit" in caplog.text, "the warning has been given")
        calls = colocate.load_recording(tmp_path / "it")["player"].calls
        assert 2 <= len(calls) < 8
        assert all(value.numel() == 50_000 for call in calls for value in call.values())
        assert sum(path.stat().st_size for path in (tmp_path / "it").rglob("*.calls")) <= 1.5 * 2**20

    def test_unrecorded_value_is_logged(
        self, player: ColocatedGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A value that only the code of a class can read is logged as unrecorded, and the call succeeds."""
        role, runtime = player.role("player", Player), player.owner.owner
        with runtime.record(role, tmp_path / "it"):
            role.foreign.keep()
            role.later(1)
            wait_until(lambda: "what foreign gives isn't recorded: builtins.object" in caplog.text, "it has been told")
        recorded = colocate.load_recording(tmp_path / "it")["player"]
        (call,) = recorded["foreign"]
        assert (call.missing or "").startswith("builtins.object")
        assert recorded["later"][0].missing is None
        with pytest.raises(SerializationError, match=r"it wasn't recorded: builtins\.object"):
            call.value()

    @needs_feature("rows")
    def test_failed_block_ends_the_recording(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """A recording whose block fails doesn't wait for running calls, and records no later calls."""
        role, runtime = player.role("player", Player), player.owner.owner
        with Gate() as gate:
            sent: list[Any] = []
            with contextlib.suppress(ZeroDivisionError), runtime.record(role, tmp_path / "it"):
                role.later(1)
                sent.append(role.play.submit(["a", "b"], gates=[gate.address, gate.address]))
                raise ZeroDivisionError
            gate.open()
            assert sent[0].result(PATIENCE_S) == ["a", "b"]
        role.later(2)
        calls = colocate.load_recording(tmp_path / "it")["player"].calls
        assert [call.method for call in calls] == ["later", "play"]

    @needs(OwnProcess)
    def test_a_rank_that_is_killed(self, player: ColocatedGroup, tmp_path: Path) -> None:
        """A file that ends amid an entry keeps its complete entries, and its rank is reported as torn."""
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


def _run_steps(group: ColocatedGroup, count: int = 3) -> list[Any]:
    """Call both roles in all ways and return the results."""
    player, critic = group.role("player", Player), group.role("critic", Critic)
    values: list[Any] = []
    for step in range(count):
        resident = player.generate.keep(torch.full((4,), float(step)))
        values += [
            critic.value(resident.ref).tolist(),
            resident.fetch()["text"],
            player.answer("yes")[1].numbers.tolist(),
        ]
        try:
            values.append(player.lucky(step))
        except RoleError as error:
            cause: Any = error.__cause__
            values.append((type(cause), str(cause), cause.why, error.rank))
        calls = [player.later.submit(number) for number in range(3)]
        values += [call.result() for call in calls]
        values.append(critic.value(player.generate(torch.full((3,), float(step)))).tolist())
    return values


class Replays(ExecutorCase):
    """`role(...).on(replay=...)`: a recording replaces a role."""

    def _record_player(self, spawn: Spawn, folder: Path, do: Callable[[ColocatedGroup], Any], **options: Any) -> Any:
        """Record a group's player while `do` runs, close the pool, and return the result of `do`."""
        group = spawn({"player": colocate.role(Player), "critic": colocate.role(Critic)}, name="group", **options)
        with group.owner.owner.record(group["player"], folder):
            result = do(group)
        group.owner.close()
        return result

    def _replay_player(self, spawn: Spawn, replay: Any, marks: Path | None = None, **options: Any) -> ColocatedGroup:
        player = colocate.role(Player, None if marks is None else str(marks)).on(replay=replay)
        return spawn({"player": player, "critic": colocate.role(Critic)}, name="group", **options)

    def test_replayed_role_gives_recorded_values(self, spawn: Spawn, tmp_path: Path) -> None:
        """A replayed role and its consumers give the recorded values, and the role's class is never constructed."""
        before = self._record_player(spawn, tmp_path / "it", _run_steps)
        (marks := tmp_path / "marks").mkdir()
        again = self._replay_player(spawn, tmp_path / "it", marks)
        assert _run_steps(again) == before
        assert "replayed" in again.owner.owner.graph.render("json")
        assert not [*marks.iterdir()]

    def test_an_error_of_a_class_that_isnt_here(self, spawn: Spawn, tmp_path: Path) -> None:
        """A recorded error whose class can't be found by name is replayed with the same message."""

        def fail(group: ColocatedGroup) -> str:
            with pytest.raises(RoleError) as caught:
                group.role("player", Player).odd()
            words = str(caught.value)
            assert "it is odd" in words
            return words.partition(" on rank")[0]  # The first rank to fail varies.

        before = self._record_player(spawn, tmp_path / "it", fail)
        assert before.endswith("Player.odd.<locals>.OddError")
        assert fail(self._replay_player(spawn, tmp_path / "it")) == before

    @needs_feature("rows")
    def test_replayed_rows_keep_recorded_order(
        self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A replayed stream yields its rows in the recorded order, and a failed row fails again."""

        def read(group: ColocatedGroup, order: Sequence[int] | None) -> Any:
            player = group.role("player", Player)
            with contextlib.ExitStack() as stack:
                gates = [stack.enter_context(Gate()) for _ in range(4)]
                addresses = [gate.address for gate in gates]
                rows = player.play.options(on_error="return").stream(["a", "b", "fails", "d"], gates=addresses)
                values = []
                for index in order or range(4):
                    if order is not None:
                        gates[index].open()
                    row, value = next(rows)
                    values.append((row, str(value.__cause__) if isinstance(value, Exception) else value))
                return values

        before = self._record_player(spawn, tmp_path / "it", lambda group: read(group, (2, 0, 3, 1)))
        assert [row for row, _ in before] == [2, 0, 3, 1]
        again = self._replay_player(spawn, colocate.Replay(tmp_path / "it", loose=True))
        assert read(again, None) == before
        wait_until(lambda: "player.play, call 0: argument gates[0]" in caplog.text, "it is told that they differ")

    @needs_feature("rows")
    def test_yielded_rows(self, spawn: Spawn, tmp_path: Path) -> None:
        """Yielded rows of all ranks are replayed in the recorded order, and kept ones as residents."""

        def read(group: ColocatedGroup) -> Any:
            player = group.role("player", Player)
            with player.produce.stream([*range(40)]) as rows:
                values: list[Any] = [*rows]
            with player.produce_async.stream([*range(6)]) as rows:
                values += [*rows]
            return values, player.produce.keep([1, 2, 3]).fetch(), player.produce([5, 6])

        before = self._record_player(spawn, tmp_path / "it", read)
        group = self._replay_player(spawn, tmp_path / "it")
        values, resident, whole = read(group)
        assert (values, resident, whole) == before

    def test_other_calls_are_refused(self, spawn: Spawn, tmp_path: Path) -> None:
        """A call with other arguments is refused; the error names call, parameter and first difference."""

        def do(group: ColocatedGroup) -> None:
            player = group.role("player", Player)
            player.generate(torch.arange(4.0))
            player.generate(torch.arange(4.0), temperature=2.0)
            player.later(1)

        self._record_player(spawn, tmp_path / "it", do)
        group = self._replay_player(spawn, tmp_path / "it")
        with pytest.raises(ReplayError, match=r"player\.generate, call 0: argument prompts is float32\[2\] with other"):
            group.role("player", Player).generate(torch.ones(4))
        group.close()
        player = self._replay_player(spawn, tmp_path / "it").role("player", Player)
        player.generate(torch.arange(4.0))
        with pytest.raises(ReplayError, match=r"call 1: argument temperature is 3\.0, and was 2\.0"):
            player.generate(torch.arange(4.0), temperature=3.0)

    def test_another_order_is_refused(self, spawn: Spawn, tmp_path: Path) -> None:
        """A call out of order is refused with the call that was recorded there; so is a method never recorded."""

        def do(group: ColocatedGroup) -> None:
            group.role("player", Player).generate(torch.arange(4.0))
            group.role("player", Player).later(1)

        self._record_player(spawn, tmp_path / "it", do)
        player = self._replay_player(spawn, tmp_path / "it").role("player", Player)
        with pytest.raises(ReplayError, match=r"answer wasn't recorded in .*: it has generate \(1\), later \(1\)"):
            player.answer("yes")
        with pytest.raises(ReplayError, match=r"player\.later, call 0 comes where generate, call 0, was recorded"):
            player.later(1)

    def test_call_after_the_recording_is_refused(self, spawn: Spawn, tmp_path: Path) -> None:
        """A call after the last recorded one is refused."""
        self._record_player(spawn, tmp_path / "it", lambda group: group.role("player", Player).later(1))
        player = self._replay_player(spawn, tmp_path / "it").role("player", Player)
        assert player.later(1) == [1, 1]
        with pytest.raises(ReplayError, match=r"call 1 wasn't recorded in .*: it ends with call 0 of that method"):
            player.later(1)

    def test_invalid_replays_are_refused_at_once(self, spawn: Spawn, tmp_path: Path) -> None:
        """A missing recording, an absent role, another number of ranks and a wrong type are refused at once."""
        self._record_player(spawn, tmp_path / "it", lambda group: group.role("player", Player).later(1))
        with pytest.raises(ConfigError, match="is of 2 ranks, and the role has 1"):
            self._replay_player(spawn, tmp_path / "it", slots=1)
        with pytest.raises(ConfigError, match="there is no recording in"):
            self._replay_player(spawn, tmp_path / "other")
        with pytest.raises(ConfigError, match="has no role 'critic'"):
            spawn({"critic": colocate.role(Critic).on(replay=tmp_path / "it")})
        with pytest.raises(ConfigError, match=r"it is a folder, or a colocate\.Replay"):
            colocate.role(Critic).on(replay=3)  # type: ignore[arg-type]

    @needs_feature("weights")
    @needs_feature("checkpoints")
    def test_replayed_role_accepts_checkpoints_and_syncs(
        self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A replayed role accepts checkpoints and weight syncs, for which nothing is saved, sent or loaded."""

        def do(group: ColocatedGroup) -> Any:
            player, critic = group.role("player", Player), group.role("critic", Critic)
            values = [critic.value(player.generate(torch.arange(4.0))).tolist()]
            group.checkpoint(tmp_path / f"point-{group.owner.name}")
            values.append(critic.value(player.generate(torch.arange(4.0))).tolist())
            return values

        before = self._record_player(spawn, tmp_path / "it", do)
        again = self._replay_player(spawn, tmp_path / "it")
        other = spawn({"taker": colocate.role(Player)})
        assert do(again) == before
        again.restore(tmp_path / f"point-{again.owner.name}")
        with pytest.raises(ConfigError, match="has nothing of role 'player', which was replayed"):
            spawn({"player": colocate.role(Player)}, restore=tmp_path / f"point-{again.owner.name}")
        for _ in range(2):
            synced = colocate.sync_weights(again["player"], other["taker"])
            assert (synced.nbytes, synced.version) == (0, 0)
        warning = "role 'taker' keeps its weights, as role 'player' is replayed"
        wait_until(lambda: warning in caplog.text, "it has been told")
        synced = colocate.sync_weights(other["taker"], again["player"])
        assert (synced.nbytes, synced.version) == (0, 1)
        assert caplog.text.count(warning) == 1

    @needs(OwnProcess)
    @needs_feature("memory")
    def test_replayed_role_holds_no_memory(self, spawn: Spawn, tmp_path: Path) -> None:
        """A replayed role holds no memory, and can sleep and wake."""
        self._record_player(spawn, tmp_path / "it", lambda group: group.role("player", Player).later(1))
        group = self._replay_player(spawn, tmp_path / "it")
        assert group.sleep("player") == group.wake("player")
        assert all(role.total == 0 for slot in group.memory().slots for role in slot.roles if role.role == "player")
        assert group.role("player", Player).later(1) == [1, 1]

    @needs_feature("pausing")
    @pytest.mark.parametrize("how", ["wait", "keep", "abort"])
    def test_replayed_role_pauses(self, spawn: Spawn, tmp_path: Path, how: Any) -> None:
        """A pause of a replayed role is accepted, and the answers after the resume are the recorded ones."""
        self._record_player(
            spawn, tmp_path / "it", lambda group: [group["player"].later(number) for number in range(3)]
        )
        player = colocate.role(Player).on(replay=tmp_path / "it", background=True)
        group = spawn({"player": player, "critic": colocate.role(Critic)}, name="group")
        role = group.role("player", Player)
        assert role.later(0) == [0, 0]
        group.pause("player", how=how, timeout=PATIENCE_S)
        answers = role.later.submit(1)
        group.resume("player")
        assert (answers.result(PATIENCE_S), role.later(2)) == ([1, 1], [2, 2])

    def test_siblings(self, spawn: Spawn, tmp_path: Path) -> None:
        """Access to a replayed sibling's object raises an error that says why."""
        self._record_player(spawn, tmp_path / "it", lambda group: group.role("player", Player).later(1))
        critic = self._replay_player(spawn, tmp_path / "it").role("critic", Critic)
        with pytest.raises(RoleError, match=r"role 'player' is replayed from .*, and has no '_bias'"):
            critic.look()

    def test_default_generators(self, spawn: Spawn, tmp_path: Path) -> None:
        """A replay leaves the process's default generators as the recorded role's calls did."""

        def do(group: ColocatedGroup) -> Any:
            player, critic = group.role("player", Player), group.role("critic", Critic)
            torch.manual_seed(7)
            return [number for _ in range(3) for number in (player.default(), critic.default())]

        before = self._record_player(spawn, tmp_path / "it", do, slots=1)
        assert do(self._replay_player(spawn, tmp_path / "it", slots=1)) == before


class Comparisons(ExecutorCase):
    """`role(...).on(compare=...)`: a role is compared with its recording."""

    @pytest.fixture
    def recorded(self, spawn: Spawn, tmp_path: Path) -> Path:
        """Record some calls and return the folder."""
        group = spawn({"player": colocate.role(Player)}, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "it"):
            self._make_calls(group)
        group.owner.close()
        return tmp_path / "it"

    @staticmethod
    def _make_calls(group: ColocatedGroup) -> None:
        player = group.role("player", Player)
        for step in range(3):
            player.generate(torch.full((4,), float(step)))
            player.later(step)
        with pytest.raises(RoleError):
            player.lucky(0)

    def test_the_same(self, spawn: Spawn, recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Equal results are counted, without a difference in the table or the log."""
        group = spawn({"player": colocate.role(Player).on(compare=recorded)}, name="group")
        self._make_calls(group)
        table = {row.method: row for row in colocate.comparison(group["player"])}
        assert (table["generate"].calls, table["generate"].numbers) == (6, 3 * (4 + 4))
        assert all((row.differ, row.arguments, row.missing) == (0, 0, 0) for row in table.values())
        assert "differs from" not in caplog.text

    def test_first_difference_is_logged(self, spawn: Spawn, recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The first difference is logged with call, path, count and size; the table counts all differences."""
        group = spawn({"player": colocate.role(Player, bias=2.0).on(compare=recorded)}, name="group")
        self._make_calls(group)
        words = (
            r"player\.generate, call 0: its value\['ids'\]\[0\] was \S+, and is \S+; "
            r"2 of 4 differ, by 2 at most, relatively"
        )
        wait_until(lambda: re.search(words, caplog.text), "the first difference has been told")
        assert "its arguments were the same" in caplog.text
        table = {row.method: row for row in colocate.comparison(group["player"])}
        generate, later = table["generate"], table["later"]
        assert (generate.differ, generate.different, generate.arguments) == (6, 12, 0)
        assert generate.absolute == pytest.approx(2.0, abs=1e-5)
        assert (later.differ, later.absolute) == (6, 2)

    @needs_feature("rows")
    def test_rows_that_end_on_another_rank(self, spawn: Spawn, tmp_path: Path) -> None:
        """Rows are compared by index, whichever rank ran them and however many each rank had."""

        def play(group: ColocatedGroup, first: int) -> None:
            with contextlib.ExitStack() as stack:
                gates = [stack.enter_context(Gate()) for _ in range(20)]
                for gate in (gates[first], *gates[16:]):
                    gate.open()
                rows = group.role("player", Player).play.stream([*range(20)], gates=[gate.address for gate in gates])
                assert {next(rows)[0] for _ in range(5)} == {first, 16, 17, 18, 19}  # All run on the first row's rank.
                for gate in gates:
                    gate.open()
                assert len([*rows]) == 15

        group = spawn({"player": colocate.role(Player)}, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "rows"):
            play(group, 0)
        group.owner.close()
        (call,) = colocate.load_recording(tmp_path / "rows")["player"]["play"]
        ranks = {row.index: row.rank for row in call.rows}
        assert sorted([*ranks.values()].count(rank) for rank in (0, 1)) == [8, 12]
        group = spawn({"player": colocate.role(Player).on(compare=tmp_path / "rows")}, name="group")
        play(group, next(row for row in range(16) if ranks[row] != ranks[0]))
        (table,) = colocate.comparison(group["player"])
        assert (table.calls, table.numbers, table.differ) == (2, 2 + 20, 0)

    @needs_feature("rows")
    @pytest.mark.parametrize("count", [3, 5])
    def test_a_row_less_or_more(
        self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
    ) -> None:
        """A missing or extra row is a difference though all rows have equal values, and a replay refuses the call."""
        group = spawn({"player": colocate.role(Player)}, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "rows"):
            group.role("player", Player).play([1, 1, 1, 1])
        group.owner.close()
        group = spawn({"player": colocate.role(Player).on(compare=tmp_path / "rows")}, name="group")
        group.role("player", Player).play([1] * count)
        (table,) = colocate.comparison(group["player"])
        assert (table.calls, table.differ, table.arguments, table.missing) == (2, 2, 2, max(0, count - 4))
        wait_until(lambda: "differs from" in caplog.text, "it is told")
        assert f"(the number of its rows) was 4, and is {count}" in caplog.text or "wasn't recorded" in caplog.text
        group.owner.close()
        group = spawn({"player": colocate.role(Player).on(replay=tmp_path / "rows")}, name="group")
        with pytest.raises(ReplayError, match=f"call 0: argument row is {count} rows, and was 4 rows"):
            group.role("player", Player).play([1] * count)

    @pytest.mark.parametrize("what", ["points", "point", "missing", "times", "type", "error", "both"])
    def test_values_of_all_kinds(self, spawn: Spawn, tmp_path: Path, what: str) -> None:
        """Structured arrays, dates, NaN and error values are read, replayed and compared."""
        group = spawn({"player": colocate.role(Player)}, slots=1, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "it"):
            gave = group.role("player", Player).give(what)
        group.owner.close()
        (call,) = colocate.load_recording(tmp_path / "it")["player"]["give"]
        group = spawn({"player": colocate.role(Player).on(replay=tmp_path / "it")}, slots=1, name="group")
        for value in (call.value(), group.role("player", Player).give(what)):
            assert (type(value), repr(value)) == (type(gave), repr(gave))
        group.owner.close()
        for bias, tolerance, differs in ((0.0, 0.0, False), (1.0, 0.0, True), (1e-6, 1e-3, what == "type")):
            compare = colocate.Compare(tmp_path / "it", tolerance=tolerance)
            group = spawn({"player": colocate.role(Player).on(compare=compare)}, slots=1, name="group")
            group.role("player", Player).give(what, bias)
            (table,) = colocate.comparison(group["player"])
            differs = differs or (bias == 1e-6 and what in ("error", "both"))  # texts have no tolerance
            assert (table.calls, table.differ, table.missing) == (1, int(differs), 0), table.first
            group.owner.close()

    @pytest.mark.parametrize("slots", [2, 1])
    def test_a_comparison_fails_no_call(self, spawn: Spawn, tmp_path: Path, slots: int) -> None:
        """A damaged recording counts as not comparable, and fails no call."""
        group = spawn({"player": colocate.role(Player)}, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "it"):
            for _ in range(2):
                group.role("player", Player).buffer()
        group.owner.close()
        for file in (tmp_path / "it").rglob("rank-*.calls"):
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        group = spawn({"player": colocate.role(Player).on(compare=tmp_path / "it")}, slots=slots, name="group")
        for _ in range(2):
            assert len(group.role("player", Player).buffer()) == slots
        (table,) = colocate.comparison(group["player"])
        assert (table.calls, table.differ, table.missing) == (2 * slots, 0, slots)
        assert re.search(r"buffer, call 1: it can't be .*is damaged at byte \d+: ", table.first or "")

    @needs_feature("weights")
    @pytest.mark.parametrize("slots", [2, 1])
    def test_weights_that_differ_between_roles(
        self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture, slots: int
    ) -> None:
        """A difference after a sync of different weights is attributed to the weights, not to the role."""

        def do(group: ColocatedGroup) -> None:
            giver, taker = group.role("giver", Giver), group.role("taker", Taker)
            for _ in range(2):
                colocate.sync_weights(giver, taker)
                taker.answer(torch.arange(4.0))
                giver.learn()

        roles: dict[str, RoleSpec[Any]] = {"giver": colocate.role(Giver), "taker": colocate.role(Taker)}
        group = spawn(roles, name="group")
        with group.owner.owner.record([group["giver"], group["taker"]], tmp_path / "it"):
            do(group)
        group.owner.close()

        def compared(giver: float, taker: float) -> Any:
            roles: dict[str, RoleSpec[Any]] = {
                "giver": colocate.role(Giver, giver),
                "taker": colocate.role(Taker, taker),
            }
            on = {name: role.on(compare=tmp_path / "it") for name, role in roles.items()}
            group = spawn(on, slots=slots, name="group")
            do(group)
            (learn,), (answer,) = (colocate.comparison(group[name]) for name in ("giver", "taker"))
            group.owner.close()
            return learn, answer

        learn, answer = compared(0.0, 0.0)
        assert (learn.first, answer.first, learn.origin, answer.origin) == (None, None, None, None)
        learn, answer = compared(0.5, 0.0)
        assert (learn.first, answer.differ) == (None, slots)
        assert answer.first.startswith("taker.answer, call 1: its value[")
        assert "its weights differ since the sync before taker.answer, call 1" in answer.first
        words = "taker.answer, call 1, its weights: the sync before taker.answer, call 1, has brought others"
        assert answer.origin.words == words
        _, answer = compared(0.0, 0.5)
        assert "weights differ" not in answer.first
        assert answer.origin.words.startswith("taker.answer, call 0: it was given the same")

    def test_a_difference_that_grows(self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A growing difference is logged at first and at each tenfold growth; the origin is the first one."""

        def do(group: ColocatedGroup, biases: Sequence[float]) -> None:
            for bias in biases:
                group.role("player", Player).give("missing", bias)

        group = spawn({"player": colocate.role(Player)}, slots=1, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "it"):
            do(group, [0.0] * 6)
        group.owner.close()
        group = spawn({"player": colocate.role(Player).on(compare=tmp_path / "it")}, slots=1, name="group")
        do(group, [0.0, 1e-7, 5e-7, 1e-4, 2e-4, 0.25])
        (give,) = colocate.comparison(group["player"])
        assert (give.differ, give.arguments) == (5, 5)
        wait_until(lambda: "call 5: its value" in caplog.text, "the largest one is told")
        calls = re.findall(r"player\.give, call (\d): its value", caplog.text)
        assert calls == ["1", "3", "5"]
        assert give.origin is not None
        assert give.origin.words == "player.give, call 1, parameter bias: it was given something else"

    def test_calls_that_havent_come(self, spawn: Spawn, recorded: Path) -> None:
        """Recorded calls that a run hasn't made yet are counted as left."""
        group = spawn({"player": colocate.role(Player).on(compare=recorded)}, name="group")
        table = {row.method: row for row in colocate.comparison(group["player"])}
        assert [(table[name].calls, table[name].left) for name in ("generate", "later")] == [(0, 6), (0, 6)]
        group.role("player", Player).generate(torch.full((4,), 0.0))
        table = {row.method: row for row in colocate.comparison(group["player"])}
        assert (table["generate"].calls, table["generate"].left, table["generate"].differ) == (2, 4, 0)

    def test_a_call_that_others_had_not_begun(self, spawn: Spawn, tmp_path: Path) -> None:
        """A rank that hadn't begun a call when the call failed on another rank isn't compared."""
        group = spawn({"player": colocate.role(Player)}, name="group")
        with group.owner.owner.record(group["player"], tmp_path / "it"), pytest.raises(RoleError):
            group.role("player", Player).lucky(0)
        group.owner.close()
        for file in (tmp_path / "it" / "group.player").glob("rank-1.*"):
            file.unlink()
        group = spawn({"player": colocate.role(Player).on(compare=tmp_path / "it")}, name="group")
        assert group.role("player", Player).lucky(7) == ["lucky", "lucky"]
        (lucky,) = colocate.comparison(group["player"])
        assert (lucky.calls, lucky.differ, lucky.missing) == (2, 1, 0)

    def test_other_arguments(self, spawn: Spawn, recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A difference after different arguments is reported together with the first differing argument."""
        group = spawn({"player": colocate.role(Player).on(compare=recorded)}, name="group")
        group.role("player", Player).generate(torch.full((4,), 5.0))
        wait_until(lambda: "its arguments differ, too: prompts is float32[2] with other" in caplog.text, "it is told")
        generate, *_ = colocate.comparison(group["player"])
        assert (generate.arguments, generate.differ) == (2, 2)


def _call_all_kinds(group: ColocatedGroup) -> None:
    steady, batch = group.role("steady", Steady), torch.arange(9.0)
    steady.double(batch)
    steady.double.keep(batch).fetch()
    steady.padded(batch)
    steady.balanced(batch, [8, 1, 1, 1, 4, 1, 1, 1, 1])
    steady.double(steady.balanced.keep(batch, [8, 1, 1, 1, 4, 1, 1, 1, 1]).ref)
    steady.mean(batch)
    steady.shape()
    steady.whole(batch)
    steady.learn(batch)
    with pytest.raises(RoleError, match="row 5"):
        steady.fail(batch)
    if "rows" in FEATURES:
        steady.play([float(row) for row in range(9)])
        steady.produce([*range(9)])


class OtherRanks(ExecutorCase):
    """`role(...).on(compare=...)` with another number of ranks: the joined results are compared."""

    @pytest.fixture
    def recorded_on_two(self, spawn: Spawn, tmp_path: Path) -> Path:
        """Record all kinds of calls on two ranks and return the folder."""
        group = spawn({"steady": colocate.role(Steady)}, name="group")
        with group.owner.owner.record(group["steady"], tmp_path / "it"):
            _call_all_kinds(group)
        group.owner.close()
        return tmp_path / "it"

    def _compare_ranks(
        self, spawn: Spawn, compare: Any, slots: int, bias: float = 0.0, **options: Any
    ) -> dict[str, Any]:
        role = colocate.role(Steady, bias).on(compare=compare, **options)
        group = spawn({"steady": role}, slots=slots, name="group")
        _call_all_kinds(group)
        return {row.method: row for row in colocate.comparison(group["steady"])}

    @needs_feature("balance")
    @pytest.mark.parametrize("slots", [1, 4])
    def test_the_same_on_other_ranks(
        self, spawn: Spawn, recorded_on_two: Path, slots: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Joined, kept and yielded results equal the recording on any number of ranks, and each call counts once."""
        table = self._compare_ranks(spawn, recorded_on_two, slots)
        assert {row.first for row in table.values()} == {None}
        assert {name: (row.calls, row.differ, row.missing, row.arguments) for name, row in table.items()} == {
            **dict.fromkeys(table, (1, 0, 0, 0)),
            "double": (3, 0, 0, 0),
            "balanced": (2, 0, 0, 0),
        }
        assert table["double"].numbers == 3 * (9 + 9)
        assert table["fail"].numbers == 1
        assert "differs from" not in caplog.text

    @needs_feature("balance")
    @needs_feature("rows")
    def test_first_difference_on_other_ranks_is_reported(
        self, spawn: Spawn, recorded_on_two: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The first difference is reported with call and path in the joined result."""
        table = self._compare_ranks(spawn, recorded_on_two, 4, bias=1.0)
        assert (table["double"].differ, table["double"].different, table["double"].absolute) == (2, 2, 1.0)
        words = (
            r"steady\.double, call 0: its value\['twice'\]\[5\] was 10.0, and is 11.0; 1 of 18 differ, by 1 at most, "
            r"relatively 0.1 \(its arguments were the same, but for what is split, and isn't compared: batch\)"
        )
        assert re.match(words, table["double"].first)
        assert table["play"].first.startswith("steady.play, call 0, row 5: its value was 5.0, and is 6.0")
        assert table["produce"].first.startswith("steady.produce, call 0, row 5: its value was 5, and is 6")
        assert [table[name].differ for name in ("play", "produce", "padded", "mean")] == [1, 1, 0, 0]
        wait_until(lambda: re.search(words, caplog.text), "the first difference has been told")

    @pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2, "dp": 2}, {"dp": 4}])
    def test_a_comparison_over_meshes(self, spawn: Spawn, tmp_path: Path, mesh: dict[str, int]) -> None:
        """On any mesh one copy of each part is compared, so that each call counts once."""

        def do(group: ColocatedGroup) -> None:
            group.role("steady", Steady).double(torch.arange(9.0))
            group.role("steady", Steady).mean(torch.arange(9.0))

        group = spawn({"steady": colocate.role(Steady).on(mesh={"dp": 2, "tp": 2})}, slots=4, name="group")
        with group.owner.owner.record(group["steady"], tmp_path / "it"):
            do(group)
        group.owner.close()
        role = colocate.role(Steady).on(compare=tmp_path / "it", mesh=mesh)
        group = spawn({"steady": role}, slots=math.prod(mesh.values()), name="group")
        do(group)
        double, mean = colocate.comparison(group["steady"])
        assert (double.first, double.calls, double.numbers) == (None, 1, 18)
        assert (mean.first, mean.calls, mean.numbers) == (None, 1, 1)

    def test_per_rank_lists_are_not_comparable(
        self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A list of ranks' items isn't comparable across numbers of ranks, unless all recorded items are equal."""
        group = spawn({"steady": colocate.role(Steady)}, name="group")
        with group.owner.owner.record(group["steady"], tmp_path / "it"):
            group.role("steady", Steady).who()
            group.role("steady", Steady).learn(torch.arange(2.0))
        group.owner.close()
        group = spawn({"steady": colocate.role(Steady).on(compare=tmp_path / "it")}, slots=1, name="group")
        steady = group.role("steady", Steady)
        assert steady.who() == [0]
        steady.learn(torch.arange(2.0))
        who_row, learn = colocate.comparison(group["steady"])
        assert (who_row.calls, who_row.missing, who_row.differ) == (1, 1, 0)
        assert "steady.who, call 0: who is collected with Gather(): that has an item for each" in str(who_row.first)
        assert (learn.calls, learn.missing, learn.numbers) == (1, 0, 1)
        wait_until(lambda: "who is collected with Gather()" in caplog.text, "it has been told")

    @needs_feature("balance")
    @needs_feature("rows")
    def test_arguments_of_all_ranks(self, spawn: Spawn, recorded_on_two: Path) -> None:
        """Broadcast arguments and rows are compared across numbers of ranks; scattered arguments are not."""
        group = spawn({"steady": colocate.role(Steady).on(compare=recorded_on_two)}, slots=1, name="group")
        steady = group.role("steady", Steady)
        steady.double(torch.arange(9.0), scale=3.0)
        steady.whole(torch.arange(8.0))
        steady.mean(torch.arange(8.0))
        steady.play([float(row) for row in range(8)] + [7.0])
        table = {comparison_row.method: comparison_row for comparison_row in colocate.comparison(group["steady"])}
        double, whole, mean, play = (table[name] for name in ("double", "whole", "mean", "play"))
        assert [comparison_row.arguments for comparison_row in (double, whole, mean, play)] == [1, 1, 0, 1]
        assert "its arguments differ, too: scale is given, and was not" in str(double.first)
        assert "its arguments were the same, but for what is split, and isn't compared: batch" in str(mean.first)
        assert "row 8: its value was 8.0, and is 7.0" in str(play.first)


def _recorded_ranks(folder: Path) -> list[Sequence[int]]:
    return [call.ranks for call in colocate.load_recording(folder)["player"].calls]


def _spawn_restarting(spawn: Spawn, player: RoleSpec[Any], **options: Any) -> ColocatedGroup:
    roles = {"player": player, "lasting": colocate.role(Lasting)}
    return spawn(roles, name="group", on_failure="restart", **options)


class Restarts(ExecutorCase):
    """Restarts of groups whose roles are recorded, replayed or compared."""

    @pytest.fixture
    def counted(self, spawn: Spawn, tmp_path: Path) -> Path:
        """Record a role that returns 1, 2, 3, 4 for equal arguments, and return the folder."""
        group = _spawn_restarting(spawn, colocate.role(Player))
        with group.owner.owner.record(group["player"], tmp_path / "it"):
            for _ in range(4):
                group.role("player", Player).buffer()
        group.owner.close()
        return tmp_path / "it"

    @needs(OwnProcess)
    def test_restart_ends_the_recording(self, spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A restart ends the group's recording; the log, a later replay and a comparison say so."""
        group = _spawn_restarting(spawn, colocate.role(Player))
        with group.owner.owner.record(group["player"], tmp_path / "it"):
            group.role("player", Player).buffer()
            wait_until(lambda: _recorded_ranks(tmp_path / "it") == [(0, 1)], "it is written")
            kill_and_get_error(group)
            group.wait_ready(PATIENCE_S)
            group.role("player", Player).buffer()
        assert "with which the recording of player has ended" in caplog.text
        recorded = colocate.load_recording(tmp_path / "it")["player"]
        assert [call.values()[0].tolist() for call in recorded["buffer"]] == [[1.0, 1.0]]
        assert recorded.ended == "its group was restarted"
        group.owner.close()
        words = r"it ends with call 0 of that method, as its group was restarted"
        group = _spawn_restarting(spawn, colocate.role(Player).on(replay=tmp_path / "it"))
        group.role("player", Player).buffer()
        with pytest.raises(ReplayError, match=words):
            group.role("player", Player).buffer()
        group.owner.close()
        for slots in (2, 1):
            group = _spawn_restarting(spawn, colocate.role(Player).on(compare=tmp_path / "it"), slots=slots)
            for _ in range(2):
                group.role("player", Player).buffer()
            (buffer,) = colocate.comparison(group["player"])
            group.owner.close()
            assert buffer.first == "player.buffer, call 1: it wasn't recorded, as its group was restarted"

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    @pytest.mark.parametrize("restores", [False, True])
    def test_a_replay_goes_on(self, spawn: Spawn, counted: Path, tmp_path: Path, restores: bool) -> None:
        """After a restart or restore a replay continues from the checkpoint, or from the first call without one."""
        group = _spawn_restarting(spawn, colocate.role(Player).on(replay=counted))
        player = group.role("player", Player)

        def values(count: int) -> list[float]:
            return [float(player.buffer()[0][0]) for _ in range(count)]

        assert values(1) == [1.0]
        kill_and_get_error(group)
        group.wait_ready(PATIENCE_S)
        assert values(2) == [1.0, 2.0]
        group.checkpoint(tmp_path / "point")
        assert values(1) == [3.0]
        if restores:
            group.restore(tmp_path / "point")
        else:
            kill_and_get_error(group)
            group.wait_ready(PATIENCE_S)
        assert values(2) == [3.0, 4.0]

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    @pytest.mark.parametrize("slots", [2, 1])
    def test_a_comparison_goes_on(self, spawn: Spawn, counted: Path, tmp_path: Path, slots: int) -> None:
        """After a restart repeated calls are compared with the same recorded calls again."""
        group = _spawn_restarting(spawn, colocate.role(BufferedPlayer).on(compare=counted), slots=slots)
        player = group.role("player", BufferedPlayer)
        player.buffer()
        group.checkpoint(tmp_path / "point")
        player.buffer()
        kill_and_get_error(group)
        group.wait_ready(PATIENCE_S)
        for _ in range(3):
            player.buffer()
        (buffer,) = colocate.comparison(group["player"])
        assert buffer.first is None
        assert (buffer.calls, buffer.missing, buffer.left) == ((8, 0, 0) if slots == 2 else (5, 0, 0))


AREAS = [Recordings, Replays, Comparisons, OtherRanks, Restarts]
