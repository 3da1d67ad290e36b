"""`colocate run`: a job of an installed distribution, its folder, its end, resuming, and being stopped."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.cli.conftest import CommandLine

ACME = """
    executor: {use: local, with: {processes: false}}
    pools:
      main: {slots: 2}
    groups:
      policy:
        pool: main
        roles:
          reward: {use: acme.reward, with: {wanted: 4}}
    job: {use: acme.tally, with: {steps: 3}}
"""


def config(folder: Path) -> Any:
    return YAML(typ="safe", pure=True).load(folder / "config.yaml")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("processes", ["false", "true"])
def test_job_runs_to_completion(colocate: CommandLine, processes: str) -> None:
    colocate.write("demo.yaml", ACME)
    done = colocate("run", "demo.yaml", "--set", f"executor.with.processes={processes}", distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, "")
    folder = colocate.folder / "runs" / "demo"

    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["reward"] for row in rows] == [pytest.approx(each) for each in (-1.0, -2 / 3, -1.0)]
    assert all(set(row) == {"step", "time", "reward", "seconds"} and set(row["seconds"]) == {"score"} for row in rows)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert config(folder)["executor"] == {"use": "local", "with": {"processes": processes == "true"}}

    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "demo: connecting to local",
        "demo: reserving pool main: 2 slots",
        "demo: starting group policy: 2 workers with 1 role",
    ]
    seconds = r"\d+\.\d s"
    assert re.fullmatch(
        rf"demo: started in {seconds} \(connect {seconds}, pool main {seconds}, group policy {seconds}\)", lines[3]
    )
    assert lines[4] == "demo: running in runs/demo"
    assert lines[5].startswith("step 1/3  reward -1  score ")
    assert "scores" in lines
    (row,) = [line.split() for line in lines if line.startswith("policy  reward  score")]
    assert row[3] == "4"
    assert any(line.startswith("(start-up) ") for line in lines)
    assert "everything is closed" in lines[-1]
    assert (folder / "log.txt").read_text() == done.stdout
    assert not (folder / "error.txt").exists()


PRINTING = """
    import logging
    import os
    import sys

    import colocate

    logging.basicConfig(level=logging.INFO)

    class Talking:
        @colocate.method
        def talk(self):
            print("said by a rank")
            os.write(1, b"written by a rank\\n")

    def job(run):
        print("said by the job")
        sys.stderr.write("complained\\n")
        logging.info("logged")
        run.groups["policy"]["talking"].talk()
        run.log(1, x=1)
"""


def test_all_output_lies_in_the_folder_and_the_report(colocate: CommandLine) -> None:
    """`log.txt` has the output of the driver, by any stream, of the workers, and of the run itself."""
    colocate.write("beside.py", PRINTING)
    colocate.write(
        "demo.yaml",
        """
        executor: {use: local, with: {processes: true}}
        pools: {main: {slots: 1}}
        groups: {policy: {pool: main, roles: {talking: "beside:Talking"}}}
        job: beside:job
        """,
    )
    done = colocate("run", "demo.yaml")
    assert done.returncode == 0
    folder = colocate.folder / "runs" / "demo"
    log = (folder / "log.txt").read_text().splitlines()
    for line in ("said by the job", "complained", "INFO:root:logged", "step 1  x 1", "demo: connecting to local"):
        assert line in log
    for said in ("said by a rank", "written by a rank"):
        assert any(line.startswith("[policy") and line.endswith(said) for line in log)
    assert sorted(log) == sorted([*done.stdout.splitlines(), *done.stderr.splitlines()])
    assert "complained" in (folder / "report.html").read_text()
    assert not (folder / "trace.json").exists()
    assert colocate("run", "demo.yaml", "--set", "trace=true").returncode == 0
    (trace,) = colocate.folder.glob("runs/*/trace.json")
    names = [event["name"] for event in json.loads(trace.read_text())]
    assert {"talking.talk", "step 1"} <= set(names)


FAILING = """
    import colocate

    class Bad(colocate.Role):
        def __init__(self):
            1 / 0

        @colocate.method
        def f(self): ...

    def job(run): ...
"""


def test_failed_start_leaves_report(colocate: CommandLine) -> None:
    """A start that fails leaves its log, error and report in the run's folder, and prints the report's path."""
    colocate.write("beside.py", FAILING)
    colocate.write(
        "demo.yaml",
        """
        pools: {main: {slots: 1}}
        groups: {policy: {pool: main, roles: {bad: "beside:Bad"}}}
        job: beside:job
        """,
    )
    done = colocate("run", "demo.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("error: group 'policy' could not start: 1 rank failed\n")
    assert "in __init__\n    1 / 0" in done.stderr
    *shown, last, _, report = done.stdout.splitlines()
    assert (last, report) == (
        "demo: starting group policy: 1 worker with 1 role",
        "report: runs/demo/report.html",
    )
    folder = colocate.folder / "runs" / "demo"
    for name in ("error.txt", "report.html"):
        assert "in __init__" in (folder / name).read_text()
    assert (folder / "log.txt").read_text().startswith("\n".join([*shown, last]))


def test_json_and_nothing_else(colocate: CommandLine) -> None:
    colocate.write("demo.yaml", ACME.replace("acme.tally", "beside:noisy").replace(", with: {steps: 3}", ""))
    colocate.write("beside.py", "def noisy(run):\n    print('noise')\n    run.log(1, x=float('nan'))\n")
    done = colocate("run", "demo.yaml", "--json", distributions=("acme",))
    assert done.returncode == 0
    summary = json.loads(done.stdout)
    assert summary["last"] == {"step": 1, "x": None}
    assert summary["stopped"] is None
    assert Path(summary["directory"]) == colocate.folder / "runs" / "demo"


def test_resume_goes_on_where_the_last_checkpoint_is(colocate: CommandLine) -> None:
    colocate.write("demo.yaml", ACME)
    colocate("run", "demo.yaml", "--set", "job.with.checkpoint_every=2", distributions=("acme",))
    folder = colocate.folder / "runs" / "demo"
    changes = ("--set", "job.with.steps=5")
    done = colocate("run", "demo.yaml", "--resume", *changes, distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ndemo: running in runs/demo, going on after step 3\nstep 4/5 " in done.stdout
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5]
    assert [path.name for path in (colocate.folder / "runs").iterdir()] == ["demo"]
    assert config(folder)["job"]["with"]["steps"] == 5


def test_nothing_to_resume(colocate: CommandLine) -> None:
    colocate.write("demo.yaml", ACME)
    done = colocate("run", "demo.yaml", "--resume", distributions=("acme",))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nothing to resume: no complete checkpoint of 'demo' in ")


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGINT, "true"),
        (signal.SIGTERM, "false"),
        pytest.param(signal.SIGINT, "false", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "true", marks=pytest.mark.long),
    ],
)
def test_signal_stops_run_with_checkpoint(colocate: CommandLine, number: signal.Signals, processes: str) -> None:
    colocate.write("demo.yaml", ACME)
    changes = ("--set", "job.with.steps=1000000", "--set", f"executor.with.processes={processes}")
    with colocate.start("run", "demo.yaml", *changes, distributions=("acme",)) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        next(line for line in running.stdout if line.startswith("step 2/"))
        if number == signal.SIGINT:  # as a terminal does: the signal goes to the whole process group, workers included
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        out, err = running.communicate()
    assert running.returncode == 128 + number
    again = " (a second one ends it at once)" if number == signal.SIGINT else ""
    assert err == f"{number.name}: stopping after a checkpoint{again}\n"
    assert "everything is closed" in out
    step = metrics(colocate.folder / "runs" / "demo")[-1]["step"]
    assert out.splitlines()[-1] == f"stopped by {number.name}; saved up to step {step}, go on with --resume"
    folder = colocate.folder / "runs" / "demo"
    last = max(path.name for path in (folder / "checkpoints").iterdir())
    assert last == f"step-{metrics(folder)[-1]['step']:06d}"


def test_a_signal_before_the_first_checkpoint(colocate: CommandLine) -> None:
    """A run that is stopped before its first checkpoint says that nothing is saved."""
    colocate.write("demo.yaml", "job: beside:job\n")
    job = "import time\n\ndef job(run):\n    print('begun')\n    while not run.stopping:\n        time.sleep(0.01)\n"
    colocate.write("beside.py", job)
    with colocate.start("run", "demo.yaml") as running:
        assert running.stdout is not None
        next(line for line in running.stdout if line == "begun\n")
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate()
    assert out.splitlines()[-1] == "stopped by SIGTERM; nothing is saved to go on from"


class TestErrors:
    def run(self, colocate: CommandLine, job: str, *args: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        colocate.write("demo.yaml", ACME.replace("acme.tally", "beside:job").replace(", with: {steps: 3}", ""))
        colocate.write("beside.py", job)
        return colocate("run", "demo.yaml", *args, distributions=("acme",), **variables)

    def test_job_error_keeps_traceback(self, colocate: CommandLine) -> None:
        done = self.run(colocate, "def job(run):\n    return 1 / 0\n")
        assert done.returncode == 1
        shown = done.stderr.splitlines()
        assert shown[0] == "Traceback (most recent call last):"
        assert re.fullmatch(r"  \.\.\. \d+ frames of colocate", shown[1])  # colocate's frames are folded
        assert re.fullmatch(r'  File ".*/beside.py", line 2, in job', shown[2])
        assert shown[3:] == ["    return 1 / 0", "           ~~^~~", "ZeroDivisionError: division by zero"]
        folder = colocate.folder / "runs" / "demo"
        for name in ("report.html", "log.txt", "error.txt"):
            assert "beside.py" in (folder / name).read_text()
        assert (folder / "error.txt").read_text() == done.stderr

    def test_dropped_call_error_omits_framework_frames(self, colocate: CommandLine) -> None:
        """The error of a dropped call, which closing finds, is written without the framework's frames."""
        reward = "run.groups['policy']['reward']"
        done = self.run(colocate, f"def job(run):\n    {reward}.score.keep([1, 2])\n    {reward}.score(['a', 'b'])\n")
        assert done.returncode == 1
        error = (colocate.folder / "runs" / "demo" / "error.txt").read_text()
        assert re.match(r".*\n  \|   \.\.\. \d+ frames of colocate\n  \| ExceptionGroup: runtime ", error)
        assert "/colocate/" not in error
        assert "acme" in error

    def test_role_error_includes_worker_traceback(self, colocate: CommandLine) -> None:
        done = self.run(colocate, "def job(run):\n    run.groups['policy']['reward'].score([1, 2])\n")
        assert done.returncode == 1
        assert re.match(
            r"Traceback \(most recent call last\):\n  \.\.\. \d+ frames of colocate\n"
            r'  File ".*/beside.py", line 2, in job\n    run.groups.*\n(?:  +[~^]+\n)?  \.\.\. \d+ frames of colocate\n'
            r"error: reward.score raised TypeError on rank \d of .*\nThe call was made at .*/beside.py:2\n\n"
            r"Traceback in the worker:\nTraceback .*\n  File .*acme",
            done.stderr,
        )
        assert "object of type 'int' has no len()" in done.stderr
        assert "/colocate/" not in done.stderr
        assert "Traceback in the worker:" in (colocate.folder / "runs" / "demo" / "error.txt").read_text()
        done = colocate("run", "demo.yaml", "--json", distributions=("acme",))
        assert done.returncode == 1
        (error,) = json.loads(done.stdout)["errors"]
        assert error["type"] == "RoleError"
        assert "beside.py" in error["traceback"]

    @pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:surrogateescape"])
    def test_any_text_can_be_shown_and_written(self, colocate: CommandLine, encoding: str) -> None:
        """Text that isn't valid UTF-8, as of a file's name, is shown and written, whatever the terminal's encoding."""
        job = """
            def job(run):
                run.show("t\\udcff", [{"column\\udcff": "\\udcff\u20ac"}])
                with run.timed("phase\\udcff"):
                    print("said \\udcff")
                run.log(1, **{"x\\udcff": 1})
                raise ValueError("\\udcff x")
            """
        done = self.run(colocate, job, PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
        folder = colocate.folder / "runs" / "demo"
        assert "phase\\udcff" in (folder / "report.html").read_text()
        assert "said \\udcff\n" in (folder / "log.txt").read_text()
        for name, shown in (("report.html", "\ufffd"), ("log.txt", "\\udcff"), ("error.txt", "\\udcff")):
            assert f"ValueError: {shown} x" in (folder / name).read_text()

    @pytest.mark.parametrize(("code", "status", "said"), [("7", 7, ""), ("'bye'", 1, "bye\n")])
    def test_exiting_job_leaves_report(self, colocate: CommandLine, code: str, status: int, said: str) -> None:
        """A job's exit status is the command's, and the folder has a report, a log and the error."""
        job = f"import sys\ndef job(run):\n    run.log(1, x=1)\n    sys.exit({code})\n"
        done = self.run(colocate, job)
        assert (done.returncode, done.stderr) == (status, f"ended by sys.exit({code}): everything is closed\n{said}")
        folder = colocate.folder / "runs" / "demo"
        for name in ("report.html", "log.txt", "error.txt"):
            assert "SystemExit: " in (folder / name).read_text()
        assert "beside.py" in (folder / "error.txt").read_text()
        done = self.run(colocate, job, "--json")
        assert done.returncode == status
        assert [error["type"] for error in json.loads(done.stdout)["errors"]] == ["SystemExit"]

    def test_closed_output_pipe_ends_job(self, colocate: CommandLine) -> None:
        """A closed output pipe, as of `colocate run FILE | head`, ends the job with a message of its own."""
        colocate.write("demo.yaml", ACME.replace("acme.tally", "beside:job").replace(", with: {steps: 3}", ""))
        colocate.write(
            "beside.py",
            "import itertools\ndef job(run):\n    for step in itertools.count(1):\n        run.log(step, x=1)\n",
        )
        with colocate.start("run", "demo.yaml", distributions=("acme",)) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.readline()
            running.stdout.close()
            said = running.stderr.read()
        assert (running.returncode, said) == (
            1,
            "nobody reads its output any more: everything is closed, what came after the last checkpoint is lost\n",
        )

    def test_a_reader_that_leaves_behind_the_last_step_ends_nothing(self, colocate: CommandLine) -> None:
        """A pipe that closes after the last step fails nothing: only tables are unread, and the report has them."""
        colocate.write("demo.yaml", ACME.replace("acme.tally", "beside:job").replace(", with: {steps: 3}", ""))
        colocate.write(
            "beside.py",
            "import pathlib, time\ndef job(run):\n    run.log(1, x=1)\n"
            "    while not pathlib.Path('left').exists():\n        time.sleep(0.01)\n",
        )
        with colocate.start("run", "demo.yaml", distributions=("acme",)) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            while "step 1" not in running.stdout.readline():
                pass
            running.stdout.close()
            (colocate.folder / "left").touch()
            said = running.stderr.read()
        assert (running.returncode, said) == (0, "")
        folder = colocate.folder / "runs" / "demo"
        assert (folder / "report.html").exists()
        assert not (folder / "error.txt").exists()

    def test_a_step_or_a_number_that_none_can_keep(self, colocate: CommandLine) -> None:
        """`run.log` and `run.checkpoint` refuse steps and numbers that the run's files can't hold."""
        refused = {
            "run.log(1.0, x=1)": "TypeError: run.log: step=1.0 is not a whole number",
            "run.log(None, x=1)": "TypeError: run.log: step=None is not a whole number",
            "run.log(True, x=1)": "TypeError: run.log: step=True is not a whole number",
            "run.log(2**63, x=1)": "ValueError: run.log: step=9223372036854775808 is too large for 64 bits",
            "run.log(1, x=10**400)": f"ValueError: run.log: x=1{'0' * 39}... is too large for a float",
            "run.log(1, seconds=2.0)": "ValueError: run.log: 'seconds' is where a line has those of run.timed; call "
            "the number otherwise",
            "run.log(1, time=2.0)": "ValueError: run.log: 'time' is where a line has when it was logged; call the "
            "number otherwise",
            "run.checkpoint(2**63).__enter__()": "ValueError: run.checkpoint: step=9223372036854775808 is too large "
            "for 64 bits",
            "run.checkpoint('last').__enter__()": "TypeError: run.checkpoint: step='last' is not a whole number",
            "run.checkpoint(-1).__enter__()": "ValueError: run.checkpoint: step=-1 is less than 0",
        }
        job = f"""
            def job(run):
                for line in {list(refused)}:
                    try:
                        exec(line)
                    except (TypeError, ValueError) as error:
                        print(f"refused: {{type(error).__name__}}: {{error}}")
            """
        done = self.run(colocate, job)
        assert (done.returncode, done.stderr) == (0, "")
        told = [line.removeprefix("refused: ") for line in done.stdout.splitlines() if line.startswith("refused: ")]
        assert told == [*refused.values()]

    def test_a_checkpoint_before_the_last_one(self, colocate: CommandLine) -> None:
        """A checkpoint before the last one is refused: a resumed run starts from the highest step."""
        job = """
            def job(run):
                for step in (5, 5, 1):
                    with run.checkpoint(step) as folder:
                        (folder / "it").touch()
            """
        done = self.run(colocate, job)
        assert done.stderr.endswith(
            "ValueError: run.checkpoint: step=1 is before the run's last checkpoint, of step 5, from which the run "
            "would go on; steps count up\n"
        )
        kept = colocate.folder / "runs" / "demo" / "checkpoints" / "step-000005" / "it"
        assert kept.exists()

    def test_a_config_without_a_job(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", "seed: 1\n")
        done = colocate("run", "demo.yaml")
        assert (done.returncode, done.stderr) == (
            1,
            "error: config 'demo' has no job to run; add one: `job: plugin.job`, or module:function\n",
        )

    def test_another_version_in_the_worker(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", ACME)
        newer = colocate.installed("acme_newer")
        changes = ("--set", "executor.with.processes=true", "--set", f"+pools.main.env.PYTHONPATH={newer}")
        done = colocate("run", "demo.yaml", *changes, distributions=("acme",))
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "1.0.0" in done.stderr
        assert "2.0.0" in done.stderr


HANGING = """
    import threading

    import colocate

    class Hanging:
        @colocate.method
        def hang(self):
            threading.Event().wait()

    def job(run):
        run.log(1, x=1)
        run.groups["policy"]["hanging"].hang()
"""


def test_second_signal_ends_hanging_run(colocate: CommandLine) -> None:
    colocate.write("beside.py", HANGING)
    colocate.write(
        "demo.yaml",
        """
        executor: {use: local, with: {processes: true}}
        pools: {main: {slots: 2}}
        groups: {policy: {pool: main, roles: {hanging: "beside:Hanging"}}}
        job: beside:job
        """,
    )
    with colocate.start("run", "demo.yaml") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        next(line for line in running.stdout if line.startswith("step 1"))
        running.send_signal(signal.SIGINT)
        assert running.stderr.readline().startswith("SIGINT: stopping after a checkpoint")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate()
    assert running.returncode == 128 + signal.SIGINT, err
    assert err.startswith("interrupted: ")
    with pytest.raises(ProcessLookupError):  # no process of its session is left
        os.killpg(running.pid, 0)
