"""The output of a run, on a terminal and elsewhere."""

import io
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from colocate._calls.records import CallRecord, TransferRecord
from colocate.testing.waiting import becomes_true
from colocate_report.calls import CallLog, Span, Total
from colocate_report.contention import Handover
from colocate_report.record import RunRecord
from colocate_run.log import RunLog
from colocate_run.screen import PLAIN_WIDTH, Screen


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=PLAIN_WIDTH, highlight=False), out


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=True, highlight=False), out


def record(**changes: object) -> RunRecord:
    fields = {
        "name": "demo",
        "directory": Path("runs/demo"),
        "config": "name: demo\n",
        "metrics": (),
        "tables": {"answers": [{"question": "[bold]cat", "after": "tac"}]},
        "totals": (Total("policy", "actor", "generate", 4, 2.0),),
        "spans": (),
        "phases": {"rollout": 7.5, "update": 2.5},
        "tree": "runtime local\n└ pool main",
        "graph": "{}",
        "environment": {},
        "started": 0.0,
        "seconds": 10.0,
    }
    return RunRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_start_stages_are_shown_on_any_console() -> None:
    for make in (terminal, plain):
        console, out = make()
        with Screen(console).show_start("demo") as stage:
            with stage("connect", "connecting to ray"):
                if make is terminal:
                    becomes_true(lambda out=out: "demo: connecting to ray  0s" in out.getvalue())  # type: ignore[misc]
                else:
                    assert out.getvalue() == "demo: connecting to ray\n"
            with stage("pool main", "reserving pool main: 2 slots"):
                pass
        told = out.getvalue().splitlines()
        assert told[-1] == "demo: started in 0.0 s (connect 0.0 s, pool main 0.0 s)" or make is terminal
        assert "(connect 0." in told[-1]


def test_log_has_printed_lines_without_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = terminal()
    monkeypatch.setattr("sys.stdout", console.file)
    screen, log = Screen(console), RunLog()
    log.write_text("early\n")
    with log.capture_output(), screen.log_to(log):
        log.open_file(tmp_path / "log.txt")
        with screen.show_start("demo") as stage, stage("connect", "connecting to ray"):
            print("while it starts")
        with screen.show_progress("demo", Path("/elsewhere/demo"), None):
            print("while it runs")
            screen.show_step({"step": 1, "reward": 0.5})
    log.close()
    print("afterwards")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("demo: started in")] == [
        "early",
        "demo: connecting to ray",
        "while it starts",
        "demo: running in /elsewhere/demo",
        "while it runs",
        "step 1  reward 0.5",
    ]
    assert all(text in out.getvalue() for text in ("while it starts", "while it runs", "afterwards"))


def test_a_step_is_a_narrow_line_of_a_log() -> None:
    """A step's line has its most important numbers, uncut, and counts the numbers that are only in metrics.jsonl."""
    console, out = plain()
    losses = {f"policy/some_loss_{number}": 0.123456 for number in range(30)}
    screen = Screen(console)
    screen.show_step({"step": 7, **losses, "reward": 0.5, "eval_accuracy": 0.25, "seconds": {"rollout": 1.0}})
    screen.show_step({"step": 8, "reward": 0.5, "seconds": {"rollout": 1.0, "update": 2.0}})
    screen.show_step({"step": 9, "x" * 200: 1})
    narrow, whole, long = out.getvalue().splitlines()
    assert len(narrow) <= 100
    assert narrow.startswith("step 7  eval_accuracy 0.25  reward 0.5  policy/some_loss_0 0.1235  ")
    shown = narrow.count("some_loss") + 2
    assert narrow.endswith(f"  (+{33 - shown} in metrics.jsonl)")
    assert whole == "step 8  reward 0.5  rollout 1.00s  update 2.00s"
    assert long.split() == ["step", "9", "x" * 200, "1"]


def test_a_disk_that_is_full_ends_the_log_and_not_the_run() -> None:
    log = RunLog()
    log.open_file(Path("/dev/full"))
    log.write_text("one")
    assert "No space left" in str(log.fault)
    log.close()


def test_a_bar_with_the_last_numbers_on_a_terminal() -> None:
    console, out = terminal()
    screen = Screen(console)
    with screen.show_progress("demo", Path("/elsewhere/demo"), 3):
        screen.set_total(80)
        screen.show_step({"step": 4, "reward": 0.5, "eval_accuracy": 0.25, "seconds": {"rollout": 0.5}})
        screen.show_step({"step": 5, "reward": 0.75, "seconds": {"rollout": 0.25}})
    shown = out.getvalue()
    assert "going on after step 3" in shown
    last = shown[shown.rindex("reward") :]
    assert last.startswith("reward 0.75  eval_accuracy 0.25")  # the last known value: this step has none
    assert "rollout 0.25s" in last
    assert "5/80" in shown


def test_a_quiet_screen_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=True)
    with screen.show_progress("demo", Path("demo"), None):
        screen.set_total(2)
        screen.show_step({"step": 1, "reward": 1})
        screen.show_signal("SIGINT")
    screen.show_record(record())
    screen.show_report_path(Path("report.html"))
    assert capfd.readouterr() == ("", "")


def test_the_end_shows_tables_times_and_owners() -> None:
    console, out = plain()
    Screen(console).show_record(record())
    assert out.getvalue() == (
        "\nanswers\nquestion   after\n[bold]cat  tac\n"
        "\ntime per phase\nphase    seconds  share\nrollout      7.5  75%\nupdate       2.5  25%\n"
        "\ntime per role\ngroup   role   method    calls  seconds  per call (ms)\n"
        "policy  actor  generate      4        2            500\n"
        "\nruntime local\n└ pool main\n"
    )


def test_summary_shows_copies_saved_by_fusing() -> None:
    console, out = plain()
    Screen(console).show_record(record(handed_over=[Handover("policy", "actor", "critic", 1 << 20)]))
    assert "would have copied them: actor to critic 1 MiB.\n" in out.getvalue()


def call(role: str, method: str, spans: Sequence[tuple[int, float, float]], group: str = "policy") -> CallRecord:
    ranks = tuple(rank for rank, _, _ in spans)
    return CallRecord(group, role, method, ranks, 0.0, 9.0, tuple(spans), False, None, 0.0)


COMES = TransferRecord(0, "policy", "narrow", "go", 0, 7, 0.0, 1.0)


def test_calls_are_counted_by_method_and_kept_by_slot() -> None:
    calls = CallLog(lambda group, role, rank: 2 if role == "narrow" else rank)
    calls.colocate_call_finished(call("wide", "go", [(0, 1.0, 2.0), (1, 1.0, 4.0)]))
    calls.colocate_call_finished(call("narrow", "go", [(0, 2.0, 3.0)]))
    calls.colocate_call_finished(call("wide", "go", [(0, 5.0, 6.0)]))
    calls.colocate_call_finished(call("any", "go", [(1, 5.0, 6.0)], group="made by the job"))
    assert calls.method_totals() == (
        Total("policy", "wide", "go", 2, 4.0),  # as long as the slowest rank
        Total("policy", "narrow", "go", 1, 1.0),
        Total("made by the job", "any", "go", 1, 1.0),
    )
    calls.colocate_call_finished(attrs.evolve(call("wide", "go", []), handed_over={"narrow": 8}, transfers=(COMES,)))
    calls.colocate_call_finished(attrs.evolve(call("wide", "go", []), handed_over={"narrow": 2}, transfers=(COMES,)))
    assert calls.list_handovers() == (Handover("policy", "narrow", "wide", 10),)
    assert [(use.role, use.transferred) for use in calls.measure_contention() if use.transferred] == [("wide", 14)]
    assert calls.last_spans()[2] == Span("policy", 2, "narrow", "go", 2.0, 3.0)
    assert [span.slot for span in calls.last_spans()] == [0, 1, 2, 0, 1]


def test_a_bar_that_counts_more_than_steps() -> None:
    """`set_progress` makes the bar count more than logged steps, also for a resumed run."""
    console, out = terminal()
    screen = Screen(console)
    with screen.show_progress("demo", Path("/elsewhere/demo"), 2):
        screen.set_total(10)
        screen.set_progress(502, 510)
        assert (screen._bar.tasks[0].completed, screen._bar.tasks[0].total) == (502, 510)
        screen.show_step({"step": 3})
        assert screen._bar.tasks[0].completed == 502
        screen.set_progress(503, 510)
    assert "503/510" in out.getvalue()
