"""`colocate plugins`, `check` and `doctor`, each as a user runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.conftest import CommandLine

from colocate_run.cli.doctor import describe_shared_memory

ACME = """
    pools:
      main: {slots: 2}
    groups:
      policy:
        pool: main
        roles:
          reward: {use: acme.reward, with: {wanted: 4}}
          second: {use: "beside:Beside", slots: [1]}
    job: {use: acme.tally, with: {steps: 2}}
"""

BESIDE = """
    import colocate

    class Beside:
        @colocate.method
        def go(self): ...
"""


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys; sys.argv = ['colocate', '--help']\nfrom colocate_run.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "print([m for m in ('torch', 'numpy', 'ruamel.yaml', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "check" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


class TestPlugins:
    def test_plugins_are_listed_with_distributions(self, colocate: CommandLine) -> None:
        done = colocate("plugins", distributions=("acme", "broken"))
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line.split() for line in done.stdout.splitlines()]
        assert ["acme", "roles,", "jobs", "acme", "1.0.0", "acme.plugin"] in lines
        assert ["raises", "executor", "broken", "0.1", "broken.raises"] in lines
        found = json.loads(colocate("plugins", "--json", distributions=("acme",)).stdout)
        (acme,) = [plugin for plugin in found if plugin["name"] == "acme"]
        assert acme == {
            "kind": "roles",
            "name": "acme",
            "distribution": "acme",
            "version": "1.0.0",
            "origin": "acme 1.0.0",
            "value": "acme.plugin",
            "rivals": [],
        }

    def test_budgets_are_shown(self, colocate: CommandLine) -> None:
        """`colocate check` shows budgets with their units, so that a forgotten unit is visible."""
        colocate.write("demo.yaml", ACME)
        colocate.write("beside.py", BESIDE)
        changes = {
            "executor.with.processes": "true",
            "pools.main.device_memory": "4096",
            "groups.policy.device_memory": "2048",
            "groups.policy.residency": "swap",
            "groups.policy.roles.second.host_memory": "2GB",
        }
        sets = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
        done = colocate("check", "demo.yaml", *sets, distributions=("acme",))
        assert (done.returncode, done.stderr) == (0, "")
        pools, roles, _ = done.stdout.split("\n\n")[-3:]
        assert pools.splitlines()[-1].endswith("  device_memory=4 KiB")
        assert roles.splitlines()[0] == "group policy in pool main (device_memory=2 KiB, residency=swap): roles"
        assert [line.partition("dp=")[2][1:].strip() for line in roles.splitlines()[2:]] == ["", "host_memory=1.9 GiB"]
        plan = json.loads(colocate("check", "demo.yaml", *sets, "--json", distributions=("acme",)).stdout)
        assert plan["groups"]["policy"]["roles"]["second"]["host_memory"] == 2_000_000_000
        assert (plan["observe"], plan["trace"]) == ([], False)

    def test_places_are_shown(self, colocate: CommandLine) -> None:
        """`colocate check` shows where a pool's slots must lie; without such options the column is absent."""
        pytest.importorskip("distributed")
        colocate.write("demo.yaml", ACME)
        colocate.write("beside.py", BESIDE)
        said = {"slots": 2, "labels": {"name": "in(a,b)"}, "resources": {"disk": 1}, "together": "host"}
        executor = {"use": "dask", "with": {"address": "tcp://10.0.0.1:8786"}}
        sets = ["--set", f"pools.main={json.dumps(said)}", "--set", f"+executor={json.dumps(executor)}"]
        done = colocate("check", "demo.yaml", *sets, distributions=("acme",))
        assert (done.returncode, done.stderr) == (0, "")
        where = "1 disk each, on nodes with name=in(a,b), all of one host"
        assert where in done.stdout
        plan = json.loads(colocate("check", "demo.yaml", *sets, "--json", distributions=("acme",)).stdout)
        assert plan["pools"]["main"] == {**said, "cpus": 1, "gpus": 0, "strategy": "pack", "env": {}, "where": where}
        assert " where " not in colocate("check", "demo.yaml", distributions=("acme",)).stdout


class TestNoImport:
    """With `--no-import`, the config of somebody else imports no module beside it."""

    def test_modules_are_refused_and_not_imported(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", ACME)
        colocate.write("beside.py", BESIDE + "print('it has run')")
        for command in ("check", "run", "doctor", "audit", "groups", "close demo"):
            done = colocate(*command.split(), "demo.yaml", "--no-import", distributions=("acme",))
            assert done.returncode == 1
            assert "'beside:Beside' names a module, and this config may name plugins only" in done.stderr
            assert "it has run" not in done.stdout

    def test_file_beside_config_shadows_no_module(self, colocate: CommandLine) -> None:
        (colocate.folder / "theirs").mkdir()
        colocate.write("theirs/demo.yaml", ACME.replace('second: {use: "beside:Beside", slots: [1]}', ""))
        colocate.write("theirs/acme.py", "raise SystemExit('the wrong one')")
        assert colocate("check", "theirs/demo.yaml", distributions=("acme",)).returncode == 1
        assert colocate("check", "theirs/demo.yaml", "--no-import", distributions=("acme",)).returncode == 0


class TestCheck:
    def test_the_plan_is_shown_and_nothing_started(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", ACME)
        colocate.write("beside.py", BESIDE)
        done = colocate("check", "demo.yaml", distributions=("acme",))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("demo: the plan is sound (seed 0; nothing was started)\n")
        tables = done.stdout.split("\n\n")
        assert tables[-2].splitlines() == [
            "group policy in pool main: roles",
            "role    use            from           with      slots  mesh",
            "reward  acme.reward    acme 1.0.0     wanted=4  all    dp=2",
            "second  beside:Beside  module beside            1      dp=1",
        ]
        assert tables[-1].splitlines() == [
            "group policy: roles per slot",
            "slot  roles",
            "0     reward",
            "1     reward, second",
        ]
        plan = json.loads(colocate("check", "demo.yaml", "--json", distributions=("acme",)).stdout)
        assert plan["groups"]["policy"]["slots"] == [["reward"], ["reward", "second"]]
        assert plan["job"] == {"use": "acme.tally", "from": "acme 1.0.0", "with": {"steps": 2}}
        assert not (colocate.folder / "runs").exists()
        done = colocate("doctor", "demo.yaml", distributions=("acme",))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("\ndemo.yaml: works here\n")

    def test_modules_beside_the_config_and_in_the_current_folder_are_found(self, colocate: CommandLine) -> None:
        (colocate.folder / "configs").mkdir()
        colocate.write("configs/demo.yaml", ACME)
        colocate.write("configs/beside.py", BESIDE)
        assert colocate("check", "configs/demo.yaml", distributions=("acme",)).returncode == 0
        colocate.write("beside.py", BESIDE)
        (colocate.folder / "configs" / "beside.py").unlink()
        assert colocate("check", "configs/demo.yaml", distributions=("acme",)).returncode == 0

    def test_all_mistakes_at_once(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", ACME.replace("wanted: 4", "wanted: four").replace("pool: main", "pool: man"))
        colocate.write("beside.py", BESIDE)
        done = colocate("check", "demo.yaml", "--executor", "rey", "--set", "job.with.step=1", distributions=("acme",))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == [
            "error: demo.yaml: 4 mistakes",
            "  line 6: groups.policy.pool: no pool is called 'man'; there are main (did you mean 'main'?)",
            "  line 8: groups.policy.roles.reward.with.wanted: must be an integer, not the text 'four'",
            "  executor.use: no executor is called 'rey' (installed: dask, local and ray); did you mean 'ray'? "
            "(from --executor rey)",
            "  job.with.step: job acme.tally has no parameter 'step' (from --set job.with.step=1) "
            "(did you mean 'steps'?)",
        ]

    def test_mistakes_as_json(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", "seed: x\n")
        done = colocate("check", "demo.yaml", "--json")
        assert (done.returncode, done.stderr) == (1, "")
        (error,) = json.loads(done.stdout)["errors"]
        assert error == {
            "type": "ConfigError",
            "message": "demo.yaml: 1 mistake",
            "mistakes": [
                {"path": "seed", "line": 1, "message": "must be an integer, not the text 'x'", "nearest": None}
            ],
        }

    def test_signature_error_keeps_traceback(self, colocate: CommandLine) -> None:
        """An error that a job's `__signature__` raises is shown with its traceback."""
        colocate.write("demo.yaml", "job: 'beside:job'\n")
        colocate.write(
            "beside.py",
            """
            class Signature:
                def __get__(self, instance, owner=None):
                    raise LookupError("a bug")

            class Job:
                __signature__ = Signature()

                def __call__(self, run): ...

            job = Job()
            """,
        )
        done = colocate("check", "demo.yaml")
        assert done.returncode == 1
        assert "Traceback (most recent call last)" in done.stderr
        assert done.stderr.endswith("LookupError: a bug\n")


class TestDoctor:
    def test_versions_devices_and_plugins(self, colocate: CommandLine) -> None:
        done = colocate("doctor", distributions=("acme", "broken"))
        assert (done.returncode, done.stderr) == (0, "")
        assert "python" in done.stdout
        assert "CPUs" in done.stdout
        assert "shared memory" in done.stdout
        assert re.search(r"needs \S+: pip install 'broken\[needy\]'\n", done.stdout)

    def test_shared_memory_of_which_there_is_none_or_little(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert describe_shared_memory(tmp_path / "none").startswith(f"{tmp_path}/none: No such file or directory; Ray")
        free = f"{tmp_path}: 32 MiB free of 64 MiB"
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 << 20, free=32 << 20))
        assert describe_shared_memory(tmp_path).startswith(f"{free}; that is little for Ray")
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=8 << 30, free=1 << 30))
        assert describe_shared_memory(tmp_path) == f"{tmp_path}: 1 GiB free of 8 GiB"
        monkeypatch.setattr(os, "access", lambda folder, mode: False)
        assert "may not write there (mode " in describe_shared_memory(tmp_path)

    def test_a_distribution_that_was_removed_by_half(self, colocate: CommandLine, tmp_path: Path) -> None:
        lost = tmp_path / "gone-1.0.dist-info"
        lost.mkdir()
        (lost / "entry_points.txt").write_text("[colocate.roles]\ngone = gone_plugin\n")
        done = colocate.forks.run(("doctor", "--json"), tmp_path, os.environ | {"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0
        (gone,) = [plugin for plugin in json.loads(done.stdout)["plugins"] if plugin["name"] == "gone"]
        assert gone["fault"].startswith(f"the role plugin 'gone' ({lost}, which has no METADATA: install it again, ")

    def test_tmpfs_spill_dir_is_reported(self, colocate: CommandLine) -> None:
        colocate.write(
            "demo.yaml",
            "executor: {use: local, with: {processes: true, spill_dir: /dev/shm}}\npools: {main: {slots: 1}}\n",
        )
        done = colocate("doctor", "demo.yaml", "--json")
        assert done.returncode == 1
        told = json.loads(done.stdout)
        (error,) = told["config"]["errors"]
        assert error["message"].startswith("spill_dir='/dev/shm': ")
        for text in (told["devices"]["memory that sleeps"], error["message"]):
            assert "is a tmpfs" in text

    def test_a_pool_that_this_machine_cannot_hold(self, colocate: CommandLine) -> None:
        colocate.write("demo.yaml", "pools: {main: {slots: 1, gpus: 99}}\n")
        done = colocate("doctor", "demo.yaml", "--json")
        assert (done.returncode, done.stderr) == (1, "")
        told = json.loads(done.stdout)
        assert "GiB free)" in told["devices"]["memory that sleeps"]
        (error,) = told["config"]["errors"]
        assert error["type"] == "PlacementError"
        assert "99" in error["message"]


@pytest.mark.parametrize("command", ["check", "run", "doctor"])
def test_config_without_required_processes_is_refused(colocate: CommandLine, command: str) -> None:
    """Every command refuses a config whose role needs processes that the executor lacks."""
    colocate.write(
        "demo.yaml",
        """
        pools: {main: {slots: 2}}
        groups: {g: {pool: main, roles: {together: "beside:Together"}}}
        job: beside:job
        """,
    )
    colocate.write(
        "beside.py",
        """
        import colocate

        @colocate.needs("process_group")
        class Together:
            @colocate.method
            def go(self): ...

        def job(run): ...
        """,
    )
    told = "role 'together' makes process groups of its 2 ranks, which need a process each"
    done = colocate(command, "demo.yaml")
    assert done.returncode == 1
    assert told in (done.stdout + done.stderr)
    assert "is sound" not in done.stdout
    done = colocate(command, "demo.yaml", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (error,) = found["config"]["errors"] if command == "doctor" else found["errors"]
    assert [mistake["message"].startswith(told) for mistake in error["mistakes"]] == [True]
    assert not (colocate.folder / "runs").exists()
    done = colocate(command, "demo.yaml", "--set", "+executor.with.processes=true")  # the error suggests this change
    assert (done.returncode, done.stderr) == (0, "")
