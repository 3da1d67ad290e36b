"""Profiles: each second of the profiled slots counts once, and the ranks' traces share one file."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.suite.probes.profiled import ShiftedTimed, Timed

import colocate
from colocate import ColocatedGroup
from colocate.errors import ColocateError, ConfigError
from colocate.executor import OwnProcess
from colocate.features import FEATURES
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.counting import Counting
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from colocate import Profile

SLACK_S = 0.12
"""The tolerance for times on a busy machine."""


def part_seconds(profile: Profile, label: str, what: str) -> float:
    """Return the seconds of all slots that a call spent on a part."""
    part = profile.parts.get(label)
    return 0.0 if part is None else part.seconds.get(what, 0.0)


def approximate(expected: float) -> Any:
    """Match a time within the tolerance."""
    return pytest.approx(expected, abs=SLACK_S)


def read_events(profile: Profile) -> list[dict[str, Any]]:
    """Return the events of a profile's file."""
    entries: list[dict[str, Any]] = json.loads(profile.trace.read_text())
    return entries


def find_threads(profile: Profile, slot: int) -> set[int]:
    """Return the thread numbers of a slot's worker in the file."""
    named = [entry for entry in read_events(profile) if entry["name"] == "thread_name"]
    return {entry["tid"] for entry in named if entry["args"]["name"].startswith(f"slot {slot}: thread ")}


@needs(OwnProcess)
class Profiling(ExecutorCase):
    """`colocate.profile`."""

    @pytest.fixture
    def in_its_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Change to the test's own folder; skip without torch."""
        if "looking" not in FEATURES:
            pytest.skip("feature 'looking' isn't here")
        pytest.importorskip("torch")
        monkeypatch.chdir(tmp_path)

    @pytest.fixture
    def two(self, spawn: Spawn, in_its_folder: None) -> ColocatedGroup:
        """Spawn two ranks, and warm up their process group."""
        group = spawn({"timed": colocate.role(Timed)})
        timed = group.role("timed", Timed)
        timed.reduce([0.0, 0.0])
        timed.step([0.0, 0.0])
        return group

    def test_where_the_time_went(self, two: ColocatedGroup) -> None:
        """Work, waits for other ranks and waits for the driver are told apart, and their sum is the whole time."""
        timed = two.role("timed", Timed)
        with colocate.profile(two) as profile:
            began = time.time()
            timed.work([0.1, 0.5])
            time.sleep(0.3)
            timed.multiply()
            took = time.time() - began
        assert part_seconds(profile, "timed.work", "compute") == approximate(0.6)
        assert part_seconds(profile, "timed.multiply", "for others") == approximate(
            0.4
        )  # Rank 0 waits for rank 1's work.
        assert part_seconds(profile, "timed.multiply", "for the driver") == approximate(2 * 0.3)
        assert profile.parts["timed.work"].calls == 2
        assert profile.seconds == pytest.approx(took, abs=SLACK_S)
        whole = sum(sum(part.seconds.values()) for part in profile.parts.values())
        assert whole == pytest.approx(2 * profile.seconds, rel=1e-6)
        *_, last = profile.rows()
        assert last["call"] == "all"
        assert last["time (s)"] == pytest.approx(profile.seconds, abs=1e-5)

    @pytest.mark.parametrize("method", ["reduce", "step", "pass_on"])
    def test_a_rank_that_comes_late(self, two: ColocatedGroup, method: str) -> None:
        """A wait for a late rank is no computation or communication, in Python, a C++ backward pass or between two."""
        timed = two.role("timed", Timed)
        late = [0.4, 0.0] if method == "pass_on" else [0.0, 0.4]
        with colocate.profile(two) as profile:
            getattr(timed, method)(late)
        label = f"timed.{method}"
        assert part_seconds(profile, label, "compute") == approximate(0.4)
        assert part_seconds(profile, label, "for others") == approximate(0.4)
        assert part_seconds(profile, label, "communication") < SLACK_S

    @pytest.mark.long
    def test_overlapped_operation_costs_nothing(self, two: ColocatedGroup) -> None:
        """An operation that overlaps with work costs nothing; only the remaining wait counts."""
        timed = two.role("timed", Timed)
        with colocate.profile(two) as profile:
            timed.overlap([0.0, 0.3])
        assert part_seconds(profile, "timed.overlap", "compute") == approximate(0.5 + 0.3 + 0.5)
        assert part_seconds(profile, "timed.overlap", "for others") < SLACK_S
        with colocate.profile(two) as profile:
            timed.overlap([0.0, 0.9])
        assert part_seconds(profile, "timed.overlap", "compute") == approximate(0.5 + 0.9 + 0.5)
        assert part_seconds(profile, "timed.overlap", "for others") == approximate(0.4)

    @pytest.mark.long
    def test_calls_that_overlap_count_once(self, two: ColocatedGroup) -> None:
        """Overlapping async calls count their time once."""
        timed = two.role("timed", Timed)
        with colocate.profile(two) as profile:
            calls = [timed.wait.submit(0.4) for _ in range(3)]
            colocate.wait(calls)
        assert part_seconds(profile, "timed.wait", "compute") == approximate(2 * 0.4)

    def test_one_file(self, two: ColocatedGroup, tmp_path: Path) -> None:
        """One file has calls and the ranks' operators on one clock, with separate threads and flows for each rank."""
        timed = two.role("timed", Timed)
        with colocate.profile(two) as profile:
            timed.multiply()
            timed.step([0.0, 0.0])
        assert [path.name for path in tmp_path.iterdir()] == ["profile.json"] == [profile.trace.name]
        entries = read_events(profile)
        spans = [entry for entry in entries if entry["ph"] == "X" and entry["cat"] == "timed"]
        assert {entry["name"] for entry in spans} == {"timed.multiply", "timed.step"}
        ranks = [[entry for entry in entries if entry["tid"] in find_threads(profile, slot)] for slot in (0, 1)]
        for slot, of_rank in enumerate(ranks):
            (call,) = [entry for entry in spans if entry["name"] == "timed.multiply" and entry["args"]["rank"] == slot]
            (range_,) = [entry for entry in of_rank if entry["name"] == "timed.multiply"]
            (product,) = [entry for entry in of_rank if entry["name"] == "aten::mm" and _is_inside(entry, range_)]
            assert _is_inside(product, call, slack=1000)
            assert abs(range_["ts"] - call["ts"]) < SLACK_S * 1e6
            assert product["tid"] == range_["tid"] != call["tid"]
            assert product["pid"] == call["pid"]
            assert sum(entry["name"] == "aten::mm" and _is_inside(entry, call, slack=1000) for entry in of_rank) == 1
        for key in ("id", "tid"):
            mine, other_ids = ({entry.get(key) for entry in of_rank} - {None} for of_rank in ranks)
            assert mine
            assert other_ids
            assert not mine & other_ids

    @pytest.mark.long
    def test_only_some_ranks(self, two: ColocatedGroup) -> None:
        """Only the chosen ranks are profiled and hooked, and no hook stays after the profile."""
        timed = two.role("timed", Timed)
        assert timed.hooks() == [0, 0]
        with colocate.profile(two, roles="timed", ranks=1) as profile:
            assert timed.hooks() == [0, 2]
            assert timed.patched() == [False, True]
            timed.work([0.2, 0.1])
        assert timed.hooks() == [0, 0]
        assert timed.patched() == [False, False]
        assert profile.slots == {two.name: (1,)}
        assert part_seconds(profile, "timed.work", "compute") == approximate(0.1)
        assert (bool(find_threads(profile, 0)), bool(find_threads(profile, 1))) == (False, True)
        with colocate.profile(two) as again:
            timed.work([0.1, 0.1])
        assert again.trace.name == "profile-2.json"
        assert part_seconds(again, "timed.work", "compute") == approximate(0.2)

    @pytest.mark.long
    def test_a_clock_that_is_ahead(self, spawn: Spawn, in_its_folder: None) -> None:
        """A worker's clock that is five seconds ahead changes neither the table nor the trace."""
        group = spawn({"timed": colocate.role(ShiftedTimed, 5.0)})
        timed = group.role("timed", ShiftedTimed)
        timed.reduce([0.0, 0.0])
        with colocate.profile(group) as profile:
            began = time.time()
            timed.reduce([0.0, 0.4])
            time.sleep(0.2)
            timed.multiply()
            took = time.time() - began
        assert part_seconds(profile, "timed.reduce", "for others") == approximate(0.4)
        assert part_seconds(profile, "timed.reduce", "compute") == approximate(0.4)
        assert part_seconds(profile, "timed.multiply", "for the driver") == approximate(2 * 0.2)
        assert profile.seconds == pytest.approx(took, abs=SLACK_S)
        spans = [span for span in read_events(profile) if span["ph"] == "X" and span["name"] == "timed.multiply"]
        assert len(spans) == 4  # a call and a range on each of two ranks
        assert max(span["ts"] for span in spans) - min(span["ts"] for span in spans) < SLACK_S * 1e6

    def test_a_block_that_fails(self, two: ColocatedGroup, tmp_path: Path) -> None:
        """A failed block leaves no file or hook, and the next profile can begin."""
        with pytest.raises(ZeroDivisionError), colocate.profile(two):
            _ = 1 / 0
        assert list(tmp_path.iterdir()) == []
        assert two.role("timed", Timed).hooks() == [0, 0]
        with colocate.profile(two) as profile:
            two.role("timed", Timed).multiply()
        assert profile.trace.exists()

    @pytest.mark.long
    def test_a_block_that_fails_amid_a_call(self, two: ColocatedGroup, tmp_path: Path) -> None:
        """A block that fails amid a call doesn't wait for the rank; the next profile begins after the call."""
        timed, calls = two.role("timed", Timed), list[Any]()

        def fail() -> None:
            with colocate.profile(two):
                calls.append(timed.work.submit([3.0, 3.0]))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert not calls[0].done()
        assert list(tmp_path.iterdir()) == []
        with colocate.profile(two) as profile:
            timed.multiply()
        assert [path.name for path in tmp_path.iterdir()] == [profile.trace.name]
        assert timed.hooks() == [0, 0]

    def test_an_interrupted_profile(self, two: ColocatedGroup, tmp_path: Path) -> None:
        """An interrupt while ranks write the profile leaves no file, and fails no call."""
        timed = two.role("timed", Timed)
        previous = signal.signal(signal.SIGUSR1, _raise_interrupt)
        with Gate() as gate, ThreadPoolExecutor(1) as other:

            def interrupt() -> None:
                gate.wait_for()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

            timed.write_late(gate.address)
            interrupted = other.submit(interrupt)
            try:
                with pytest.raises(InterruptedError), colocate.profile(two):
                    pass
            finally:
                interrupted.result()  # Joined first: a later signal would end this process.
                signal.signal(signal.SIGUSR1, previous)
            call = timed.multiply.submit()
            gate.open()
            call.result(PATIENCE_S)
        assert list(tmp_path.iterdir()) == []
        with colocate.profile(two) as profile:
            timed.multiply()
        assert profile.trace.exists()

    def test_a_rank_that_cant_begin(self, two: ColocatedGroup, tmp_path: Path) -> None:
        """If one rank can't begin, the whole profile is refused with the reason, and the next one works."""
        timed = two.role("timed", Timed)
        timed.refuse_next()
        words = r"the profile of worker 1 of group .* can't begin: RuntimeError: another one goes on"
        with pytest.raises(ColocateError, match=words), colocate.profile(two):
            raise AssertionError
        assert timed.hooks() == [0, 0]
        assert list(tmp_path.iterdir()) == []
        with colocate.profile(two) as profile:
            timed.multiply()
        assert profile.trace.exists()

    @pytest.mark.long
    @needs_feature("looking")
    def test_two_at_once(self, spawn: Spawn, in_its_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Profiles of two groups that begin at the same moment have a file each."""
        groups = [spawn({"echo": colocate.role(Echo, "the tag")}, slots=1) for _ in range(2)]
        from colocate.features.profiling.driver import _Session  # Needs the feature "looking".

        both, begin = threading.Barrier(2), _Session.start_profile

        def begin_together(session: _Session) -> None:
            both.wait(PATIENCE_S)
            begin(session)

        monkeypatch.setattr(_Session, "start_profile", begin_together)

        def profile(group: ColocatedGroup) -> str:
            with colocate.profile(group) as profile:
                group.role("echo", Echo).noop()
            assert profile.parts["echo.noop"].calls == 1
            return profile.trace.name

        with ThreadPoolExecutor(2) as threads:
            assert {*threads.map(profile, groups)} == {"profile.json", "profile-2.json"}

    @pytest.mark.long
    def test_another_group_that_hangs(self, two: ColocatedGroup, spawn: Spawn) -> None:
        """A group that hangs doesn't affect the profile of another group."""
        other = spawn({"other": colocate.role(Counting)}, slots=1)
        pid = other.role("other", Counting).pid()[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            with colocate.profile(two) as profile:
                two.role("timed", Timed).multiply()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert profile.trace.exists()

    def test_one_profile_at_a_time(self, two: ColocatedGroup) -> None:
        """A second profile at a time is refused, and the first one continues."""
        timed = two.role("timed", Timed)
        with colocate.profile(two) as outer:
            with pytest.raises(ColocateError, match="is being profiled already"), colocate.profile(two):
                raise AssertionError
            timed.work([0.1, 0.1])
        assert part_seconds(outer, "timed.work", "compute") == approximate(0.2)

    def test_invalid_profile_arguments_are_refused(self, two: ColocatedGroup) -> None:
        """Wrong roles, ranks and options are refused before the profile begins."""
        with pytest.raises(ConfigError, match=r"no role 'tined'.*timed"), colocate.profile(two, roles="tined"):
            raise AssertionError
        with (
            pytest.raises(ConfigError, match=r"role 'timed' has 2, no rank 2"),
            colocate.profile(two, roles=["timed"], ranks=[0, 2]),
        ):
            raise AssertionError
        with pytest.raises(ConfigError, match="none of these ranks has a GPU"), colocate.profile(two, memory=True):
            raise AssertionError
        assert two.role("timed", Timed).hooks() == [0, 0]

    @pytest.mark.long
    def test_stacks(self, two: ColocatedGroup) -> None:
        """With `sampler="py-spy"` the file has a rank's Python stacks on the driver's clock."""
        timed = two.role("timed", Timed)
        with colocate.profile(two, ranks=1, sampler="py-spy") as profile:
            timed.multiply()
            timed.work([0.0, 0.8])
        entries = read_events(profile)
        (call,) = [
            entry for entry in entries if entry["name"] == "timed.work" and entry.get("args", {}).get("rank") == 1
        ]
        (stacks,) = {
            entry["tid"]
            for entry in entries
            if entry["name"] == "thread_name" and entry["args"]["name"] == "slot 1: stacks"
        }
        samples = [entry for entry in entries if entry["tid"] == stacks and re.search(r"(?<!\w)work$", entry["name"])]
        assert {entry["ph"] for entry in samples} == {"B", "E"}
        start, end = min(entry["ts"] for entry in samples), max(entry["ts"] for entry in samples)
        assert start == pytest.approx(call["ts"], abs=SLACK_S * 1e6)
        assert end == pytest.approx(call["ts"] + call["dur"], abs=SLACK_S * 1e6)
        assert part_seconds(profile, "timed.work", "compute") == approximate(0.8)
        with pytest.raises(ConfigError, match="only torch's"), colocate.profile(two, memory=True, sampler="py-spy"):
            raise AssertionError
        with pytest.raises(ConfigError, match="'torch' or 'py-spy'"), colocate.profile(two, sampler="pyspy"):
            raise AssertionError

    def test_roles_without_torch(self, spawn: Spawn, in_its_folder: None) -> None:
        """Calls of roles without torch are profiled, too."""
        group = spawn({"echo": colocate.role(Echo, "the tag")})
        with colocate.profile(group) as profile:
            group.role("echo", Echo).noop()
        assert profile.parts["echo.noop"].calls == 2
        assert profile.seconds > 0


def _raise_interrupt(number: int, frame: object) -> None:
    raise InterruptedError


def _is_inside(inner: dict[str, Any], outer: dict[str, Any], slack: float = 0.0) -> bool:
    return bool(outer["ts"] - slack <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack)


AREAS = [Profiling]
