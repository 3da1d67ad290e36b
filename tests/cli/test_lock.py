"""One driver per run's folder, `--resume=auto`, and arrays of jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine

from colocate.errors import ClosedError, ConfigError
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_run import lock
from colocate_run.folder import RunFolder
from colocate_run.lock import LOCK, FolderLock, lock_folder

CONFIG = """
    groups: {}
    job: {use: "counting:job"}
"""
# The job waits for a file; a child that it forks outlives the job.
COUNTING = """
    import os
    import time
    from pathlib import Path

    def job(run, forks=False):
        begun = 0 if run.resumed is None else int((run.resumed / "step").read_text())
        if forks and os.fork() == 0:
            while os.getppid() == run_pid:
                time.sleep(0.01)
            Path("orphan").touch()
            while not Path("go").exists():
                time.sleep(0.01)
            os._exit(0)
        with run.checkpoint(begun + 1) as directory:
            (directory / "step").write_text(str(begun + 1))
        run.log(begun + 1, begun=begun)
        (run.directory / "waits").touch()
        while not Path("go").exists():
            time.sleep(0.01)

    run_pid = os.getpid()
"""
# All three drivers meet at this import, before they look for the run's folder.
MEETING = """
import os, time
from pathlib import Path

if meeting := os.environ.get("MEETING"):
    Path(f"meets-{meeting}").touch()
    while len(list(Path().glob(f"meets-{meeting[:-1]}?"))) < 3:
        time.sleep(0.001)
"""


@pytest.fixture
def counting(colocate: CommandLine) -> CommandLine:
    colocate.write("counting.py", COUNTING)
    colocate.write("demo.yaml", CONFIG)
    return colocate


def waits(colocate: CommandLine, name: str = "demo") -> None:
    wait_until((colocate.folder / "runs" / name / "waits").exists, "the job has begun")


def begun(colocate: CommandLine, name: str = "demo") -> list[int]:
    lines = (colocate.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["begun"] for line in lines]


class TestOneDriver:
    @pytest.mark.in_make_test("--resume=auto")
    @pytest.mark.parametrize("how", ["--resume", "--resume=auto"])
    def test_others_are_refused_by_name(self, counting: CommandLine, how: str) -> None:
        """One driver gets the run's folder; the others are refused with its pid, host and job, and change nothing."""
        (counting.folder / "go").touch()
        assert counting("run", "demo.yaml").returncode == 0
        for name in ("go", "runs/demo/waits"):
            (counting.folder / name).unlink()
        drivers = [counting.start("run", "demo.yaml", how, SLURM_JOB_ID="42") for _ in range(3)]
        wait_until(lambda: sum(each.poll() is not None for each in drivers) == 2, "two have ended")
        waits(counting)
        (winner,) = (each for each in drivers if each.poll() is None)
        (counting.folder / "go").touch()
        for each in drivers:
            _, told = each.communicate()
            assert each.returncode == (0 if each is winner else 1), told
            if each is not winner:
                assert re.search(
                    rf"runs/demo is being written by the driver with pid {winner.pid} on \S+ \(job 42\)", told
                )
        assert begun(counting) == [0, 1]
        assert not (counting.folder / "runs" / "demo" / LOCK).exists()
        assert [path.name for path in (counting.folder / "runs").iterdir()] == ["demo"]

    @pytest.mark.long
    def test_first_run_holds_folder(self, counting: CommandLine) -> None:
        """A first run holds its folder against other drivers, before and after its first checkpoint."""
        first = counting.start("run", "demo.yaml")
        waits(counting)
        for how in ("--resume", "--resume=auto"):
            done = counting("run", "demo.yaml", how)
            assert done.returncode == 1
            assert f"is being written by the driver with pid {first.pid}" in done.stderr
        for path in (counting.folder / "runs" / "demo" / "checkpoints").iterdir():
            path.rename(counting.folder / path.name)
        done = counting("run", "demo.yaml", "--resume=auto")
        assert done.returncode == 1
        assert f"is being written by the driver with pid {first.pid}" in done.stderr
        (counting.folder / "go").touch()
        first.communicate()
        assert [path.name for path in (counting.folder / "runs").iterdir()] == ["demo"]

    @pytest.mark.long
    def test_first_starts_at_the_same_moment(self, counting: CommandLine) -> None:
        """If three drivers start at once with `--resume=auto`, one creates the folder, and two are refused."""
        counting.write("counting.py", MEETING + textwrap.dedent(COUNTING))
        for number in range(4):
            name, go = f"demo-{number}", counting.folder / "go"
            options = ("run", "demo.yaml", "--resume=auto", "--set", f"name={name}")
            drivers = [counting.start(*options, MEETING=f"{name}-{each}") for each in range(3)]
            try:
                wait_until(lambda these=drivers: sum(each.poll() is not None for each in these) == 2, "two have ended")
                waits(counting, name)
            finally:
                go.touch()
                told = {each.pid: each.communicate()[1] for each in drivers}
            go.unlink()
            (winner,) = (each.pid for each in drivers if each.returncode == 0)
            del told[winner]
            refused = f"runs/{name} is being written by the driver with pid {winner} on "
            assert all(refused in each for each in told.values()), told
            assert begun(counting, name) == [0]
        assert {path.name for path in (counting.folder / "runs").iterdir()} == {f"demo-{each}" for each in range(4)}

    def test_killed_driver_loses_folder(self, counting: CommandLine) -> None:
        """A killed driver loses its folder, even if a child of the driver is still alive."""
        first = counting.start("run", "demo.yaml", "--set", "+job.with.forks=true")
        waits(counting)
        first.kill()
        first.wait()
        wait_until((counting.folder / "orphan").exists, "the child is alone")
        second = counting.start("run", "demo.yaml", "--resume")
        wait_until(lambda: begun(counting) == [0, 1] or second.poll() is not None, "it goes on")
        assert json.loads((counting.folder / "runs" / "demo" / LOCK).read_bytes())["pid"] == second.pid
        (counting.folder / "go").touch()
        assert second.wait() == 0
        for each in (first, second):
            each.communicate()


# In another container the driver's pid means nothing: only the kernel's lock counts.
ELSEWHERE = """
import sys
from pathlib import Path
from colocate.errors import ConfigError
from colocate_run import lock

lock._is_alive = lambda owner: False
try:
    lock.FolderLock.acquire(Path(sys.argv[1])).release()
    print("taken")
except ConfigError as error:
    print(error)
"""


class TestContainers:
    """Containers of one machine, each of which sees only its own processes."""

    def elsewhere(self, folder: Path) -> str:
        words = [sys.executable, "-c", ELSEWHERE, str(folder)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def test_lock_survives_read_by_owner(self, tmp_path: Path) -> None:
        """A read of `lock.json` in the driver's own process doesn't release the kernel's lock."""
        with lock_folder(tmp_path, lambda text: None):
            for ask in ((tmp_path / LOCK).read_bytes, lambda: lock._read_owner(tmp_path / LOCK)):
                ask()
                assert f"is being written by the driver with pid {os.getpid()} " in self.elsewhere(tmp_path)
        assert self.elsewhere(tmp_path) == "taken\n"

    def test_forked_child_does_not_keep_lock(self, tmp_path: Path) -> None:
        told, tell = os.pipe()
        mine = FolderLock.acquire(tmp_path)
        child = os.fork()
        if not child:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
        try:
            os.close(told)
            lock._close(mine._file)  # as the kernel does when the driver is killed
            mine._released.set()
            assert self.elsewhere(tmp_path) == "taken\n"
        finally:
            os.close(tell)
            os.waitpid(child, 0)


class TestOtherMachines:
    """Drivers on other machines: kernel locks may not work there, so the lock file's heartbeat counts."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(lock, "BEAT_S", 0.02)
        monkeypatch.setattr(lock, "WATCHED_S", 0.5)
        self.write(tmp_path, 0)
        return tmp_path

    def write(self, folder: Path, beat: int) -> None:
        owner = {"host": "n7", "boot": "another", "pid": 1, "started": 0.0, "job": "42", "beat": f"{beat:012d}"}
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            size = os.pwrite(file, json.dumps(owner).encode(), 0)  # as a heartbeat writes: the file is never empty
            os.ftruncate(file, size)
        finally:
            os.close(file)

    def test_one_that_beats_is_refused_by_name(self, folder: Path) -> None:
        said: list[str] = []

        def beat() -> None:
            wait_until(lambda: bool(said), "it watches")
            self.write(folder, 1)

        beater = threading.Thread(target=beat)
        beater.start()
        with pytest.raises(ConfigError, match=r"being written by the driver with pid 1 on n7 \(job 42\)"):
            FolderLock.acquire(folder, said.append)
        beater.join()

    def test_silent_driver_loses_folder(self, folder: Path) -> None:
        """A silent driver loses its folder, and a driver that lost it fails at its next checkpoint."""
        FolderLock.acquire(folder).release()
        with lock_folder(folder, lambda text: None) as mine:
            run = RunFolder(folder, check_lock=mine.check_owned)
            with run.write_checkpoint(1):
                pass
            wait_until(lambda: b"3" in (folder / LOCK).read_bytes().rpartition(b"beat")[2], "it beats")
            self.write(folder, 5)
            with (
                pytest.raises(ClosedError, match=r"the driver with pid 1 on n7 \(job 42\) has taken it"),
                run.write_checkpoint(2),
            ):
                pass
            assert [step for step, _ in run.list_checkpoints()] == [1]

    def test_late_heartbeat_writes_nothing_after_release(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A heartbeat that races with the release writes nothing: another file may have the descriptor by then."""
        mine = FolderLock.acquire(folder)
        looks, goes_on, check = threading.Event(), threading.Event(), FolderLock.check_owned

        def slow(self: FolderLock) -> None:
            check(self)
            looks.set()
            goes_on.wait()

        monkeypatch.setattr(FolderLock, "check_owned", slow)
        assert looks.wait(PATIENCE_S)
        (beater,) = (each for each in threading.enumerate() if each.name == "colocate-lock")
        releasing = threading.Thread(target=mine.release)
        releasing.start()
        releasing.join(0.1)  # the release waits for the heartbeat
        with (folder / "another").open("w+") as other:
            goes_on.set()
            releasing.join(PATIENCE_S)
            beater.join(PATIENCE_S)
            assert other.read() == ""
        assert not (folder / LOCK).exists()

    @pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"boot": 1}', b"\xff", b"[" * 10**5])
    def test_a_lock_that_says_nothing(self, folder: Path, text: bytes) -> None:
        """A lock file with unreadable contents belongs to nobody, and can be taken."""
        (folder / LOCK).write_bytes(text)
        with lock_folder(folder, lambda text: None), pytest.raises(ConfigError, match=f"pid {os.getpid()} "):
            FolderLock.acquire(folder)
        assert not (folder / LOCK).exists()


# The job ends before its first checkpoint in the way that `by` names, and logs the number of earlier tries.
STOPPED = """
    import os
    import signal
    from pathlib import Path

    def job(run, by):
        run.log(1, tries=len(list(Path().glob("try-*"))))
        Path(f"try-{len(list(Path().glob('try-*')))}").touch()
        if by == "SIGKILL" or by == "SIGTERM":
            os.kill(os.getpid(), getattr(signal, by))
        elif by == "an error":
            raise RuntimeError("of the job's own")
        else:
            with run.checkpoint(1):
                pass
"""


class TestAuto:
    @pytest.mark.in_make_test("SIGTERM")
    @pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM", "an error"])
    def test_requeued_job_reuses_folder_without_checkpoint(self, colocate: CommandLine, by: str) -> None:
        """A requeued job reuses the folder of tries without a checkpoint, and keeps the metrics of the last try."""
        colocate.write("stopped.py", STOPPED)
        colocate.write("demo.yaml", CONFIG.replace("counting:job", "stopped:job") + "\n")
        how = ("run", "demo.yaml", "--resume=auto", "--set")
        for _ in range(2):
            assert colocate(*how, f"+job.with.by={by}").returncode
        done = colocate(*how, "+job.with.by=")
        assert done.returncode == 0, done.stderr
        assert [path.name for path in (colocate.folder / "runs").iterdir()] == ["demo"]
        folder = colocate.folder / "runs" / "demo"
        assert [json.loads(line)["tries"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [2]
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000001"]
        assert not (folder / "error.txt").exists()

    def test_auto_resume_starts_new_run(self, counting: CommandLine) -> None:
        """`--resume=auto` starts a run if there is none, and else resumes it; plain `--resume` needs a checkpoint."""
        (counting.folder / "go").touch()
        done = counting("run", "--resume", "demo.yaml")
        assert done.returncode == 1
        assert "nothing to resume" in done.stderr
        assert "--resume=auto" in done.stderr
        for _ in range(2):
            done = counting("run", "--resume=auto", "demo.yaml")
            assert done.returncode == 0, done.stderr
        assert begun(counting) == [0, 1]

    @pytest.mark.long
    def test_an_array_of_jobs(self, counting: CommandLine) -> None:
        """Array tasks with one name are refused; with a name per task, each task starts and resumes its own run."""
        (counting.folder / "go").touch()
        done = counting("run", "demo.yaml", "--resume=auto", SLURM_ARRAY_TASK_ID="3")
        assert done.returncode == 1
        assert "task 3 of an array" in done.stderr
        assert "name: demo-${SLURM_ARRAY_TASK_ID}" in done.stderr
        name = "name: ${NAME}-${SLURM_ARRAY_TASK_ID}"
        counting.write("demo.yaml", name + "\ngroups: {}\njob: {use: 'counting:job'}\n")
        for _ in range(2):
            tasks = [
                counting.start("run", "demo.yaml", "--resume=auto", NAME="d", SLURM_ARRAY_TASK_ID=str(task))
                for task in range(4)
            ]
            for each in tasks:
                assert each.wait() == 0, each.communicate()[1]
                each.communicate()
        assert sorted(path.name for path in (counting.folder / "runs").iterdir()) == ["d-0", "d-1", "d-2", "d-3"]
        for task in range(4):
            assert begun(counting, f"d-{task}") == [0, 1]
